"""Values with proved errors: what a float32 computation of the same formula can give, whatever the order of its sums.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 3.3): an operation on
numbers that are off by at most some error gives a number that is off by what these errors move the exact result by,
and by its own rounding. Source of the rule: docs/tolerance.md#gemm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch

from narrowgauge.reference.bounds.bounds import ANY_ORDER, EXACT, Bounds
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, TINY, UNIT

Later = Callable[[], torch.Tensor]
"""A tensor that is computed when somebody asks."""

TRUNCATING = 2 * UNIT
"""The relative error of an addition that truncates, as tensor cores' do."""
EXP_ULPS = 2
TANH_ULPS = 2
RSQRT_ULPS = 2
"""CUDA C++ Programming Guide, "Mathematical Functions Appendix", standard functions in single precision: the maximum
error of expf, tanhf and rsqrtf. Division, square root and reciprocal round correctly (0 ulp) without fast-math. The
intrinsics of fast-math are not covered, but for ex2.approx of fused attention: `reference.high_precision.attention`."""

_HALF_ULP = {
    torch.float32: (UNIT, SMALLEST / 2), torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25),
}  # fmt: skip
"""Of a rounding to a dtype, relative to normal numbers, and of subnormal ones."""
_OWN = 2.0**-50
"""Covers a few roundings of the value in float64, and of the ends of its interval."""
_WIDER = 1 + 2.0**-40
"""Covers the rounding of errors in float64."""


