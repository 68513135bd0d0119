"""Exact sums of products in float64, and their rounding to float32 in one rounding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowgauge.reference.numbers.slabs import slabs

FLOAT64_EXACT = 2.0**53
# A product of at most this many columns is split by bits, not by columns: a block of MX, whose elements share a scale.
_LEAF = 32
# Span of numbers of 13 significant bits and equal exponents. A row of larger span has several exponents.
_MANTISSAS = 2.0**26
# Only the highest of 64 bits.
_TIE = -(1 << 63)
_MANTISSA = (1 << 23) - 1
# Fields of a float64 number: mantissa, hidden bit (the lowest bit of the exponent field), exponent.
_FRACTION, _HIDDEN, _EXPONENT = (1 << 52) - 1, 1 << 52, 0x7FF << 52
_TINY = 2.0**-126


@dataclass
class ExactSum:
    """Exact sums (M, N) as high + low, both float64, |low| at most half an ulp of high.

    If a sum needs more than two float64 numbers, low is the remainder rounded: low has the sign of the remainder and is
    0 only for a remainder of 0.
    """

    high: torch.Tensor
    low: torch.Tensor | None
    """None if every sum is a float64 number."""

    def to_float32(self) -> torch.Tensor:
        """Each sum rounded once, to nearest even."""
        rounded = self.high.float()
        if self.low is not None:
            rows = self.low.any(1).nonzero().squeeze(1)
            rounded[rows] = round_to_odd(self.high[rows], self.low[rows]).float()
        return rounded


def round_to_odd(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """high + low rounded to odd: a float64 number that rounds to the same float32 number as the exact sum.

    `high` is the sum rounded to float64. If `low` is not 0 and the last bit of `high` is 0, the result is the neighbour
    of `high` in the direction of `low`, whose last bit is 1. With 53 ≥ 24 + 2 bits, two roundings then equal one
    rounding (Boldo and Melquiond, 2008). Sums of NaN or infinity stay.
    """
    even = (high.view(torch.int64) & 1) == 0
    inexact = (low != 0) & torch.isfinite(high) & torch.isfinite(low)
    toward = torch.where(low > 0, torch.inf, -torch.inf).to(torch.float64)
    return torch.where(inexact & even, torch.nextafter(high, toward), high)


def two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly (Knuth)."""
    s = a + b
    back = s - a
    return s, (a - (s - back)).add_(b - back)


def float32_ends(lower: torch.Tensor, upper: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest float32 number of intervals [lower, upper], float64 ends.

    An end that rounds to infinity is infinite: the nearest float32 number of a number of the interval is infinite too.
    """

    def round_down(v: torch.Tensor) -> torch.Tensor:
        nearest = v.float()
        above = (nearest.double() > v) & nearest.isfinite()
        return torch.where(above, torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)), nearest)

    return 0.0 - round_down(0.0 - lower), round_down(upper)


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """fl(x·y + z), rounded once, of float32 tensors.

    If y has powers of two alone and every product is a float32 number, the result is fl(product + z). Else the product
    is exact in float64; the sum is rounded to float64 and then to float32. The two roundings equal one rounding unless
    the float64 sum is a tie between two float32 numbers or below the normal float32 numbers. Such elements are
    recomputed by `round_to_odd`.
    """
    if bool(((y.view(torch.int32) & _MANTISSA) == 0).all()):
        product = x * y
        if torch.equal(product / y, x):
            return product + z
    s = x.double().mul_(y).add_(z)
    rounded = s.float()
    if rounded.numel() == 0:
        return rounded
    beside_tie = s.view(torch.int64) << 35  # the bits below float32 precision; a tie has only the first
    if bool((beside_tie.amin() == _TIE) | (rounded.abs().amin() <= _TINY)):
        at = ((beside_tie == _TIE) | (rounded.abs() <= _TINY)).nonzero(as_tuple=True)
        x, y, z = (operand.expand_as(rounded)[at].double() for operand in (x, y, z))
        rounded[at] = round_to_odd(*two_sum(x * y, z)).float()
    return rounded


def add_product(y: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """y = `fma`(x, factor, y) in place: float32 (M, N), (M, N) and (N,).

    A single pass of torch's `addcmul_` if it rounds once on this device, else `fma`.
    """
    if addcmul_rounds_once(str(y.device)):
        y.addcmul_(x, factor)
    else:
        y.copy_(fma(x, factor, y))


# x, factor, y and fl(x·factor + y). A computation with further roundings fails on a witness: it gives 0 if the product
# is rounded to float32 first, 2^24 + 4 if the sum is rounded to a float64 tie first, and 0 if subnormal factors,
# addends or outputs are flushed.
_WITNESSES = (
    (1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11, 2.0**-24),
    (1 + 2.0**-23, 1 - 2.0**-23, 2.0**24 + 2, 2.0**24 + 2),
    (2.0**-149, 2.0**100, 0.0, 2.0**-49),
    (2.0**-126, 2.0**-126, 2.0**-149, 2.0**-149),
)
# Elements of a row: more than the elements of a thread block of a GPU, and no multiple of a vector.
_LONG = 4099


@lru_cache(maxsize=16)
def addcmul_rounds_once(device: str) -> bool:
    """Whether torch's `addcmul_` of float32 numbers on this device is a fused multiply-add.

    torch does not document it: the compiler decides for each loop. So the function runs each loop that `add_product`
    can reach, with each witness in every element: rows longer than a vector and a thread block, a single row, a single
    column, each contiguous and as a part of a wider matrix.
    """
    x, factor, y, expected = torch.tensor(_WITNESSES, device=device).unbind(1)
    count = len(_WITNESSES)
    for (rows, columns), beside in itertools.product(((1, _LONG), (3, _LONG), (_LONG, 1)), (0, 1)):
        for first in range(count):
            witness = torch.arange(first, first + columns, device=device) % count
            out = torch.empty(rows, columns + beside, device=device)[:, :columns]
            out.copy_(y[witness])
            out.addcmul_(x[witness].repeat(rows, 1), factor[witness])
            if not torch.equal(out, expected[witness].expand(rows, columns)):
                return False
    return True


def lowest_bit(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that divides all numbers along the last dimension: (…, K) float64 to (…,).

    Magnitudes are 0 or from 2^-900 to 2^900, so no intermediate is subnormal. 0, NaN and infinity are ignored; the
    result is infinity for a row without further numbers.
    """
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], torch.inf)
    rows = values.reshape(-1, values.shape[-1])
    lowest = values.new_empty(rows.shape[0])
    for slab in slabs(rows):
        lowest[slab] = _scaled_bits(rows[slab]).amin(dim=1)
    return _unscaled(lowest).view(values.shape[:-1])


