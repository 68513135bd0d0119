"""Bounded numbers: no float32 computation leaves their intervals (sound), and what is off by more does (sharp)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.high_precision.attention import Softmax
from narrowgauge.reference.high_precision.bounded import (
    ERF_ULPS,
    RSQRT_ULPS,
    TANH_ULPS,
    TRUNCATING,
    Bounded,
    exactly,
    rounded_constant,
)
from tests.reference.inside import inside, width

f32 = np.float32
U = 2.0**-24


def numbers(seed: int, *shape: int, spread: int = 8) -> torch.Tensor:
    """float32 of both signs over 2^±spread, with zeros and powers of two among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    x[rng.random(shape) < 0.05] = 0
    powers = rng.random(shape) < 0.05
    x[powers] = 2.0 ** rng.integers(-3, 4, int(powers.sum()))
    return torch.from_numpy(x.astype(f32))


def uncertain(seed: int, *shape: int) -> Bounded:
    """Numbers with relative errors from 0 to ½."""
    value = numbers(seed, *shape).double()
    share = torch.from_numpy(np.random.default_rng(seed + 99).choice([0, 2.0**-22, 2.0**-10, 0.5], shape))
    return Bounded(value, value.abs() * share)


def members(x: Bounded, seed: int) -> torch.Tensor:
    """float32 numbers of the intervals, their ends among them."""
    where = torch.from_numpy(np.random.default_rng(seed).choice([-1, -0.7, 0, 0.3, 1], tuple(x.shape)))
    member = (x.value + where * x.error).float()
    return torch.where((member.double() - x.value).abs() <= x.error, member, x.value.float())


OPERATIONS: dict[
    str, tuple[Callable[[Bounded, Bounded], Bounded], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
]
OPERATIONS = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "subtract": (lambda a, b: a - b, lambda a, b: a - b),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b),
    "divide": (lambda a, b: a / b, lambda a, b: a / b),
    "half": (lambda a, _: a.times_power_of_two(0.5), lambda a, _: a * 0.5),
    "tanh": (lambda a, _: a.tanh(), lambda a, _: a.tanh()),
    "erf": (lambda a, _: a.erf(), lambda a, _: a.erf()),
    "rsqrt": (lambda a, _: (a * a).rsqrt(), lambda a, _: (a * a).rsqrt()),
    "sum": (lambda a, _: a.sum(0), lambda a, _: a[torch.randperm(len(a))].sum(0)),
    "mean": (lambda a, _: a.mean(1), lambda a, _: a.flip(1).cumsum(1)[:, -1] / a.shape[1]),
    "matmul": (lambda a, b: a.matmul(b.mT), lambda a, b: a @ b.mT),
}


