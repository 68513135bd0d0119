"""The bounds of MX and FP8 products: no correct kernel leaves the bounds, in any order or in the declared order."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.bounds.bounds import Bounds, bounds
from narrowgauge.reference.gemm.gemm import alpha, gemm
from narrowgauge.reference.ops import quantize
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.reference import kernels, narrow, orders
from tests.reference.bounds.test_bounds import accepted, assert_ends_within_budget, float32_inside, neighbour, ordinal
from tests.reference.gemm.test_gemm_formats import BLOCK_PAIRS, pair, sums

U = Fraction(1, 1 << 24)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = [("mxfp8-e4m3", "mxfp8-e4m3"), ("mxfp8-e5m2", "mxfp8-e5m2"), ("mxfp8-e4m3", "mxfp8-e5m2"),
         ("mxfp6-e3m2", "mxfp4"), ("mxfp6-e2m3", "mxfp8-e4m3")]  # fmt: skip
FAMILIES = ["any", "data", "lattice", "positive", "sparse"]
ORDERS = [None, "blocks"]


def assert_accepted(limits: Bounds, out: np.ndarray, what: object) -> None:
    """Every one of the sums (p, m, n) or (m, n), float32, is right after the cast."""
    cast = orders.cast(np.asarray(out, np.float32), limits.expected.dtype)
    assert accepted(limits, cast).all(), what


# Sound.


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", narrow.EXPONENTS)
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_no_order_of_summation_leaves_the_bounds(names: tuple[str, str], kind: str) -> None:
    """About 130 orders and trees of products, and of scaled blocks, for five families."""
    for seed, (family, k) in enumerate(zip(FAMILIES, (32, 96, 160, 64, 96), strict=True)):
        a, b = pair(names, seed, (2, 3, k), kind, family)
        limits = bounds(a, b, out_dtype=DTYPES[seed % 2])
        rng = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            found = orders.accumulators(kernels.scaled_terms(a, b), rng, 20)
        assert_accepted(limits, found, (family, "products"))
        for out in kernels.scaled_blocks(a, b, rng, 5):
            assert_accepted(limits, out, (family, "blocks"))
        assert_accepted(limits, kernels.declared(a, b), (family, "declared"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", narrow.EXPONENTS)
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_the_declared_order_does_not_leave_its_bounds(names: tuple[str, str], kind: str) -> None:
    for seed, (family, k) in enumerate(itertools.product(FAMILIES, (1, 33, 160))):
        a, b = pair(names, seed, (4, 5, k), kind, family)
        limits = bounds(a, b, out_dtype=torch.float32, order="blocks")
        assert_accepted(limits, kernels.declared(a, b), (family, k))
        assert accepted(limits, limits.expected).all()


def test_the_declared_order_of_nvfp4_does_not_leave_its_bounds() -> None:
    rounded = 0
    for seed, family in enumerate(FAMILIES):
        rng = np.random.default_rng(seed)
        codes = [torch.from_numpy(rng.integers(0, 256, (rows, 80)).astype(np.uint8)) for rows in (4, 5)]
        scales = [torch.from_numpy(rng.integers(0, 0x7F, (rows, 10)).astype(np.uint8)) for rows in (4, 5)]
        a, b = (
            Quantized(x, s, torch.tensor([2688.0]), find_recipe("nvfp4"), (len(x), 160))
            for x, s in zip(codes, scales, strict=True)
        )
        assert alpha(a, b) == 1
        limits = bounds(a, b, out_dtype=torch.float32, order="blocks")
        assert_accepted(limits, kernels.declared(a, b), family)
        rounded += int((~limits.exact).sum())
    assert rounded


@pytest.mark.sampled(18)
@pytest.mark.parametrize("kind", narrow.FLOATS)
@pytest.mark.parametrize("names", BLOCK_PAIRS, ids="-".join)
def test_no_way_to_scale_blocks_leaves_the_bounds(names: tuple[str, str], kind: str) -> None:
    kinds = list(narrow.FLOATS)
    for seed, (family, k) in enumerate(zip(FAMILIES, (128, 300, 160, 300, 40), strict=True)):
        rng = np.random.default_rng(seed)
        other = kinds[seed] if seed % 2 else kind
        a = narrow.narrow(names[0], rng, 2, k, kind=kind, family=family)
        b = narrow.narrow(names[1], rng, 3, k, kind=other, family=family)
        dtype = DTYPES[seed % 2]
        in_order, any_order = (bounds(a, b, out_dtype=dtype, order=order) for order in ("blocks", None))
        chain = kernels.promoted(a, b)
        assert_accepted(in_order, chain, (family, "declared"))
        assert_accepted(any_order, chain, (family, "declared"))
        for limits in (in_order, any_order):
            assert accepted(limits, limits.expected).all()
        for what, out in kernels.promoted_otherwise(a, b, rng):
            assert_accepted(any_order, out, (family, what))


def test_terms_below_the_smallest_float32_may_each_round() -> None:
    """40 blocks of 3/4·2^-149 round to 2^-149 each: their sum is 40·2^-149 instead of 30·2^-149."""
    codes = torch.zeros(2, 32 * 40, dtype=torch.uint8)
    codes[0, ::32], codes[1, ::32] = 0x3C, 0x38
    scales = torch.full((1, 40), 127 - 75, dtype=torch.uint8)
    a, b = (Quantized(codes[row : row + 1], scales, None, find_recipe("mxfp8-e4m3"), (1, 1280)) for row in (0, 1))
    assert gemm(a, b, out_dtype=torch.float32).item() == 30 * 2.0**-149
    assert kernels.declared(a, b).item() == 40 * 2.0**-149
    for order in ORDERS:
        limits = bounds(a, b, out_dtype=torch.float32, order=order)
        assert_accepted(limits, kernels.declared(a, b), order)
        assert not accepted(limits, torch.tensor([[53 * 2.0**-149]])).any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_the_bias_comes_before_the_cast_and_c_after_it(out_dtype: torch.dtype, order: str | None) -> None:
    for seed, family in enumerate(FAMILIES):
        a, b = pair(BLOCK_PAIRS[0], seed, (3, 4, 300), "near", family)
        a.scales *= 2.0**-12  # within float16's range
        y = torch.from_numpy(kernels.promoted(a, b))
        c, bias = (-y * 1.01).to(out_dtype), -y[0] * 0.5
        limits = bounds(a, b, out_dtype=out_dtype, c=c, bias=bias, order=order)
        out = ((y + bias).to(out_dtype).float() + c.float()).to(out_dtype)
        assert accepted(limits, out).all()
        assert accepted(limits, limits.expected).all()
        assert torch.equal(limits.expected, gemm(a, b, out_dtype=out_dtype, c=c, bias=bias))
        assert ((out.double() - limits.centre).abs() <= limits.budget).all()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "names", [NAMES[0], NAMES[3], ("fp8-current-e4m3", "fp8-current-e5m2"), *BLOCK_PAIRS], ids="-".join
)
def test_every_accepted_output_is_within_its_budget(names: tuple[str, str], family: str) -> None:
    """Also if c and the bias cancel the sum, so that the budget is far larger than the output."""
    a, b = pair(names, 11, (12, 13, 300), "near", family)
    y = gemm(a, b, out_dtype=torch.float32)
    c, bias = -y * (1 + 2.0**-20), y.flip(0)[0] * 0.3
    epilogues = ({}, {"c": c}, {"bias": bias}, {"c": c, "bias": bias})
    for out_dtype, added, order in itertools.product(DTYPES, epilogues, (*ORDERS, "decoded-aligned-25-16")):
        assert_ends_within_budget(bounds(a, b, out_dtype=out_dtype, order=order, **added))


# The tiers.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("k", [64, 4096, 16384])
@pytest.mark.parametrize("names", [*NAMES, ("fp8-current-e4m3", "fp8-current-e5m2"), *BLOCK_PAIRS], ids="-".join)
def test_a_lattice_under_equal_scales_is_exact_however_long(names: tuple[str, str], k: int) -> None:
    a, b = pair(names, k, (4, 5, k), "one" if names[0].startswith("fp8") else "equal", "lattice")
    for order in ORDERS:
        limits = bounds(a, b, out_dtype=torch.float32, order=order)
        assert limits.exact.all()
        assert (limits.tier == 0).all()
        exact = (narrow.values(a) @ narrow.values(b).T).astype(np.float32)
        np.testing.assert_array_equal(limits.expected.numpy(), exact)
        for direction in (-math.inf, math.inf):
            assert not accepted(limits, neighbour(limits.expected, direction)).any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", [*NAMES, ("fp8-current-e4m3", "fp8-current-e5m2"), *BLOCK_PAIRS], ids="-".join)
def test_a_declared_order_is_bounded_more_sharply(names: tuple[str, str]) -> None:
    a, b = pair(names, 2, (8, 8, 1024), "wide", "any")
    free, declared = (bounds(a, b, out_dtype=torch.float32, order=order) for order in ORDERS)
    assert not free.exact.any()
    widths = [(ordinal(limits.upper) - ordinal(limits.lower)).double() for limits in (free, declared)]
    assert (declared.lower >= free.lower).all()
    assert (declared.upper <= free.upper).all()
    assert widths[1].mean() < widths[0].mean() / 4


def running_error(a: Quantized, b: Quantized, i: int, j: int) -> Fraction:
    """u·Σ|s| over the additions of the declared order, s exact: without its growth by what went before."""
    left, right = narrow.elements(a)[i], narrow.elements(b)[j]
    scale = narrow.factors(a)[i] * narrow.factors(b)[j]
    error = total = Fraction(0)
    for block in kernels.blocks_of(a):
        partial = Fraction(0)
        for product in (left[block] * right[block]).tolist():
            begun = partial != 0
            partial += Fraction(product)
            error += U * abs(partial) * Fraction(scale[block.start]) if begun else 0
        begun = total != 0
        total += partial * Fraction(scale[block.start])
        error += U * abs(total) if begun else 0
    return error


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_the_interval_is_no_wider_than_the_running_error(names: tuple[str, str]) -> None:
    """[S − E, S + E], E = u·Σ|partial sums| + u·|S| + 2^-149 in fractions, to within an ulp; no term where exact."""
    a, b = pair(names, 3, (3, 3, 160), "wide", "any")
    limits = bounds(a, b, out_dtype=torch.float32, order="blocks")
    exact = sums(a, b)
    for at in np.ndindex(3, 3):
        error = running_error(a, b, *at) * (1 + 400 * U) + U * abs(exact[at]) + Fraction(1, 1 << 149)
        low, high = (torch.tensor(rounding.nearest(exact[at] + side * error, "float32")) for side in (-1, 1))
        assert ordinal(low) - ordinal(limits.lower[at]) <= 1
        assert ordinal(limits.upper[at]) - ordinal(high) <= 1


@pytest.mark.parametrize("kind", ["near", "wide", "small"])
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_the_interval_of_any_order_is_the_rules_to_within_an_ulp(names: tuple[str, str], kind: str) -> None:
    """docs/tolerance.md#any-order, in fractions; terms below 2^-149 add 2^-150 each."""
    a, b = pair(names, 4, (3, 3, 96), kind, "any")
    limits = bounds(a, b, out_dtype=torch.float32)
    exact = sums(a, b)
    left, right = (np.vectorize(Fraction, otypes=[object])(narrow.values(q)) for q in (a, b))
    for i, j in np.ndindex(3, 3):
        terms = [x * y for x, y in zip(left[i], right[j], strict=True) if x * y]
        size, n = sum(map(abs, terms)), len(terms)
        acc = (n - 1) * U * size
        if all(abs(term) * 2**149 % 1 == 0 for term in terms):
            most = acc
        else:
            most = (acc + n * Fraction(1, 1 << 150)) * (1 + n * U)
        for error, inside in ((acc, True), (most, False)):
            e = 0 if limits.exact[i, j] else error
            e = e * (1 + U) + U * abs(exact[i, j]) + Fraction(1, 1 << 149)
            low, high = (torch.tensor(end) for end in float32_inside(exact[i, j] - e, exact[i, j] + e))
            if inside:
                assert limits.lower[i, j] <= low
                assert limits.upper[i, j] >= high
            else:
                assert ordinal(low) - ordinal(limits.lower[i, j]) <= 1
                assert ordinal(limits.upper[i, j]) - ordinal(high) <= 1


