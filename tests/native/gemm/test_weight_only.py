"""Products of a plain matrix and a quantized one, on inputs whose results are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import narrowgauge
from narrowgauge.contracts import CONTRACTS
from narrowgauge.native.gemm import weight_only
from narrowgauge.native.runtime.sources import FOLDER, replaced
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.spec.quantized import PARTS, BatchedQuantized, Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_equal

DTYPES = (torch.bfloat16, torch.float16)
INT4 = ("int4-g128", "int4-g32-zp")
RECIPES = ("nvfp4", "nvfp4-2d", "nvfp4-rowscaled", "mxfp4", "mxfp8-e4m3", "fp8-row-e4m3", "fp8-current-e4m3", *INT4)
SHAPES = ((1, 1, 256), (17, 70, 768), (3, 9, 40), (2, 130, 1024), (2, 3, 0), (0, 4, 256))
"""M, N and K: of tensor cores with tails, a single chunk, and chunks of only a part of the teams; and of the portable
kernel."""


def takes(recipe: str, dtype: torch.dtype) -> bool:
    return not recipe.startswith("mx") or dtype == torch.bfloat16


def lattice(recipe: str, dtype: torch.dtype, m: int, n: int, k: int) -> tuple[torch.Tensor, Quantized]:
    """Small integers, and blocks with scales of their own: every sum is a float32 number in any order."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    if recipe in INT4:
        return a, of_codes(find_recipe(recipe), n, k, generator)
    w = torch.randint(-3, 4, (n, k), generator=generator).float()
    w *= torch.exp2(torch.randint(0, 3, (n, -(-k // 16)), generator=generator)).repeat_interleave(16, 1)[:, :k]
    amax = torch.full((n if recipe.endswith("rowscaled") else 1,), 2688.0) if recipe.startswith("nvfp4") else None
    return a, reference.quantize(w, recipe, amax=amax)


def of_codes(recipe: Recipe, n: int, k: int, generator: torch.Generator) -> Quantized:
    """Any codes, scales of groups of other powers of two, and any zero points."""
    shape = scales_shape((n, k), recipe)
    scales = torch.exp2(torch.randint(-1, 2, shape, generator=generator).float())
    zeros = torch.randint(0, 16, shape, generator=generator).to(torch.uint8) if recipe.zero_points else None
    codes = torch.randint(0, 256, codes_shape((n, k), recipe), generator=generator).to(torch.uint8)
    return Quantized(codes, scales, None, recipe, (n, k), zeros=zeros)


def expected(a: torch.Tensor, b: Quantized) -> torch.Tensor:
    """The exact sums, times the scale of a row or of the tensor, rounded to float32 and to the dtype of a."""
    integer = b.recipe.integer
    sums = a.double() @ (reference.dequantize(b, torch.float32).double() if integer else operand(b)).T
    assert torch.equal(sums, sums.float().double())
    scales = b.scales.view(1, -1) if b.recipe.scale.name == "FP32" and not integer else 1.0
    return (sums.float() * scales).to(a.dtype)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_the_rounded_exact_sums(recipe: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES if takes(recipe, dtype) else ():
            a, b = lattice(recipe, dtype, *shape)
            assert_equal(ops.weight_only_gemm(a, b), expected(a, b))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-row-e4m3", "fp8-current-e4m3", "int4-g32-zp"])
def test_batches_and_biases(recipe: str) -> None:
    """Each product of a batch has scales of its own; the bias of a product is added before the rounding."""
    pairs = [lattice(recipe, torch.bfloat16, 5, 66 + 0 * n, 256 + 0 * n) for n in range(2)]
    pairs = [pairs[0], (pairs[1][0].flip(0), lattice(recipe, torch.bfloat16, 6, 66, 256)[1])]
    a, matrices = torch.stack([x for x, _ in pairs]), [b for _, b in pairs]
    parts = {name: [getattr(b, name) for b in matrices] for name in (*PARTS, "zeros")}
    stacked = {name: None if part[0] is None else torch.stack(part) for name, part in parts.items()}
    b = BatchedQuantized(**stacked, recipe=matrices[0].recipe, shape=(2, 66, 256))
    bias = torch.arange(132).view(2, 66).bfloat16()
    right = torch.stack([expected(x, matrix) for x, matrix in pairs])
    assert_equal(ops.weight_only_gemm(a, b), right)
    sums = torch.stack([expected(x.float(), matrix) for x, matrix in pairs])
    assert_equal(ops.weight_only_gemm_bias(a, b, bias), (sums + bias.float().unsqueeze(1)).bfloat16())
    one = ops.weight_only_gemm_bias(a[1], matrices[1], bias[1])
    assert_equal(one, (sums[1] + bias[1].float()).bfloat16())


@pytest.mark.long
@pytest.mark.parametrize("tiling", [(4, 2, 1, 8), (4, 1, 1, 16), (4, 2, 1, 32), (8, 1, 1, 64)])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", *INT4, "mxfp8-e4m3", "fp8-row-e4m3"])
def test_tensor_cores_on_a_cpu_by_their_model(
    recipe: str, tiling: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only, "_portable", weight_only._skinny)
    monkeypatch.setattr(weight_only, "tiling", lambda *_: weight_only.Tiling(*tiling))
    for dtype in DTYPES:
        for shape in ((17, 150, 768), (1, 3, 1280)) if takes(recipe, dtype) else ():
            a, b = lattice(recipe, dtype, *shape)
            assert_equal(weight_only.weight_only_gemm(a, b), expected(a, b))


def test_a_block_has_rows_for_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 132 multiprocessors; codes of 8 bits leave no room for 64 rows of a."""
    monkeypatch.setattr(weight_only, "is_hopper", lambda _: True)
    monkeypatch.setattr(weight_only.wgmma, "multiprocessors", lambda _: 132)

    def chosen(m: int, n: int, k: int, weight: str = "NVFP4") -> tuple[int, ...]:
        found = weight_only.tiling((1, m, n), k, weight, torch.device("cpu"))
        return found.rows_of_a, found.rows_of_b, found.slices

    assert chosen(1, 8192, 8192) == (8, 128, 2)
    assert chosen(16, 8192, 8192) == (16, 128, 2)
    assert chosen(64, 8192, 8192) == (64, 128, 2)
    assert chosen(64, 8192, 8192, "MXFP8")[0] == 32
    assert chosen(16, 2048, 7168) == (16, 64, 2)
    assert chosen(16, 28672, 4096) == (16, 128, 1)
    monkeypatch.setattr(weight_only, "is_hopper", lambda _: False)
    for m in (1, 16, 64):
        for weight in ("NVFP4", "MXFP8"):
            other = weight_only.tiling((1, m, 2048), 7168, weight, torch.device("cpu"))
            assert (other.slices, other.shared_bytes <= 99 * 1024) == (1, True)


def every_number(recipe: str) -> Iterator[Quantized]:
    """Every code under every scale code, in the first column of a row each; the other columns are 0."""
    b = reference.quantize(torch.zeros(1, 256), recipe)
    bits, with_scales = b.recipe.element.bits, b.scales.dtype == torch.uint8
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    for scale in range(256) if with_scales else (0,):
        rows, scales = torch.zeros(len(codes), b.codes.shape[1], dtype=torch.uint8), b.scales.repeat(len(codes), 1)
        rows[:, 0] = codes
        if with_scales:
            scales.fill_(scale)
        amax = None if b.amax is None else torch.full((1,), 2688.0)
        yield Quantized(rows, scales, amax, b.recipe, (len(codes), 256))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("recipe", "model"),
    [(recipe, False) for recipe in ("nvfp4", "mxfp4", "mxfp8-e4m3", "fp8-row-e4m3")]
    + [("nvfp4", True), ("mxfp4", True), ("fp8-row-e4m3", True)]
    + [pytest.param("mxfp8-e4m3", True, marks=pytest.mark.long)],
    ids=lambda value: value if isinstance(value, str) else ["portable", "tensor-cores"][value],
)
def test_every_code_under_every_scale(recipe: str, model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond the range of the dtype of a become infinite, and small ones are rounded."""
    if model:
        monkeypatch.setattr(weight_only, "_portable", weight_only._skinny)
    for dtype in DTYPES:
        if not takes(recipe, dtype):
            continue
        a = torch.zeros(1, 256, dtype=dtype)
        a[0, 0] = 1.0
        several = list(every_number(recipe))
        # one call: rows of all scales below each other
        first = several[0]
        codes, scales = torch.cat([q.codes for q in several]), torch.cat([q.scales for q in several])
        b = Quantized(codes, scales, first.amax, first.recipe, (len(codes), 256))
        values = reference.dequantize(b, torch.float32)[:, 0]
        found = weight_only.weight_only_gemm(a, b)[0]
        # The other 255 products of an infinite or NaN scale are NaN.
        special = values.isnan() | reference.dequantize(b, torch.float32)[:, 1].isnan()
        assert found[special].isnan().all()
        assert_equal(found[~special], values[~special].to(dtype) + 0.0)  # a sum of zeros is +0


@ON_EVERY_DEVICE
def test_special_numbers_of_a_reach_every_output_of_their_row() -> None:
    _, b = lattice("nvfp4", torch.bfloat16, 1, 70, 256)
    a = torch.ones(3, 256, dtype=torch.bfloat16)
    a[0, 255], a[1, 7] = torch.nan, torch.inf
    found = ops.weight_only_gemm(a, b)
    assert found[0].isnan().all()
    assert not found[1].isfinite().any()
    assert found[2].isfinite().all()


def test_operands_that_the_kernels_do_not_have() -> None:
    a = torch.zeros(2, 64, dtype=torch.float16)
    for recipe in ("mxfp4", "mxfp8-e5m2", "fp8-block-1x128", "mxfp4-1x16", "int8-row"):
        with pytest.raises(NotImplementedError, match=f"b is Quantized.*{recipe}"):
            weight_only.weight_only_gemm(
                a.bfloat16() if "1x16" in recipe else a, reference.quantize(torch.ones(4, 64), recipe)
            )
    with pytest.raises(ValueError, match=r"a has shape \(2, 32\), not \(2, 64\)"):
        weight_only.weight_only_gemm(a, reference.quantize(torch.ones(4, 32), "nvfp4"))
    with pytest.raises(TypeError, match="a is bfloat16, float16, not float32"):
        weight_only.weight_only_gemm(a.float(), reference.quantize(torch.ones(4, 64), "nvfp4"))


# ---- wrong kernels, each by one change of the source -----------------------------------------------------------------

PRODUCT, WEIGHT = "gemm/portable/gemm_weight_only.cu", "gemm/weight_only.cuh"
WRONG = {
    # name: (recipe, file, text, its replacement, words of the cause, or "" if the kernel is refused without a cause)
    "nibbles-exchanged": (
        "nvfp4", PRODUCT, "code >> column % 2 * 4 & 0xFu", "code >> (1 - column % 2) * 4 & 0xFu",
        "two codes of a byte are exchanged",
    ),
    "signs-lost": (
        "mxfp4", PRODUCT, "column % 2 * 4 & 0xFu", "column % 2 * 4 & 0x7u", "signs of the codes are lost",
    ),
    "scale-of-the-next-block": (
        "nvfp4", PRODUCT, "+ column / scale_columns(weight)];",
        "+ (column / 16 + 1) % (p.k / 16)];", "those of the next block",
    ),
    "scale-of-the-first-row": (
        "mxfp4", PRODUCT, "scale = p.scales[row * scales_of_row", "scale = p.scales[0 * scales_of_row",
        "those of row 0",
    ),
    "block-scale-left-out": (
        "mxfp8-e4m3", PRODUCT, ": e8m0_to_float(scale);", ": 1.0f;", "scales of b are left out",
    ),
    "last-columns-dropped": (
        "nvfp4", PRODUCT, "column < p.k; ++column", "column < p.k - 16; ++column", "leaves out the last 16",
    ),
    "first-column-dropped": (
        "nvfp4", PRODUCT, "i64 column = 0; column", "i64 column = 1; column", "leaves out the first element",
    ),
    "sum-in-the-dtype-of-a": (
        "nvfp4", PRODUCT, "number_of<T>(p, WEIGHT, x, column), sum);",
        "number_of<T>(p, WEIGHT, x, column), rounded_to<T>(sum));", "",
    ),
    "row-of-a-exchanged": (
        "fp8-row-e4m3", PRODUCT, "(p.a) + y * p.k;", "(p.a) + (y + 1) % p.m * p.k;", "a is that of the next row",
    ),
    "scale-of-the-tensor-inverted": (
        "nvfp4", WEIGHT, "p.factor[0] / divisor", "divisor / p.factor[0]", "factor(b) divides",
    ),
    "scale-of-the-tensor-twice": (
        "nvfp4", WEIGHT, "p.factor[0] / divisor", "p.factor[0] / divisor * (p.factor[0] / divisor)",
        "factor(b) is a factor twice",
    ),
    "scale-of-the-first-row-of-b": ("fp8-row-e4m3", WEIGHT, "p.factor[x]", "p.factor[0]", "those of row 0"),
    "scale-of-the-row-of-a": ("fp8-row-e4m3", WEIGHT, "p.factor[x]", "p.factor[y]", ""),
    "zero-point-left-out": (
        "int4-g32-zp", PRODUCT, "nibble - p.zeros[place]", "nibble", "zero points of b are left out",
    ),
    "zero-point-less-one": (
        "int4-g32-zp", PRODUCT, "nibble - p.zeros[place]", "nibble - p.zeros[place] - 1", "zero points of b are more",
    ),
    "int4-without-its-sign": ("int4-g32", PRODUCT, "(nibble ^ 8) - 8", "nibble", "without a sign"),
    "group-of-the-next-columns": (
        "int4-g32", PRODUCT, "+ column / p.group;", "+ (column / p.group + 1) % scales_of_row(p, weight);",
        "those of the next block",
    ),
    "scale-not-multiplied": ("nvfp4", WEIGHT, "(p.factor != nullptr) sum", "(p.factor == nullptr) sum", "factor(b)"),
}  # fmt: skip


def told(recipe: str) -> str:
    """The report on a (17, 208) by a quantized b (33, 208); empty if the kernel passes."""
    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randn(rows, 208, generator=generator).bfloat16() for rows in (17, 33))
    b = reference.quantize((w.float() * torch.exp2(torch.arange(33.0) % 4).unsqueeze(1)).bfloat16(), recipe)
    found = ops.weight_only_gemm(a, b)
    assertion = narrowgauge.assert_result, CONTRACTS["weight-only-gemm"]
    result = narrowgauge.explain(*assertion, found, a, b, decode="rounded-scale", diagnose="full")
    return "" if result.passed else str(result)


@pytest.mark.long
@pytest.mark.parametrize("recipe", sorted({row[0] for row in WRONG.values()}))
def test_the_contract_accepts_the_kernel(recipe: str) -> None:
    assert told(recipe) == ""


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_the_contract_names_the_mistake_of_a_kernel(name: str, tmp_path: Path) -> None:
    recipe, file, text, replacement, words = WRONG[name]
    source = (FOLDER / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, text
    with replaced(file, source.replace(text, replacement), tmp_path):
        found = told(recipe)
    assert found
    assert words in found
