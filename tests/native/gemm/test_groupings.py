"""Grouped GEMM of rows of experts in a buffer: the same bytes as sections in sequence."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.native import ops as native
from narrowgauge.native.gemm import gemm as paths
from narrowgauge.native.gemm.operands import stored
from narrowgauge.spec.modules.routing import Grouping, arrange
from narrowgauge.spec.quantized import BatchedQuantized, GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_EVERY_DEVICE, needs_gpu, ops

PAIRS = {
    "nvfp4": "nvfp4", "mxfp8-e4m3": "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32": "fp8-block-128x128-e4m3-fp32",
    "fp8-current-e4m3": "fp8-current-e4m3",
}  # fmt: skip
SIZES = {"few": [3, 0, 130, 1, 17], "one": [0, 0, 70], "none": [0, 0], "borders": [127, 128, 129]}


def placed(part: torch.Tensor, rows: list[int], height: int, filling: int) -> torch.Tensor:
    buffer = torch.full((height, part.shape[1] * part.element_size()), filling, dtype=torch.uint8)
    buffer[rows] = part.contiguous().view(torch.uint8)
    return buffer.view(part.dtype)


CASES = [
    *((path, sizes, grouping) for path in ("portable", "fused", "tensor", "beside") for sizes in SIZES
      for grouping in ("masked", "contiguous")),
    *(("portable", "few", grouping) for grouping in ("psum", "indptr")),
]  # fmt: skip
"""Paths, sizes and groupings. "beside": matrices are dequantized beside the products."""


@ON_EVERY_DEVICE
@pytest.mark.parametrize(
    ("path", "sizes", "grouping"),
    [pytest.param(*case, marks=[] if case[:2] == ("portable", "few") else [pytest.mark.long]) for case in CASES],
)
@pytest.mark.parametrize("recipe", PAIRS)
def test_rows_of_experts(
    grouping: Grouping, recipe: str, sizes: str, path: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(grouping, recipe, SIZES[sizes], path, monkeypatch)


def check(grouping: Grouping, recipe: str, sizes: list[int], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = find_recipe(recipe)
    draw = torch.Generator().manual_seed(0)
    n, k = (40, 256) if path == "portable" else (256, 1024)
    if path != "portable":
        if recipe.startswith("fp8") and path != "fused":
            pytest.skip("the FP8 tensor cores have one path")
        monkeypatch.setattr(paths, "grouped_path_for", lambda *given: path_of(path, given[-1]))
        monkeypatch.setattr(paths, "ROWS_BESIDE", 0 if path == "beside" else 1 << 30)
    x = torch.randn(sum(sizes), k, generator=draw).bfloat16()
    w = [torch.randn(n, k, generator=draw).bfloat16() for _ in sizes]
    a: GroupedQuantized = ops.quantize_grouped(x, torch.tensor(sizes), recipe)
    b = [ops.quantize(matrix, PAIRS[recipe]) for matrix in w]
    right = ops.gemm_grouped(a, b, out_dtype=torch.bfloat16)
    place = arrange(grouping, sizes, 4 if grouping == "indptr" else 128)
    index = torch.tensor(place.index)
    for filling in (0x7F, 0):  # NaN of E4M3, of E8M0 nearly, of float32
        codes = placed(a.codes, place.rows, place.height, filling)
        scales = a.scales if rule.whole else placed(a.scales, place.rows, place.height, filling)
        if grouping == "masked":
            shape = len(sizes), place.height // len(sizes), k
            batch = [part.view(len(sizes), -1, part.shape[1]) for part in (codes, scales)]
            amax = None if a.amax is None else a.amax.view(-1, 1)
            found = ops.gemm_masked(BatchedQuantized(*batch, amax, rule, shape), b, index, out_dtype=torch.bfloat16)
            found = found.view(place.height, n)
        else:
            q = Quantized(codes, scales, a.amax, rule, (place.height, k))
            options = {} if grouping == "contiguous" else {"grouping": grouping}
            if grouping == "indptr":
                options["alignment"] = 4
            found = ops.gemm_contiguous(q, b, index.int(), out_dtype=torch.bfloat16, **options)
        assert torch.equal(found[place.rows].view(torch.int16), right.view(torch.int16))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("count", [0, 1, 480, 481, 1100])
def test_words_in_memory_of_a_device(count: int, device: str) -> None:
    words = [(1 << 63) + 5 * number for number in range(count)]
    found = stored(words, torch.empty(0, device=device).device).cpu()
    assert [word % (1 << 64) for word in found.tolist()] == words


@needs_gpu
@pytest.mark.parametrize("recipe", PAIRS)
def test_a_graph_has_the_addresses_of_the_matrices(recipe: str) -> None:
    """Grouped products are captured, and a replay reads the present numbers."""
    sizes = [3, 0, 130, 1, 17]
    b = [native.quantize(torch.randn(40, 256, device="cuda").bfloat16(), PAIRS[recipe]) for _ in sizes]
    rows = torch.tensor(sizes, device="cuda")
    operands = [
        native.quantize_grouped(torch.randn(sum(sizes), 256, device="cuda").bfloat16(), rows, recipe) for _ in range(2)
    ]
    native.gemm_grouped(operands[0], b[::-1], out_dtype=torch.bfloat16)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = native.gemm_grouped(operands[0], b, out_dtype=torch.bfloat16)
    for part in ("codes", "scales", "amax"):
        if (target := getattr(operands[0], part)) is not None:
            target.copy_(getattr(operands[1], part))
    graph.replay()
    assert torch.equal(out, native.gemm_grouped(operands[1], b, out_dtype=torch.bfloat16))


def path_of(path: str, family: str) -> str:
    """The path of tensor cores, which has a model on a CPU."""
    if family.startswith("fp8"):
        return paths.FP8
    return paths.FUSED if path == "fused" else paths.TENSOR
