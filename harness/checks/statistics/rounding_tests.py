"""Tests of stochastic rounding with the backend's own random bits: docs/tolerance.md#stochastic-rounding.

The reference cannot know the bits, so the tests judge the distribution of the roundings. The null hypothesis of every
test: an element rounds up with the probability that the recipe's finite number of bits gives, independently of all
other elements and calls. P-values are upper bounds, however small they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.statistics.correlations import Correlations, Roundings
from narrowgauge.harness.checks.statistics.rounding_choices import RoundingChoices
from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest
from narrowgauge.harness.checks.statistics.tail_bounds import bennett, binomial, chernoff
from narrowgauge.spec.recipes import Recipe

BYTE = 256
DETECTED_BIAS = 1 / 512
"""Bias of the roundings that a case detects: the mean bias of random bytes without their last bit."""
Z_FALSE, Z_MISSED = 6.1, 2.6
"""Normal quantiles of a two-sided false alarm of 1e-9, and of missing a bias in one case of 200."""
DRAWS = math.ceil((Z_FALSE + Z_MISSED) ** 2 / 4 / DETECTED_BIAS**2)
"""Roundings that a case counts: (z_a + z_b)²·p(1 - p)/d² for d = 1/512 at p = 1/2, 5 million. The mean of p(1 - p) over
all distances is 1/6. The difference to 1/4 pays for Holm's procedure: 350 tests in each of a thousand cases."""
CALLS = (4, 512)
"""Smallest and largest number of calls of a case. The comparison of calls needs the smallest number. A small matrix
would need more than the largest number for DRAWS roundings, and detects only a larger bias."""