class Bounded:
    """Numbers known to within an error: float64 tensors of one shape.

    Every member of [value − error, value + error] may be what a float32 kernel has at this place; the exact number is
    one of them. Operations keep that: the result's interval holds the rounded result of any members of the operands'
    intervals. An infinite error: anything is right, infinities and NaN too, since an intermediate result may overflow
    or divide by 0. A value that is not finite with error 0 is what IEEE 754 gives in every order.

    Errors are computed when somebody asks for them, so that values alone cost what the formula does.
    """

    def __init__(self, value: torch.Tensor, error: torch.Tensor | Later) -> None:
        """Raises TypeError where the tensors are not float64, ValueError where their shapes differ."""
        if value.dtype != torch.float64:
            raise TypeError(f"a bounded number is float64, not {value.dtype}")
        self.value = value
        self._error = error
        if isinstance(error, torch.Tensor):
            self._check(error)

    @cached_property
    def error(self) -> torch.Tensor:
        """How far from the value a right number can be, at most."""
        if isinstance(self._error, torch.Tensor):
            return self._error
        error = self._error()
        self._check(error)
        self._error = error  # lets go of what it was computed from
        return error

    def _check(self, error: torch.Tensor) -> None:
        if error.dtype != torch.float64:
            raise TypeError(f"the error of a bounded number is float64, not {error.dtype}")
        if self.value.shape != error.shape:
            shapes = f"{tuple(self.value.shape)} and {tuple(error.shape)}"
            raise ValueError(f"every bounded number has an error: shapes are {shapes}")

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @cached_property
    def size(self) -> torch.Tensor:
        """The largest magnitude that each number can have."""
        return self.value.abs() + self.error

    @cached_property
    def free(self) -> torch.Tensor:
        """bool: where anything is right."""
        return torch.isinf(self.error)

    def __add__(self, other: Bounded) -> Bounded:
        return _rounded(self.value + other.value, lambda: self.error + other.error, _free(self, other), least=0.0)

    def __sub__(self, other: Bounded) -> Bounded:
        return _rounded(self.value - other.value, lambda: self.error + other.error, _free(self, other), least=0.0)

    def __mul__(self, other: Bounded) -> Bounded:
        return _rounded(
            self.value * other.value,
            lambda: self.value.abs() * other.error + self.error * other.size,
            _free(self, other),
        )

    def __truediv__(self, other: Bounded) -> Bounded:
        """A divisor whose interval holds 0 and other numbers makes anything right."""
        value = self.value / other.value

        def moved() -> torch.Tensor:
            numerator = self.error + value.abs() * other.error
            return torch.where(numerator == 0, 0.0, numerator / (other.value.abs() - other.error))

        def free() -> torch.Tensor:
            return self.free | other.free | ((other.value.abs() <= other.error) & (other.error > 0))

        return _rounded(value, moved, free)

    def times(self, factor: float) -> Bounded:
        """The product with a power of two, exact where it does not underflow. Raises ValueError for another factor."""
        if abs(math.frexp(factor)[0]) != 0.5:
            raise ValueError(f"{factor} is no power of two, so the product rounds: multiply by near({factor})")
        value = self.value * factor

        def error() -> torch.Tensor:
            moved = self.error * abs(factor)
            return torch.where((moved == 0) & (value.float() == value), 0.0, moved + SMALLEST)

        return _settled(value, error, _free(self))

    def spread(self, roundings: int) -> Bounded:
        """The same numbers after so many further roundings: of a kernel that takes other steps to the same number."""
        return _settled(self.value, lambda: self.error + roundings * UNIT * _WIDER * self.size, _free(self))

    def further(self, own: Later) -> Bounded:
        """The same numbers, off by `own` (broadcast to the shape) more."""
        return _settled(self.value, lambda: (self.error + own()) * _WIDER, _free(self))

    def masked(self, keep: torch.Tensor) -> Bounded:
        """Zeros, exactly, where `keep` (bool, broadcast to the shape) is False."""
        return Bounded(torch.where(keep, self.value, 0.0), lambda: torch.where(keep, self.error, 0.0))

    @property
    def mT(self) -> Bounded:
        """The last two dimensions exchanged."""
        return Bounded(self.value.mT, lambda: self.error.mT)

    def sum(self, dim: int, *, keepdim: bool = False, unit: float = UNIT) -> Bounded:
        """The sum over a dimension, in any order, any tree: (n − 1)·unit·Σ|x| of its n terms that are not 0.

        That is Jeannerod and Rump's bound (2013) of additions that round to nearest; others have a larger `unit`, and
        the bound is divided by 1 − (n − 1)·unit. The error is 0 where no partial sum in whatever order can round
        (docs/tolerance.md#exact-sums): the terms have none, and are float32 numbers.
        """
        total = self.value.sum(dim, keepdim=keepdim)

        def error() -> torch.Tensor:
            magnitude = self.size.sum(dim, keepdim=keepdim) * _WIDER
            added = ((self.size != 0).sum(dim, keepdim=keepdim) - 1).clamp(min=0) * unit
            rounding = added * magnitude
            if unit > UNIT:
                rounding = rounding / (1 - added).clamp(min=0)
            own = 2.0**-52 * self.shape[dim] * magnitude
            bound = (self.error.sum(dim, keepdim=keepdim) + rounding + own) * _WIDER
            quantum = lowest_bit(self.value.movedim(dim, -1))
            if keepdim:
                quantum = quantum.unsqueeze(dim)
            never_rounds = (magnitude + total.abs()) / 2 <= 2.0**ACCUMULATOR_BITS * quantum
            certain = (self.error == 0).all(dim, keepdim=keepdim) & (magnitude <= FLT_MAX)
            bound = torch.where((never_rounds | (added == 0)) & certain, 0.0, bound)
            return torch.where(magnitude > FLT_MAX, torch.inf, bound)

        return _settled(total, error, lambda: self.free.any(dim, keepdim=keepdim))

    def mean(self, dim: int, *, keepdim: bool = False) -> Bounded:
        """The sum over a dimension, in any order, divided by the count, or times the rounded inverse of the count."""
        return self.sum(dim, keepdim=keepdim) * near(1.0 / self.shape[dim], self.value.device)

    def matmul(self, other: Bounded, *, unit: float = UNIT, roundings: int = 0) -> Bounded:
        """(…, M, K) @ (…, K, N), summed in any order, fused or not: an error of (K + roundings)·unit·Σ|x·y|.

        That is divided by 1 − (K + roundings)·unit, which covers the higher orders. `roundings`: how many more each
        product may have, of factors that a kernel multiplies one side by, or of accumulators that it scales on the way.
        """
        value = self.value @ other.value

        def error() -> torch.Tensor:
            columns = self.shape[-1]
            terms = (columns + roundings) * unit
            magnitude = self.size @ other.size
            moved = self.error @ other.size + self.value.abs() @ other.error
            rounding = (terms / (1 - terms) if terms < 1 else torch.inf) * magnitude + columns * TINY
            bound = (moved + rounding + 2.0**-51 * columns * magnitude) * _WIDER
            return torch.where(magnitude > FLT_MAX, torch.inf, bound)

        return _settled(value, error, lambda: self.free.any(-1).unsqueeze(-1) | other.free.any(-2).unsqueeze(-2))

    def exp(self, *, ulps: int = EXP_ULPS) -> Bounded:
        """e^x, to within so many ulps. A result below 2^-126 may be 0."""
        value = self.value.exp()
        return _rounded(value, lambda: value * self.error.expm1(), _free(self), unit=2 * ulps * UNIT, least=TINY)

    def tanh(self) -> Bounded:
        value = self.value.tanh()

        def moved() -> torch.Tensor:
            return torch.maximum((self.value + self.error).tanh() - value, value - (self.value - self.error).tanh())

        return _rounded(value, moved, _free(self), unit=2 * TANH_ULPS * UNIT)

    def rsqrt(self) -> Bounded:
        """1/√x; anything is right where x may be 0 or less, and is not known exactly."""
        value = self.value.rsqrt()

        def moved() -> torch.Tensor:
            above = (self.value - self.error).rsqrt() - value
            return torch.where(self.error == 0, 0.0, torch.maximum(above, value - (self.value + self.error).rsqrt()))

        def free() -> torch.Tensor:
            return self.free | ((self.value <= self.error) & (self.error > 0))

        return _rounded(value, moved, free, unit=2 * RSQRT_ULPS * UNIT)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """The same numbers after a rounding to nearest, to float32, bfloat16 or float16, of what is kept in between."""
        relative, absolute = _HALF_ULP[dtype]

        def error() -> torch.Tensor:
            bound = self.error + (relative * self.size + absolute) * _WIDER
            return bound.masked_fill(self.value.abs() + bound > torch.finfo(dtype).max, torch.inf)

        return _settled(self.value, error, _free(self))

    def either(self, other: Callable[[], Bounded]) -> Bounded:
        """What holds both intervals of the same numbers, computed in two ways, around the values of this one."""

        def error() -> torch.Tensor:
            second = other()
            apart = (self.value - second.value).abs()
            return torch.maximum(self.error, (second.error + apart) * _WIDER)

        return _settled(self.value, error, _free(self))

    def interval(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[lower, upper] of `dtype`: what a kernel can write, since casts are monotone. NaN where the value is."""
        return (self.value - self.error).float().to(dtype), (self.value + self.error).float().to(dtype)

    def limits(self, dtype: torch.dtype) -> Bounds:
        """What is right for an output of that dtype, as of a GEMM: `reference.bounds.bounds.Bounds`, of the same shape.

        `expected` is the value, cast once; where the error is 0 nothing else is right, but for the sign of a zero.
        """
        expected = self.value.float().to(dtype)
        lower, upper = self.interval(dtype)
        exact = self.error == 0
        return Bounds(
            expected=expected,
            fused=expected,
            lower=lower,
            upper=upper,
            exact=exact,
            zero_sum=expected == 0,
            undetermined=self.free,
            centre=self.value,
            budget=torch.maximum(upper.double() - self.value, self.value - lower.double()).abs() + SMALLEST,
            tier=torch.where(exact, EXACT, ANY_ORDER).to(torch.uint8),
        )


def exactly(x: torch.Tensor) -> Bounded:
    """Numbers of a float32, bfloat16 or float16 tensor: error 0."""
    value = x.double()
    return Bounded(value, lambda: torch.zeros_like(value))


def near(constant: float, device: torch.device | None = None) -> Bounded:
    """A constant that a kernel has rounded to float32: a scalar."""
    value = torch.tensor(constant, dtype=torch.float64, device=device)
    return Bounded(value, lambda: UNIT * value.abs() + SMALLEST)


def _free(*operands: Bounded) -> Later:
    """Where anything is right of an operand, and so of the result."""

    def found() -> torch.Tensor:
        first, *others = operands
        free = first.free
        for other in others:
            free = free | other.free
        return free

    return found


def _rounded(value: torch.Tensor, moved: Later, free: Later, *, unit: float = UNIT, least: float = SMALLEST) -> Bounded:
    """A result whose exact value the operands' errors move by at most `moved`, after its rounding to float32.

    `unit` and `least` are the largest relative error and that of what underflows.
    """

    def error() -> torch.Tensor:
        by_operands = moved()
        return (by_operands + unit * (value.abs() + by_operands) + least + _OWN * value.abs()) * _WIDER

    return _settled(value, error, free)


def _settled(value: torch.Tensor, error: Later, free: Later) -> Bounded:
    """Infinite errors where an operand's is (`free`) or the result may overflow; 0 where a value is not finite."""

    def settled() -> torch.Tensor:
        finite = torch.isfinite(value)
        bound = torch.where(finite, error().nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
        return bound.masked_fill(free() | (finite & (value.abs() + bound > FLT_MAX)), torch.inf)

    return Bounded(value, settled)
