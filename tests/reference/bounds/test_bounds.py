"""The bounds of a GEMM: no order of summation leaves the bounds (sound), and wrong results do (sharp)."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.reference.bounds.bounds import Bounds, bounds
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.gemm.operands import element_values
from narrowgauge.reference.ops import gemm, quantize
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits
from tests.reference import orders
from tests.reference.samples import FAMILIES, operands, quantized, values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)
U = Fraction(1, 1 << 24)
# Two amaxes each: α = 1, an odd α, large, small, and subnormal.
AMAXES = [(2688.0, 2688.0), (3.3, 41.7), (1e12, 3e9), (1e-4, 0.02), (1e-17, 3e-18)]


class Problem:
    """Operands of a family with their exact terms, and addends that cancel, or do not."""

    def __init__(self, family: str, seed: int, m: int, n: int, k: int, amaxes: tuple[float, float]) -> None:
        self.rng = np.random.default_rng(seed)
        left, left_scales, right, right_scales = operands(family, self.rng, m, n, k)
        self.a, self.b = quantized(left, left_scales, amaxes[0]), quantized(right, right_scales, amaxes[1])
        self.left, self.right = values(left, left_scales), values(right, right_scales)
        self.terms = orders.products(self.left, self.right)
        self.alpha = np.float32(alpha(self.a, self.b).item())

    def addend(self, like: np.ndarray) -> np.ndarray:
        """float32: the opposite of the outputs, nearly so, of their size, far smaller, or zero."""
        how = self.rng.choice([-1, -1.0001, 1, 0.3, 1e-6, 0], like.shape)
        return (like * how * self.rng.choice([1, 1 + 2.0**-20], like.shape)).astype(np.float32)

    def addends(self, epilogue: str) -> dict[str, torch.Tensor]:
        y = gemm(self.a, self.b, out_dtype=torch.float32).numpy()
        added = {}
        if "c" in epilogue:
            added["c"] = torch.from_numpy(self.addend(y))
        if "bias" in epilogue:
            added["bias"] = torch.from_numpy(self.addend(y[0]))
        return added


def accepted(limits: Bounds, out: torch.Tensor) -> torch.Tensor:
    """bool: docs/tolerance.md#gemm, read off the fields of `Bounds` as their docstrings say."""
    right_bits = (bits(out) == bits(limits.expected)) | (bits(out) == bits(limits.fused))
    unsigned = limits.zero_sum & ((out == limits.expected) | (out == limits.fused))
    nan = out.isnan() & limits.expected.isnan()
    inside = (limits.lower <= out) & (out <= limits.upper)
    free = limits.undetermined & ~out.isfinite()
    return torch.where(limits.exact, right_bits | unsigned | nan, inside | nan | free)


def assert_within_budget(limits: Bounds, out: torch.Tensor, what: object) -> None:
    """Every finite output is within its budget, if the budget is finite."""
    above = (out.double() - limits.centre).abs() > limits.budget
    assert not (above & out.isfinite() & limits.centre.isfinite() & limits.budget.isfinite()).any(), what


def assert_ends_within_budget(limits: Bounds) -> None:
    """Every accepted output is within its budget: the ends of each interval, the expected and the fused output."""
    for end in (limits.lower, limits.upper, limits.expected, limits.fused):
        assert_within_budget(limits, torch.where(limits.exact, limits.expected, end), "end")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, NaN being equal to NaN; zeros of both signs are too."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def ordinal(x: torch.Tensor) -> torch.Tensor:
    """Position of a float among the numbers of its dtype; neighbours differ by 1 (int64)."""
    word = bits(x).long()
    return torch.where(word < 0, -(word & ((1 << (8 * x.element_size() - 1)) - 1)), word)


def neighbour(x: torch.Tensor, direction: float) -> torch.Tensor:
    """The next number of the same dtype."""
    return torch.nextafter(x, torch.full_like(x, direction))


# Sound.