# Sharp.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", [*NAMES, *BLOCK_PAIRS], ids="-".join)
def test_what_lies_outside_the_interval_is_rejected(names: tuple[str, str], order: str | None) -> None:
    for family in ("any", "data"):
        a, b = pair(names, 5, (6, 6, 256), "near", family)
        limits = bounds(a, b, out_dtype=torch.float32, order=order)
        for end, direction in ((limits.lower, -math.inf), (limits.upper, math.inf)):
            outside = neighbour(torch.where(limits.exact, limits.expected, end), direction)
            assert not accepted(limits, outside).any()


def test_another_order_than_the_declared_one_is_seen() -> None:
    """2^40 − 2^40 + 9/8: the declared order is exact, the opposite order loses 9/8."""
    codes = torch.zeros(2, 96, dtype=torch.uint8)
    codes[:, ::32] = 0x38
    codes[0, 32], codes[0, 64] = 0xB8, 0x39
    scales = torch.tensor([[147, 147, 127]], dtype=torch.uint8)
    a, b = (Quantized(codes[row : row + 1], scales, None, find_recipe("mxfp8-e4m3"), (1, 96)) for row in (0, 1))
    free, declared = (bounds(a, b, out_dtype=torch.float32, order=order) for order in ORDERS)
    terms = kernels.scaled_terms(a, b)
    forward, backward = (torch.from_numpy(kernels.in_turn(some)) for some in (terms, terms[:, :, ::-1]))
    assert forward == 1.125
    assert backward == 0
    assert accepted(free, forward)
    assert accepted(free, backward)
    assert accepted(declared, forward)
    assert not accepted(declared, backward)


