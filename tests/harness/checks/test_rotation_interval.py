"""The interval of a rotated value holds the results of every order of summation, and is as narrow as proved."""

import math
from fractions import Fraction

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.rotation_interval import FLT_MAX, UNIT, Interval, rotated_interval
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import terms

GROUPS = [2, 4, 8, 16, 32, 64, 128]
FAMILIES = [
    "normal", "uniform", "outliers", "tiles", "low-rows", "huge", "subnormal", "zeros", "negative-zeros", "position",
    "spread",
]  # fmt: skip


def rotating_recipe(group: int):
    return find_recipe("nvfp4-rht" if group == 16 else f"nvfp4-rht{group}")


def matrix(family: str, rows: int = 64, columns: int = 256) -> torch.Tensor:
    return make_inputs(case_from_labels("transform", "nvfp4-rht", (rows, columns), "bf16", family)).x


def any_tree(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The last dimension added up in float32, in an order and a tree of chance."""
    left = list(values.unbind(-1))
    while len(left) > 1:
        one, other = (left.pop(int(torch.randint(len(left), (1,), generator=generator))) for _ in range(2))
        left.append(one + other)
    return left[0]


def outside(y: torch.Tensor, interval: Interval) -> torch.Tensor:
    return ~((y >= interval.lower) & (y <= interval.upper))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", GROUPS)
def test_no_order_or_tree_of_additions_leaves_it(group, family):
    x = matrix(family)
    interval = rotated_interval(x, rotating_recipe(group))
    assert not bool(interval.undetermined.any())
    products = terms(x, rotating_recipe(group).transform)
    generator = torch.Generator().manual_seed(group)
    for _ in range(24 if group <= 32 else 4):
        y = any_tree(products, generator).bfloat16().view(x.shape)
        assert not bool(outside(y, interval).any())
    assert not bool(outside(reference.transform(x, rotating_recipe(group)), interval).any())
    once = products.double().sum(-1).float().bfloat16().view(x.shape)  # a kernel with a wider accumulator
    assert not bool(outside(once, interval).any())


def test_thousands_of_trees_of_hard_sums():
    """Two large terms that cancel and much smaller terms: every tree rounds differently."""
    generator = torch.Generator().manual_seed(7)
    spread = matrix("spread", 512, 16)
    seen = set()
    interval = rotated_interval(spread, rotating_recipe(16))
    products = terms(spread, rotating_recipe(16).transform)
    for _ in range(3000):
        y = any_tree(products, generator).bfloat16().view(spread.shape)
        assert not bool(outside(y, interval).any())
        seen.add(tuple(y[:, 0].view(torch.int16).tolist()))
    assert len(seen) > 1000


def exact(row: list[float], column: int, group: int) -> tuple[Fraction, Fraction, int]:
    """Sum, sum of magnitudes and count of the products of one output, in rationals."""
    c = Fraction(coefficient(group))
    sigma = signs(rotating_recipe(group).transform).tolist()
    products = [
        Fraction(v) * c * int(s) * (-1) ** bin(k & column).count("1")
        for k, (v, s) in enumerate(zip(row, sigma, strict=True))
    ]
    return sum(products, Fraction()), sum(map(abs, products), Fraction()), sum(p != 0 for p in products)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", ["normal", "spread", "subnormal", "tiles"])
@pytest.mark.parametrize("group", [4, 16, 32])
def test_it_is_as_narrow_as_the_rule_says(group, family):
    """In rationals: the ends are v ± (n - 1)·u·A, at most a float32 outward, rounded to bfloat16; v for exact sums."""
    x = matrix(family, 4, 128)
    interval = rotated_interval(x, rotating_recipe(group))
    for row in range(4):
        for column in range(128):
            start = column // group * group
            v, total, count = exact(x[row, start : start + group].tolist(), column - start, group)
            error = (count - 1) * Fraction(UNIT) * total if count else Fraction()
            low, high = (float(end[row, column]) for end in (interval.lower, interval.upper))
            slack = Fraction(1, 2**20) * error
            below, above = (torch.tensor(float(v + s * (error + slack))) for s in (-1, 1))
            assert low >= torch.nextafter(below, torch.tensor(-math.inf)).bfloat16()
            assert high <= torch.nextafter(above, torch.tensor(math.inf)).bfloat16()


@pytest.mark.parametrize("group", GROUPS)
def test_a_sum_that_cannot_round_is_known(group):
    x = torch.randint(-7, 8, (64, 2 * group), generator=torch.Generator().manual_seed(3)).bfloat16()
    interval = rotated_interval(x, rotating_recipe(group))
    assert torch.equal(interval.lower, interval.upper)  # but for the sign of 0
    assert torch.equal(interval.lower, reference.transform(x, rotating_recipe(group)))


def test_what_is_not_finite_is_known():
    x = torch.zeros(3, 16).bfloat16()
    x[0, 3], x[1, 3], x[2, 3], x[2, 4] = torch.inf, torch.nan, torch.inf, torch.inf
    interval = rotated_interval(x, rotating_recipe(16))
    expected = reference.transform(x, rotating_recipe(16))
    for end in (interval.lower, interval.upper):
        assert torch.equal(end.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert not bool(interval.undetermined.any())
    assert {bool(v) for v in expected[2].isnan()} == {True, False}


def test_a_sum_that_may_overflow_to_both_infinities_is_anything():
    x = torch.zeros(2, 16).bfloat16()
    x[0] = torch.finfo(torch.bfloat16).max
    x[1, :3] = torch.finfo(torch.bfloat16).max
    interval = rotated_interval(x, rotating_recipe(16))
    products = terms(x, rotating_recipe(16).transform)[0]
    both = ((products > 0).sum(1) > 4) & ((products < 0).sum(1) > 4)  # four are below the largest float32 number
    assert interval.undetermined.tolist() == [both.tolist(), [False] * 16]
    assert 8 < int(both.sum()) < 16
    assert bool((interval.lower[0, both] == -torch.inf).all())
    assert bool((interval.upper[0, both] == torch.inf).all())
    assert bool(torch.isfinite(interval.lower[1]).all())
    assert 8 * float(x[0, 0]) / 4 > FLT_MAX


def test_a_sum_that_overflows_to_one_infinity_is_never_nan():
    """Rows with 1 to 16 elements near the largest number: random trees of additions, and the accepted results."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(256, 16, generator=generator) * 2.0**100
    chosen = torch.rand(256, 16, generator=generator) < torch.arange(256).unsqueeze(1) / 256
    large = torch.finfo(torch.bfloat16).max * (1 - torch.rand(256, 16, generator=generator) / 4)
    x = torch.where(chosen, large * x.sign(), x).bfloat16()
    interval = rotated_interval(x, rotating_recipe(16))
    infinite = interval.lower.isinf() | interval.upper.isinf()
    products = terms(x, rotating_recipe(16).transform)
    seen = torch.zeros(x.shape, dtype=torch.bool)
    for _ in range(300):
        y = any_tree(products, generator).bfloat16().view(x.shape)
        assert not bool((outside(y, interval) & ~interval.undetermined).any())
        seen |= y.isinf()
    certain = interval.lower == interval.upper
    assert bool((certain & (interval.upper == torch.inf)).any())
    assert bool((infinite & ~certain & ~interval.undetermined & seen).any())
    assert int(interval.undetermined.sum()) > 100
    assert bool(seen[interval.undetermined].float().mean() > 0.5)  # no wider than necessary
    neighbours = (interval.lower == torch.finfo(torch.bfloat16).max) & (interval.upper == torch.inf)
    assert not bool(neighbours.any())
