"""Tests for correlations of roundings that must be independent: elements, rows, blocks, calls, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest
from narrowgauge.harness.checks.statistics.tail_bounds import bennett

REACH = 4096
"""Largest distance in elements, or in rows, between the elements of a pair. All powers of two up to it are tested."""
CALLS, ROWS, BLOCKS, LANES = range(4)
"""Dimensions of a tensor of residuals."""
RESIDUALS = 1 << 20
"""Residuals that the tests look at: those of the first calls, of at least two."""
PLAIN_SEED, HIGH_SEED, SEED_AS_OFFSET = range(3)
"""Calls with another seed: a different lowest bit, a different bit 32, the seed plus the offset of the second call."""
SEED_NAMES = ("seeds", "seeds with another high word", "seed plus offset")


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


@dataclass(frozen=True)
class Roundings:
    """Residuals of the roundings of a call, float32 (M, K), and their variances."""

    residuals: torch.Tensor
    variance: torch.Tensor


class Correlations:
    """Sums of products (up - p)·(up' - p') over pairs of roundings that must be independent.

    Residuals are multiples of 1/256 in [-1, 1], so products and their sums are exact. Residuals are not divided by
    their standard deviations: a rare rounding would then outweigh a hundred other roundings, and a valid tail bound
    would have to allow for it. The variance of a product is exactly p(1 - p)·p'(1 - p').
    """

    def __init__(self, variance: torch.Tensor, width: int) -> None:
        """`variance`, float32 (M, K): p(1 - p), 0 for an element without randomness. `width`: columns of a block."""
        self.width = width
        self.calls = max(2, RESIDUALS // max(1, variance.numel()))
        """Number of calls that `add` takes."""
        self.sums: dict[str, list[_Sum]] = {}
        self._variance = variance
        self._first_calls = torch.empty(0)
        """Residuals of the first two calls in memory order, (calls, elements)."""

    def add(self, residuals: torch.Tensor) -> None:
        """Add the residuals of the first calls, float32 (calls, M, K)."""
        blocks, variances = self._in_blocks(residuals), self._in_blocks(self._variance.unsqueeze(0))
        for dimension, noun, reach in (
            (LANES, "column", REACH), (BLOCKS, "block", REACH // self.width), (ROWS, "row", REACH),
        ):  # fmt: skip
            few, its_variances = _at_most(blocks, variances, dimension)
            for distance in _distances(few.shape[dimension], reach):
                self._add(f"{noun}s {distance} apart", few, its_variances, dimension, distance)
        flat, flat_variances = _in_memory_order(residuals, self._variance.unsqueeze(0))
        for distance in _distances(flat.shape[LANES], REACH):
            if distance >= self.width:  # columns of a block are nearer
                self._add(f"elements {distance} apart", flat, flat_variances, LANES, distance)
        for distance in _distances(len(flat), len(flat)):
            name = "calls" if distance == 1 else f"calls {distance} apart"
            self._add(name, flat, flat_variances.expand_as(flat), CALLS, distance)
        calls = flat.flatten(1)
        self._first_calls = calls[:2].clone()
        self._add_shifted("calls", *_neighbours(calls))
        self._add_searched(flat, flat_variances)

    def add_seed(self, kind: int, residuals: torch.Tensor) -> None:
        """Add the residuals (M, K) of a call with a different seed: PLAIN_SEED, HIGH_SEED or SEED_AS_OFFSET.

        The call has the offset of the first call. It must be independent of the first call, and of the second call if
        the seed grew by as much as the offset of the second call.
        """
        other = min(int(kind == SEED_AS_OFFSET), len(self._first_calls) - 1)
        left = self._first_calls[other].unsqueeze(0)
        right = residuals.flatten()[: left.shape[1]].unsqueeze(0)
        self._add_one_shift(SEED_NAMES[kind], left, right, 0)
        self._add_shifted(SEED_NAMES[kind], left, right)

    def add_half(self, residuals: torch.Tensor, other: Roundings) -> None:
        """Add the residuals (M, K) of a call of a half, and the residuals (K, M) of the second half in the same call.

        Both halves round the same elements: they must be independent element by element, and place by place in memory.
        """
        across = other.residuals.T, other.variance.T
        size = min(residuals.numel(), other.residuals.numel())
        along = other.residuals.flatten()[:size], other.variance.flatten()[:size]
        if across[0].shape == residuals.shape:
            self._sums("halves, same element", 1)[0].add(residuals, across[0], (self._variance, across[1]))
        left, variance = residuals.flatten()[:size], self._variance.flatten()[:size]
        self._sums("halves, same place in memory", 1)[0].add(left, along[0], (variance, along[1]))

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
            yield StatisticalTest(name, adjusted, sentence, kind=name.split()[0].rstrip(","))

    def _sums(self, name: str, count: int) -> list[_Sum]:
        return self.sums.setdefault(name, [_Sum() for _ in range(count)])

    def _in_blocks(self, residuals: torch.Tensor) -> torch.Tensor:
        """(calls, M, K) as (calls, M, blocks, width). A short last block is filled with zeros."""
        padded = torch.nn.functional.pad(residuals, (0, -residuals.shape[2] % self.width))
        return padded.view(*residuals.shape[:2], padded.shape[2] // self.width, self.width)

    def _add(self, name: str, residuals: torch.Tensor, variance: torch.Tensor, dimension: int, distance: int) -> None:
        """Add all pairs of elements at a distance, in two sums of independent products.

        The first sum has the pairs that begin in an even run of `distance` elements, the second sum the other pairs.
        The last run may be short.
        """
        for number, start in enumerate((0, distance)):
            runs, rest = divmod(residuals.shape[dimension] - start, 2 * distance)
            sums = self._sums(name, 2)
            if runs > 0:
                parts = [_paired(part, dimension, start, runs, distance) for part in (residuals, variance)]
                sums[number].add(*parts[0], parts[1])
            if rest > distance:
                begin, count = start + 2 * distance * runs, rest - distance
                left, right = (
                    tuple(part.narrow(dimension, first, count) for part in (residuals, variance))
                    for first in (begin, begin + distance)
                )
                sums[number].add(left[0], right[0], (left[1], right[1]))

    def _add_shifted(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the pairs of an element of a call and an element of another call, at a distance in memory order.

        `left`, `right`: residuals (pairs of calls, elements). A generator that adds the numbers of call and thread to
        the seed gives these calls the same bits at a different place.
        """
        for distance in _distances(left.shape[1], REACH):
            for sign, (one, other) in (("behind", (left, right)), ("before", (right, left))):
                self._add_one_shift(f"{name}, {distance} elements {sign}", one, other, distance)

    def _add_one_shift(self, name: str, left: torch.Tensor, right: torch.Tensor, distance: int) -> None:
        """Add the pairs of element i of `left` and element i + `distance` of `right`, (pairs of calls, elements)."""
        size = left.shape[1]
        variance = self._variance.flatten()[:size]
        variances = variance[: size - distance], variance[distance:]
        self._sums(name, 1)[0].add(left[:, : size - distance], right[:, distance:], variances)

    def _add_searched(self, flat: torch.Tensor, variance: torch.Tensor) -> None:
        """Add the pairs at two distances that need not be powers of two: within a call, and from call to call.

        The first call, and the first two calls, choose the distance with the largest sum of products in standard
        deviations of independent residuals, and further calls are tested. These calls are independent of the choice, so
        the choice needs no correction of the p-value.
        """
        calls, size = flat.shape[0], flat.shape[LANES]
        if calls < 4 or size < 4:
            return
        rows = flat.flatten(1)
        spectra = torch.fft.rfft(rows[:2].double(), 2 * size)
        within = torch.fft.irfft(spectra[0] * spectra[0].conj(), 2 * size)[1:size]
        pairs = torch.arange(size - 1, 0, -1, device=within.device)
        distance = 1 + int((within.abs() / pairs.sqrt()).argmax())
        self._add(f"elements {distance} apart, searched", flat[1:], variance, LANES, distance)
        between = torch.fft.irfft(spectra[0].conj() * spectra[1], 2 * size)
        offsets = torch.arange(2 * size, device=between.device)
        pairs = (size - torch.minimum(offsets, 2 * size - offsets)).clamp(min=1)
        distance = int((between.abs() / pairs.sqrt()).argmax())
        left, right = _neighbours(rows[2:])
        if distance > size:  # the element of the later call lies before the element of the earlier call
            distance, left, right = 2 * size - distance, right, left
        self._add_one_shift(f"calls, {distance} elements on, searched", left, right, distance)


