"""Functions of a number, with the documented errors of their implementations.

`FUNCTIONS` is the only table of errors: the forms of a function, with their sources. A verdict rests on the forms named
by its contract. The tables of CUDA are measured and not guaranteed. Errors measured on a GPU replace them if a file of
`narrowgauge.spec.program.measured_functions` is in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from narrowgauge.reference.contracts.interval import Interval, hull, rounded, widened
from narrowgauge.spec.program import measured_functions, read_functions
from narrowgauge.spec.summation import SMALLEST_NORMAL, SMALLEST_SUBNORMAL, UNIT

_GUIDE = "CUDA C++ Programming Guide 13.0, section 17.1, table 17"
_INTRINSICS = "CUDA C++ Programming Guide 13.0, section 17.2, table 18"
_PTX = "PTX ISA 9.0"
_EVALUATION = 2.0**-49
"""Relative error of a float64 function of torch: libm and CUDA document at most 4 ulps of 2^-52."""


@dataclass(frozen=True)
class Form:
    """A form of a function: its documented error."""

    ulps: float = 0.0
    """Distance from the correctly rounded result, in ulps."""
    relative: float = 0.0
    absolute: float = 0.0
    ulps_of_argument: float = 0.0
    """Further ulps for a unit of the argument's magnitude."""
    argument: float = 0.0
    """Relative error of the argument, such as of x·log2 e."""
    source: str = ""

    def applied(self, low: torch.Tensor, high: torch.Tensor, *, flushes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Ends of the exact function, moved outward by the error of the result.

        `flushes`: a subnormal term of the last sum may be 0, such as 0.128·x of erf x = x + 0.128·x.
        """
        relative = max((2 * self.ulps + 1) * UNIT if self.ulps else 0.0, self.relative)
        subnormal = (self.ulps + 0.5) * SMALLEST_SUBNORMAL if self.ulps else 0.0
        return widened(low, high, relative, self.absolute + subnormal + (SMALLEST_NORMAL if flushes else 0.0))


@dataclass(frozen=True)
class Function:
    """A function of one number."""

    evaluate: Callable[[torch.Tensor], torch.Tensor]
    """In float64, with a relative error of at most `_EVALUATION`."""
    increasing: bool
    forms: dict[str, Form]
    default: tuple[str, ...]
    """Forms of correct kernels, for every dialect without a named form."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """Results of every implementation lie here."""
    exact_at: tuple[float, ...] = ()
    """Arguments with an exact result in every implementation."""


FUNCTIONS: dict[str, Function] = {
    "exp": Function(
        torch.exp, True,
        {
            "expf": Form(ulps=2, source=f"{_GUIDE}: expf"),
            "exp2": Form(ulps=2, argument=2 * UNIT, source=f"{_PTX}: ex2.approx of fl(x·log2 e), as Triton's tl.exp"),
            "polynomial": Form(
                relative=2.0**-13.4, argument=2 * UNIT, source="FlashAttention-4, flash_attn/cute/utils.py at 0251105: "
                "ex2_emulation of degree 3",
            ),
            "__expf": Form(ulps=2, ulps_of_argument=1.173, source=f"{_INTRINSICS}: 2 + floor(abs(1.173·x)) ulp"),
        },
        ("expf", "exp2"), range=(0.0, math.inf), exact_at=(0.0, math.inf, -math.inf),
    ),
    "log": Function(
        torch.log, True,
        {
            "logf": Form(ulps=1, source=f"{_GUIDE}: logf"),
            "lg2": Form(absolute=2.0**-22, relative=2.0**-22, source=f"{_PTX}: lg2.approx times ln 2"),
        },
        ("logf", "lg2"), exact_at=(1.0, math.inf),
    ),
    "exp2": Function(
        torch.exp2, True, {"exp2f": Form(ulps=2, source=f"{_GUIDE}: exp2f; {_PTX}: ex2.approx")}, ("exp2f",),
        range=(0.0, math.inf), exact_at=(0.0, math.inf, -math.inf),
    ),
    "rsqrt": Function(
        torch.rsqrt, False,
        {"rsqrtf": Form(ulps=2, source=f"{_GUIDE}: rsqrtf; it covers 1/sqrtf and rsqrt.approx, 2^-22.9")}, ("rsqrtf",),
        range=(0.0, math.inf), exact_at=(0.0, math.inf),
    ),
    "sqrt": Function(
        torch.sqrt, True,
        {
            "sqrtf": Form(ulps=0, relative=UNIT, source=f"{_GUIDE}: sqrtf, correctly rounded"),
            "approximate": Form(ulps=1, source=f"{_GUIDE}: sqrtf with -use_fast_math"),
        },
        ("sqrtf",), range=(0.0, math.inf), exact_at=(0.0, math.inf),
    ),
    "tanh": Function(
        torch.tanh, True,
        {
            "tanhf": Form(ulps=2, source=f"{_GUIDE}: tanhf"),
            "sigmoid": Form(
                absolute=6 * UNIT,
                source="2·s − 1, s = 1/(1 + e^(−2x)): e^(−2x) is off by 5 units of 2^-24, and sum, quotient and "
                "difference round: 10·s·(1 − s) + 4·s + 1 ≤ 6 units",
            ),
            "approximate": Form(relative=2.0**-11, source=f"{_PTX}: tanh.approx"),
        },
        ("tanhf",), range=(-1.0, 1.0), exact_at=(0.0, math.inf, -math.inf),
    ),
    "erf": Function(
        torch.erf, True, {"erff": Form(ulps=2, source=f"{_GUIDE}: erff")}, ("erff",),
        range=(-1.0, 1.0), exact_at=(0.0, math.inf, -math.inf),
    ),
}  # fmt: skip
"""Functions by name. Every function is monotone. Implementations may have steps that are not: an end is widened by the
whole error, and these steps lie inside."""


_MEASURED = {
    ("exp", "expf"): "expf", ("exp", "exp2"): "ex2.approx.f32", ("log", "logf"): "logf", ("exp2", "exp2f"): "exp2f",
    ("rsqrt", "rsqrtf"): "rsqrtf", ("sqrt", "approximate"): "sqrt.approx.f32", ("tanh", "tanhf"): "tanhf",
    ("tanh", "approximate"): "tanh.approx.f32", ("erf", "erff"): "erff",
}  # fmt: skip
"""Names of measured functions by function and form. Further forms keep their documented errors."""


def function_of(name: str) -> Function:
    """The function with this name, with measured errors if a file of them is in use."""
    measured = measured_functions()
    return FUNCTIONS[name] if measured is None else _with_errors(name, measured.path)


@lru_cache(maxsize=64)
def _with_errors(name: str, path: str) -> Function:
    measured = read_functions(path)
    forms = {}
    for key, form in FUNCTIONS[name].forms.items():
        forms[key] = form
        device_name = _MEASURED.get((name, key), "")
        if device_name in measured.ulps:
            ulps = measured.ulps[device_name]
            below = SMALLEST_NORMAL if device_name in measured.flushes else ulps * SMALLEST_SUBNORMAL
            source = f"measured: {device_name} within {ulps:g} ulps of the exact result, {measured.about}"
            forms[key] = replace(form, ulps=0.0, relative=ulps * 2 * UNIT, absolute=below, source=source)
    return replace(FUNCTIONS[name], forms=forms)


def apply(name: str, x: Interval, forms: Sequence[str] = (), *, flushes: bool = False) -> Interval:
    """A function of every number of `x`, by any of the named forms; none: the forms of `Function.default`.

    `flushes`: subnormal numbers may be flushed. Raises ValueError for an unknown form. A number outside of the domain
    gives NaN.
    """
    function = function_of(name)
    unknown = set(forms) - set(function.forms)
    if unknown:
        raise ValueError(f"{name} has no form {', '.join(sorted(unknown))}; forms: {', '.join(function.forms)}")
    return hull([_by(function, function.forms[form], x, flushes) for form in forms or function.default])


def _by(function: Function, form: Form, x: Interval, flushes: bool) -> Interval:
    """The function in one form."""
    ends = (x.low, x.high) if function.increasing else (x.high, x.low)
    outward = (-1, 1) if function.increasing else (1, -1)
    moved = [_moved(end, sign, form.argument) for end, sign in zip(ends, outward, strict=True)]
    results = [function.evaluate(end) for end in moved]
    low, high = form.applied(*results, flushes=flushes)
    if form.ulps_of_argument:
        extra = form.ulps_of_argument * torch.fmax(x.low.abs(), x.high.abs()) * 2 * UNIT
        # An infinite result is infinite in every form.
        low, high = (torch.where(result.isinf(), end, end + sign * result.abs() * extra)
                     for end, sign, result in ((low, -1, results[0]), (high, 1, results[1])))  # fmt: skip
    known = (x.low == x.high) | x.low.isinf() | x.high.isinf()
    exact = [torch.isin(end, end.new_tensor(function.exact_at)) & (known | end.isinf()) for end in ends]
    low = torch.where(exact[0], function.evaluate(ends[0]), low).clamp(*function.range)
    high = torch.where(exact[1], function.evaluate(ends[1]), high).clamp(*function.range)
    if function.evaluate is torch.rsqrt:  # 1/√−0 is −∞
        low = torch.where((x.low == 0) & x.low.signbit(), -torch.inf, low)
        high = torch.where((x.high == 0) & ~x.high.signbit(), torch.inf, high)
    domain = results[0].isnan() | results[1].isnan()
    nan = x.may_be_nan | domain
    # An end outside of the domain, as below 0 for a root: the numbers inside begin at the end of the domain.
    inside = domain & ~(results[0].isnan() & results[1].isnan())
    if bool(inside.any()):
        edge = function.evaluate(torch.zeros_like(low))
        low = torch.where(inside & low.isnan(), edge, low)
        high = torch.where(inside & high.isnan(), edge, high)
    return rounded(low, high, nan)


def _moved(end: torch.Tensor, sign: int, relative: float) -> torch.Tensor:
    """An end of the argument moved outward by a relative error."""
    return torch.where(end.isinf(), end, end + sign * end.abs() * relative) if relative else end
