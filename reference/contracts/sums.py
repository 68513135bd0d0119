"""Sums of intervals in any order, or of a declared depth, along the last dimension."""

from __future__ import annotations

import math
from functools import partial

import torch

from narrowgauge.reference.contracts.interval import Interval, absolute, divide, exactly
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.recipes import Hadamard
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST_NORMAL, SMALLEST_SUBNORMAL, UNIT

_FLOAT64_UNIT = 2.0**-52
_FIRST = 32
"""Number of terms of a row for a first look at the lowest bits."""


def total(x: Interval, depth: int | None = None, *, flushes: bool = False) -> Interval:
    """Σ of the numbers of each row, (…, K) to (…, 1), in float32 or better.

    Any order (`depth` None): (n − 1)·(u + 2^-52)·A + n·2^-149 on both sides, n the terms that may differ from 0 and A
    the sum of their largest magnitudes (Jeannerod and Rump, 2013: no term of higher order). `depth`: every term passes
    through at most so many roundings, which gives ((1 + u)^depth − 1)·A. A sum is exact if no partial sum can round:
    all terms are multiples of a power of two q, and A ≤ 2^24·q. The sign of a zero sum is free.

    `flushes`: n terms and n − 1 sums may be subnormal and become 0, which is 2n·2^-126 at most. Partial sums are
    multiples of q too, so none of them is subnormal if q ≥ 2^-126.
    """
    count = x.shape[-1]
    # The sign is the highest bit: a minimum of integers takes a tenth of the time of `signbit`.
    bits = x.low.contiguous().view(torch.int64)
    first = bits.amin(-1, keepdim=True) if count else bits.sum(-1, keepdim=True)
    signed = first < 0
    alone = x.point and not bool(signed.any())  # numbers from 0 on are their magnitudes
    magnitude = x.low if alone else x.low.abs() if x.point else torch.maximum(x.low.abs(), x.high.abs())
    finite = magnitude if x.finite else _finite_part(x)
    size = finite.sum(-1, keepdim=True)
    if alone and bool((first > 0).all()):
        terms = torch.full_like(size, count)
    elif x.finite:
        terms = magnitude.sign().sum(-1, keepdim=True)
    else:
        terms = magnitude.count_nonzero(-1).unsqueeze(-1).double()
    relative = (terms - 1).clamp_(min=0) * (UNIT + _FLOAT64_UNIT) if depth is None else _growth(depth, count)
    error = relative * size + terms * (SMALLEST_SUBNORMAL + (2 * SMALLEST_NORMAL if flushes else 0.0))
    low = size if finite is x.low else x.low.sum(-1, keepdim=True)
    high = low if x.point else x.high.sum(-1, keepdim=True)
    exact = terms <= 1
    known = torch.ones_like(exact) if x.point else (x.low == x.high).all(-1, keepdim=True)
    if x.point or bool(known.any()):
        quantum = _quantum(finite, size)
        few_bits = (size <= 2.0**ACCUMULATOR_BITS * quantum) & (quantum >= (SMALLEST_NORMAL if flushes else 0.0))
        exact |= few_bits & known
    exact &= size <= FLT_MAX
    if x.point and bool((exact & (low != 0) | low.isinf()).all()):
        return Interval(low, low)
    error = torch.where(exact, 0.0, error)
    # A partial sum of the positive or of the negative terms may overflow. Later terms do not bring it back.
    beyond = FLT_MAX * (1 - (count + 1) * 2 * UNIT)
    low, high = low - error, high + error
    low = torch.where(signed, low, low.clamp(min=0.0))  # a sum of numbers from 0 on is no less than 0, and no −0
    if x.finite and bool((size <= beyond).all()):
        return Interval(torch.where((low == 0) & signed, -0.0, low), torch.where(high == 0, 0.0, high))
    positive = x.high.clamp(min=0).sum(-1, keepdim=True) > beyond
    negative = x.low.clamp(max=0).sum(-1, keepdim=True) < -beyond
    nan = x.may_be_nan.any(-1, keepdim=True) | (positive & negative)
    low = torch.where((low == 0) & signed, -0.0, low).masked_fill(negative, -torch.inf)
    high = torch.where(high == 0, 0.0, high).masked_fill(positive, torch.inf)
    return Interval(_known(low, -torch.inf, x), _known(high, torch.inf, x), nan)


