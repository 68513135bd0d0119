"""docs/tolerance.md#stochastic-rounding: stochastic rounding by bits that nobody else can know, judged by its
distribution.

Every test has its own null hypothesis in full: an element goes up with the probability that the recipe's finite bits
give it, independently of all others and of all other calls. P-values are bounds that hold at any depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from narrowgauge.harness.checks.finding import spaced
from narrowgauge.harness.checks.statistics.chance import Chance
from narrowgauge.harness.checks.statistics.correlations import Correlations
from narrowgauge.harness.checks.statistics.odds import Odds
from narrowgauge.harness.checks.statistics.tails import bennett, binomial, chernoff
from narrowgauge.spec.recipes import Recipe

BYTE = 256
SEEN = 1 / 512
"""The bias of a rounding that a case sees: what bytes without their last bit have on average."""
Z_FALSE, Z_MISSED = 6.1, 2.6
"""Normal quantiles of a false alarm of 1e-9 on either side, and of a bias missed in one case of 200."""
DRAWS = math.ceil((Z_FALSE + Z_MISSED) ** 2 / 4 / SEEN**2)
"""Roundings that a case counts, (z_a + z_b)²·p(1 - p)/d² for d = 1/512 at p = 1/2: 5 million. Over all distances
p(1 - p) is 1/6 on average, and what that leaves is for Holm: 350 tests in each of a thousand cases."""
CALLS = (4, 512)
"""Calls of a case: at least enough to compare them, at most what a small matrix is worth; it sees less."""


def calls_of(odds: Odds) -> int:
    """How many calls give a case its DRAWS; 1 where nothing is random."""
    count = int((odds.chance > 0).sum())
    return min(max(-(-DRAWS // count), CALLS[0]), CALLS[1]) if count else 1


class Tally:
    """Counts of roundings, call after call, and the tests that they are for."""

    def __init__(self, odds: Odds, recipe: Recipe, negative: torch.Tensor) -> None:
        """`negative`, bool (M, K): the sign of what is rounded."""
        self.chance = odds.chance
        self.calls = 0
        self.ups = torch.zeros_like(odds.chance, dtype=torch.int32)
        self._random = odds.chance > 0
        self._share = odds.chance.clamp(min=0).float() / BYTE
        self._binade = negative.int() * 256 + (odds.below >> recipe.element.mantissa_bits).int()
        self._fmt = recipe.element
        self._correlations = Correlations(self._share * (1 - self._share) * self._random, recipe.block[1])

    @property
    def draws(self) -> int:
        """Roundings that were counted."""
        return self.calls * int(self._random.sum())

    def add(self, up: torch.Tensor) -> None:
        """Take in which elements went up: bool (calls, M, K), of calls that follow one another."""
        self.calls += len(up)
        self.ups += up.sum(0, dtype=torch.int32)
        self._correlations.add(self._residuals(up))

    def add_seed(self, up: torch.Tensor) -> None:
        """Take in bool (M, K) of another seed than the first call's, and its offset: compared, and not counted."""
        self._correlations.add_seed(self._residuals(up))

    def _residuals(self, up: torch.Tensor) -> torch.Tensor:
        return (up.float() - self._share) * self._random

    def chances(self) -> list[Chance]:
        """All tests that there are numbers for."""
        some = self.chance >= 0
        if not self.calls or not bool(some.any()):
            return []
        shares, ups = self.chance[some].long(), self.ups[some].long()
        width = self.calls + 1
        cells = torch.bincount(shares * width + ups, minlength=BYTE * width).view(BYTE, width).double()
        return [
            *_classes(cells),
            *self._biases(cells),
            *(_repeats(cells) if self.calls > 1 else ()),
            *self._correlations.chances(),
        ]

    def _biases(self, cells: torch.Tensor) -> Iterator[Chance]:
        """Bias of all roundings, by the bits that a probability needs, by sign and binade."""
        count = cells.sum(1) * self.calls
        ups = _ups(cells)
        share = torch.arange(BYTE, dtype=torch.float64, device=cells.device) / BYTE
        sums = torch.stack([ups, count * share, count * share * (1 - share), count])
        sums[:, 0] = 0  # never, and not by chance: a class of its own
        yield _bias("bias", "bias", *sums.sum(1).tolist())
        for bits in range(1, 9):
            of_bits = sums[:, BYTE >> bits :: BYTE >> bits - 1]
            if float(of_bits[3].sum()):
                yield _bias("bits", f"bias where {bits} of the bits count", *of_bits.sum(1).tolist())
        where = self._binade[self._random].long()
        share = self._share[self._random].double()
        found = torch.stack([
            torch.bincount(where, weights, 512)
            for weights in (
                self.ups[self._random].double(), share * self.calls, share * (1 - share) * self.calls,
                torch.full_like(share, self.calls),
            )
        ])  # fmt: skip
        for group in found[3].nonzero().flatten().tolist():
            yield _bias("binade", f"bias of {self._group(group)}", *found[:, group].tolist())

    def _group(self, group: int) -> str:
        """Numbers of one sign and binade, by the scaled values that are in it."""
        sign, exponent = divmod(group, 256)
        first = self._fmt.value(exponent << self._fmt.mantissa_bits)
        behind = min(2 * first, self._fmt.max) or self._fmt.value(1 << self._fmt.mantissa_bits)
        return f"{'negative' if sign else 'positive'} values from {first:g} to {behind:g}"