def has_powers(values: torch.Tensor) -> bool:
    """Whether all numbers, float64, are powers of two or 0."""
    return not bool((values.contiguous().view(torch.int64) & _FRACTION).any())


def lowest_bits(values: torch.Tensor) -> torch.Tensor:
    """`lowest_bit` of each number alone: float64 of the same shape."""
    return _unscaled(_scaled_bits(values))


def _scaled_bits(values: torch.Tensor) -> torch.Tensor:
    """The lowest bit of each number times 2^51; a number above 2^1010 for 0, NaN and infinity."""
    word = values.contiguous().view(torch.int64)
    mantissa = (word & _FRACTION).bitwise_or_(_HIDDEN)
    count = (-mantissa).bitwise_and_(mantissa).double()
    # Half the power of two of each number, from the exponent field: 2^1023 for NaN and infinity; infinity for 0, whose
    # exponent field wraps around.
    half = word.sub(_HIDDEN).bitwise_and_(_EXPONENT).view(torch.float64)
    return count.mul_(half)


def _unscaled(lowest: torch.Tensor) -> torch.Tensor:
    lowest.mul_(2.0**-51)
    return lowest.masked_fill_(lowest > 2.0**960, torch.inf)


def exact_sum(a: torch.Tensor, b: torch.Tensor) -> ExactSum:
    """Σ_k a[i, k]·b[j, k], exact: (M, K) and (N, K) float64 to (M, N).

    Numbers have at most 13 significant bits and magnitudes from 2^-400 to 2^400. A float64 matmul is exact in any order
    if the sum of magnitudes is at most 2^53 units; `certified` proves the condition from norms of the rows in units of
    their lowest bits. Else the function adds, without an error, products of fewer columns and then of fewer bits. NaN
    and infinity give the sums of IEEE 754, which are the same in every order. Source: docs/numerics.md#nvfp4-gemm,
    step 1.
    """
    if min(*a.shape, *b.shape) == 0:
        return ExactSum(a @ b.T, None)
    spans = span(a), span(b)
    if certified(*spans):
        return ExactSum(a @ b.T, None)
    finite_a, finite_b = a.isfinite(), b.isfinite()
    if not bool(finite_a.all() & finite_b.all()):
        special = a @ b.T
        total = exact_sum(a.where(finite_a, 0.0), b.where(finite_b, 0.0))
        finite = special.isfinite()
        low = None if total.low is None else total.low.where(finite, 0.0)
        return ExactSum(total.high.where(finite, special), low)
    expansion = Expansion()
    for part in _split(a, b, spans):
        expansion.add(part)
    return expansion.rounded()


