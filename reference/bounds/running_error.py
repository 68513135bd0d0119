"""Running error bounds: distance of float32 sums from the exact sums, addition by addition.

Let the inputs of an addition have errors of at most e together, and let s be their exact sum. The result is off by at
most e + u·(|s| + e), with u the roundoff of the addition. The result is off by at most e if the addition cannot round:
if an input has no nonzero product, or if e = 0 and s is a float32 number. s and e are evaluated in float64;
`with_evaluation_error` covers the rounding of this evaluation. Source: docs/tolerance.md#declared-order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, lowest_bit
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, LAST_BITS, SMALLEST_SUBNORMAL

CHUNK = 32
"""Columns of K in a step. The partial sums in a step are followed only if one of them may round: most cannot."""


@dataclass
class PartialSums:
    """Partial sums (M, N) of products with their error bounds, float64; of a tree level, (B, M, N)."""

    total: torch.Tensor
    """Exact partial sum, evaluated in float64."""
    magnitude: torch.Tensor
    """Sum of the magnitudes of all terms so far."""
    quantum: torch.Tensor
    """A power of two that divides every term so far; infinity if all terms are 0."""
    error: torch.Tensor
    """Largest distance of the float32 sum from the exact sum, without the rounding of this evaluation."""
    peak: torch.Tensor | None = None
    """Largest magnitude of an exact partial sum so far, or None if overflow is not checked."""

    def exact(self) -> torch.Tensor:
        """bool: no sum of any subset of the terms so far can round, in any order."""
        largest_part = (self.magnitude + self.total.abs()) / 2
        return (self.error == 0) & (largest_part <= 2.0**ACCUMULATOR_BITS * self.quantum)

    def exact_in_float64(self) -> torch.Tensor:
        """bool: every sum of a subset of the terms so far is a float64 number, and `total` is exact."""
        return self.magnitude <= FLOAT64_EXACT * (1 - 2.0**-20) * self.quantum

    def select(self, index: int | slice) -> PartialSums:
        """The sums with this index along the first dimension of (B, M, N)."""
        peak = None if self.peak is None else self.peak[index]
        return PartialSums(self.total[index], self.magnitude[index], self.quantum[index], self.error[index], peak)

    def plus(self, other: PartialSums, roundoff: float) -> PartialSums:
        """The float32 sum of two float32 sums, by an addition with a relative error of at most `roundoff`."""
        total, error = self.total + other.total, self.error + other.error
        sums = PartialSums(
            total,
            self.magnitude + other.magnitude,
            torch.minimum(self.quantum, other.quantum),
            error,
            None if self.peak is None or other.peak is None else torch.maximum(self.peak, other.peak),
        )
        size = total.abs()
        if sums.peak is not None:
            sums.peak = torch.maximum(sums.peak, size)
        fits = (total.float() == total) & (error == 0) & sums.exact_in_float64()
        rounds = (self.magnitude != 0) & (other.magnitude != 0) & ~fits
        sums.error = (size + error).mul_(rounds).mul_(roundoff).add_(error)  # a product is faster than torch.where
        return sums


def empty_sums(m: int, n: int, device: torch.device, *, peak: bool = False) -> PartialSums:
    """Sums (M, N) of no terms."""
    zeros = torch.zeros(m, n, dtype=torch.float64, device=device)
    return PartialSums(zeros, zeros, torch.full_like(zeros, torch.inf), zeros, zeros if peak else None)


def sequential_sum(left: torch.Tensor, right: torch.Tensor, roundoff: float, before: PartialSums) -> PartialSums:
    """The products of (M, K) and (N, K), finite float64 numbers, added to `before` in order of K."""
    sums = before
    for start in range(0, left.shape[1], CHUNK):
        x, y = left[:, start : start + CHUNK], right[:, start : start + CHUNK]
        chunk = _exact_sums(x, y)
        after = PartialSums(
            sums.total + chunk.total,
            sums.magnitude + chunk.magnitude,
            torch.minimum(sums.quantum, chunk.quantum),
            sums.error,
            sums.peak,
        )
        if sums.peak is not None or not bool(after.exact().all()):
            follow_additions(x, y, roundoff, sums, after)
        sums = after
    return sums


def follow_additions(
    x: torch.Tensor, y: torch.Tensor, roundoff: float, before: PartialSums, after: PartialSums
) -> None:
    """Sets `after.error`, and `after.peak` if present, for the columns of `x` and `y` added to `before` one by one.

    The recurrence e + u·(|s| + e) gives at most (e + u·Σ|s|)·(1 + u)^n after n additions. The error stays 0 if e = 0
    and every s is a float32 number.
    """
    columns = x.shape[1]
    total, sizes = before.total.clone(), torch.zeros_like(before.total)
    size, adds = torch.empty_like(total), torch.empty_like(total)
    begun = (before.magnitude != 0).double()
    all_begun = bool(begun.all())
    # Union of the bits of all partial sums. The last 29 bits of a float32 number held in float64 are 0.
    bits = torch.zeros_like(total, dtype=torch.int64)
    no_error = (
        (before.error == 0)
        & after.exact_in_float64()
        & (after.quantum >= SMALLEST_SUBNORMAL)
        & (after.magnitude <= FLT_MAX)
    )
    any_without_error = bool(no_error.any())
    # Rows of the transpose are contiguous: five times faster than columns.
    x, y = x.T.contiguous(), y.T.contiguous()
    nonzero_x, nonzero_y = (x != 0).double(), (y != 0).double()
    has_zero = ((x == 0).any(1) | (y == 0).any(1)).tolist()
    for column, column_has_zero in enumerate(has_zero):
        total.addr_(x[column], y[column])
        torch.abs(total, out=size)
        if after.peak is not None:
            after.peak = torch.maximum(after.peak, size)
        if any_without_error:
            bits.bitwise_or_(total.view(torch.int64))
        if not column_has_zero and all_begun:
            sizes.add_(size)
            continue
        torch.mul(nonzero_x[column].unsqueeze(1), nonzero_y[column], out=adds)  # 0 if the addition cannot round
        if all_begun:
            sizes.addcmul_(size, adds)
        else:
            sizes.addcmul_(size, adds * begun)
            torch.maximum(begun, adds, out=begun)
            all_begun = bool(begun.all())
    after.error = (before.error + roundoff * sizes) * error_growth(columns, roundoff)
    if any_without_error:
        after.error.mul_(~(no_error & ((bits & LAST_BITS) == 0)))


def tree_sum(
    left: torch.Tensor, right: torch.Tensor, roundoff: float, term_error: torch.Tensor, *, peak: bool = False
) -> PartialSums:
    """The products of (M, K) and (N, K), finite float64 numbers, added in the order "tree" of `Summation`.

    `term_error` (M, N): error of every nonzero product before the additions. The sums of columns that were padded with
    zeros equal the sums without these columns.
    """
    columns = left.shape[1]
    if columns == 0:
        return empty_sums(left.shape[0], right.shape[0], left.device, peak=peak)
    return _subtree(left, right, roundoff, term_error, 1 << (columns - 1).bit_length(), peak)


def _subtree(
    x: torch.Tensor, y: torch.Tensor, roundoff: float, term_error: torch.Tensor, width: int, peak: bool
) -> PartialSums:
    """The tree sum of `width` columns, a power of two; missing last columns count as zeros."""
    if width > CHUNK:
        half = width // 2
        first = _subtree(x[:, :half], y[:, :half], roundoff, term_error, half, peak)
        if x.shape[1] <= half:
            return first
        return first.plus(_subtree(x[:, half:], y[:, half:], roundoff, term_error, half, peak), roundoff)
    sums = _exact_sums(x, y)
    sums.error = term_error * ((x != 0).double() @ (y != 0).double().T)
    if not peak and bool(sums.exact().all()):
        return sums
    x, y = (torch.nn.functional.pad(side, (0, width - side.shape[1])).T.unsqueeze(2) for side in (x, y))
    products = x * y.mT
    nodes = PartialSums(
        products,
        products.abs(),
        lowest_bit(x).unsqueeze(2) * lowest_bit(y).unsqueeze(1),
        term_error * (products != 0),
        products.abs() if peak else None,
    )
    while nodes.total.shape[0] > 1:
        nodes = nodes.select(slice(0, None, 2)).plus(nodes.select(slice(1, None, 2)), roundoff)
    return nodes.select(0)


def _exact_sums(x: torch.Tensor, y: torch.Tensor) -> PartialSums:
    """The sums of the products of (M, W) and (N, W), with error 0."""
    magnitude = x.abs() @ y.abs().T
    quantum = torch.outer(lowest_bit(x), lowest_bit(y)).masked_fill_(magnitude == 0, torch.inf)
    return PartialSums(x @ y.T, magnitude, quantum, torch.zeros_like(magnitude))


def error_growth(additions: int, roundoff: float) -> float:
    """An upper bound of (1 + roundoff)^additions, the factor by which additions multiply an earlier error."""
    return math.exp(additions * roundoff) * (1 + 2.0**-40)


def with_evaluation_error(sums: PartialSums, columns: int, roundoff: float) -> torch.Tensor:
    """The error of sums of K = `columns` products and of the evaluation in float64; 0 if the error of the sums is 0.

    The evaluation of s rounds by at most K·2^-53·A in each of 2·K additions, with A the sum of magnitudes: by
    u·K²·2^-52·A in all. The evaluation of e is covered by a factor 1 + 2^-20.
    """
    evaluation = roundoff * float(columns) ** 2 * 2.0**-52 * sums.magnitude
    return (sums.error * (1 + 2.0**-20) + evaluation).mul_(sums.error > 0)
