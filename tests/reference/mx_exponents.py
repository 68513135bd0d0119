"""Exponents of MX scales for arrays of amaxes, in whole numbers.

A rule is a row of docs/dialects.md#e8m0-scales for amax = m·2^e, or for a quotient that is first rounded to float32.
`narrowgauge.reference.scalar.mx` has the same rules for a single amax; these functions are fast.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from narrowgauge.reference.scalar.mx import EMAX
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format

ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1)
NAMES = {E4M3: "mxfp8-e4m3", E5M2: "mxfp8-e5m2", E3M2: "mxfp6-e3m2", E2M3: "mxfp6-e2m3", E2M1: "mxfp4"}
DIALECTS = ("te", "ocp", "even", "ceil", "compressed-tensors", "floor-448", "nearest")
# Smallest mantissa that rounds up to 2 in the element's mantissa, ties away: 2 less half of the last bit.
CARRIES = {
    E4M3: Fraction(31, 16), E2M3: Fraction(31, 16), E5M2: Fraction(15, 8), E3M2: Fraction(15, 8), E2M1: Fraction(7, 4),
}  # fmt: skip
f32 = np.float32


def parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 numbers above 0 as m·2^(e − 23): m int64 with 24 bits, e int64."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return (fraction * 2**24).astype(np.int64), exponent.astype(np.int64) - 1


def beyond(m: np.ndarray, limit: Fraction, *, reached: bool) -> np.ndarray:
    """1 if the mantissa m/2^23 is above `limit`, or, if `reached`, at least `limit`; else 0."""
    left, right = m * limit.denominator, limit.numerator << 23
    return (left >= right if reached else left > right).astype(np.int64)


def stored(exponent: np.ndarray) -> np.ndarray:
    """Codes of E8M0, saturating."""
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def codes(amax: np.ndarray, element: Format, dialect: str) -> np.ndarray:
    """E8M0 codes of finite amaxes, float32 (n,), by the rule of a dialect, whose quotient or product is rounded."""
    scales = np.zeros(amax.shape, np.uint8)
    with np.errstate(all="ignore"):
        if dialect == "te":
            value, drop = amax * (f32(1) / f32(element.max)), 0
        elif dialect in ("floor-448", "nearest"):
            value, drop = amax / f32(element.max), 0
        else:
            value, drop = amax, EMAX[element]
    positive = value > 0
    m, e = parts(value[positive])
    if dialect in ("te", "ceil"):
        e = e + beyond(m, Fraction(1), reached=False)
    elif dialect == "even":
        e = e + beyond(m, CARRIES[element], reached=True)
    elif dialect == "compressed-tensors":
        e = e + beyond(m, CARRIES[E2M3] if element is E2M3 else Fraction(7, 4), reached=True)
    elif dialect == "nearest":
        e = e + (m * m > 2 << 46)  # never equal: 2 is no square of a fraction
    scales[positive] = stored(e - drop)
    return scales


def codes_of_quotient(amax: np.ndarray, element: Format, dialect: str) -> np.ndarray:
    """E8M0 codes by the exact quotient amax/max, in dialects te, floor-448 and nearest: r = m/w, between ½ and 2."""
    m, e = parts(amax)
    largest = Fraction(element.max) / 2 ** EMAX[element]
    if dialect == "te":
        step = beyond(m, largest, reached=False)
    elif dialect == "floor-448":
        step = beyond(m, largest, reached=True) - 1
    else:
        square, twice = (m * largest.denominator) ** 2, 2 * largest.numerator**2 << 46
        step = (square > twice).astype(np.int64) - (4 * square < twice)
    return stored(e - EMAX[element] + step)