@SETTINGS
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 2**32),
    blocks=st.integers(1, 5),
    amaxes=st.sampled_from(AMAXES),
    out_dtype=st.sampled_from(DTYPES),
    epilogue=st.sampled_from(["", "c", "bias", "c and bias"]),
)
def test_no_order_of_summation_leaves_the_bounds(
    family: str, seed: int, blocks: int, amaxes: tuple[float, float], out_dtype: torch.dtype, epilogue: str
) -> None:
    """About 120 orders and trees an example, each with the epilogue fused and unfused. Outputs and ends of intervals
    are within their budgets."""
    problem = Problem(family, seed, 2, 3, 32 * blocks, amaxes)
    added = problem.addends(epilogue)
    limits = bounds(problem.a, problem.b, out_dtype=out_dtype, **added)
    sums = orders.accumulators(problem.terms, problem.rng, 30)
    arrays = {name: tensor.numpy() for name, tensor in added.items()}
    for name, out in orders.outputs(sums, problem.alpha, arrays.get("c"), arrays.get("bias"), out_dtype):
        assert accepted(limits, out).all(), name
        assert_within_budget(limits, out, name)
    assert_ends_within_budget(limits)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_exact_tier_every_order_gives_the_same_sum(family: str) -> None:
    found = 0
    for seed in range(6):
        problem = Problem(family, seed, 3, 3, 32, AMAXES[0])
        limits = bounds(problem.a, problem.b, out_dtype=torch.float32)
        sums = orders.accumulators(problem.terms, problem.rng, 40)
        exact = limits.exact.numpy()
        assert (sums[:, exact] == sums[0, exact]).all()
        assert (sums[0, exact] == problem.terms.astype(np.float64).sum(axis=2)[exact]).all()
        found += exact.sum()
    assert found, "no output of this family is in the exact tier"


@pytest.mark.parametrize("epilogue", ["", "c", "bias", "c and bias"])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_expected_output(family: str, out_dtype: torch.dtype, epilogue: str) -> None:
    problem = Problem(family, 2, 4, 5, 128, (3.3, 41.7))
    added = problem.addends(epilogue)
    limits = bounds(problem.a, problem.b, out_dtype=out_dtype, **added)
    y = gemm(problem.a, problem.b, out_dtype=out_dtype, **added)
    assert torch.equal(bits(y), bits(limits.expected))
    assert ((limits.lower <= y) & (y <= limits.upper)).all()
    assert accepted(limits, y).all()
    for field in ("expected", "fused", "lower", "upper"):
        assert getattr(limits, field).dtype == out_dtype


# Amaxes of rows.


@pytest.mark.sampled(6)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("epilogue", ["", "c", "bias", "c and bias"])
@pytest.mark.parametrize("family", ["wide", "cancel", "lattice"])
def test_a_scaled_row_has_the_bounds_of_the_row_alone(family: str, epilogue: str, out_dtype: torch.dtype) -> None:
    """Each output has the bounds of a 1×1 product of plain operands, also for scaled columns."""
    problem = Problem(family, 3, 4, 3, 96, (1.0, 1.0))
    rows, columns = torch.tensor([3.3, 1e-17, 2688.0, math.inf]), torch.tensor([41.7, 3e-18, 0.0])
    row_scaled = find_recipe("nvfp4-rowscaled")
    added = problem.addends(epilogue)
    c, bias = added.get("c"), added.get("bias")
    plain = ((problem.a, torch.ones(1)), (problem.b, torch.ones(1)))
    scaled = ((problem.a, rows), (problem.b, columns))
    for left, right in ((scaled[0], scaled[1]), (scaled[0], plain[1]), (plain[0], scaled[1])):
        a, b = (
            dataclasses.replace(q, amax=amax, recipe=row_scaled if len(amax) > 1 else q.recipe)
            for q, amax in (left, right)
        )
        limits = bounds(a, b, out_dtype=out_dtype, **added)
        y = gemm(a, b, out_dtype=out_dtype, **added)
        for i, j in np.ndindex(4, 3):
            one, other = (
                Quantized(
                    q.codes[n : n + 1], q.scales[n : n + 1], amax[n : n + 1] if len(amax) > 1 else amax,
                    find_recipe("nvfp4"), (1, 96),
                )
                for (q, amax), n in ((left, i), (right, j))
            )  # fmt: skip
            alone = bounds(
                one, other, out_dtype=out_dtype, c=None if c is None else c[i : i + 1, j : j + 1],
                bias=None if bias is None else bias[j : j + 1],
            )  # fmt: skip
            for field in dataclasses.fields(Bounds):
                mine, its = getattr(limits, field.name), getattr(alone, field.name)
                assert tuple(mine.shape) == (4, 3)
                assert same(mine[i : i + 1, j : j + 1], its), field.name
            assert same(y[i : i + 1, j : j + 1], alone.expected)


