"""Exact sums of products in float64, and roundings of them to float32 that happen once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowgauge.reference.numbers.blocks import slabs

FLOAT64_EXACT = 2.0**53
# Columns that are halved no further before bits are: a block of MX, whose elements share a scale.
_LEAF = 32
# What 13 significant bits span by themselves; a row that spans more has numbers of several sizes.
_MANTISSAS = 2.0**26
# The first bit of 64 alone.
_TIE = -(1 << 63)
_MANTISSA = (1 << 23) - 1
# Parts of a float64 number: the bits behind the point, the one before it, and the exponent.
_FRACTION, _HIDDEN, _EXPONENT = (1 << 52) - 1, 1 << 52, 0x7FF << 52
_TINY = 2.0**-126


@dataclass
class ExactSum:
    """Sums (M, N) as high + low, both float64, |low| at most half an ulp of high: exact, not rounded.

    Where it takes more than two float64 numbers, low is the rest, rounded: its sign is right, and it is 0 only where
    the rest is.
    """

    high: torch.Tensor
    low: torch.Tensor | None
    """None where the sums are float64 numbers."""

    def to_float32(self) -> torch.Tensor:
        """Each sum rounded once, to nearest even."""
        rounded = self.high.float()
        if self.low is not None:
            rows = self.low.any(1).nonzero().squeeze(1)
            rounded[rows] = round_to_odd(self.high[rows], self.low[rows]).float()
        return rounded


def round_to_odd(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """high + low as one float64 whose rounding to float32 is that of the exact sum.

    `high` is the sum rounded to float64. Where `low` is not 0 and the last bit of `high` is even, the neighbour on
    low's side is taken, whose last bit is odd: with 53 ≥ 24 + 2 bits a second rounding to nearest is then the same as
    one (Boldo and Melquiond, 2008). Not-finite sums stay.
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


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """fl(x·y + z), rounded once, of float32 tensors.

    Where y has powers of two and the product is a float32 number, that is an addition. Else the product is exact in
    float64. The sum rounds there, and once more to float32: that is one rounding unless the float64 sum is a tie
    between two float32 numbers, or smaller than a normal one.
    """
    if bool(((y.view(torch.int32) & _MANTISSA) == 0).all()):
        product = x * y
        if torch.equal(product / y, x):
            return product + z
    s = x.double().mul_(y).add_(z)
    rounded = s.float()
    if rounded.numel() == 0:
        return rounded
    beside_tie = s.view(torch.int64) << 35  # the bits that float32 has not, of which a tie has the first alone
    if bool((beside_tie.amin() == _TIE) | (rounded.abs().amin() <= _TINY)):
        at = ((beside_tie == _TIE) | (rounded.abs() <= _TINY)).nonzero(as_tuple=True)
        x, y, z = (each.expand_as(rounded)[at].double() for each in (x, y, z))
        rounded[at] = round_to_odd(*two_sum(x * y, z)).float()
    return rounded


