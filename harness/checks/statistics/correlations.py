"""Correlations of roundings that share no bits: neighbours in a thread, blocks, rows, calls, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.checks.finding import spaced
from narrowgauge.harness.checks.statistics.chance import Chance
from narrowgauge.harness.checks.statistics.tails import bennett

APART = (1, 2, 4, 8, 16)
"""Distances of neighbours that are compared."""
CALLS, ROWS, BLOCKS, LANES = range(4)
"""Dimensions of residuals."""
_ALONG = ((LANES, "lane"), (BLOCKS, "block"), (ROWS, "row"))


@dataclass
class _Sum:
    """A sum of products of residuals, no residual twice, so that all are independent."""

    total: float = 0.0
    variance: float = 0.0
    pairs: int = 0

    def add(self, left: torch.Tensor, right: torch.Tensor, variances: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add the products of two tensors of residuals; of their variances for each call."""
        variance = variances[0] * variances[1]
        calls = left.numel() // max(1, variance.numel())
        self.total += float((left * right).sum(dtype=torch.float64))
        self.variance += calls * float(variance.sum(dtype=torch.float64))
        self.pairs += calls * int((variance > 0).sum())


class Correlations:
    """Sums of products (up - p)·(up' - p') over pairs of roundings that have nothing to do with each other.

    Residuals are multiples of 1/256 within [-1, 1], so products and their sums are exact. They are not divided by their
    standard deviations: a rare rounding would then outweigh a hundred others, and a bound of the tail that holds would
    have to allow for it. The variance of a product is p(1 - p)·p'(1 - p'), exactly.
    """

    def __init__(self, variance: torch.Tensor, width: int) -> None:
        """`variance`, float32 (M, K): p(1 - p), 0 where nothing is random; `width`: elements of a block in a row."""
        self.width = width
        self.variance = self._in_blocks(variance.unsqueeze(0))
        self.sums: dict[str, list[_Sum]] = {}
        self.first: torch.Tensor | None = None

    def add(self, residuals: torch.Tensor) -> None:
        """Take in residuals, float32 (calls, M, K) of calls that follow one another."""
        given = self._in_blocks(residuals)
        if self.first is None:
            self.first = given[:1].clone()
        for dimension, noun in _ALONG:
            for apart in APART:
                self._add(f"{noun}s {apart} apart", given, self.variance, dimension, apart)
        self._add("calls", given, self.variance.expand_as(given), CALLS, 1)

    def add_seed(self, residuals: torch.Tensor) -> None:
        """Take in residuals (M, K) with another seed than the first call, and its offset."""
        assert self.first is not None
        other = self._in_blocks(residuals.unsqueeze(0))
        self.sums.setdefault("seeds", [_Sum()])[0].add(self.first, other, (self.variance, self.variance))

    def chances(self) -> Iterator[Chance]:
        """One test for each kind of neighbours that there are."""
        for test, sums in self.sums.items():
            some = [one for one in sums if one.pairs]
            if not some:
                continue
            numbers = torch.tensor([(one.total, one.variance) for one in some], dtype=torch.float64)
            log_p = bennett(*numbers.unbind(1))
            worst = some[int(log_p.argmin())]
            correlation = worst.total / math.sqrt(worst.variance * worst.pairs)
            sentence = f"roundings correlate by {correlation:+.2g} over {spaced(worst.pairs)} pairs"
            yield Chance(test, min(0.0, float(log_p.amin()) + math.log(len(some))), sentence, kind=test.split()[0])

    def _in_blocks(self, given: torch.Tensor) -> torch.Tensor:
        """(calls, M, K) as (calls, M, blocks, width), a short last block filled with zeros."""
        padded = torch.nn.functional.pad(given, (0, -given.shape[2] % self.width))
        return padded.view(*given.shape[:2], -1, self.width)

    def _add(self, test: str, given: torch.Tensor, variance: torch.Tensor, dimension: int, apart: int) -> None:
        """Pairs that begin at a multiple of twice their distance, and those between: apart, both are independent."""
        for number, start in enumerate((0, apart)):
            count = (given.shape[dimension] - start) // (2 * apart)
            if count > 0:
                parts = [_paired(part, dimension, start, count, apart) for part in (given, variance)]
                sums = self.sums.setdefault(test, [_Sum(), _Sum()])
                sums[number].add(*parts[0], parts[1])


def _paired(
    given: torch.Tensor, dimension: int, start: int, count: int, apart: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second elements of `count`·`apart` pairs along a dimension."""
    run = given.narrow(dimension, start, 2 * count * apart)
    pairs: torch.Tensor = run.unflatten(dimension, (count, 2, apart))  # type: ignore[no-untyped-call]
    return pairs.select(dimension + 1, 0), pairs.select(dimension + 1, 1)