# The tiers, in exact arithmetic.


def parts(problem: Problem, i: int, j: int) -> tuple[Fraction, Fraction, int]:
    """S+, S- and the number of nonzero products of one output."""
    terms = [Fraction(float(p)) for p in problem.terms[i, j] if p]
    return sum((p for p in terms if p > 0), Fraction(0)), -sum((p for p in terms if p < 0), Fraction(0)), len(terms)


def lowest(row: np.ndarray) -> Fraction:
    """The largest power of two that divides every nonzero value of a row; 2^-10 for a row of zeros."""
    counts = [int(value * 1024) for value in row if value]
    return Fraction(min((n & -n for n in counts), default=1), 1024)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [16, 64, 256])
def test_partial_sums_of_the_exact_tier_have_24_bits(family: str, k: int) -> None:
    """max(S+, S-) <= 2^24·q, with q the lowest bit of the row times that of the column."""
    problem = Problem(family, k, 6, 6, k, AMAXES[1])
    limits = bounds(problem.a, problem.b, out_dtype=torch.bfloat16)
    for i in range(6):
        for j in range(6):
            positive, negative, n = parts(problem, i, j)
            q = lowest(problem.left[i]) * lowest(problem.right[j])
            assert limits.exact[i, j].item() == (max(positive, negative) <= 2**24 * q or n <= 1)
            assert limits.zero_sum[i, j].item() == (positive == negative)


def total_of(numbers: list[float], amaxes: tuple[float, float]) -> tuple[Quantized, Quantized]:
    """Operands of an output with the terms `numbers`: powers of two from 2^-10 to 1024, a power per block, by ones."""
    codes, scales = np.zeros((1, 16 * len(numbers)), np.uint8), np.zeros((1, len(numbers)), np.uint8)
    for block, number in enumerate(numbers):
        scale = max(number / 4, 2.0**-9)
        codes[0, 16 * block] = rounding.encode(number / scale, E2M1)
        scales[0, block] = rounding.encode(scale, E4M3)
    assert values(codes, scales).sum() == sum(numbers)
    ones = np.full_like(codes, 2), np.full_like(scales, 0x38)
    return quantized(codes, scales, amaxes[0]), quantized(*ones, amaxes[1])


@pytest.mark.parametrize("extra", [False, True])
def test_the_exact_tier_ends_just_above_2_to_the_24_units(extra: bool) -> None:
    """S+ = 2^14 = 2^24·q exactly, by 15·1024, 512, 256, … 2^-10 and a second 2^-10; then with a third."""
    numbers = [1024.0] * 15 + [2.0**e for e in range(9, -11, -1)] + [2.0**-10] * (2 if extra else 1)
    assert sum(numbers) == 2.0**14 + 2.0**-10 * extra
    assert bounds(*total_of(numbers, AMAXES[0]), out_dtype=torch.float32).exact.all() != extra


@pytest.mark.parametrize("sign", [1, -1])
def test_the_fused_addition_rounds_once(sign: int) -> None:
    """α·S + c = ±(1 + 2^-24 + 2^-60): a sum in float64 is a tie of float32 and then goes to 1."""
    numbers = [1024.0] * 15 + [2.0**e for e in range(9, 1, -1)] + [2.0**-10]
    a, b = total_of(numbers, (2688 * (1 + 2.0**-12) * 2.0**-38, 2688.0))
    if sign < 0:
        b.codes = torch.full_like(b.codes, 0xAA)
    assert alpha(a, b) == (1 + 2.0**-12) * 2.0**-38
    assert (1 + 2.0**-12) * 2.0**-38 * sum(numbers) == 2.0**-24 * (1 + 2.0**-36)
    limits = bounds(a, b, out_dtype=torch.float32, c=torch.tensor([[float(sign)]]))
    assert limits.exact.all()
    assert limits.fused == sign * (1 + 2.0**-23)
    assert limits.expected == sign  # α·S itself rounds to 2^-24


def float32_inside(low: Fraction, high: Fraction) -> tuple[float, float]:
    """The smallest and the largest float32 number of [low, high]."""
    ends = []
    for end, sign in ((low, -1), (high, 1)):
        number = rounding.nearest(end, "float32")
        outside = sign * (Fraction(number) - end) > 0
        ends.append(float(np.nextafter(np.float32(number), np.float32(-sign * np.inf))) if outside else number)
    return ends[0], ends[1]