def required_calls(choices: RoundingChoices) -> int:
    """Number of calls with about DRAWS roundings; 1 if no element is random."""
    count = int((choices.up_bytes > 0).sum())
    return min(max(-(-DRAWS // count), CALLS[0]), CALLS[1]) if count else 1


class RoundingCounts:
    """Counts of roundings over all calls, and their statistical tests."""

    def __init__(self, choices: RoundingChoices, recipe: Recipe, negative: torch.Tensor) -> None:
        """`negative`, bool (M, K): whether the scaled element is negative."""
        self.up_bytes = choices.up_bytes
        self.calls = 0
        self.ups = torch.zeros_like(choices.up_bytes, dtype=torch.int32)
        self._random = choices.up_bytes > 0
        self._share = choices.up_bytes.clamp(min=0).float() / BYTE
        self._binade = negative.int() * 256 + (choices.below >> recipe.element.mantissa_bits).int()
        self._fmt = recipe.element
        self._correlations = Correlations(self._share * (1 - self._share) * self._random, recipe.block[1])

    @property
    def draws(self) -> int:
        """Number of counted roundings."""
        return self.calls * int(self._random.sum())

    def add(self, up: torch.Tensor) -> None:
        """Count the elements that were rounded up in consecutive calls: bool (calls, M, K)."""
        if not self.calls:
            self._correlations.add(self._residuals(up[: self._correlations.calls]))
        self.calls += len(up)
        self.ups += up.sum(0, dtype=torch.int32)

    def add_seed(self, kind: int, up: torch.Tensor) -> None:
        """Compare a call with the offset of the first call and a different seed: bool (M, K). It is not counted.

        `kind`: PLAIN_SEED, HIGH_SEED or SEED_AS_OFFSET of `correlations`.
        """
        self._correlations.add_seed(kind, self._residuals(up))

    def roundings(self, up: torch.Tensor) -> Roundings:
        """The roundings of a call: bool (M, K)."""
        return Roundings(self._residuals(up), self._share * (1 - self._share) * self._random)

    def add_half(self, up: torch.Tensor, other: Roundings) -> None:
        """Compare the first call, bool (M, K), with the other half (K, M) of this call."""
        self._correlations.add_half(self._residuals(up), other)

    def _residuals(self, up: torch.Tensor) -> torch.Tensor:
        return (up.float() - self._share) * self._random

    def tests(self) -> list[StatisticalTest]:
        """All tests for which roundings were counted."""
        known_elements = self.up_bytes >= 0
        if not self.calls or not bool(known_elements.any()):
            return []
        shares, ups = self.up_bytes[known_elements].long(), self.ups[known_elements].long()
        width = self.calls + 1
        cells = torch.bincount(shares * width + ups, minlength=BYTE * width).view(BYTE, width).double()
        return [
            *_class_tests(cells),
            *self._bias_tests(cells),
            *(_dispersion_tests(cells) if self.calls > 1 else ()),
            *self._correlations.tests(),
        ]

    def _bias_tests(self, cells: torch.Tensor) -> Iterator[StatisticalTest]:
        """Bias of all roundings; bias by the number of bits of the probability; bias by sign and binade."""
        count = cells.sum(1) * self.calls
        ups = _count_ups(cells)
        share = torch.arange(BYTE, dtype=torch.float64, device=cells.device) / BYTE
        sums = torch.stack([ups, count * share, count * share * (1 - share), count])
        sums[:, 0] = 0  # A magnitude on the grid never rounds up: `_class_tests` tests it alone.
        yield _bias_test("bias", "bias", *sums.sum(1).tolist())
        for bits in range(1, 9):
            bit_sums = sums[:, BYTE >> bits :: BYTE >> bits - 1]
            if float(bit_sums[3].sum()):
                yield _bias_test("bits", f"bias where {bits} of the bits count", *bit_sums.sum(1).tolist())
        binades = self._binade[self._random].long()
        share = self._share[self._random].double()
        binade_sums = torch.stack([
            torch.bincount(binades, weights, 512)
            for weights in (
                self.ups[self._random].double(), share * self.calls, share * (1 - share) * self.calls,
                torch.full_like(share, self.calls),
            )
        ])  # fmt: skip
        for group in binade_sums[3].nonzero().flatten().tolist():
            yield _bias_test("binade", f"bias of {self._describe_binade(group)}", *binade_sums[:, group].tolist())

    def _describe_binade(self, group: int) -> str:
        """Description of the scaled values with a sign and a binade."""
        sign, exponent = divmod(group, 256)
        start = self._fmt.value(exponent << self._fmt.mantissa_bits)
        end = min(2 * start, self._fmt.max) or self._fmt.value(1 << self._fmt.mantissa_bits)
        return f"{'negative' if sign else 'positive'} values from {start:g} to {end:g}"


def _count_ups(cells: torch.Tensor) -> torch.Tensor:
    """Number of upward roundings of each class. `cells[c, n]`: elements of class c that rounded up in n calls."""
    return cells @ torch.arange(cells.shape[1], dtype=torch.float64, device=cells.device)


def _bias_test(kind: str, test: str, ups: float, expected: float, variance: float, count: float) -> StatisticalTest:
    log_p = bennett(*(torch.tensor([number], dtype=torch.float64) for number in (ups - expected, variance)))
    return StatisticalTest(test, float(log_p), _up_sentence(ups, expected, count), kind=kind)


def _up_sentence(ups: float, expected: float, count: float) -> str:
    return f"{format_count(int(ups))} of {format_count(int(count))} went up, not {format_count(round(expected))}"


def _class_tests(cells: torch.Tensor) -> Iterator[StatisticalTest]:
    """Test of the probability of rounding up for each of the 256 distances to the grid point below."""
    count, ups = cells.sum(1) * (cells.shape[1] - 1), _count_ups(cells)
    share = torch.arange(BYTE, dtype=torch.float64, device=cells.device) / BYTE
    log_p = binomial(ups, count, share).tolist()
    for number in count.nonzero().flatten().tolist():
        n, up = float(count[number]), float(ups[number])
        yield StatisticalTest(
            f"class {number}/256", log_p[number], _up_sentence(up, n * number / BYTE, n), kind="class"
        )


def _dispersion_tests(cells: torch.Tensor) -> Iterator[StatisticalTest]:
    """Dispersion over calls: elements that round in the same direction too often or too rarely; any single element."""
    calls = cells.shape[1] - 1
    occupied_classes = cells.sum(1) > 0
    occupied_classes[0] = False
    if not bool(occupied_classes.any()):
        return
    number = occupied_classes.nonzero()
    share, times = number.double() / BYTE, torch.arange(calls + 1, dtype=torch.float64, device=cells.device)
    trials = torch.full_like(times, calls)
    log_mass = torch.lgamma(trials + 1) - torch.lgamma(times + 1) - torch.lgamma(trials - times + 1)
    log_mass = log_mass + torch.xlogy(times, share) + torch.xlogy(trials - times, 1 - share)
    spread = (times - calls * share) ** 2 / calls
    occupied_cells = cells[occupied_classes]
    total, elements = float((occupied_cells * spread).sum()), occupied_cells.sum(1)
    mean = float((elements.unsqueeze(1) * share * (1 - share)).sum())
    regular, stuck = chernoff(total, log_mass, spread, elements)
    sentence = f"over {calls} calls elements spread {total / mean:.3g} times as far as chance does"
    yield StatisticalTest("dispersion", min(0.0, min(regular, stuck) + math.log(2)), sentence)
    tails = binomial(times.expand_as(occupied_cells), trials.expand_as(occupied_cells), share.expand_as(occupied_cells))
    tails = tails.masked_fill(occupied_cells == 0, 0.0)
    worst, ups = divmod(int(tails.argmin()), calls + 1)
    log_p = min(0.0, float(tails[worst, ups]) + math.log(float(elements.sum())))
    yield StatisticalTest(
        "one element", log_p, f"it went up in {ups} of {calls} calls, at {int(number[worst])}/256 of a step"
    )