class TestOperations:
    """Any members of the operands' intervals, in float32, give a number of the result's interval."""

    @pytest.mark.parametrize("name", OPERATIONS)
    @pytest.mark.parametrize("seed", range(3))
    def test_the_result_of_any_members_is_inside(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        bounded, plain = OPERATIONS[name]
        a, b = uncertain(seed, 24, 40), uncertain(seed + 50, 24, 40)
        expected = bounded(a, b)
        for draw in range(4):
            found = plain(members(a, draw), members(b, draw + 7))
            assert bool(inside(found, expected).all()), name

    @pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
    def test_one_operation_of_exact_numbers_is_off_by_half_an_ulp(self, name: str) -> None:
        a, b = numbers(1, 500), numbers(2, 500)
        expected = OPERATIONS[name][0](exactly(a), exactly(b))
        normal = torch.isfinite(expected.value) & (expected.value.abs() > 2.0**-120)
        assert bool((expected.error <= U * expected.value.abs() * 1.0001)[normal].all())
        for x, y, value, error in zip(
            a.tolist(), b.tolist(), expected.value.tolist(), expected.error.tolist(), strict=True
        ):
            if name == "divide" and y == 0:
                continue
            one, other = Fraction(x), Fraction(y)
            exact = {"add": one + other, "subtract": one - other, "multiply": one * other}.get(name)
            exact = one / other if exact is None else exact
            assert abs(exact - Fraction(value)) <= Fraction(error)
        two_ulps_off = (expected.value * (1 + 2.0**-22)).float()
        assert not bool((inside(two_ulps_off, expected) & normal & (expected.value != 0)).any())

    @pytest.mark.parametrize(("name", "ulps"), [("tanh", TANH_ULPS), ("erf", ERF_ULPS), ("rsqrt", RSQRT_ULPS)])
    def test_functions_have_the_ulps_that_cuda_documents_and_no_more(self, name: str, ulps: int) -> None:
        """Counted from the correctly rounded result, as CUDA's table counts, and also just below a power of two."""
        x = exactly(torch.cat([torch.linspace(0.1, 5, 1000), 1 / torch.linspace(0.999, 1.001, 1000) ** 2]))
        expected = getattr(x, name)()
        nearest = expected.value.float()
        for end in (-torch.inf, torch.inf):
            result = nearest
            for _ in range(ulps):
                result = torch.nextafter(result, torch.tensor(end))
            assert bool(inside(result, expected).all())
            # One ulp is up to twice the unit, relative; hence twice as many and a rounding.
            for _ in range(ulps + 2):
                result = torch.nextafter(result, torch.tensor(end))
            assert not bool(inside(result, expected).any())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_what_is_kept_in_a_narrow_dtype_has_its_rounding(self, dtype: torch.dtype) -> None:
        x = numbers(3, 1000, spread=6)
        kept = exactly(x).rounded(dtype)
        assert bool(inside(x.to(dtype).float(), kept).all())
        assert not bool(
            inside((x * (1 + 2.5 * 2.0 ** (-8 if dtype == torch.bfloat16 else -11))), kept)[x.abs() > 1e-3].any()
        )
        assert bool(exactly(torch.tensor([1e6])).rounded(torch.float16).unbounded.all())
        assert not bool(exactly(torch.tensor([1e6])).rounded(torch.bfloat16).unbounded.any())

    def test_further_roundings_and_errors_widen(self) -> None:
        x = exactly(torch.tensor([3.0, -5.0]))
        assert x.with_roundings(4).error.tolist() == pytest.approx([12 * U, 20 * U])
        assert x.with_error(lambda: torch.tensor(0.5)).error.tolist() == pytest.approx([0.5, 0.5])
        assert x.with_roundings(0).error.tolist() == [0, 0]

    def test_either_holds_both_ways_around_the_first(self) -> None:
        one = Bounded(torch.tensor([1.0]).double(), torch.tensor([0.1]).double())
        other = Bounded(torch.tensor([1.5]).double(), torch.tensor([0.2]).double())
        both = one.hull(lambda: other)
        assert both.value.item() == 1.0
        assert both.error.item() == pytest.approx(0.7)

    def test_masked_numbers_are_exact_zeros(self) -> None:
        x = uncertain(4, 3, 5)
        keep = torch.arange(5) < 2
        masked = x.masked(keep)
        assert not bool(masked.value[:, 2:].any() | masked.error[:, 2:].any())
        assert torch.equal(masked.error[:, :2], x.error[:, :2])


class TestSums:
    @pytest.mark.parametrize("family", ["normal", "spread", "cancelling", "outlier"])
    def test_no_order_leaves_the_bound(self, family: str) -> None:
        rng = np.random.default_rng(5)
        x = numbers(6, 300, 16, spread=0 if family == "normal" else 20)
        if family == "cancelling":
            x = torch.cat([x[:150], -x[:150] * (1 + 2.0**-12)])
        if family == "outlier":
            x[7] = 2.0**30
        expected = exactly(x).sum(0)
        exact = torch.tensor([float(sum(map(Fraction, column))) for column in x.T.tolist()], dtype=torch.float64)
        assert bool(((expected.value - exact).abs() <= expected.error + 2.0**-53 * exact.abs()).all())
        orders = [np.arange(300), np.arange(300)[::-1], *(rng.permutation(300) for _ in range(5))]
        for order in orders:
            terms = x.numpy()[order]
            assert bool(inside(np.add.accumulate(terms, 0, dtype=f32)[-1], expected).all())
            while len(terms) > 1:  # halves added to halves
                half = len(terms) // 2
                terms = np.concatenate([terms[:half] + terms[half : 2 * half], terms[2 * half :]])
            assert bool(inside(terms[0], expected).all())

    def test_a_bfloat16_accumulator_is_outside(self) -> None:
        x = numbers(7, 300, 16, spread=0)
        total = torch.zeros(16, dtype=torch.bfloat16)
        for row in x:
            total = total + row.bfloat16()
        assert not bool(inside(total.float(), exactly(x).sum(0)).any())

    def test_sums_of_a_lattice_are_exact(self) -> None:
        x = torch.from_numpy(np.random.default_rng(8).integers(-64, 65, (200, 8)).astype(f32))
        for dim in (0, 1):
            total = exactly(x).sum(dim, keepdim=True)
            assert not bool(total.error.any())
            assert torch.equal(total.value, x.double().sum(dim, keepdim=True))
        off = x.sum(0) + 1
        assert not bool(inside(off, exactly(x).sum(0)).any())
        assert bool(exactly(numbers(9, 200, 8)).sum(0).error.all())
        assert bool((exactly(x) + rounded_constant(0.1)).sum(0).error.all())

    def test_zeros_do_not_round_and_one_term_is_exact(self) -> None:
        x = torch.zeros(100, 2)
        x[3] = torch.tensor([0.1, -0.3])
        assert not bool(exactly(x).sum(0).error.any())
        assert exactly(torch.zeros(0, 2)).sum(0).value.tolist() == [0, 0]

    @pytest.mark.parametrize("truncates", [False, True])
    def test_products_hold_accumulators_that_round_and_that_truncate(self, truncates: bool) -> None:
        a, b = numbers(10, 12, 200, spread=2).bfloat16().float(), numbers(11, 200, 9, spread=2).bfloat16().float()
        expected = exactly(a).matmul(exactly(b), roundoff=TRUNCATING if truncates else U)
        total = np.zeros((12, 9))
        for column in range(200):
            exact = total + np.outer(a[:, column].numpy(), b[column].numpy()).astype(np.float64)
            total = exact.astype(f32).astype(np.float64)
            if truncates:
                total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total.astype(f32), f32(0)), total)
        assert bool(inside(total.astype(f32), expected).all())

    def test_sums_that_truncate_have_their_own_unit(self) -> None:
        x = numbers(14, 300, 16, spread=0).abs()
        total = np.zeros(16, f32)
        for row in x.numpy():
            exact = total.astype(np.float64) + row
            nearest = exact.astype(f32)
            total = np.where(nearest > exact, np.nextafter(nearest, f32(0)), nearest)
        truncating = exactly(x).sum(0, roundoff=TRUNCATING)
        assert bool(inside(total, truncating).all())
        assert bool((truncating.error > 1.99 * exactly(x).sum(0).error).all())

    def test_further_roundings_of_a_product_count(self) -> None:
        a, b = exactly(numbers(12, 4, 50)), exactly(numbers(13, 50, 4))
        assert bool((a.matmul(b, roundings=50).error > 1.9 * a.matmul(b).error).all())


