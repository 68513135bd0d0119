"""Products of matrices of different recipes, and of 8-bit whole numbers, on inputs whose results are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import narrowgauge
from narrowgauge.native.gemm import int8 as native_int8
from narrowgauge.native.runtime.sources import FOLDER, replaced
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_CPU_AND_HOPPER, ON_EVERY_DEVICE, ops
from tests.native.operands import batched
from tests.native.samples import assert_equal

INT8 = (("int8-row", "int8-row"), ("int8-row-zp", "int8-row"), ("int8-row", "int8-row-zp"), ("int8-row-zp",) * 2)
SHAPES = ((1, 1, 64), (17, 70, 144), (3, 65, 77), (2, 3, 0), (0, 4, 16))
"""M, N and K: a single step, several tiles, unaligned rows, and an empty sum."""
MIXED = (
    ("fp8-row-e4m3", "mxfp4"), ("mxfp4", "fp8-row-e4m3"), ("fp8-block-1x128-e4m3-fp32", "mxfp4"),
    ("fp8-row-e5m2", "mxfp8-e4m3"), ("mxfp8-e4m3", "mxfp4"),
)  # fmt: skip


def whole(recipe: str, rows: int, k: int) -> Quantized:
    """Any codes and zero points, and scales that are powers of two."""
    generator = torch.Generator().manual_seed(rows + k)
    codes = torch.randint(0, 256, (rows, k), generator=generator).to(torch.uint8)
    scales = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    zeros = torch.randint(0, 256, (rows, 1), generator=generator).to(torch.uint8) if recipe.endswith("zp") else None
    return Quantized(codes, scales, None, find_recipe(recipe), (rows, k), zeros=zeros)


def exact(a: Quantized, b: Quantized) -> torch.Tensor:
    """The sum of products of codes less zero points, times both scales, rounded once."""
    left, right = (q.codes.view(torch.int8).long() if q.zeros is None else q.codes.long() - q.zeros for q in (a, b))
    return ((left @ right.T).double() * a.scales.double() * b.scales.T.double()).float()


@ON_EVERY_DEVICE
@pytest.mark.parametrize(("left", "right"), INT8)
def test_sums_of_whole_numbers_are_exact(left: str, right: str) -> None:
    for m, n, k in SHAPES:
        a, b = whole(left, m, k), whole(right, n, k)
        assert_equal(ops.scaled_gemm(a, b, out_dtype="float32"), exact(a, b))
    transposed = replace(b, codes=b.codes.T.contiguous(), scales=b.scales.T.contiguous(), transposed=True)
    assert_equal(ops.scaled_gemm(a, transposed, out_dtype="float16"), exact(a, b).half())


@ON_EVERY_DEVICE
def test_a_batch_of_whole_numbers() -> None:
    several = [(whole("int8-row-zp", 5, 64), whole("int8-row", 9, 64)) for _ in range(2)]
    several[1] = whole("int8-row-zp", 6, 64), whole("int8-row", 10, 64)
    several[1] = tuple(
        replace(q, codes=q.codes[1:], scales=q.scales[1:], zeros=None if q.zeros is None else q.zeros[1:],
                shape=(q.shape[0] - 1, 64)) for q in several[1]
    )  # fmt: skip
    a, b = (batched([pair[side] for pair in several]) for side in range(2))
    bias = torch.arange(18.0).view(2, 9)
    right = torch.stack([exact(*pair) for pair in several])
    assert_equal(ops.scaled_gemm(a, b, out_dtype="float32"), right)
    assert_equal(ops.scaled_gemm_bias(a, b, bias, out_dtype="float32"), right + bias.unsqueeze(1))


@pytest.mark.usefixtures("tensor_cores")
@ON_CPU_AND_HOPPER
def test_tensor_cores_of_hopper_multiply_whole_numbers() -> None:
    """Tiles with tails, of 128 and 256 columns, and the tiles of a batch, each of its own product."""
    for m, n, k in ((1, 1, 16), (17, 70, 144), (130, 600, 16)):
        a, b = whole("int8-row", m, k), whole("int8-row", n, k)
        assert_equal(ops.scaled_gemm(a, b, out_dtype="float32"), exact(a, b))
    several = [(whole("int8-row", 131, 32), whole("int8-row", 264, 32)) for _ in range(2)]
    several[1] = tuple(replace(q, codes=q.codes.flip(0), scales=q.scales.flip(0)) for q in several[1])
    a, b = (batched([pair[side] for pair in several]) for side in range(2))
    bias = torch.arange(528.0).view(2, 264)
    right = torch.stack([exact(*pair) for pair in several]) + bias.unsqueeze(1)
    assert_equal(ops.scaled_gemm_bias(a, b, bias, out_dtype="bfloat16"), right.bfloat16())


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU runs the kernel of Hopper, and no product is too small for it."""
    monkeypatch.setattr(native_int8, "is_hopper", lambda _: True)
    monkeypatch.setattr(native_int8, "SMALLEST", 0)


def test_sums_that_may_exceed_int32_are_refused() -> None:
    a, b = whole("int8-row-zp", 1, 2**15 + 2**14), whole("int8-row", 1, 2**15 + 2**14)
    assert ops.scaled_gemm(a, b).isfinite().all()
    b = whole("int8-row", 1, 131072)
    with pytest.raises(ValueError, match=r"K = 131072 .* may exceed int32; K is at most 131071"):
        ops.scaled_gemm(b, b)