def rule(problem: Problem, i: int, j: int, c: float, exact: bool, dtype: str) -> tuple[float, float]:
    """The interval of docs/tolerance.md#the-accepted-interval in fractions: casts of the float32 numbers of
    [αS − E, αS + E], or of both ends plus c, rounded to float32. A c of 0 is no addend."""
    positive, negative, n = parts(problem, i, j)
    factor = Fraction(float(problem.alpha))
    accumulation = 0 if exact else max(n - 1, 0) * U * (positive + negative)
    centre = factor * (positive - negative)
    error = abs(factor) * accumulation * (1 + U) + U * abs(centre) + Fraction(1, 1 << 149)
    ends = centre - error, centre + error
    ends = [rounding.nearest(end + Fraction(c), "float32") for end in ends] if c else float32_inside(*ends)
    low, high = (rounding.nearest(Fraction(end), dtype) for end in ends)
    return low, high


@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_interval_is_the_rules_to_within_an_ulp(family: str, out_dtype: torch.dtype, with_c: bool) -> None:
    """Never narrower than the rule in exact arithmetic, and at most one ulp wider at either end."""
    problem = Problem(family, 3, 4, 4, 96, (3.3, 41.7))
    added = problem.addends("c" if with_c else "")
    limits = bounds(problem.a, problem.b, out_dtype=out_dtype, **added)
    ends = np.empty((2, 4, 4))
    for i in range(4):
        for j in range(4):
            c = added["c"][i, j].item() if with_c else 0.0
            dtype = str(out_dtype).removeprefix("torch.")
            ends[:, i, j] = rule(problem, i, j, c, limits.exact[i, j].item(), dtype)
    low, high = torch.from_numpy(ends).to(out_dtype)
    assert (limits.lower <= low).all()
    assert (limits.upper >= high).all()
    assert (ordinal(low) - ordinal(limits.lower) <= 1).all()
    assert (ordinal(limits.upper) - ordinal(high) <= 1).all()
    for beyond, direction in ((limits.lower, -math.inf), (limits.upper, math.inf)):
        outside = accepted(limits, neighbour(beyond, direction))
        assert not outside.any()


# Sharp.


@pytest.mark.parametrize("direction", [-math.inf, math.inf])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["randn", "lattice", "positive"])
def test_one_ulp_is_seen_in_the_exact_tier(family: str, out_dtype: torch.dtype, direction: float) -> None:
    problem = Problem(family, 4, 6, 6, 32, AMAXES[1])
    limits = bounds(problem.a, problem.b, out_dtype=out_dtype)
    perturbed = neighbour(limits.expected, direction)
    assert limits.exact.any()
    assert not accepted(limits, perturbed)[limits.exact].any()


# Zeros, NaN, infinities, overflow, nothing.


def test_a_sum_of_zero_may_have_either_sign() -> None:
    codes = np.array([[2, 10, *[0] * 14], [0] * 16, [2, 2, *[0] * 14]], np.uint8)
    scales = np.full((3, 1), 0x38, np.uint8)
    limits = bounds(quantized(codes, scales), quantized(codes[2:], scales[2:]), out_dtype=torch.float32)
    assert limits.zero_sum.tolist() == [[True], [True], [False]]
    for zero in (0.0, -0.0):
        assert accepted(limits, torch.tensor([[zero], [zero], [2.0]])).all()
    assert not accepted(limits, torch.tensor([[1e-45], [-1e-45], [-2.0]])).any()


@pytest.mark.parametrize("k", [64, 2048])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_nan_scale_asks_for_nan_in_its_row_and_nowhere_else(k: int, out_dtype: torch.dtype) -> None:
    problem = Problem("wide", 10, 3, 4, k, AMAXES[0])
    clean = bounds(problem.a, problem.b, out_dtype=out_dtype)
    problem.a.scales[1, 0] = 0x7F
    limits = bounds(problem.a, problem.b, out_dtype=out_dtype)
    assert limits.expected[1].isnan().all()
    assert accepted(limits, torch.full((3, 4), math.nan, dtype=out_dtype)).tolist() == [
        [False] * 4,
        [True] * 4,
        [False] * 4,
    ]
    assert not accepted(limits, torch.zeros(3, 4, dtype=out_dtype))[1].any()
    for row in (0, 2):
        for field in ("expected", "lower", "upper", "exact"):
            assert torch.equal(getattr(limits, field)[row], getattr(clean, field)[row])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [32, 256])