def _neighbours(calls: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls 0, 2, 4, … and calls 1, 3, 5, …, as many of each."""
    even = len(calls) // 2 * 2
    return calls[0:even:2], calls[1:even:2]


def _distances(extent: int, reach: int) -> list[int]:
    """Powers of two up to `reach` between elements of an extent, and the distance between its halves."""
    powers = [1 << bit for bit in range(REACH.bit_length()) if 1 << bit <= reach and 1 << bit < extent]
    half = -(-extent // 2)
    return powers if extent < 2 or half in powers else [*powers, half]


def _at_most(residuals: torch.Tensor, variance: torch.Tensor, dimension: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The leading rows, or for pairs of rows the leading blocks, that have RESIDUALS numbers at most in all calls.

    `variance` of one call is cut at the same place.
    """
    cut = BLOCKS if dimension == ROWS else ROWS
    extent = residuals.shape[cut]
    kept = min(extent, max(1, RESIDUALS * extent // max(1, residuals.numel())))
    return residuals.narrow(cut, 0, kept), variance.narrow(cut, 0, kept)


def _in_memory_order(residuals: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The leading rows of (calls, M, K) and (1, M, K) as (calls, 1, 1, elements): rows follow one another."""
    left, right = (
        part.flatten(1).unsqueeze(1).unsqueeze(1)
        for part in _at_most(residuals.unsqueeze(2), variance.unsqueeze(2), LANES)
    )
    return left, right


def _paired(
    residuals: torch.Tensor, dimension: int, start: int, count: int, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second elements of `count`·`distance` pairs along a dimension."""
    run = residuals.narrow(dimension, start, 2 * count * distance)
    pairs: torch.Tensor = run.unflatten(dimension, (count, 2, distance))  # type: ignore[no-untyped-call]
    return pairs.select(dimension + 1, 0), pairs.select(dimension + 1, 1)