class TestSoftmax:
    def scores(self, seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        keep = torch.ones(40, 40, dtype=torch.bool).tril()
        return numbers(seed, 40, 40, spread=1) * scale, keep

    @pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 400.0])
    def test_torch_and_online_softmax_are_inside(self, scale: float) -> None:
        scores, keep = self.scores(1, scale)
        expected = Softmax(exactly(scores), keep).shares
        masked = scores.masked_fill(~keep, -torch.inf)
        assert bool(inside(masked.softmax(-1), expected).all())
        top, total, shares = torch.full((40, 1), -torch.inf), torch.zeros(40, 1), torch.zeros(40, 0)
        log2e = 1 / math.log(2)
        for block in masked.split(16, dim=1):
            new = torch.maximum(top, block.amax(1, keepdim=True))
            change = torch.exp2(top * log2e - new * log2e)
            here = torch.exp2(block * log2e - new * log2e)
            shares = torch.cat([shares * change, here], 1)
            total = total * change + here.sum(1, keepdim=True)
            top = new
        assert bool(inside(shares / total, expected).all())

    def test_it_is_sharp_and_masks(self) -> None:
        scores, keep = self.scores(2, 1.0)
        expected = Softmax(exactly(scores), keep).shares
        assert not bool(expected.error[~keep].any())
        assert float((expected.error / expected.value)[keep].amax()) < 40 * U * 40
        unmasked = scores.softmax(-1)
        assert not bool(inside(unmasked, expected)[:39].all(1).any())

    def test_scores_of_no_meaning_bound_a_share_by_1(self) -> None:
        scores, keep = self.scores(3, 1.0)
        blurred = Softmax(Bounded(scores.double(), torch.full((40, 40), 9.0).double()), keep).shares
        assert float(blurred.error.amax()) <= 1.01


