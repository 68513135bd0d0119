"""Bounds of tails: they hold, they are near, and p-values of a right sampler are never too small."""

import math
from fractions import Fraction

import pytest
import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.correlations import PLAIN_SEED
from narrowgauge.harness.checks.statistics.decision import decide
from narrowgauge.harness.checks.statistics.rounding_choices import rounding_choices
from narrowgauge.harness.checks.statistics.rounding_tests import RoundingCounts
from narrowgauge.harness.checks.statistics.tail_bounds import bennett, binomial, chernoff
from narrowgauge.spec.recipes import find_recipe


def exact_tail(up, n, p):
    """Twice the smaller exact tail, at most 1."""
    mass = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    return min(Fraction(1), 2 * min(sum(mass[up:]), sum(mass[: up + 1])))


@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize("number", [0, 1, 77, 128, 255])
def test_the_binomial_bound_holds_and_is_near(n, number):
    p = Fraction(number, 256)
    up = torch.arange(n + 1, dtype=torch.float64)
    bound = binomial(up, torch.full_like(up, n), torch.full_like(up, float(p)))
    for k, log_p in enumerate(bound.tolist()):
        exact = exact_tail(k, n, p)
        if exact == 0:
            assert log_p == -math.inf
        else:
            assert math.exp(log_p) >= exact * (1 - Fraction(1, 10**9))
            if exact < Fraction(1, 1000):
                assert math.exp(log_p) <= 1.4 * exact


def convolved(masses):
    """The distribution of a sum of independent numbers, each a dict of values to probabilities."""
    total = {0.0: 1.0}
    for mass in masses:
        found = {}
        for a, p in total.items():
            for b, q in mass.items():
                found[round(a + b, 9)] = found.get(round(a + b, 9), 0) + p * q
        total = found
    return total


def convolved_product(p, q):
    """The distribution of (up - p)·(up' - q)."""
    mass = {}
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        value = (a - p) * (b - q)
        mass[value] = mass.get(value, 0) + (p if a else 1 - p) * (q if b else 1 - q)
    return mass


def test_bennett_s_bound_holds():
    """For sums of products of residuals, each value of the sum."""
    shares = [(1 / 4, 1 / 2), (1 / 2, 1 / 2), (3 / 4, 1 / 4)] * 4
    masses = [convolved_product(p, q) for p, q in shares]
    variance = torch.tensor([sum(p * (1 - p) * q * (1 - q) for p, q in shares)], dtype=torch.float64)
    total = convolved(masses)
    assert sum(v**2 * p for v, p in total.items()) == pytest.approx(float(variance))
    for value in total:
        exact = sum(p for v, p in total.items() if abs(v) >= abs(value) - 1e-9)
        assert math.exp(float(bennett(torch.tensor([value]).double(), variance))) >= exact * (1 - 1e-9)
    assert float(bennett(variance * 0, variance)) == 0
    n, p = 400, 1 / 400  # rare large values: the bound is near
    for k in (3, 10):
        exact = sum(math.comb(n, up) * p**up * (1 - p) ** (n - up) for up in range(k, n + 1))
        bound = math.exp(float(bennett(*torch.tensor([[k - n * p], [n * p * (1 - p)]]).double())))
        assert exact <= bound <= 30 * exact
    still = torch.zeros(2, dtype=torch.float64)
    assert bennett(torch.tensor([0.0, 1.0]).double(), still).tolist() == [0.0, -math.inf]


def test_chernoff_s_bound_holds():
    values = torch.tensor([[0.0, 1.0, 4.0], [0.0, 0.5, 2.0]], dtype=torch.float64)
    mass = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]], dtype=torch.float64)
    copies = torch.tensor([5.0, 7.0], dtype=torch.float64)
    kinds = [dict(zip(v, p, strict=True)) for v, p in zip(values.tolist(), mass.tolist(), strict=True)]
    total = convolved([kinds[0]] * 5 + [kinds[1]] * 7)
    for value in total:
        below, above = chernoff(value, mass.log(), values, copies)
        assert math.exp(below) >= sum(p for v, p in total.items() if v <= value) * (1 - 1e-9)
        assert math.exp(above) >= sum(p for v, p in total.items() if v >= value) * (1 - 1e-9)
    low, high = chernoff(34.0, mass.log(), values, copies)  # the largest sum of all
    assert high < math.log(1e-6) < low


@pytest.mark.long
def test_p_values_of_a_right_sampler_are_never_too_small():
    """Of 160 seeds no more than chance allows have a p-value of at most t: for every test, and for all of them."""
    recipe = find_recipe("nvfp4-sr")
    generator = torch.Generator().manual_seed(20)
    scaled = torch.rand(6, 32, generator=generator) * 12 - 6
    odds = rounding_choices(scaled, scaled, recipe)
    odds.up_bytes[odds.up_bytes > 0] = (odds.up_bytes[odds.up_bytes > 0] // 32 * 32 + 16).to(torch.int16)
    share = odds.up_bytes.clamp(min=0) / 256
    runs, found, smallest = 160, {}, []
    for _ in range(runs):
        counts = RoundingCounts(odds, recipe, scaled.signbit())
        counts.add(torch.rand(6, 6, 32, generator=generator) < share)
        counts.add_seed(PLAIN_SEED, torch.rand(6, 32, generator=generator) < share)
        chances = counts.tests()
        for chance in chances:
            found.setdefault(chance.name, []).append(math.exp(chance.log_p))
        result = StageResult("codes", "statistics", 192, tests=chances)
        decide([result])
        assert result.passed
        smallest.append(result.figures["p_value"])
    names = {"class 144/256", "bias", "dispersion", "one element", "columns 1 apart", "columns 8 apart",
             "blocks 1 apart", "rows 2 apart", "calls", "seeds", "bias of negative values from 2 to 4"}  # fmt: skip
    assert names <= found.keys()
    for test, p_values in [*found.items(), ("smallest", smallest)]:
        if "searched" not in test:  # the distance of these tests depends on the draws
            assert len(p_values) == runs
        for t in (0.001, 0.01, 0.05, 0.2, 0.5):
            count = sum(p <= t for p in p_values)
            assert sum(math.comb(runs, k) * t**k * (1 - t) ** (runs - k) for k in range(count, runs + 1)) > 1e-6, test
    for test in ("class 144/256", "bias", "dispersion", "calls"):  # and they are p-values, not all of them 1
        assert min(found[test]) < 0.1
