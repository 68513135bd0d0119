"""GEMM of MX and FP8 operands: exact sums against fractions, NaN and infinities, sections."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.gemm.fast.code_ranges import code_ranges
from narrowgauge.reference.gemm.gemm import alpha, exact_product, gemm, gemm_grouped
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.exact import Expansion, exact_sum, lowest_bit
from narrowgauge.reference.ops import gemm_quantized, quantize
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.formats import E8M0, FORMATS, Format
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits
from tests.reference import narrow
from tests.reference.narrow import BLOCK_PAIRS, pair

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MX_PAIRS = list(itertools.product(narrow.MX, repeat=2))


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fractions(x: np.ndarray) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(x)


def sums(a: Quantized, b: Quantized) -> np.ndarray:
    """Σ of the products of codes and scales, as fractions (object array)."""
    return fractions(narrow.values(a)) @ fractions(narrow.values(b)).T


# The operand.


@pytest.mark.parametrize("kind", narrow.MX)
def test_an_operand_is_every_code_times_every_scale(kind: str) -> None:
    recipe = find_recipe(kind)
    every = np.resize(np.arange(recipe.element.codes, dtype=np.uint8), (256, 256))
    exponents = torch.arange(256).to(torch.uint8).unsqueeze(1).expand(256, 8).contiguous()
    codes = torch.from_numpy(every)
    if recipe.element.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    q = Quantized(codes, exponents, None, recipe, (256, 256))
    expected = np.array(recipe.element.values)[every] * np.array(E8M0.values)[:, None]
    np.testing.assert_array_equal(operand(q), expected)


# The exact sum.


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", narrow.EXPONENTS)
@pytest.mark.parametrize("names", MX_PAIRS, ids="-".join)
def test_the_sum_is_exact_whatever_the_scales(names: tuple[str, str], kind: str) -> None:
    for seed, (k, family) in enumerate([(1, "any"), (33, "any"), (96, "any"), (96, "data"), (96, "sparse")]):
        a, b = pair(names, seed, (2, 3, k), kind, family)
        total, expected = exact_product(a, b), sums(a, b)
        for at in np.ndindex(2, 3):
            rest = expected[at] - Fraction(total.high[at].item())
            low = Fraction(0) if total.low is None else Fraction(total.low[at].item())
            assert abs(rest - low) <= abs(low) / 2**52
            assert (rest > 0, rest < 0) == (low > 0, low < 0)
            assert total.to_float32()[at].item() == rounding.nearest(expected[at], "float32")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("special", [None, 0x7C, 0x7F])
def test_few_rows_beyond_float64_are_summed_separately(special: int | None, sign: int) -> None:
    """A row of five has the largest and the smallest numbers; then also an infinity or a NaN."""
    k = 4096
    a_codes, b_codes = np.full((5, k), 0x3C, np.uint8), np.full((3, k), 0x7E, np.uint8)
    a_codes[3] = 0x7B
    a_codes[3, 1], b_codes[0, 1] = (0x01, 0x01 if sign > 0 else 0x81)
    if special is not None:
        a_codes[3, 2], b_codes[:2, 2] = special, 0
    scales = torch.full((5, k // 32), 127, dtype=torch.uint8)
    a = Quantized(torch.from_numpy(a_codes), scales, None, find_recipe("mxfp8-e5m2"), (5, k))
    b = Quantized(torch.from_numpy(b_codes), scales[:3], None, find_recipe("mxfp8-e4m3"), (3, k))
    total, plain = exact_product(a, b), operand(a) @ operand(b).T
    others = [0, 1, 2, 4]
    assert torch.equal(total.high[others], plain[others])
    if special is not None:  # 0 times either is NaN
        assert total.high[3, :2].isnan().all()
        assert total.high[3, 2].isnan() if special == 0x7F else total.high[3, 2].isinf()
        return
    assert total.low is not None
    assert not total.low[others].any()
    expected = (k - 1) * Fraction(57344 * 448) + sign * Fraction(1, 2**25)
    assert Fraction(total.high[3, 0].item()) + Fraction(total.low[3, 0].item()) == expected
    assert Fraction(plain[3, 0].item()) != expected


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("gap", [30, 60, 120, 200])
def test_a_tie_is_broken_by_what_is_far_below_it(gap: int, sign: int) -> None:
    """1 + 2^-24 is a tie of float32; ±2^-gap in a second block decides its direction."""
    exponents = [127, 115, 127 - gap // 2]
    codes = np.zeros((2, 96), np.uint8)
    codes[0, ::32] = codes[1, ::32] = 0x38
    if sign < 0:
        codes[1, 64] |= 0x80
    scale_codes = torch.tensor([exponents], dtype=torch.uint8)
    a, b = (
        Quantized(torch.from_numpy(codes[row : row + 1]), scale_codes, None, find_recipe("mxfp8-e4m3"), (1, 96))
        for row in (0, 1)
    )
    expected = Fraction(1) + Fraction(1, 2**24) + sign * Fraction(1, 2 ** (2 * (gap // 2)))
    assert sums(a, b)[0, 0] == expected
    assert gemm(a, b, out_dtype=torch.float32).item() == (1 + 2.0**-23 if sign > 0 else 1)


def test_an_expansion_is_exact_and_rounds_once() -> None:
    """Terms over 500 binades that cancel in part, in every order of five."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        terms = np.ldexp(rng.integers(-255, 256, 5).astype(np.float64), rng.integers(-250, 250, 5) // 50 * 50)
        terms[4] = -terms[0]
        total = sum(map(Fraction, terms))
        for order in itertools.permutations(terms.tolist()):
            expansion = Expansion()
            for term in order:
                expansion.add(torch.tensor([[term]], dtype=torch.float64))
            assert sum(Fraction(part.item()) for part in expansion.parts) == total
            assert expansion.rounded().to_float32().item() == rounding.nearest(total, "float32")


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("other", [0.0, 2.0, -2.0, math.inf, -math.inf, math.nan])
def test_sums_that_are_not_finite_are_those_of_ieee_arithmetic(special: float, other: float) -> None:
    """In a sum of more than 53 bits, which a float64 product cannot give."""
    a = torch.tensor([[2.0**200, 1.0, special, 0.0], [2.0**200, 1.0, 1.0, 2.0**-200]], dtype=torch.float64)
    b = torch.tensor([[1.0, 1.0, other, 1.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    total = exact_sum(a, b)
    with np.errstate(all="ignore"):
        plain = torch.from_numpy((a.numpy()[:, None, :] * b.numpy()[None]).sum(2))
    assert not plain[:, 0].isfinite().all()
    for at in np.ndindex(2, 2):
        if not plain[at].isfinite():
            assert plain[at].isnan() == total.high[at].isnan()
            assert plain[at].isnan() or plain[at] == total.high[at]
    assert total.low is not None
    assert (total.high[1, 1], total.low[1, 1]) == (2.0**200, 2)  # and 2^-200, which low is too large to hold


@pytest.mark.parametrize("kind", ["mxfp8-e5m2", "mxfp8-e4m3"])
def test_codes_that_are_not_finite_spoil_their_rows_and_no_other(kind: str) -> None:
    a, b = pair((kind, "mxfp8-e5m2"), 3, (4, 3, 96), "wild", "positive")
    b.codes[:, 5] = 0x3C  # 1
    a.codes[:, 5] = 0
    clean = gemm(a, b, out_dtype=torch.float32)
    fmt = a.recipe.element
    assert fmt.nan_code is not None
    a.codes[1, 5] = fmt.nan_code
    if fmt.inf_code is not None:
        a.codes[2, 5] = fmt.inf_code | 0x80
    y = gemm(a, b, out_dtype=torch.float32)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert torch.equal(y[2], clean[2] if fmt.inf_code is None else torch.full((3,), -math.inf))
    a.scales[0, 2] = 0xFF
    assert gemm(a, b, out_dtype=torch.float32)[0].isnan().all()


# α and the epilogue.


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("epilogue", ["", "c", "bias", "c and bias"])
@pytest.mark.parametrize(
    "names",
    [("mxfp8-e4m3", "mxfp8-e5m2"), ("mxfp4", "mxfp6-e3m2"), ("fp8-current-e4m3", "fp8-current-e5m2-pow2")],
    ids="-".join,
)
def test_every_step_rounds_to_float32(names: tuple[str, str], epilogue: str, out_dtype: torch.dtype) -> None:
    a, b = pair(names, 7, (5, 4, 96), "near", "data")
    rng = np.random.default_rng(8)
    size = min(float(gemm(a, b, out_dtype=torch.float32).abs().mean()), 1e4)  # within float16's range
    c = torch.from_numpy(rng.standard_normal((5, 4)) * size).to(out_dtype) if "c" in epilogue else None
    bias = torch.from_numpy(rng.standard_normal(4) * size).bfloat16() if "bias" in epilogue else None
    y = gemm(a, b, out_dtype=out_dtype, c=c, bias=bias)
    factor = Fraction(alpha(a, b).item())
    whole = a.recipe.whole
    exact = fractions(narrow.elements(a)) @ fractions(narrow.elements(b)).T if whole else sums(a, b)
    for i, j in np.ndindex(5, 4):
        value = rounding.nearest(factor * Fraction(rounding.nearest(exact[i, j], "float32")), "float32")
        for addend in (None if c is None else c[i, j].item(), None if bias is None else bias[j].item()):
            if addend is not None:
                value = rounding.nearest(Fraction(value) + Fraction(addend), "float32")
        assert y[i, j].item() == rounding.nearest(Fraction(value), name(out_dtype))


# FP8 with scales of blocks.


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_c_is_added_after_the_cast_and_the_bias_before_it(out_dtype: torch.dtype) -> None:
    a, b = pair(BLOCK_PAIRS[0], 2, (6, 5, 256), "near", "data")
    a.scales *= 2.0**-12  # within float16's range
    y = gemm(a, b, out_dtype=torch.float32)
    size = float(y.abs().mean())
    generator = torch.Generator().manual_seed(3)
    c = (torch.randn(6, 5, generator=generator) * size).to(out_dtype)
    bias = (torch.randn(5, generator=generator) * size).bfloat16()
    stored = (y + bias.float()).to(out_dtype)
    found = gemm(a, b, out_dtype=out_dtype, c=c, bias=bias)
    assert torch.equal(found, (stored.float() + c.float()).to(out_dtype))
    once = ((y + bias.float()) + c.float()).to(out_dtype)
    assert torch.equal(found, once) == (out_dtype == torch.float32)
    assert torch.equal(gemm(a, b, out_dtype=out_dtype, bias=bias), stored)
    assert torch.equal(gemm(a, b, out_dtype=out_dtype, c=c), (y.to(out_dtype).float() + c.float()).to(out_dtype))


# Sections, and a GEMM whose output is quantized.

SECTIONED = ["mxfp8-e4m3", "mxfp4", "fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e4m3-pow2", "fp8-current-e4m3",
             "fp8-delayed-e4m3"]  # fmt: skip


@pytest.mark.parametrize("kind", SECTIONED)
def test_every_section_is_multiplied_by_its_own_matrix(kind: str) -> None:
    rng = np.random.default_rng(5)
    heights, k, n = [3, 0, 130, 5], 160, 4
    sections = [narrow.narrow(kind, rng, rows, k) for rows in heights]
    other = "fp8-block-1x128-e4m3-pow2" if kind.startswith("fp8-block") else kind
    matrices = [narrow.narrow(other, rng, n, k) for _ in heights]
    whole = GroupedQuantized(
        torch.cat([q.codes for q in sections]), torch.cat([q.scales for q in sections]), None, find_recipe(kind),
        (sum(heights), k), torch.tensor(heights),
    )  # fmt: skip
    c, bias = torch.randn(138, n), torch.randn(4, n)
    y = gemm_grouped(whole, matrices, out_dtype=torch.bfloat16, c=c, bias=bias)
    start = 0
    for number, (section, matrix) in enumerate(zip(sections, matrices, strict=True)):
        rows = slice(start, start + heights[number])
        start = rows.stop
        alone = gemm(section, matrix, out_dtype=torch.bfloat16, c=c[rows], bias=bias[number])
        assert torch.equal(bits(y[rows]), bits(alone))


@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "nvfp4", "fp8-block-1x128-e4m3", "fp8-delayed-e5m2"])
def test_the_quantized_output_is_the_output_quantized(recipe: str) -> None:
    a, b = pair(("mxfp8-e4m3", "mxfp8-e4m3"), 6, (5, 64, 96), "near", "data")
    c, bias = torch.randn(5, 64) * 100, torch.randn(64) * 100
    scale = torch.tensor([0.25]) if "delayed" in recipe else None
    q = gemm_quantized(a, b, recipe, out_dtype=torch.bfloat16, c=c, bias=bias, scale=scale)
    expected = quantize(gemm(a, b, out_dtype=torch.bfloat16, c=c, bias=bias), recipe, scale=scale)
    assert q.recipe == find_recipe(recipe)
    assert q.shape == (5, 64)
    assert torch.equal(q.codes, expected.codes)
    assert torch.equal(q.scales, expected.scales)


# Empty shapes and errors.


# What an operand spans.


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_span_of_any_two_numbers_is_found_of_their_codes(fmt: Format) -> None:
    """Exact for powers of two; for other numbers too large by at most the bits of a mantissa."""
    codes = torch.cartesian_prod(*[torch.arange(fmt.codes, dtype=torch.uint8)] * 2)
    nan = fmt.max if fmt.negative_zero or not fmt.signed else 0.0
    values = decode(codes, fmt, torch.float64).nan_to_num(nan=nan, posinf=fmt.max, neginf=fmt.max)
    most, unit = code_ranges(codes, fmt)
    assert torch.equal(most, values.abs().amax(1))
    some = most > 0
    assert (unit <= lowest_bit(values))[some].all()
    assert (unit >= lowest_bit(values) / 2**fmt.mantissa_bits)[some].all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["equal", "near", "wide", "wild"])
@pytest.mark.parametrize("names", MX_PAIRS[::4], ids="-".join)
def test_the_fast_exact_sum_equals_the_plain_one(names: tuple[str, str], kind: str) -> None:
    for seed, (shape, family) in enumerate([((5, 7, 31), "any"), ((20, 30, 256), "data"), ((9, 8, 160), "sparse")]):
        a, b = pair(names, seed, shape, kind, family)
        fast, plain = exact_product(a, b), exact_sum(operand(a), operand(b))
        assert torch.equal(fast.high, plain.high)
        fast_low, plain_low = (
            torch.zeros_like(total.high) if total.low is None else total.low for total in (fast, plain)
        )
        assert torch.equal(fast_low, plain_low)
