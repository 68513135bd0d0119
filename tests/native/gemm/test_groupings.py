"""Grouped GEMM of rows of experts in a buffer: the same bytes as sections one behind another."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.native.gemm import gemm as paths
from narrowgauge.spec.modules.routing import Grouping, arrange
from narrowgauge.spec.quantized import BatchedQuantized, GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops

PAIRS = {
    "nvfp4": "nvfp4", "mxfp8-e4m3": "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32": "fp8-block-128x128-e4m3-fp32",
    "fp8-current-e4m3": "fp8-current-e4m3",
}  # fmt: skip
SIZES = {"few": [3, 0, 130, 1, 17], "one": [0, 0, 70], "none": [0, 0], "borders": [127, 128, 129]}


def placed(part: torch.Tensor, rows: list[int], height: int, filling: int) -> torch.Tensor:
    buffer = torch.full((height, part.shape[1] * part.element_size()), filling, dtype=torch.uint8)
    buffer[rows] = part.contiguous().view(torch.uint8)
    return buffer.view(part.dtype)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("grouping", ["masked", "contiguous", "psum", "indptr"])
@pytest.mark.parametrize("recipe", PAIRS)
@pytest.mark.parametrize(
    "sizes", [pytest.param(SIZES[n], id=n, marks=[] if n == "few" else [pytest.mark.long]) for n in SIZES]
)
@pytest.mark.parametrize("path", ["portable", pytest.param("fast", marks=pytest.mark.long)])
def test_rows_of_experts(
    grouping: Grouping, recipe: str, sizes: list[int], path: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = find_recipe(recipe)
    draw = torch.Generator().manual_seed(0)
    n, k = (256, 512) if path == "fast" else (40, 256)
    if path == "fast":
        monkeypatch.setattr(paths, "grouped_path_for", fast)
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


def fast(m: int, codes: torch.Tensor, recipe: object, b: list[Quantized], family: str) -> str:
    """The path of tensor cores that has a model on a CPU."""
    return {"nvfp4": paths.TENSOR, "mx": paths.FUSED}.get(family, paths.FP8)