_TERMS = 1 << 20
"""Products of a rotation that are summed at once."""


def rotated(x: Interval, group: int, mask: int, *, flushes: bool = False) -> Interval:
    """Groups of the last dimension of `x` (M, K), bfloat16 numbers, rotated: docs/numerics.md#hadamard-transform.

    `mask`: the signs of a group. Products are exact, and each sum has any order. Raises ValueError if K is no multiple
    of the group.
    """
    if x.shape[-1] % group:
        raise ValueError(f"the last axis has {x.shape[-1]} elements, which are no groups of {group}")
    places = torch.arange(group)
    shared = places & places.view(-1, 1)
    odd = sum(shared >> bit & 1 for bit in range(group.bit_length())) % 2
    factors = (signs(Hadamard(group, mask)) * coefficient(group)).double() * (1 - 2.0 * odd)  # (output, input)
    factors = factors.to(x.low.device)
    turned = factors < 0
    groups = x.arranged(lambda t: t.reshape(-1, 1, group))
    parts = []
    height = max(1, _TERMS // group**2)
    for first in range(0, max(1, groups.shape[0]), height):
        some = groups.arranged(partial(_rows, slice(first, first + height)))
        low = torch.where(turned, some.high, some.low) * factors
        high = low if some.point else torch.where(turned, some.low, some.high) * factors
        nan = None if some.nan is None else some.nan.expand_as(low)
        parts.append(total(Interval(low, high, nan), flushes=flushes))
    return Interval.joined(parts).arranged(lambda t: t.reshape(x.shape))


def _rows(rows: slice, x: torch.Tensor) -> torch.Tensor:
    return x[rows]


def _finite_part(x: Interval) -> torch.Tensor:
    """The known finite magnitude of a term: the largest magnitude of its finite ends, else 0."""
    sizes = [torch.where(end.isfinite(), end.abs(), 0.0) for end in (x.low, x.high)]
    return torch.maximum(*sizes)


def _quantum(magnitude: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The power of two that divides all terms of a row, (…, 1); of the first terms, if these rule exact sums
    out."""
    some = lowest_bit(magnitude[..., :_FIRST].contiguous()).unsqueeze(-1)
    if not bool((size <= 2.0**ACCUMULATOR_BITS * some).any()):
        return some
    return lowest_bit(magnitude).unsqueeze(-1)


def _known(end: torch.Tensor, free: float, x: Interval) -> torch.Tensor:
    """An end; NaN stays only in rows with a term of NaN alone. ∞ − ∞ of possible terms is any number."""
    return torch.where(end.isnan() & ~x.never.any(-1, keepdim=True), free, end)


def _growth(depth: int, count: int) -> float:
    """(1 + u)^depth − 1, with the error of the float64 sum that is the centre."""
    return float((1 + UNIT) ** depth - 1) + count * _FLOAT64_UNIT


def mean(
    x: Interval,
    depth: int | None = None,
    *,
    count: int | None = None,
    division: str | None = None,
    flushes: bool = False,
) -> Interval:
    """Σ of each row divided by `count`, by default K: (…, K) to (…, 1). The division has the forms of `divide`."""
    divisor = exactly(float(x.shape[-1] if count is None else count), x.low.device)
    return divide(total(x, depth, flushes=flushes), divisor, division)


def merged(statistic: Interval, x: Interval, *, squares: bool = False) -> Interval:
    """The mean of each row of x, (…, K) to (…, 1), or its mean square deviation (`squares`), with every number that
    Welford's updates of parts of the row, merged in a tree, may give.

    Proof: `reference.high_precision.norm`, `_mean` and `_variance`. A row that is not finite keeps its numbers; its
    mean may be NaN.
    """
    count, size = x.shape[-1], torch.maximum(x.low.abs(), x.high.abs())
    if not count:
        return statistic
    together, most = size.sum(-1, keepdim=True), size.amax(-1, keepdim=True)
    low, high = statistic.low, statistic.high
    if x.point:  # about the exact number, unless the statistic is another one, as that of a changed contract
        middle = x.low.mean(-1, keepdim=True)
        if squares:
            middle = (x.low - middle).square().mean(-1, keepdim=True)
        inside = (middle >= low) & (middle <= high)
        low, high = torch.where(inside, middle, low), torch.where(inside, middle, high)
    second = 1 + 2.0**-10
    """Covers the terms of second order, and the products with 1/K."""
    if squares:
        of_mean = UNIT * torch.minimum(4 * together, together + 128 * most) * second
        weights, s = max(1.0, math.log2(count) / 2) * count, high * count
        moved = 4 * of_mean * (weights * s).sqrt() + 4 * of_mean * of_mean * weights
        error = (moved + (count + 12) * UNIT * (s + moved)) / count * second
    else:
        error = UNIT * min(4.0, 1 + 128 / count) * together * second
    # A difference x − m, or its square, may overflow, and the next update is ∞ − ∞.
    free = error.isnan() | (most > FLT_MAX / 4) | (squares & (high > FLT_MAX / 2))
    error = torch.where(together == 0, 0.0, error + SMALLEST_SUBNORMAL).masked_fill(free, torch.inf)
    low, high = torch.minimum(statistic.low, low - error), torch.maximum(statistic.high, high + error)
    low, finite = low.clamp(min=0.0) if squares else low, together.isfinite()
    nan = statistic.may_be_nan | ~finite | free
    if not bool(nan.any()):
        return Interval(low, high)
    low, high = torch.where(finite, low, statistic.low), torch.where(finite, high, statistic.high)
    return Interval(low, high, nan)


def largest(x: Interval) -> Interval:
    """The largest number of each row, (…, K) to (…, 1), −∞ of none. NaN is ignored, or makes the result NaN; of two
    zeros a kernel may take either."""
    if x.shape[-1] == 0:
        least = x.low.new_full((*x.shape[:-1], 1), -torch.inf)
        return Interval(least, least)
    low, high = (torch.where(end.isnan(), -torch.inf, end) for end in (x.low, x.high))
    found, most = low.amax(-1, keepdim=True), high.amax(-1, keepdim=True)
    nan = x.may_be_nan.any(-1, keepdim=True)
    if bool(((found == 0) | (most == 0)).any()):
        either = [(zeros & sign).any(-1, keepdim=True) for zeros in (low == 0, high == 0)
                  for sign in (low.signbit(), ~high.signbit())]  # fmt: skip
        found = torch.where((found == 0) & either[0], -0.0, found)
        most = torch.where((most == 0) & either[3], 0.0, most)
    elif x.point and not bool(nan.any()):
        return Interval(found, found, bits=x.bits)
    return Interval(found, most, nan if bool(nan.any()) else None, x.bits)


def amax(x: Interval) -> Interval:
    """The largest magnitude of each row, (…, K) to (…, 1), 0 of none. NaN is ignored, or makes the result NaN."""
    if x.shape[-1] == 0:
        zero = x.low.new_zeros(*x.shape[:-1], 1)
        return Interval(zero, zero)
    size, nan = absolute(x), x.may_be_nan
    low = size.low.nan_to_num(0.0, torch.inf).amax(-1, keepdim=True)
    row = nan.any(-1, keepdim=True)
    if size.point and not bool(row.any()):
        return Interval(low, low)
    low = torch.where(nan, 0.0, size.low).nan_to_num(0.0, torch.inf).amax(-1, keepdim=True)
    return Interval(low, size.high.nan_to_num(0.0, torch.inf).amax(-1, keepdim=True), row)