def add_product(y: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """y = `fma`(x, factor, y) in place: float32 (M, N), (M, N) and (N,).

    By torch's `addcmul`, in a single pass, where this device rounds it once; else by `fma`.
    """
    if addcmul_rounds_once(str(y.device)):
        y.addcmul_(x, factor)
    else:
        y.copy_(fma(x, factor, y))


# x, factor, y and fl(x·factor + y). Another way to compute it gives another number in one of them: 0 where the product
# is rounded to float32 first; 2^24 + 4 where the sum is rounded to float64 first, there a tie; 0 where subnormal
# factors are flushed, or addends or outputs.
_WITNESSES = (
    (1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11, 2.0**-24),
    (1 + 2.0**-23, 1 - 2.0**-23, 2.0**24 + 2, 2.0**24 + 2),
    (2.0**-149, 2.0**100, 0.0, 2.0**-49),
    (2.0**-126, 2.0**-126, 2.0**-149, 2.0**-149),
)
# Elements of a row: more than a block of a GPU's threads takes, and no multiple of the numbers in a vector.
_LONG = 4099


@lru_cache(maxsize=16)
def addcmul_rounds_once(device: str) -> bool:
    """Whether torch's `addcmul_` of float32 numbers on this device is a fused multiply-add.

    torch does not say; its compiler decides, once for every loop. So each of the loops that `add_product` can get to is
    asked for each of the witnesses in all of its elements: over rows that are longer than vectors and blocks of
    threads, over a single row or column, each contiguous and as a part of a wider matrix.
    """
    x, factor, y, expected = torch.tensor(_WITNESSES, device=device).unbind(1)
    count = len(_WITNESSES)
    for (rows, columns), beside in itertools.product(((1, _LONG), (3, _LONG), (_LONG, 1)), (0, 1)):
        for first in range(count):
            each = torch.arange(first, first + columns, device=device) % count
            found = torch.empty(rows, columns + beside, device=device)[:, :columns]
            found.copy_(y[each])
            found.addcmul_(x[each].repeat(rows, 1), factor[each])
            if not torch.equal(found, expected[each].expand(rows, columns)):
                return False
    return True


def lowest_bit(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that divides every number along the last dimension: (…, K) float64 to (…,).

    Numbers are 0 or from 2^-900 to 2^900, so that none is subnormal. What is 0 or not finite is left out; infinity
    where that is all.
    """
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], torch.inf)
    rows = values.reshape(-1, values.shape[-1])
    lowest = values.new_empty(rows.shape[0])
    for some in slabs(rows):
        lowest[some] = _scaled_bits(rows[some]).amin(dim=1)
    return _unscaled(lowest).view(values.shape[:-1])


def has_powers(values: torch.Tensor) -> bool:
    """Whether all numbers, float64, are powers of two or 0."""
    return not bool((values.contiguous().view(torch.int64) & _FRACTION).any())


def lowest_bits(values: torch.Tensor) -> torch.Tensor:
    """The same of each number by itself: float64 to a tensor of its shape."""
    return _unscaled(_scaled_bits(values))


def _scaled_bits(values: torch.Tensor) -> torch.Tensor:
    """The lowest bit of each number times 2^51; more than 2^1010 of what is left out."""
    word = values.contiguous().view(torch.int64)
    mantissa = (word & _FRACTION).bitwise_or_(_HIDDEN)
    count = (-mantissa).bitwise_and_(mantissa).double()
    # Half the power of two of each number, from its exponent alone: 2^1023 of what is not finite, infinity of 0, whose
    # exponent wraps around.
    half = word.sub(_HIDDEN).bitwise_and_(_EXPONENT).view(torch.float64)
    return count.mul_(half)


def _unscaled(lowest: torch.Tensor) -> torch.Tensor:
    lowest.mul_(2.0**-51)
    return lowest.masked_fill_(lowest > 2.0**960, torch.inf)


def exact_sum(a: torch.Tensor, b: torch.Tensor) -> ExactSum:
    """Σ_k a[i, k]·b[j, k], exactly: (M, K) and (N, K) float64 to (M, N).

    Numbers have at most 13 significant bits, and magnitudes from 2^-400 to 2^400. A float64 matmul is exact in any
    order once the sum of magnitudes counts at most 2^53 units: certified by norms of the rows in units of their lowest
    bits. Where that fails, products of fewer columns, and then of fewer bits, are added without an error. NaN and
    infinities have the sums of IEEE 754, the same in every order.
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
        settled = special.isfinite()
        low = None if total.low is None else total.low.where(settled, 0.0)
        return ExactSum(total.high.where(settled, special), low)
    total_of = Expansion()
    for part in _split(a, b, spans):
        total_of.add(part)
    return total_of.rounded()


def exact_rows(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, span_b: Span) -> ExactSum:
    """`exact_sum` where `product`, a @ b.T, is exact but for some `rows` of `a`, which are replaced in it.

    `span_b`: at least what any row of `b` spans. The large and the small numbers of these rows are multiplied by
    themselves, since each spans half the exponents.
    """
    some = a[rows]
    if not bool(product[rows].isfinite().all()):
        part = exact_sum(some, b)
    else:
        total_of = Expansion()
        for side in _halves(some):
            for term in [side @ b.T] if certified(span(side), span_b) else _parts(side, b):
                total_of.add(term)
        part = total_of.rounded()
    product[rows] = part.high
    if part.low is None:
        return ExactSum(product, None)
    low = torch.zeros_like(product)
    low[rows] = part.low
    return ExactSum(product, low)


class Expansion:
    """A sum that loses nothing: tensors of one shape, float64, whose sum it is."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def add(self, term: torch.Tensor) -> None:
        """Adds `term` by TwoSum, from the largest part down, and keeps what is left as a part of its own."""
        for number, part in enumerate(self.parts):
            self.parts[number], term = two_sum(part, term)
            if not bool(term.any()):
                return
        self.parts.append(term)

    def rounded(self) -> ExactSum:
        """The sum as high and low.

        Passes of TwoSum from the smallest part up (Kahan's distillation) end where each part is at most half an ulp of
        the one before; so the first alone is within that of the sum, and the second has the sign of the rest.
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
    """What the rows of an operand (M, K) span, in units of the lowest bit of each: (M,), or the largest of them."""

    sum: torch.Tensor
    """‖x_i‖₁."""
    norm: torch.Tensor
    """‖x_i‖₂."""
    most: torch.Tensor
    """max|x_i|."""


def span(x: torch.Tensor) -> Span:
    """What each row of `x` spans: (M, K) float64."""
    found = Span(*(x.new_empty(x.shape[0]) for _ in range(3)))
    for rows in slabs(x):
        magnitude = x[rows].abs()
        found.sum[rows], found.most[rows] = magnitude.sum(1), magnitude.amax(1)
        found.norm[rows] = magnitude.square_().sum(1).sqrt_()
    unit = lowest_bit(x)
    return Span(found.sum / unit, found.norm / unit, found.most / unit)


def certified(a: Span, b: Span) -> bool:
    """Whether no partial sum of a float64 matmul can round. False where something is not finite.

    Hölder's inequality: Σ|x·y| is at most ‖x‖₁·max|y|, max|x|·‖y‖₁ and ‖x‖₂·‖y‖₂.
    """
    pairs = ((a.sum, b.most), (a.most, b.sum), (a.norm, b.norm))
    units = torch.stack([one.amax() * other.amax() for one, other in pairs]).amin()
    return bool(units < FLOAT64_EXACT * (1 - 2.0**-20))


def _parts(a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors (M, N) that are exact and whose sum is a @ b.T."""
    spans = span(a), span(b)
    if certified(*spans):
        yield a @ b.T
    else:
        yield from _split(a, b, spans)


def _split(a: torch.Tensor, b: torch.Tensor, spans: tuple[Span, Span]) -> Iterator[torch.Tensor]:
    """The same of operands whose matmul is not exact: first of fewer columns, then of fewer bits."""
    span_a, span_b = (span.most.amax() for span in spans)
    columns = a.shape[1]
    if columns > _LEAF or max(span_a, span_b) <= _MANTISSAS:
        half = -(-columns // (2 * _LEAF)) * _LEAF if columns > _LEAF else columns // 2
        yield from _parts(a[:, :half], b[:, :half])
        yield from _parts(a[:, half:], b[:, half:])
    elif span_a >= span_b:
        for some in _halves(a):
            yield from _parts(some, b)
    else:
        for some in _halves(b):
            yield from _parts(a, some)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The large and the small numbers of each row, 0 in place of the others; either spans about half the exponents.

    Of numbers that span 2^s and have p significant bits, the large span at most 2^(s/2 + p), the small 2^(s/2).
    """
    middle = x.abs().amax(1).mul_(lowest_bit(x).nan_to_num_(posinf=0.0)).sqrt_().unsqueeze(1)
    large = x.abs() >= middle
    return x.where(large, 0.0), x.where(~large, 0.0)