def test_promotion_without_a_fused_multiply_add_is_seen() -> None:
    """Of exact partial sums the declared chain has one answer."""
    a, b = pair(BLOCK_PAIRS[0], 9, (12, 12, 512), "near", "lattice")
    limits = bounds(a, b, out_dtype=torch.float32, order="blocks")
    assert limits.exact.all()
    assert (limits.tier == 0).all()
    otherwise = dict(kernels.promoted_otherwise(a, b, np.random.default_rng(9)))
    for what in ("P(s_a·s_b)", "(P·s_b)s_a", "dequantized"):
        assert not accepted(limits, torch.from_numpy(otherwise[what])).all(), what


# Overflow, NaN, zero, nothing, errors.


def huge(signs: list[int]) -> tuple[Quantized, Quantized]:
    """Terms ±448·448·2^109 ≈ ±1.3e38 in blocks of their own: two of one sign fit float32, three do not."""
    codes = torch.zeros(1, 32 * len(signs), dtype=torch.uint8)
    for block, sign in enumerate(signs):
        codes[0, 32 * block] = 0x7E | (0x80 if sign < 0 else 0)
    ones = torch.full_like(codes, 0x7E)
    scales = torch.full((1, len(signs)), 127, dtype=torch.uint8)
    shape = (1, codes.shape[1])
    left = Quantized(codes, scales + 109, None, find_recipe("mxfp8-e4m3"), shape)
    return left, Quantized(ones, scales, None, find_recipe("mxfp8-e4m3"), shape)


