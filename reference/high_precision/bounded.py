"""Values with proved error bounds: the possible results of a float32 computation of a formula, in any order of sums.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 3.3): the error of a result
is the error propagated from the operands plus the rounding of the operation. Source: docs/tolerance.md#gemm,
docs/tolerance.md#high-precision-stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch

from narrowgauge.reference.bounds.bounds import ANY_ORDER, EXACT, Bounds
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST_NORMAL, SMALLEST_SUBNORMAL, UNIT

Lazy = Callable[[], torch.Tensor]
"""A tensor computed on first use."""

TRUNCATING = 2 * UNIT
"""Largest relative error of a truncating addition, as in tensor cores."""
EXP_ULPS = 2
TANH_ULPS = 2
ERF_ULPS = 2
RSQRT_ULPS = 2
"""CUDA C++ Programming Guide 13.0, section 17.1, table 17: the maximum error of expf and exp2f, tanhf, erff and rsqrtf
over the full range. The table counts ulps from the correctly rounded result, and its figures are measured, not
guaranteed. Division, square root and reciprocal round correctly (0 ulp) without fast-math. Of the fast-math intrinsics
only ex2.approx of fused attention is covered: `reference.high_precision.attention`."""

_HALF_ULP = {
    torch.float32: (UNIT, SMALLEST_SUBNORMAL / 2),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
}
"""Half an ulp of a dtype: relative for normal numbers, absolute for subnormal numbers."""
_EVALUATION = 2.0**-50
"""Covers a few float64 roundings of the value and of the ends of its interval."""
_SLACK = 1 + 2.0**-40
"""Covers the float64 roundings of errors."""


def assumption(function: str, ulps: int) -> str:
    """Phrase of the assumption of a bound: the table of CUDA is measured and not guaranteed."""
    return f"{function} within {ulps} ulps (CUDA C++ Programming Guide, table 17)"


def half_ulp(dtype: torch.dtype) -> tuple[float, float]:
    """Half an ulp of float32, bfloat16 or float16: relative for normal numbers, absolute for subnormal numbers."""
    return _HALF_ULP[dtype]


def relative_error(ulps: float) -> float:
    """Largest relative error of a result that is `ulps` from the correctly rounded result: (ulps + ½)·2^-23.

    An ulp of a number y is at most 2^-23·|y|, and correct rounding adds half an ulp.
    """
    return (2 * ulps + 1) * UNIT


class Bounded:
    """Values with error bounds, float64 tensors of the same shape.

    A correct float32 kernel has a number in [value − error, value + error]; the exact number lies in the interval.
    Operations preserve this: the interval of a result contains the rounded result for any numbers in the intervals of
    the operands. With an infinite error any number is accepted, also infinity and NaN, because an intermediate result
    may overflow or a divisor may be 0. An infinite or NaN value with error 0 is the IEEE 754 result in every order.

    Errors are computed on first use, so the values alone cost no more than the formula.
    """

    def __init__(self, value: torch.Tensor, error: torch.Tensor | Lazy, assumes: str = "") -> None:
        """`assumes`: what the bound assumes of device functions (`assumption`), empty if nothing.

        Raises TypeError if a tensor is not float64, ValueError if the shapes differ.
        """
        if value.dtype != torch.float64:
            raise TypeError(f"a bounded number is float64, not {value.dtype}")
        self.value = value
        self.assumes = assumes
        self._error = error
        if isinstance(error, torch.Tensor):
            self._check(error)

    @cached_property
    def error(self) -> torch.Tensor:
        """Largest distance of a correct number from the value."""
        if isinstance(self._error, torch.Tensor):
            return self._error
        error = self._error()
        self._check(error)
        self._error = error  # frees the operands of the computation
        return error

    def _check(self, error: torch.Tensor) -> None:
        if error.dtype != torch.float64:
            raise TypeError(f"the error of a bounded number is float64, not {error.dtype}")
        if self.value.shape != error.shape:
            shapes = f"{tuple(self.value.shape)} and {tuple(error.shape)}"
            raise ValueError(f"every bounded number has an error: shapes are {shapes}")

    def assuming(self, assumes: str) -> Bounded:
        """The same numbers; results of operations on these numbers do not keep the assumption."""
        return Bounded(self.value, lambda: self.error, assumes)

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @cached_property
    def max_magnitude(self) -> torch.Tensor:
        """Largest magnitude of a number in each interval."""
        return self.value.abs() + self.error

    @cached_property
    def unbounded(self) -> torch.Tensor:
        """bool: the error is infinite, so any number is accepted."""
        return torch.isinf(self.error)

    def __add__(self, other: Bounded) -> Bounded:
        return _rounded(
            self.value + other.value, lambda: self.error + other.error, _any_unbounded(self, other), underflow=0.0
        )

    def __sub__(self, other: Bounded) -> Bounded:
        return _rounded(
            self.value - other.value, lambda: self.error + other.error, _any_unbounded(self, other), underflow=0.0
        )

    def __mul__(self, other: Bounded) -> Bounded:
        return _rounded(
            self.value * other.value,
            lambda: self.value.abs() * other.error + self.error * other.max_magnitude,
            _any_unbounded(self, other),
        )

    def __truediv__(self, other: Bounded) -> Bounded:
        """The quotient; unbounded if the interval of the divisor contains 0 and other numbers."""
        value = self.value / other.value

        def propagated() -> torch.Tensor:
            numerator = self.error + value.abs() * other.error
            return torch.where(numerator == 0, 0.0, numerator / (other.value.abs() - other.error))

        def unbounded() -> torch.Tensor:
            return self.unbounded | other.unbounded | ((other.value.abs() <= other.error) & (other.error > 0))

        return _rounded(value, propagated, unbounded)

    def times_power_of_two(self, factor: float) -> Bounded:
        """The product with a power of two, exact unless it underflows. Raises ValueError for another factor."""
        if abs(math.frexp(factor)[0]) != 0.5:
            raise ValueError(
                f"{factor} is no power of two, so the product rounds: multiply by rounded_constant({factor})"
            )
        value = self.value * factor

        def error() -> torch.Tensor:
            propagated = self.error * abs(factor)
            return torch.where((propagated == 0) & (value.float() == value), 0.0, propagated + SMALLEST_SUBNORMAL)

        return _or_unbounded(value, error, _any_unbounded(self))

    def with_roundings(self, roundings: int) -> Bounded:
        """The same values after more roundings, by a kernel that computes the same number in other steps."""
        return _or_unbounded(
            self.value, lambda: self.error + roundings * UNIT * _SLACK * self.max_magnitude, _any_unbounded(self)
        )

    def with_error(self, added: Lazy) -> Bounded:
        """The same values with an additional error, broadcast to the shape."""
        return _or_unbounded(self.value, lambda: (self.error + added()) * _SLACK, _any_unbounded(self))

    def masked(self, keep: torch.Tensor) -> Bounded:
        """Exact zeros at the places where `keep` (bool, broadcast to the shape) is False."""
        return Bounded(torch.where(keep, self.value, 0.0), lambda: torch.where(keep, self.error, 0.0))

    @property
    def mT(self) -> Bounded:
        """The last two dimensions exchanged."""
        return Bounded(self.value.mT, lambda: self.error.mT)

    def sum(self, dim: int, *, keepdim: bool = False, roundoff: float = UNIT) -> Bounded:
        """The sum over a dimension, in any tree of additions: an error of m / (1 − m)·P, m = (n − 1)·roundoff.

        n: nonzero terms. P: the larger of the sum of the positive terms and the sum of the magnitudes of the negative
        terms (docs/tolerance.md#high-precision-stages has the proof). The error is 0 if the terms have no error and are
        float32 numbers, and no partial sum can round in any order (docs/tolerance.md#exact-sums).
        """
        total = self.value.sum(dim, keepdim=keepdim)

        def error() -> torch.Tensor:
            magnitude = self.max_magnitude.sum(dim, keepdim=keepdim) * _SLACK
            added = ((self.max_magnitude != 0).sum(dim, keepdim=keepdim) - 1).clamp(min=0) * roundoff
            propagated = self.error.sum(dim, keepdim=keepdim)
            rounding = added / (1 - added).clamp(min=0) * _largest_partial_sum(magnitude, total, propagated)
            evaluation = 2.0**-52 * self.shape[dim] * magnitude
            bound = (propagated + rounding + evaluation) * _SLACK
            quantum = lowest_bit(self.value.movedim(dim, -1))
            if keepdim:
                quantum = quantum.unsqueeze(dim)
            never_rounds = (magnitude + total.abs()) / 2 <= 2.0**ACCUMULATOR_BITS * quantum
            certain = (self.error == 0).all(dim, keepdim=keepdim) & (magnitude <= FLT_MAX)
            bound = torch.where((never_rounds | (added == 0)) & certain, 0.0, bound)
            return torch.where(magnitude > FLT_MAX, torch.inf, bound)

        return _or_unbounded(total, error, lambda: self.unbounded.any(dim, keepdim=keepdim))

    def mean(self, dim: int, *, keepdim: bool = False) -> Bounded:
        """The mean over a dimension: a sum in any order, divided by the count or times the rounded inverse of it."""
        return self.sum(dim, keepdim=keepdim) * rounded_constant(1.0 / self.shape[dim], self.value.device)

    def matmul(self, other: Bounded, *, roundoff: float = UNIT, roundings: int = 0) -> Bounded:
        """(…, M, K) @ (…, K, N), summed in any order, with or without FMA.

        The error is ((1 + roundings)·Σ|x·y| + (K − 1)·P)·roundoff, with P of `sum`, divided by 1 − (K + roundings)·
        roundoff, which covers terms of higher order. `roundings`: further roundings of a product, by factors of an
        operand or by rescaled accumulators.
        """
        value = self.value @ other.value

        def error() -> torch.Tensor:
            columns = self.shape[-1]
            terms = (columns + roundings) * roundoff
            magnitude = self.max_magnitude @ other.max_magnitude
            propagated = self.error @ other.max_magnitude + self.value.abs() @ other.error
            partial = _largest_partial_sum(magnitude, value, propagated)
            rounding = (1 + roundings) * roundoff * magnitude + max(columns - 1, 0) * roundoff * partial
            rounding = (rounding / (1 - terms) if terms < 1 else torch.inf * rounding) + columns * SMALLEST_NORMAL
            bound = (propagated + rounding + 2.0**-51 * columns * magnitude) * _SLACK
            return torch.where(magnitude > FLT_MAX, torch.inf, bound)

        return _or_unbounded(
            value, error, lambda: self.unbounded.any(-1).unsqueeze(-1) | other.unbounded.any(-2).unsqueeze(-2)
        )

    def tanh(self) -> Bounded:
        value = self.value.tanh()

        def propagated() -> torch.Tensor:
            return torch.maximum((self.value + self.error).tanh() - value, value - (self.value - self.error).tanh())

        return _rounded(value, propagated, _any_unbounded(self), roundoff=relative_error(TANH_ULPS))

    def erf(self) -> Bounded:
        value = torch.erf(self.value)

        def propagated() -> torch.Tensor:
            above, below = torch.erf(self.value + self.error), torch.erf(self.value - self.error)
            return torch.maximum(above - value, value - below)

        return _rounded(value, propagated, _any_unbounded(self), roundoff=relative_error(ERF_ULPS))

    def rsqrt(self) -> Bounded:
        """1/√x; unbounded if x has an error and its interval reaches 0."""
        value = self.value.rsqrt()

        def propagated() -> torch.Tensor:
            above = (self.value - self.error).rsqrt() - value
            return torch.where(self.error == 0, 0.0, torch.maximum(above, value - (self.value + self.error).rsqrt()))

        def unbounded() -> torch.Tensor:
            return self.unbounded | ((self.value <= self.error) & (self.error > 0))

        return _rounded(value, propagated, unbounded, roundoff=relative_error(RSQRT_ULPS))

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """The same values stored as float32, bfloat16 or float16, rounded to nearest."""
        relative, absolute = _HALF_ULP[dtype]

        def error() -> torch.Tensor:
            bound = self.error + (relative * self.max_magnitude + absolute) * _SLACK
            return bound.masked_fill(self.value.abs() + bound > torch.finfo(dtype).max, torch.inf)

        return _or_unbounded(self.value, error, _any_unbounded(self))

    def hull(self, other: Callable[[], Bounded]) -> Bounded:
        """Intervals around these values that contain both intervals of the same numbers, computed in two ways."""

        def error() -> torch.Tensor:
            second = other()
            apart = (self.value - second.value).abs()
            return torch.maximum(self.error, (second.error + apart) * _SLACK)

        return _or_unbounded(self.value, error, _any_unbounded(self))

    def interval(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest output of a kernel in `dtype`: casts are monotone. NaN for a NaN value."""
        return (self.value - self.error).float().to(dtype), (self.value + self.error).float().to(dtype)

    def limits(self, dtype: torch.dtype) -> Bounds:
        """The accepted outputs in `dtype`, of the same shape, in the form of the bounds of a GEMM.

        `expected` is the value, cast once. If the error is 0, no other output is accepted, except for the sign of a
        zero.
        """
        expected = self.value.float().to(dtype)
        lower, upper = self.interval(dtype)
        exact = self.error == 0
        return Bounds(
            expected=expected,
            fused=expected,
            decoded=expected,
            lower=lower,
            upper=upper,
            exact=exact,
            zero_sum=expected == 0,
            undetermined=self.unbounded,
            centre=self.value,
            budget=torch.maximum(upper.double() - self.value, self.value - lower.double()).abs() + SMALLEST_SUBNORMAL,
            tier=torch.where(exact, EXACT, ANY_ORDER).to(torch.uint8),
        )


def exactly(x: torch.Tensor | Bounded) -> Bounded:
    """The numbers of a float32, bfloat16 or float16 tensor, with error 0; bounded numbers as they are."""
    if isinstance(x, Bounded):
        return x
    value = x.double()
    return Bounded(value, lambda: torch.zeros_like(value))


def rounded_constant(constant: float, device: torch.device | None = None) -> Bounded:
    """A scalar constant that a kernel rounds to float32. 0 is exact."""
    value = torch.tensor(constant, dtype=torch.float64, device=device)
    return Bounded(value, lambda: UNIT * value.abs() + (SMALLEST_SUBNORMAL if constant else 0.0))


def _largest_partial_sum(magnitude: torch.Tensor, total: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the sum of any of the terms, with `magnitude` Σ|x| and a sum `total` ± `error`.

    The sum of some terms lies between minus the sum of the negative magnitudes and the sum of the positive terms. Their
    sum is `magnitude` and their difference is the total, so the larger of them is the mean of both.
    """
    return torch.minimum((magnitude + total.abs() + error) / 2, magnitude)


def _any_unbounded(*operands: Bounded) -> Lazy:
    """bool: an operand is unbounded, and so is the result."""

    def unbounded() -> torch.Tensor:
        first, *others = operands
        result = first.unbounded
        for operand in others:
            result = result | operand.unbounded
        return result

    return unbounded


def _rounded(
    value: torch.Tensor,
    propagated: Lazy,
    unbounded: Lazy,
    *,
    roundoff: float = UNIT,
    underflow: float = SMALLEST_SUBNORMAL,
) -> Bounded:
    """A result after its rounding to float32, with an error of at most `propagated` from the operands.

    `roundoff`: largest relative error of the rounding. `underflow`: largest error of a result that underflows.
    """

    def error() -> torch.Tensor:
        moved = propagated()
        return (moved + roundoff * (value.abs() + moved) + underflow + _EVALUATION * value.abs()) * _SLACK

    return _or_unbounded(value, error, unbounded)


def _or_unbounded(value: torch.Tensor, error: Lazy, unbounded: Lazy) -> Bounded:
    """The result, with an infinite error if it is `unbounded` or may overflow; error 0 for infinite and NaN values."""

    def checked_error() -> torch.Tensor:
        finite = torch.isfinite(value)
        bound = torch.where(finite, error().nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
        return bound.masked_fill(unbounded() | (finite & (value.abs() + bound > FLT_MAX)), torch.inf)

    return Bounded(value, checked_error)