def lattice(recipe: str, rows: int, seed: int) -> Quantized:
    """Small integers times powers of two of blocks, and scales of rows that are powers of two."""
    if recipe.startswith("int8"):
        return whole(recipe, rows, 200)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, 200), generator=generator).float()
    x *= torch.exp2(torch.randint(0, 3, (rows, 25), generator=generator)).repeat_interleave(8, 1)
    q = reference.quantize(x, recipe)
    if q.scales.dtype == torch.float32:
        q.scales = torch.exp2(torch.randint(-2, 3, q.scales.shape, generator=generator).float())
    return q


@ON_EVERY_DEVICE
@pytest.mark.parametrize(("left", "right"), MIXED)
def test_products_of_fp8_and_mx_are_the_rounded_exact_sums(left: str, right: str) -> None:
    """Small integers times powers of two: no sum rounds, in any order."""
    a, b = lattice(left, 17, 1), lattice(right, 70, 2)
    sums = reference.dequantize(a, torch.float32).double() @ reference.dequantize(b, torch.float32).double().T
    assert torch.equal(sums, sums.float().double())
    assert_equal(ops.scaled_gemm(a, b, out_dtype="float32"), sums.float())
    bias = torch.arange(70.0)
    assert_equal(ops.scaled_gemm_bias(a, b, bias, out_dtype="bfloat16"), (sums.float() + bias).bfloat16())


def test_pairs_that_the_kernels_do_not_have() -> None:
    a = reference.quantize(torch.ones(4, 64), "nvfp4")
    with pytest.raises(NotImplementedError, match="scale is E4M3 and E8M0"):
        ops.scaled_gemm(a, reference.quantize(torch.ones(4, 64), "mxfp4"))
    with pytest.raises(NotImplementedError, match="whole numbers"):
        ops.scaled_gemm(whole("int8-row", 2, 64), reference.quantize(torch.ones(4, 64), "fp8-row-e4m3"))
    with pytest.raises(ValueError, match=r"multiplies \(M, K\) by \(N, K\)"):
        ops.scaled_gemm(whole("int8-row", 2, 64), whole("int8-row", 2, 32))


# ---- wrong kernels, each by one change of the source -----------------------------------------------------------------

INT8_SOURCE, PIPELINE = "gemm/gemm_int8.cu", "gemm/portable/gemm.cuh"
HOPPER_SOURCE = "gemm/sm90/gemm_wgmma_int8.cu"
WHOLE = ("int8-row-zp", "int8-row-zp")
WRONG = {
    # name: (recipes, file, text, its replacement, words of the cause, or "" if the kernel is refused without a cause)
    "zero-point-of-a-left-out": (WHOLE, INT8_SOURCE, " - z_a * of_rows[TILE + column]", "", ""),
    "product-of-zero-points-left-out": (WHOLE, INT8_SOURCE, " + k * z_a * z_b", "", ""),
    "zero-point-less-one": (
        WHOLE, INT8_SOURCE, "of.zeros[row] - 128u", "of.zeros[row] - 129u", "zero points of a are less by 1",
    ),
    "sums-of-rows-exchanged": (WHOLE, INT8_SOURCE, "z_b * of_rows[row]", "z_b * of_rows[column]", ""),
    "scale-of-the-row-of-b": (WHOLE, INT8_SOURCE, "a.scales[y]", "b.scales[x]", "factor(b) is a factor twice"),
    "last-columns-dropped": (WHOLE, INT8_SOURCE, "start + STEP < p.k) load", "start + 2 * STEP <= p.k) load", ""),
    "signs-lost": (INT8[0], HOPPER_SOURCE, "static_cast<signed char>(tile[", "static_cast<u8>(tile[", ""),
    "rows-taken-twice": (INT8[0], HOPPER_SOURCE, "top + i / 2 % 2 * 8", "top", ""),
    "scales-of-the-next-block": (
        MIXED[0], PIPELINE, "scales[(start + j) / MX_BLOCK", "scales[(start + j + MX_BLOCK) % k / MX_BLOCK",
        "those of the next block",
    ),
    "scales-of-mx-left-out": (
        MIXED[2], PIPELINE, "from.scaled_elements() && inside", "false", "scales of b are left out",
    ),
    "scales-of-the-row-above": (
        MIXED[2], PIPELINE, "from.scales) + row * (across", "from.scales) + (row ^ 1) % from.rows * (across", "",
    ),
}  # fmt: skip


def told(recipes: tuple[str, str]) -> str:
    """The report of the check of inputs on which no sum rounds; empty if the kernel passes."""
    keys = {"b_recipe": recipes[1]}
    try:
        narrowgauge.check(
            ops.scaled_gemm, "scaled-gemm", recipe=recipes[0], shapes=[(17, 208, 33)], families=("scales-distinct",),
            keys=keys,
        )  # fmt: skip
    except AssertionError as failed:
        return str(failed)
    return ""


@pytest.mark.long
@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", WRONG)
def test_the_contract_refuses_a_wrong_kernel(name: str, tmp_path: Path) -> None:
    recipes, file, text, replacement, words = WRONG[name]
    source = (FOLDER / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, text
    assert not told(recipes)
    with replaced(file, source.replace(text, replacement), tmp_path):
        found = told(recipes)
    assert found
    assert words in found