def test_a_sum_that_overflows_in_some_order_is_undetermined() -> None:
    a, b = huge([1, 1, 1, -1, -1])
    assert math.isfinite(gemm(a, b, out_dtype=torch.float32).item())
    for order in ORDERS:
        limits = bounds(a, b, out_dtype=torch.float32, order=order)
        assert limits.undetermined.all()
        assert not limits.exact.any()
        for out in (limits.expected.item(), math.inf, -math.inf, math.nan):
            assert accepted(limits, torch.tensor([[out]])).all()
        assert not accepted(limits, torch.tensor([[1e38]])).any()
    assert not np.isfinite(kernels.declared(a, b)).any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", [("mxfp8-e5m2", "mxfp8-e4m3"), BLOCK_PAIRS[1]], ids="-".join)
def test_codes_that_are_not_finite_follow_ieee_arithmetic(names: tuple[str, str], order: str | None) -> None:
    a, b = pair(names, 10, (4, 3, 160), "near", "positive")
    b.codes[:, 7] = 0x38
    clean = bounds(a, b, out_dtype=torch.float32, order=order)
    a.codes[1, 7], a.codes[2, 7], a.codes[3, 7], a.codes[3, 9] = 0x7F, 0xFC, 0x7C, 0xFC
    b.codes[:, 9] = 0x38
    limits = bounds(a, b, out_dtype=torch.float32, order=order)
    assert limits.expected[1].isnan().all()
    assert limits.expected[2].tolist() == [-math.inf] * 3
    assert limits.expected[3].isnan().all()
    assert limits.exact[1:].all()
    nan, inf = torch.full((4, 3), math.nan), torch.full((4, 3), -math.inf)
    assert accepted(limits, nan).all(1).tolist() == [False, True, False, True]
    assert accepted(limits, inf).all(1).tolist() == [False, False, True, False]
    assert not accepted(limits, torch.zeros(4, 3))[1:].any()
    assert clean.expected.isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", [NAMES[0], ("fp8-current-e4m3", "fp8-current-e5m2"), BLOCK_PAIRS[0]], ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 32), (2, 0, 32), (2, 3, 0), (0, 0, 0)])
def test_the_bounds_of_an_empty_product_are_empty_or_zero(
    names: tuple[str, str], m: int, n: int, k: int, order: str | None
) -> None:
    a, b = pair(names, 1, (m, n, k))
    limits = bounds(a, b, out_dtype=torch.bfloat16, order=order)
    assert tuple(limits.expected.shape) == (m, n)
    assert limits.exact.all()
    assert limits.tier.shape == limits.exact.shape
    assert accepted(limits, torch.zeros(m, n).bfloat16()).all()
    if m and n:
        assert not accepted(limits, torch.full((m, n), 1e-30).bfloat16()).any()


def test_an_unknown_order_is_refused() -> None:
    a = quantize(torch.ones(2, 32), "mxfp8-e4m3")
    with pytest.raises(ValueError, match=re.escape(", or None for any order; not 'butterfly'")):
        bounds(a, a, out_dtype=torch.float32, order="butterfly")
