"""Running error bounds: how far float32 sums can be from the exact ones, addition by addition.

Where the sums that an addition is given are off by at most e together, and their exact sum is s, the result is off by
at most e + u·(|s| + e); or by nothing more where the addition cannot round. It cannot where one of the two is 0, or
where nothing has rounded before and s is a float32 number. s and e are evaluated in float64: `widened` covers that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, lowest_bit
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, LAST_BITS, SMALLEST

CHUNK = 32
"""Columns whose partial sums are looked at together first, since most of them cannot round."""


@dataclass
class Running:
    """Sums (M, N) on their way along K, float64."""

    total: torch.Tensor
    magnitude: torch.Tensor
    """The sum of magnitudes."""
    unit: torch.Tensor
    """A power of two that divides every term; infinity where all are 0."""
    error: torch.Tensor
    """The largest distance of the float32 sum from the exact one. Evaluation in float64 is not covered."""
    peak: torch.Tensor | None = None
    """The largest magnitude of an exact partial sum so far; None where nobody asks."""

    def exact(self) -> torch.Tensor:
        """bool: no sum of some of the terms so far, in whatever order, can round."""
        largest_part = (self.magnitude + self.total.abs()) / 2
        return (self.error == 0) & (largest_part <= 2.0**ACCUMULATOR_BITS * self.unit)

    def in_float64(self) -> torch.Tensor:
        """bool: every sum of some of the terms so far is a float64 number, and `total` the exact one."""
        return self.magnitude <= FLOAT64_EXACT * (1 - 2.0**-20) * self.unit

    def every(self, first: int, step: int | None = None) -> Running:
        """Of sums one behind the other (B, M, N) that number, or every so many from there on."""
        which: int | slice = first if step is None else slice(first, None, step)
        peak = None if self.peak is None else self.peak[which]
        return Running(self.total[which], self.magnitude[which], self.unit[which], self.error[which], peak)

    def plus(self, other: Running, unit: float) -> Running:
        """The float32 sum of two float32 sums, each addition being off by at most `unit`, relative."""
        total, error = self.total + other.total, self.error + other.error
        found = Running(
            total,
            self.magnitude + other.magnitude,
            torch.minimum(self.unit, other.unit),
            error,
            None if self.peak is None or other.peak is None else torch.maximum(self.peak, other.peak),
        )
        size = total.abs()
        if found.peak is not None:
            found.peak = torch.maximum(found.peak, size)
        fits = (total.float() == total) & (error == 0) & found.in_float64()
        rounds = (self.magnitude != 0) & (other.magnitude != 0) & ~fits
        found.error = (size + error).mul_(rounds).mul_(unit).add_(error)  # a product, which is faster than a choice
        return found


def empty(m: int, n: int, device: torch.device, *, peak: bool = False) -> Running:
    """The sum of nothing, (M, N)."""
    zeros = torch.zeros(m, n, dtype=torch.float64, device=device)
    return Running(zeros, zeros, torch.full_like(zeros, torch.inf), zeros, zeros if peak else None)


def running_sum(left: torch.Tensor, right: torch.Tensor, unit: float, before: Running) -> Running:
    """The products of (M, K) and (N, K), finite float64 numbers, added to `before` in order of K."""
    sums = before
    for start in range(0, left.shape[1], CHUNK):
        x, y = left[:, start : start + CHUNK], right[:, start : start + CHUNK]
        here = _products(x, y)
        after = Running(
            sums.total + here.total,
            sums.magnitude + here.magnitude,
            torch.minimum(sums.unit, here.unit),
            sums.error,
            sums.peak,
        )
        if sums.peak is not None or not bool(after.exact().all()):
            every_partial(x, y, unit, sums, after)
        sums = after
    return sums


def every_partial(x: torch.Tensor, y: torch.Tensor, unit: float, before: Running, after: Running) -> None:
    """`after.error`, and peak, where the columns of `x` and `y` are added to `before` one by one.

    e + u·(|s| + e) at every step is at most (e + u·Σ|s|)·(1 + u)^n after n of them. Where e is 0 and every s a float32
    number, it stays 0.
    """
    columns = x.shape[1]
    total, sizes = before.total.clone(), torch.zeros_like(before.total)
    size, adds = torch.empty_like(total), torch.empty_like(total)
    begun = (before.magnitude != 0).double()
    all_begun = bool(begun.all())
    # All bits of all partial sums: of float32 numbers that float64 has too, the last 29 are 0.
    bits = torch.zeros_like(total, dtype=torch.int64)
    clean = (before.error == 0) & after.in_float64() & (after.unit >= SMALLEST) & (after.magnitude <= FLT_MAX)
    some_clean = bool(clean.any())
    # Columns one by one are rows of the transpose, five times faster.
    x, y = x.T.contiguous(), y.T.contiguous()
    some_x, some_y = (x != 0).double(), (y != 0).double()
    zeros = ((x == 0).any(1) | (y == 0).any(1)).tolist()
    for column, some_zero in enumerate(zeros):
        total.addr_(x[column], y[column])
        torch.abs(total, out=size)
        if after.peak is not None:
            after.peak = torch.maximum(after.peak, size)
        if some_clean:
            bits.bitwise_or_(total.view(torch.int64))
        if not some_zero and all_begun:
            sizes.add_(size)
            continue
        torch.mul(some_x[column].unsqueeze(1), some_y[column], out=adds)  # what is added, or added to, may be 0
        if all_begun:
            sizes.addcmul_(size, adds)
        else:
            sizes.addcmul_(size, adds * begun)
            torch.maximum(begun, adds, out=begun)
            all_begun = bool(begun.all())
    after.error = (before.error + unit * sizes) * growth(columns, unit)
    if some_clean:
        after.error.mul_(~(clean & ((bits & LAST_BITS) == 0)))


def tree_sum(left: torch.Tensor, right: torch.Tensor, unit: float, own: torch.Tensor, *, peak: bool = False) -> Running:
    """The products of (M, K) and (N, K), finite float64 numbers, added in the order "tree" of `Summation`.

    Each that is not 0 is off by `own` (M, N) before. Of columns that were padded with zeros the sums are those without.
    """
    columns = left.shape[1]
    if columns == 0:
        return empty(left.shape[0], right.shape[0], left.device, peak=peak)
    return _subtree(left, right, unit, own, 1 << (columns - 1).bit_length(), peak)


def _subtree(x: torch.Tensor, y: torch.Tensor, unit: float, own: torch.Tensor, width: int, peak: bool) -> Running:
    """The sum of `width` columns, a power of two, of which the last may be missing."""
    if width > CHUNK:
        half = width // 2
        first = _subtree(x[:, :half], y[:, :half], unit, own, half, peak)
        if x.shape[1] <= half:
            return first
        return first.plus(_subtree(x[:, half:], y[:, half:], unit, own, half, peak), unit)
    found = _products(x, y)
    found.error = own * ((x != 0).double() @ (y != 0).double().T)
    if not peak and bool(found.exact().all()):
        return found
    x, y = (torch.nn.functional.pad(side, (0, width - side.shape[1])).T.unsqueeze(2) for side in (x, y))
    products = x * y.mT
    nodes = Running(
        products,
        products.abs(),
        lowest_bit(x).unsqueeze(2) * lowest_bit(y).unsqueeze(1),
        own * (products != 0),
        products.abs() if peak else None,
    )
    while nodes.total.shape[0] > 1:
        nodes = nodes.every(0, 2).plus(nodes.every(1, 2), unit)
    return nodes.every(0)


def _products(x: torch.Tensor, y: torch.Tensor) -> Running:
    """The products of (M, W) and (N, W), before they are added: no error."""
    magnitude = x.abs() @ y.abs().T
    units = torch.outer(lowest_bit(x), lowest_bit(y)).masked_fill_(magnitude == 0, torch.inf)
    return Running(x @ y.T, magnitude, units, torch.zeros_like(magnitude))


def growth(steps: int, unit: float) -> float:
    """At least (1 + unit)^steps: what so many additions make of an error that was there before."""
    return math.exp(steps * unit) * (1 + 2.0**-40)


def widened(sums: Running, columns: int, unit: float) -> torch.Tensor:
    """The error of sums of K = `columns` products with that of its own evaluation in float64, 0 where it is 0.

    The rounding of s there is at most K·2^-53 of the sum of magnitudes A for each of 2·K additions, hence
    u·K^2·2^-52·A in all; 2^-20 of the bound covers that of e.
    """
    own = unit * float(columns) ** 2 * 2.0**-52 * sums.magnitude
    return (sums.error * (1 + 2.0**-20) + own).mul_(sums.error > 0)
