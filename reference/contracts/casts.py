"""Casts of intervals: every number rounds to a dtype, from float64 in a single rounding."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.reference.contracts.interval import Interval

_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cast(x: Interval, dtype: str, rounding: str = "nearest") -> Interval:
    """Every number rounded to `dtype`: float32, bfloat16 or float16, nearest even, overflow to infinity.

    A kernel may round to float32 before: an interval holds the float32 of each of its numbers. Equal ends become a
    point. `rounding`: "truncate" rounds toward zero: no correct kernel, an explanation of wrong bytes.
    """
    target = DTYPES[dtype]

    def narrow(end: torch.Tensor) -> torch.Tensor:
        return (truncated(end, target) if rounding == "truncate" else nearest(end, target, is_float32=x.point)).double()

    found = replace(x.increasing(narrow), bits=_BITS[dtype])
    return Interval(found.low, found.low, bits=found.bits) if not found.point and equal_ends(found) else found


def equal_ends(x: Interval) -> bool:
    """Whether a correct kernel must hold one number everywhere, with the sign of a zero, or NaN."""
    if x.nan is None or not bool(x.nan.any()):
        return torch.equal(x.low.view(torch.int64), x.high.view(torch.int64))
    one = (x.low == x.high) & (x.low.signbit() == x.high.signbit()) & ~x.nan
    return bool((one | x.never).all())


def nearest(x: torch.Tensor, dtype: torch.dtype, *, is_float32: bool = False) -> torch.Tensor:
    """`x` (float64) rounded once to nearest even of `dtype`. torch rounds to float32 first, so this rounds to odd.

    24 bits are at least two more than bfloat16 and float16 have, so two roundings then equal one (Boldo and Melquiond,
    2008). `is_float32`: `x` holds float32 numbers.
    """
    number = x.float()
    if is_float32 or dtype == torch.float32:
        return number.to(dtype)
    word = number.view(torch.int32)
    if dtype == torch.bfloat16:
        # Two roundings differ from a single rounding only if the float32 number is a tie and the number is not.
        ties = ((word & 0xFFFF) == 0x8000).nonzero(as_tuple=True)
        result = number.to(dtype)
        if ties[0].numel():
            result[ties] = _by_odd(x[ties], number[ties]).to(dtype)
        return result
    return _by_odd(x, number).to(dtype)


def truncated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` (float64) rounded toward zero to `dtype`."""
    number = x.to(dtype)
    beyond = number.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(number, torch.zeros_like(number)), number)


def below(x: torch.Tensor) -> torch.Tensor:
    """The greatest float32 number that is not above `x` (float64), with the sign of a zero."""
    number = x.float()
    above = number.double() > x
    return torch.where(above, torch.nextafter(number, number.new_tensor(-torch.inf)), number)


def _by_odd(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """`x` (float64) rounded to odd: float32. `number`: `x` rounded to nearest float32."""
    back, word = number.double(), number.view(torch.int32)
    inexact = (back != x) & ((word & 1) == 0)
    farther = torch.where(x.abs() > back.abs(), 1, -1).to(torch.int32)
    return torch.where(inexact, word + farther, word).view(torch.float32)
