"""Tests for correlations of roundings that must be independent: lanes, blocks, rows, calls, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.checks.finding import format_count
from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest
from narrowgauge.harness.checks.statistics.tail_bounds import bennett

DISTANCES = (1, 2, 4, 8, 16)
"""Distances between the elements of a pair."""
CALLS, ROWS, BLOCKS, LANES = range(4)
"""Dimensions of a tensor of residuals."""
_DIMENSION_NAMES = ((LANES, "lane"), (BLOCKS, "block"), (ROWS, "row"))


@dataclass
class _Sum:
    """Sum of products of residuals. No residual occurs twice, so the products are independent."""

    total: float = 0.0
    variance: float = 0.0
    pairs: int = 0

    def add(self, left: torch.Tensor, right: torch.Tensor, variances: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add the products of two tensors of residuals. `variances`: variances of both tensors, for a single call."""
        variance = variances[0] * variances[1]
        calls = left.numel() // max(1, variance.numel())
        self.total += float((left * right).sum(dtype=torch.float64))
        self.variance += calls * float(variance.sum(dtype=torch.float64))
        self.pairs += calls * int((variance > 0).sum())


class Correlations:
    """Sums of products (up - p)·(up' - p') over pairs of roundings that must be independent.

    Residuals are multiples of 1/256 in [-1, 1], so products and their sums are exact. Residuals are not divided by
    their standard deviations: a rare rounding would then outweigh a hundred other roundings, and a valid tail bound
    would have to allow for it. The variance of a product is exactly p(1 - p)·p'(1 - p').
    """

    def __init__(self, variance: torch.Tensor, width: int) -> None:
        """`variance`, float32 (M, K): p(1 - p), 0 for an element without randomness. `width`: columns of a block."""
        self.width = width
        self.variance = self._in_blocks(variance.unsqueeze(0))
        self.sums: dict[str, list[_Sum]] = {}
        self.first_call: torch.Tensor | None = None

    def add(self, call_residuals: torch.Tensor) -> None:
        """Add the residuals of consecutive calls, float32 (calls, M, K)."""
        residuals = self._in_blocks(call_residuals)
        if self.first_call is None:
            self.first_call = residuals[:1].clone()
        for dimension, noun in _DIMENSION_NAMES:
            for distance in DISTANCES:
                self._add(f"{noun}s {distance} apart", residuals, self.variance, dimension, distance)
        self._add("calls", residuals, self.variance.expand_as(residuals), CALLS, 1)

    def add_seed(self, residuals: torch.Tensor) -> None:
        """Add the residuals (M, K) of a call with the offset of the first call and a different seed."""
        assert self.first_call is not None
        seed_residuals = self._in_blocks(residuals.unsqueeze(0))
        self.sums.setdefault("seeds", [_Sum()])[0].add(self.first_call, seed_residuals, (self.variance, self.variance))

    def tests(self) -> Iterator[StatisticalTest]:
        """A test for each kind of pair in the matrix."""
        for name, sums in self.sums.items():
            nonempty = [product_sum for product_sum in sums if product_sum.pairs]
            if not nonempty:
                continue
            numbers = torch.tensor(
                [(product_sum.total, product_sum.variance) for product_sum in nonempty], dtype=torch.float64
            )
            log_p = bennett(*numbers.unbind(1))
            worst = nonempty[int(log_p.argmin())]
            correlation = worst.total / math.sqrt(worst.variance * worst.pairs)
            sentence = f"roundings correlate by {correlation:+.2g} over {format_count(worst.pairs)} pairs"
            adjusted = min(0.0, float(log_p.amin()) + math.log(len(nonempty)))
            yield StatisticalTest(name, adjusted, sentence, kind=name.split()[0])

    def _in_blocks(self, residuals: torch.Tensor) -> torch.Tensor:
        """(calls, M, K) as (calls, M, blocks, width). A short last block is filled with zeros."""
        padded = torch.nn.functional.pad(residuals, (0, -residuals.shape[2] % self.width))
        return padded.view(*residuals.shape[:2], padded.shape[2] // self.width, self.width)

    def _add(self, name: str, residuals: torch.Tensor, variance: torch.Tensor, dimension: int, distance: int) -> None:
        """Add all pairs of elements at a distance, in two sums of independent products.

        The first sum has the pairs that begin in an even run of `distance` elements, the second sum the other pairs.
        """
        for number, start in enumerate((0, distance)):
            count = (residuals.shape[dimension] - start) // (2 * distance)
            if count > 0:
                parts = [_paired(part, dimension, start, count, distance) for part in (residuals, variance)]
                sums = self.sums.setdefault(name, [_Sum(), _Sum()])
                sums[number].add(*parts[0], parts[1])


def _paired(
    residuals: torch.Tensor, dimension: int, start: int, count: int, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second elements of `count`·`distance` pairs along a dimension."""
    run = residuals.narrow(dimension, start, 2 * count * distance)
    pairs: torch.Tensor = run.unflatten(dimension, (count, 2, distance))  # type: ignore[no-untyped-call]
    return pairs.select(dimension + 1, 0), pairs.select(dimension + 1, 1)