def _ups(cells: torch.Tensor) -> torch.Tensor:
    """How often each class went up, of counts (256, calls + 1) of elements by their own number of times."""
    return cells @ torch.arange(cells.shape[1], dtype=torch.float64, device=cells.device)


def _bias(kind: str, test: str, ups: float, expected: float, variance: float, count: float) -> Chance:
    log_p = bennett(*(torch.tensor([number], dtype=torch.float64) for number in (ups - expected, variance)))
    return Chance(test, float(log_p), _went(ups, expected, count), kind=kind)


def _went(ups: float, expected: float, count: float) -> str:
    return f"{spaced(int(ups))} of {spaced(int(count))} went up, not {spaced(round(expected))}"


def _classes(cells: torch.Tensor) -> Iterator[Chance]:
    """The up-probability of each class of distance."""
    count, ups = cells.sum(1) * (cells.shape[1] - 1), _ups(cells)
    share = torch.arange(BYTE, dtype=torch.float64, device=cells.device) / BYTE
    log_p = binomial(ups, count, share).tolist()
    for number in count.nonzero().flatten().tolist():
        n, up = float(count[number]), float(ups[number])
        yield Chance(f"class {number}/256", log_p[number], _went(up, n * number / BYTE, n), kind="class")


def _repeats(cells: torch.Tensor) -> Iterator[Chance]:
    """Dispersion over calls: elements that go the same way too often, or too rarely; and any single one."""
    calls = cells.shape[1] - 1
    some = cells.sum(1) > 0
    some[0] = False
    if not bool(some.any()):
        return
    number = some.nonzero()
    share, times = number.double() / BYTE, torch.arange(calls + 1, dtype=torch.float64, device=cells.device)
    trials = torch.full_like(times, calls)
    log_mass = torch.lgamma(trials + 1) - torch.lgamma(times + 1) - torch.lgamma(trials - times + 1)
    log_mass = log_mass + torch.xlogy(times, share) + torch.xlogy(trials - times, 1 - share)
    spread = (times - calls * share) ** 2 / calls
    held = cells[some]
    total, elements = float((held * spread).sum()), held.sum(1)
    mean = float((elements.unsqueeze(1) * share * (1 - share)).sum())
    regular, stuck = chernoff(total, log_mass, spread, elements)
    words = f"over {calls} calls elements spread {total / mean:.3g} times as far as chance does"
    yield Chance("dispersion", min(0.0, min(regular, stuck) + math.log(2)), words)
    tails = binomial(times.expand_as(held), trials.expand_as(held), share.expand_as(held))
    tails = tails.masked_fill(held == 0, 0.0)
    worst, at = divmod(int(tails.argmin()), calls + 1)
    log_p = min(0.0, float(tails[worst, at]) + math.log(float(elements.sum())))
    yield Chance("one element", log_p, f"it went up in {at} of {calls} calls, at {int(number[worst])}/256 of a step")