class TestSpecialValues:
    def test_nan_and_infinities_are_expected_as_such(self) -> None:
        x = exactly(torch.tensor([torch.nan, torch.inf, 1.0]))
        total = x + exactly(torch.tensor([1.0, 1.0, 1.0]))
        assert inside(torch.tensor([torch.nan, torch.inf, 2.0]), total).tolist() == [True, True, True]
        assert inside(torch.tensor([1.0, -torch.inf, torch.nan]), total).tolist() == [False, False, False]
        assert inside(torch.tensor([torch.nan]), (x - x).sum(0, keepdim=True)).tolist() == [True]

    def test_what_may_overflow_is_free(self) -> None:
        big = exactly(torch.tensor([3e38, 1.0]))
        assert (big + big).unbounded.tolist() == [True, False]
        assert (big * big).unbounded.tolist() == [True, False]
        assert exactly(torch.full((3, 1), 2e38)).sum(0).unbounded.tolist() == [True]
        assert exactly(torch.full((1, 3), 2e19)).matmul(exactly(torch.full((3, 1), 2e19))).unbounded.tolist() == [
            [True]
        ]
        assert inside(torch.tensor([torch.inf, torch.inf]), big + big).tolist() == [True, False]
        assert ((big + big) - big).unbounded.tolist() == [True, False]

    def test_a_divisor_that_may_be_0_makes_anything_right(self) -> None:
        one = exactly(torch.ones(3))
        divisor = Bounded(torch.tensor([1.0, 0.0, 0.1]).double(), torch.tensor([0.0, 1e-9, 0.2]).double())
        assert (one / divisor).unbounded.tolist() == [False, True, True]
        assert inside(torch.tensor([torch.inf]), exactly(torch.ones(1)) / exactly(torch.zeros(1))).tolist() == [True]

    def test_the_root_of_what_may_be_0_makes_anything_right(self) -> None:
        x = Bounded(torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([0.0, 1e-9, 0.0]).double())
        assert x.rsqrt().unbounded.tolist() == [False, True, False]

    def test_products_that_underflow_may_be_subnormal(self) -> None:
        tiny = torch.tensor([1e-30]) * 1.0
        assert bool(inside(tiny * 1e-12, exactly(tiny) * rounded_constant(1e-12)).all())
        assert bool(
            inside(torch.tensor([2.0**-149]) * 0.5, exactly(torch.tensor([2.0**-149])).times_power_of_two(0.5)).all()
        )


class TestOutputs:
    def test_an_exact_value_is_right_but_for_the_sign_of_zero(self) -> None:
        x = exactly(torch.tensor([1.0, 0.0]))
        assert inside(torch.tensor([1.0, -0.0]), x).tolist() == [True, True]
        assert inside(torch.tensor([1.0 + 2.0**-23, 2.0**-149]), x).tolist() == [False, False]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_interval_is_cast_outward_by_monotone_casts(self, dtype: torch.dtype) -> None:
        x = uncertain(15, 2000)
        ends = [(x.value - x.error).float().to(dtype), (x.value + x.error).float().to(dtype)]
        assert all(bool(inside(end.float(), x, dtype).all()) for end in ends)
        assert float(width(exactly(numbers(15, 2000)), dtype).amax()) == 0

    def test_values_cost_no_errors(self) -> None:
        def never() -> torch.Tensor:
            raise AssertionError("the error was asked for")

        x = Bounded(torch.ones(2, 2).double(), never)
        found = (x * x + x - x / x).matmul(x).sum(0).tanh().rsqrt()
        assert bool(found.value.isfinite().all())
        with pytest.raises(AssertionError, match="asked for"):
            _ = found.error

    def test_errors_of_use_say_what_is_wrong(self) -> None:
        wide = torch.ones(2).double()
        with pytest.raises(TypeError, match=r"a bounded number is float64, not torch\.float32"):
            Bounded(torch.ones(2), wide)
        with pytest.raises(TypeError, match=r"the error of a bounded number is float64, not torch\.float32"):
            Bounded(wide, torch.ones(2))
        with pytest.raises(ValueError, match=r"every bounded number has an error: shapes are \(2,\) and \(3,\)"):
            _ = Bounded(wide, lambda: torch.zeros(3).double()).error
        with pytest.raises(
            ValueError, match=r"0\.3 is no power of two, so the product rounds: multiply by rounded_constant\(0\.3\)"
        ):
            exactly(wide).times_power_of_two(0.3)
