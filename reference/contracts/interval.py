"""The numbers of correct kernels at a step, and the arithmetic of float32 steps on intervals.

An interval has two ends in float64, also infinite, and a mask of the elements with a possible NaN. A number equal in
every correct kernel has equal ends; if all numbers of a tensor have, then `low` and `high` are one tensor of float32
numbers, and a step costs as much as the plain formula. A NaN end: only NaN is possible. −0
is less than 0.

A step rounds to float32 or not at all: the same rule covers kernels in float64 and fused multiply-add: if m and M
are the least and the greatest exact result, the ends are min(m, fl(m)) and max(M, fl(M)). An end that float64 does not
hold exactly moves one float64 number outward first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from narrowgauge.reference.numbers.exact import two_sum
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_NORMAL

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
APPROXIMATE_DIVISION = 2.5 * 2.0**-23
"""Relative error of div.approx, div.full and `__fdividef`: 2 ulp (CUDA C++ Programming Guide, table of intrinsic
functions), 2.5 ulp from the exact quotient. The bound covers fl(a·rcp.approx(b)): 1.5 ulp and a rounding."""
_OUTWARD = 2.0**-52
"""Relative step outward of a float64 result with an error of 2^-53."""
_FLOAT64_BITS = 53
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
FLUSHED_DIVISOR = 2.0**126
"""div.approx and `__fdividef` give 0 for a finite dividend and a divisor beyond (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Interval:
    """Ends of the numbers of a tensor, float64, and where a number may be NaN."""

    low: torch.Tensor
    high: torch.Tensor
    """The same object as `low` if all ends are equal: a point."""
    nan: torch.Tensor | None = None
    """Bool, the shape of the ends. None: only elements with NaN ends."""
    bits: int = 53
    """Bits of the significands of the ends at most. A point has float32 numbers: 24."""

    @property
    def point(self) -> bool:
        """Whether all ends are equal."""
        return self.low is self.high

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.low.shape

    @cached_property
    def finite(self) -> bool:
        """Whether every number is finite: no NaN, no infinite end."""
        if self.nan is not None and bool(self.nan.any()):
            return False
        # One pass: a sum is finite only if all terms are. Finite numbers beyond 2^900 may count as infinite.
        return all(bool(end.sum().isfinite()) for end in ((self.low,) if self.point else (self.low, self.high)))

    @cached_property
    def may_be_nan(self) -> torch.Tensor:
        """Where the number may be NaN."""
        return self.low.isnan() if self.nan is None else self.nan

    @cached_property
    def never(self) -> torch.Tensor:
        """Where no number is possible but NaN."""
        return self.low.isnan() & self.high.isnan()

    def increasing(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
        """An increasing function of every number, exact or a rounding of its own; NaN stays."""
        low = function(self.low)
        return Interval(low, low if self.point else function(self.high), self.nan, self.bits)

    def arranged(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
        """The same numbers in a new arrangement, for example a view."""
        low = function(self.low)
        nan = None if self.nan is None else function(self.nan)
        return Interval(low, low if self.point else function(self.high), nan, self.bits)

    @staticmethod
    def joined(parts: Sequence[Interval]) -> Interval:
        """Numbers behind numbers."""
        low = torch.cat([part.low for part in parts])
        high = low if all(part.point for part in parts) else torch.cat([part.high for part in parts])
        nan = None if all(part.nan is None for part in parts) else torch.cat([part.may_be_nan for part in parts])
        return Interval(low, high, nan, max(part.bits for part in parts))


def exactly(value: torch.Tensor | float, device: torch.device | str = "cpu") -> Interval:
    """The interval of known numbers: float32, bfloat16 or float16, or a float32 number."""
    bits = SIGNIFICAND_BITS.get(value.dtype, 24) if isinstance(value, torch.Tensor) else 24
    number = value.double() if isinstance(value, torch.Tensor) else torch.tensor(value, device=device).double()
    return Interval(number, number, bits=bits)


def constant(value: float, device: torch.device | str = "cpu") -> Interval:
    """A constant of a formula: from the number to its float32."""
    number = torch.tensor(value, dtype=torch.float64, device=device)
    return rounded(number, number)


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` (float64) rounded to float32, nearest even, as float64."""
    return x.float().double()


def rounded(
    low: torch.Tensor, high: torch.Tensor, nan: torch.Tensor | None = None, exact: torch.Tensor | None = None
) -> Interval:
    """The ends of a step from the least and the greatest result, which round to float32 or not at all.

    `exact`: where float64 holds both ends exactly. None: everywhere.
    """
    if exact is not None and not bool(exact.all()):
        low, high = (
            torch.where(exact, end, torch.nextafter(end, end.new_tensor(beyond)))
            for end, beyond in ((low, -torch.inf), (high, torch.inf))
        )
    if low is not high:
        return Interval(torch.minimum(low, to_float32(low)), torch.maximum(high, to_float32(high)), nan)
    number = to_float32(low)
    if nan is None and (torch.equal(number, low) or bool(((number == low) | low.isnan()).all())):
        return Interval(low, low, bits=24)
    return Interval(torch.minimum(low, number), torch.maximum(low, number), nan)


def flushed(x: Interval, limit: float = SMALLEST_NORMAL) -> Interval:
    """The numbers, and a zero of their sign for numbers below a limit: subnormal numbers, flushed as by -ftz=true."""
    above = (x.low > 0) & (x.low < limit)
    below = (x.high < 0) & (x.high > -limit)
    if not bool((above | below).any()):
        return x
    return Interval(torch.where(above, 0.0, x.low), torch.where(below, -0.0, x.high), x.nan, x.bits)


def same(a: Interval, b: Interval) -> bool:
    """Whether two points hold equal numbers; NaN equals NaN."""
    return a.point and b.point and torch.equal(a.low.view(torch.int64), b.low.view(torch.int64))


def hull(intervals: Sequence[Interval]) -> Interval:
    """The numbers of all intervals, of the same shape."""
    found = intervals[0]
    for other in intervals[1:]:
        low, high = _least(found.low, other.low), _greatest(found.high, other.high)
        both = found.finite and other.finite
        nan = None if both else found.may_be_nan | other.may_be_nan
        found = Interval(low, high, nan, max(found.bits, other.bits))
    return found


def add(a: Interval, b: Interval) -> Interval:
    """a + b."""
    low, error = two_sum(a.low, b.low)
    exact = (error == 0) | ~low.isfinite()
    if a.point and b.point:
        return rounded(low, low, None, exact)
    high, error = two_sum(a.high, b.high)
    exact &= (error == 0) | ~high.isfinite()
    if a.finite and b.finite:
        return rounded(low, high, None, exact)
    # ∞ − ∞ at a single end: the other operand has more numbers, and their sum with this infinity is the infinity.
    never = low.isnan() & high.isnan()
    invalid = (_reaches(a, -torch.inf) & _reaches(b, torch.inf)) | (_reaches(a, torch.inf) & _reaches(b, -torch.inf))
    low = torch.where(low.isnan() & ~never, torch.inf, low)
    high = torch.where(high.isnan() & ~never, -torch.inf, high)
    return rounded(low, high, a.may_be_nan | b.may_be_nan | invalid, exact)


def negative(a: Interval) -> Interval:
    """−a."""
    low = -a.high
    return Interval(low, low if a.point else -a.low, a.nan, a.bits)


def subtract(a: Interval, b: Interval) -> Interval:
    """a − b."""
    return add(a, negative(b))


def multiply(a: Interval, b: Interval) -> Interval:
    """a·b of different numbers: the product of a number with itself is `square`."""
    if a.point and b.point:  # float64 holds each product of two float32 numbers
        product = a.low * b.low
        return rounded(product, product)
    low, high = _corners(a, b, torch.mul, exact=a.bits + b.bits <= _FLOAT64_BITS)
    if a.finite and b.finite:
        return rounded(low, high)
    invalid = (_holds_zero(a) & _infinite(b)) | (_infinite(a) & _holds_zero(b))
    low, high = _between_infinities(low, high, a, b)
    return rounded(low, high, a.may_be_nan | b.may_be_nan | invalid)


def square(a: Interval) -> Interval:
    """a²."""
    if a.point:
        product = a.low * a.low
        if 2 * a.bits <= 24 and product.numel():
            least, most = product.aminmax()
            if bool((least >= SMALLEST_NORMAL) & (most <= FLT_MAX)):  # float32 holds so few bits
                return Interval(product, product, bits=24)
        return rounded(product, product)
    magnitude = absolute(a)
    low, high = magnitude.low * magnitude.low, magnitude.high * magnitude.high
    if 2 * a.bits > _FLOAT64_BITS:
        low, high = low * (1 - _OUTWARD), high * (1 + _OUTWARD)
    return rounded(low, high, a.nan)


def absolute(a: Interval) -> Interval:
    """|a|."""
    if a.point:
        return a.increasing(torch.abs)
    one, other = a.low.abs(), a.high.abs()
    low = torch.where(_holds_zero(a), 0.0, torch.fmin(one, other))
    return Interval(low, torch.fmax(one, other), a.nan, a.bits)


def divide(a: Interval, b: Interval, form: str | None = None, *, flushes: bool = False) -> Interval:
    """a/b in a form: "quotient" rounds once, "reciprocal" is a·fl(1/b), "approximate" has 2.5 ulp. None: any of them.

    The reciprocal of a power of two is exact: a quotient by a power of two, as in a mean, is the same in every form.
    `flushes`: a subnormal reciprocal may be 0. Raises ValueError for an unknown form.
    """
    if form == "reciprocal":
        reciprocal = _quotient(exactly(1.0, b.low.device), b)
        return multiply(a, flushed(reciprocal) if flushes else reciprocal)
    quotient, size = _quotient(a, b), absolute(b)
    if form == "quotient":
        return quotient
    if form not in (None, "approximate"):
        raise ValueError(f"a division has the form quotient, reciprocal or approximate, not {form!r}")
    # Beyond these divisors a reciprocal overflows or is subnormal, and has a larger error than an approximate quotient.
    usual = bool(((size.low >= SMALLEST_NORMAL) & (size.high <= FLUSHED_DIVISOR)).all())
    if form is None and usual and b.point and b.low.dim() == 0 and bool(torch.frexp(size.low)[0] == 0.5):
        return quotient
    if form == "approximate" or usual:
        return _approximate(quotient, size)
    return hull([_approximate(quotient, size), divide(a, b, "reciprocal", flushes=flushes), quotient])


def _approximate(quotient: Interval, divisor: Interval) -> Interval:
    """A quotient with the error of an approximate division. `divisor`: its magnitudes."""
    low, high = widened(quotient.low, quotient.high, APPROXIMATE_DIVISION)
    flushed = (divisor.high > FLUSHED_DIVISOR) & ~low.isinf()
    if bool(flushed.any()):
        low, high = torch.where(flushed, low.clamp(max=0.0), low), torch.where(flushed, high.clamp(min=0.0), high)
    return rounded(low, high, quotient.nan)


def widened(
    low: torch.Tensor, high: torch.Tensor, relative: float, absolute: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends moved outward by an error relative to each end, and by an absolute error, and rounded outward."""
    slack = relative * (1 + 2.0**-40) + 2.0**-50
    lower = low - low.abs() * slack - absolute
    upper = high + high.abs() * slack + absolute
    stay = [end.isinf() | (end == 0) if absolute == 0 else end.isinf() for end in (low, high)]
    return torch.where(stay[0], low, lower), torch.where(stay[1], high, upper)


def maximum(a: Interval, b: Interval) -> Interval:
    """The larger of two numbers. NaN in either operand gives either the other operand or NaN."""
    return _selected(a, b, _greatest)


def minimum(a: Interval, b: Interval) -> Interval:
    """The smaller of two numbers. NaN in either operand gives either the other operand or NaN."""
    return _selected(a, b, _least)


def _selected(a: Interval, b: Interval, function: Function) -> Interval:
    low, high = function(a.low, b.low), function(a.high, b.high)
    zeros = _holds_zero(a) & _holds_zero(b) & ~(_known_zero(a) & _known_zero(b) & (a.low.signbit() == b.low.signbit()))
    if bool(zeros.any()):  # a maximum of −0 and 0 may be either
        low, high = torch.where(zeros & (low == 0), -0.0, low), torch.where(zeros & (high == 0), 0.0, high)
    elif a.point and b.point:
        high = low
    nan, bits = a.may_be_nan | b.may_be_nan, max(a.bits, b.bits)
    if not bool(nan.any()):
        return Interval(low, high, None, bits)
    # fmaxf ignores NaN and torch propagates it: where one operand may be NaN, the other may stand alone.
    for operand, other in ((a, b), (b, a)):
        low = torch.where(operand.may_be_nan, _least(low, other.low), low)
        high = torch.where(operand.may_be_nan, _greatest(high, other.high), high)
    return Interval(low, high, nan, bits)


Condition = tuple[torch.Tensor, torch.Tensor]
"""Where a comparison may hold, and where it may fail."""


def choose(condition: Condition, a: Interval, b: Interval) -> Interval:
    """`a` where a condition holds, else `b`."""
    may_hold, may_fail = condition
    both = may_hold & may_fail
    low, high = torch.where(may_hold, a.low, b.low), torch.where(may_hold, a.high, b.high)
    nan = torch.where(may_hold, a.may_be_nan, b.may_be_nan)
    bits = max(a.bits, b.bits)
    if not bool(both.any()):
        return Interval(low, low if a.point and b.point else high, None if a.finite and b.finite else nan, bits)
    return Interval(
        torch.where(both, _least(a.low, b.low), low),
        torch.where(both, _greatest(a.high, b.high), high),
        torch.where(both, a.may_be_nan | b.may_be_nan, nan),
        bits,
    )


def compare(a: Interval, b: Interval, relation: str) -> Condition:
    """Where a relation (">", ">=", "<", "<=") may hold, and where it may fail. A comparison with NaN fails."""
    if relation in ("<", "<="):
        return compare(b, a, relation.replace("<", ">"))
    may_hold = a.high > b.low if relation == ">" else a.high >= b.low
    may_fail = a.low <= b.high if relation == ">" else a.low < b.high
    return may_hold, may_fail | a.may_be_nan | b.may_be_nan


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _quotient(a: Interval, b: Interval) -> Interval:
    """a/b, rounded once or not at all."""
    if a.point and b.point:
        quotient = a.low / b.low
        return rounded(quotient, quotient, None, _quotient_is_exact(a.low, b.low, quotient))
    inside = (b.low < 0) & (b.high > 0)
    low, high = _corners(a, _signed_zero_ends(b), torch.div, exact=False)
    invalid = (_holds_zero(a) & _holds_zero(b)) | (_infinite(a) & _infinite(b))
    if bool(inside.any()):
        low, high = low.masked_fill(inside, -torch.inf), high.masked_fill(inside, torch.inf)
    low, high = _between_infinities(low, high, a, b)
    nan = a.may_be_nan | b.may_be_nan | invalid
    return rounded(low, high, nan if bool(nan.any()) else None)


def _signed_zero_ends(b: Interval) -> Interval:
    """`b` with ends at zero, with the sign of the further numbers of the interval: a single infinite end of a
    quotient."""
    if b.point:
        return b
    low = torch.where((b.low == 0) & (b.high > 0), 0.0, b.low)
    high = torch.where((b.high == 0) & (b.low < 0), -0.0, b.high)
    return Interval(low, high, b.nan)


def _corners(a: Interval, b: Interval, function: Function, *, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest result over the ends of two operands that are not both points.

    `exact`: whether float64 holds the results. Else they move outward; a result of 0 stays, since the numbers are far
    from the underflow of float64.
    """
    ends_a, ends_b = ((x.low,) if x.point else (x.low, x.high) for x in (a, b))
    results = [function(x, y) for x in ends_a for y in ends_b]
    zeros = bool((results[0] == 0).any())
    least, greatest = (_least, _greatest) if zeros else (torch.fmin, torch.fmax)
    low = high = results[0]
    for result in results[1:]:
        low, high = least(low, result), greatest(high, result)
    if exact:
        return low, high
    lower, upper = low.sub(low.abs(), alpha=_OUTWARD), high.add(high.abs(), alpha=_OUTWARD)
    if zeros or not bool((lower.sum() + upper.sum()).isfinite()):  # −0 + 0 is 0, and ∞ − ∞ is NaN
        lower, upper = (
            torch.where((end == 0) | end.isinf(), end, moved) for end, moved in ((low, lower), (high, upper))
        )
    return lower, upper


def _between_infinities(
    low: torch.Tensor, high: torch.Tensor, a: Interval, b: Interval
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of 0 for NaN from −∞ and ∞ times 0, or divided by ∞: the numbers between −∞ and ∞ give a zero."""
    lost = low.isnan() & high.isnan()
    if not bool(lost.any()):
        return low, high
    lost &= ~a.never & ~b.never & ((a.low != a.high) | (b.low != b.high))
    return torch.where(lost, -0.0, low), torch.where(lost, 0.0, high)


def _least(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The lesser of two numbers; NaN is no number. fmin may give either of two zeros."""
    low = torch.fmin(a, b)
    zeros = (a == 0) & (b == 0) & (a.signbit() | b.signbit())
    return torch.where(zeros, -0.0, low) if bool(zeros.any()) else low


def _greatest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The greater of two numbers; NaN is no number. fmax may give either of two zeros."""
    return -_least(-a, -b)


def _quotient_is_exact(a: torch.Tensor, b: torch.Tensor, quotient: torch.Tensor) -> torch.Tensor:
    """Where a quotient of float32 numbers is exact: float64 holds the product of two float32 numbers."""
    return ((to_float32(quotient) == quotient) & (quotient * b == a)) | ~quotient.isfinite() | (a == 0)


def _holds_zero(a: Interval) -> torch.Tensor:
    return (a.low <= 0) & (a.high >= 0)


def _known_zero(a: Interval) -> torch.Tensor:
    """Where the number is 0, of a known sign."""
    return (a.low == 0) & (a.high == 0) & (a.low.signbit() == a.high.signbit())


def _reaches(a: Interval, limit: float) -> torch.Tensor:
    return (a.low == limit) | (a.high == limit)


def _infinite(a: Interval) -> torch.Tensor:
    return a.low.isinf() | a.high.isinf()