def exact_rows(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, span_b: Span) -> ExactSum:
    """`exact_sum` of `a` and `b`, given `product` = a @ b.T, which is exact except in `rows`; replaces these rows.

    `span_b`: upper bound of the span of a row of `b`. The large and the small numbers of the rows are multiplied
    separately, because each part spans half the exponents.
    """
    inexact = a[rows]
    if not bool(product[rows].isfinite().all()):
        part = exact_sum(inexact, b)
    else:
        expansion = Expansion()
        for half in _halves(inexact):
            for term in [half @ b.T] if certified(span(half), span_b) else _parts(half, b):
                expansion.add(term)
        part = expansion.rounded()
    product[rows] = part.high
    if part.low is None:
        return ExactSum(product, None)
    low = torch.zeros_like(product)
    low[rows] = part.low
    return ExactSum(product, low)


class Expansion:
    """An exact sum as a list of float64 tensors of equal shape (an expansion, Shewchuk 1997)."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def add(self, term: torch.Tensor) -> None:
        """Add `term` by TwoSum, from the largest part down, and append the remainder as a new part."""
        for number, part in enumerate(self.parts):
            self.parts[number], term = two_sum(part, term)
            if not bool(term.any()):
                return
        self.parts.append(term)

    def rounded(self) -> ExactSum:
        """The sum as high and low.

        Passes of TwoSum from the smallest part up (Kahan's distillation) end when each part is at most half an ulp of
        the preceding part. Then the first part is the sum rounded to float64, and the second part has the sign of the
        remainder.
        """
        parts = list(self.parts)
        moved = len(parts) > 1
        while moved:
            moved = False
            for number in range(len(parts) - 1, 0, -1):
                high, low = two_sum(parts[number - 1], parts[number])
                moved = moved or not torch.equal(high, parts[number - 1])
                parts[number - 1], parts[number] = high, low
        low_parts = parts[1:]
        if not low_parts:
            return ExactSum(parts[0], None)
        low = low_parts[-1]
        for part in reversed(low_parts[:-1]):
            low = part + low
        return ExactSum(parts[0], low)


@dataclass
class Span:
    """Norms of the rows of an operand (M, K) in units of the lowest bit of the row: (M,), or the largest norms."""

    sum: torch.Tensor
    """‖x_i‖₁."""
    norm: torch.Tensor
    """‖x_i‖₂."""
    largest: torch.Tensor
    """max|x_i|."""


def span(x: torch.Tensor) -> Span:
    """The `Span` of the rows of `x`, (M, K) float64."""
    norms = Span(*(x.new_empty(x.shape[0]) for _ in range(3)))
    for rows in slabs(x):
        magnitude = x[rows].abs()
        norms.sum[rows], norms.largest[rows] = magnitude.sum(1), magnitude.amax(1)
        norms.norm[rows] = magnitude.square_().sum(1).sqrt_()
    unit = lowest_bit(x)
    return Span(norms.sum / unit, norms.norm / unit, norms.largest / unit)


def certified(a: Span, b: Span) -> bool:
    """Whether no partial sum of a float64 matmul can round. False for NaN and infinity.

    Hölder's inequality: Σ|x·y| is at most ‖x‖₁·max|y|, max|x|·‖y‖₁ and ‖x‖₂·‖y‖₂.
    """
    pairs = ((a.sum, b.largest), (a.largest, b.sum), (a.norm, b.norm))
    units = torch.stack([norm_a.amax() * norm_b.amax() for norm_a, norm_b in pairs]).amin()
    return bool(units < FLOAT64_EXACT * (1 - 2.0**-20))


def _parts(a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    """Exact float64 tensors (M, N) that sum to a @ b.T."""
    spans = span(a), span(b)
    if certified(*spans):
        yield a @ b.T
    else:
        yield from _split(a, b, spans)


def _split(a: torch.Tensor, b: torch.Tensor, spans: tuple[Span, Span]) -> Iterator[torch.Tensor]:
    """`_parts` of operands whose matmul may round: products of fewer columns, then of fewer bits."""
    span_a, span_b = (span.largest.amax() for span in spans)
    columns = a.shape[1]
    if columns > _LEAF or max(span_a, span_b) <= _MANTISSAS:
        half = -(-columns // (2 * _LEAF)) * _LEAF if columns > _LEAF else columns // 2
        yield from _parts(a[:, :half], b[:, :half])
        yield from _parts(a[:, half:], b[:, half:])
    elif span_a >= span_b:
        for half_a in _halves(a):
            yield from _parts(half_a, b)
    else:
        for half_b in _halves(b):
            yield from _parts(a, half_b)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The large and the small numbers of each row, with 0 for the remaining numbers; each spans half the exponents.

    If the numbers span 2^s and have p significant bits, the large numbers span at most 2^(s/2 + p), the small 2^(s/2).
    """
    middle = x.abs().amax(1).mul_(lowest_bit(x).nan_to_num_(posinf=0.0)).sqrt_().unsqueeze(1)
    large = x.abs() >= middle
    return x.where(large, 0.0), x.where(~large, 0.0)
