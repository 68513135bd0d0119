"""Codes of values: rounding to nearest, saturating or not."""

from __future__ import annotations

from typing import Literal

import torch

from narrowgauge.reference.numbers.rounding import FLOAT32_INF_BITS, nearest_away, nearest_even, nearest_toward_zero
from narrowgauge.spec.formats import FORMATS, Format

Ties = Literal["even", "zero", "away"]
_NEAREST = {"even": nearest_even, "zero": nearest_toward_zero, "away": nearest_away}


def encode(x: torch.Tensor, fmt: Format, *, saturate: bool = True, ties: Ties = "even") -> torch.Tensor:
    """Codes (uint8, the shape of `x`) nearest to float32 `x`; a tie goes to the even code, toward 0 or away from 0.

    Saturating (`cvt.rn.satfinite` of PTX): overflow and infinity give the largest finite value with their sign; NaN
    gives the canonical NaN, or the largest positive value if the format has no NaN. Not saturating: overflow and
    infinity give infinity, or NaN if the format has no infinity. E8M0, UE5M3 and UINT4 are unsigned: zero
    gives the smallest code, a negative number NaN, or 0 without NaN. −0.0 and negative numbers that round to zero keep
    the sign, if the format has −0.
    Source: docs/numerics.md#formats.

    Raises TypeError for a wrong dtype, ValueError for `saturate=False` and a format with neither infinity nor NaN.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"encode takes float32 values, not {x.dtype}; convert them first, exactly")
    overflow = fmt.max_code if saturate else fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    if overflow is None:
        names = ", ".join(f.name for f in FORMATS.values() if f.nan_code is not None)
        raise ValueError(f"{fmt.name} has no code for overflow, so it must saturate; formats that need not: {names}")
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    code = _NEAREST[ties](magnitude, fmt)
    if fmt.complement:
        return _complement(code, bits, magnitude, fmt)
    overflows = None if saturate else code > fmt.max_code
    if overflows is None:
        code.clamp_(max=fmt.max_code)
    else:
        code.masked_fill_(overflows, overflow)
    # A masked choice takes as long as ten additions. So signs are added, and NaN is masked only if x has a NaN.
    code.sub_(bits >> 31, alpha=fmt.sign_code)
    if not fmt.signed:
        code.masked_fill_((bits < 0) & (magnitude != 0), fmt.nan_code or 0)
    if fmt.signed and not fmt.negative_zero:
        code.masked_fill_(code == fmt.sign_code, 0)
        if overflows is not None:
            code.masked_fill_(overflows, overflow)
    stored = code.to(torch.uint8)
    if x.numel() and bool(magnitude.amax() > FLOAT32_INF_BITS):
        stored.masked_fill_(magnitude > FLOAT32_INF_BITS, fmt.max_code if fmt.nan_code is None else fmt.nan_code)
    return stored


def _complement(code: torch.Tensor, bits: torch.Tensor, magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes of a format in two's complement, from rounded magnitudes; the most negative number has no positive one."""
    negative = bits < 0
    code = torch.where(negative, -code.clamp(max=fmt.max_code + 1), code.clamp(max=fmt.max_code))
    code.masked_fill_(magnitude > FLOAT32_INF_BITS, fmt.max_code)
    return code.bitwise_and_(fmt.codes - 1).to(torch.uint8)