def test_every_order_is_accepted_under_an_infinite_alpha(family: str, k: int) -> None:
    problem = Problem(family, 11, 4, 4, k, (1e30, 1e30))
    assert problem.alpha == math.inf
    limits = bounds(problem.a, problem.b, out_dtype=torch.float32)
    sums = orders.accumulators(problem.terms, problem.rng, 20)
    for name, out in orders.outputs(sums, problem.alpha, None, None, torch.float32):
        assert accepted(limits, out).all(), name
    assert not accepted(limits, torch.ones(4, 4)).any()


def test_an_infinity_has_the_sign_of_the_sum_if_determined() -> None:
    cancelling, plain = (Problem(family, 12, 4, 4, 256, (1e30, 1e30)) for family in ("cancel", "positive"))
    assert not bounds(plain.a, plain.b, out_dtype=torch.float32).undetermined.any()
    limits = bounds(cancelling.a, cancelling.b, out_dtype=torch.float32)
    for i in range(4):
        for j in range(4):
            positive, negative, n = parts(cancelling, i, j)
            open_sign = abs(positive - negative) <= (n - 1) * U * (positive + negative) and not limits.exact[i, j]
            assert limits.undetermined[i, j].item() == open_sign
    assert limits.undetermined.any()


@pytest.mark.parametrize("epilogue", ["", "c"])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_every_order_is_accepted_where_the_output_overflows(out_dtype: torch.dtype, epilogue: str) -> None:
    """α·S on both sides of FLT_MAX; with c the output of a fused kernel is finite, of an unfused kernel infinite."""
    problem = Problem("positive", 0, 6, 6, 1600, (1.8e19, 1.8e19))
    y = problem.alpha.astype(np.float64) * problem.terms.astype(np.float64).sum(axis=2)
    assert (y < 3e38).any()
    assert (y > 4e38).any()
    added = {"c": torch.full((6, 6), -3e38)} if epilogue else {}
    limits = bounds(problem.a, problem.b, out_dtype=out_dtype, **added)
    assert not limits.exact.all()
    sums = orders.accumulators(problem.terms, problem.rng, 10)
    c = added["c"].numpy() if epilogue else None
    for name, out in orders.outputs(sums, problem.alpha, c, None, out_dtype):
        assert accepted(limits, out).all(), name


# ---- float16 outputs that overflow -----------------------------------------------------------------------------------


def test_float16_sums_that_overflow():
    """448·144 + 448·2.25 is 65520, exact in any order; with products below the last bit, both results are right."""
    a = quantize(torch.full((1, 32), 448.0), "mxfp8-e4m3")
    b = quantize(torch.full((1, 32), 448.0), "mxfp8-e4m3")
    b.codes.zero_()
    b.codes[0, :2] = torch.tensor([0x71, 0x41])
    assert element_values(b)[0, :2].tolist() == [144.0, 2.25]
    limits = bounds(a, b, out_dtype=torch.float16)
    assert limits.exact.all()
    assert limits.expected.item() == math.inf
    assert gemm(a, b, out_dtype=torch.float16).item() == math.inf
    b.codes[0, 2] = 0x81  # −2^-9, times 448: 65519.125
    limits = bounds(a, b, out_dtype=torch.float16)
    assert limits.exact.all()
    assert limits.expected.item() == 65504
    # Four products ±2^-18 are below half the last bit of 65520, and an order may lose them.
    a.codes[0, 2:6], b.codes[0, 2:6] = 0x01, torch.tensor([0x01, 0x01, 0x81, 0x81])
    limits = bounds(a, b, out_dtype=torch.float16)
    assert not limits.exact.any()
    assert not limits.undetermined.any()
    assert (limits.lower.item(), limits.upper.item()) == (65504, math.inf)
    found = [65504.0, math.inf, -math.inf, math.nan, 65472.0]
    correct = [within_bounds(torch.tensor([[y]], dtype=torch.float16), limits).item() for y in found]
    assert correct == [True, True, False, False, False]
