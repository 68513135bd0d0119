"""The MX recipes in exact arithmetic: exponents of scales as comparisons of whole numbers, quantize a number at a time.

A rule is a row of docs/dialects.md#e8m0-scales for amax = m·2^e, or of a quotient that is rounded to float32 first.
Nothing here comes from `reference` except `Format.value`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from tests.reference import scalar

ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1)
NAMES = {E4M3: "mxfp8-e4m3", E5M2: "mxfp8-e5m2", E3M2: "mxfp6-e3m2", E2M3: "mxfp6-e2m3", E2M1: "mxfp4"}
DIALECTS = ("te", "ocp", "even", "ceil", "compressed-tensors", "floor-448", "nearest")
# OCP MX 1.0, table 1: the exponent of the largest number.
EMAX = {E4M3: 8, E5M2: 15, E3M2: 4, E2M3: 2, E2M1: 2}
# From which mantissa on the element's mantissa, ties away, carries: 2 less half of its last bit.
CARRIES = {
    E4M3: Fraction(31, 16), E2M3: Fraction(31, 16), E5M2: Fraction(15, 8), E3M2: Fraction(15, 8), E2M1: Fraction(7, 4),
}  # fmt: skip
f32 = np.float32


def parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 numbers above 0 as m·2^(e − 23): m int64 with 24 bits, e int64."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return (fraction * 2**24).astype(np.int64), exponent.astype(np.int64) - 1


def beyond(m: np.ndarray, limit: Fraction, *, reached: bool) -> np.ndarray:
    """Whether the mantissa m/2^23 is above `limit`, or `reached`, not below it: 1 or 0."""
    left, right = m * limit.denominator, limit.numerator << 23
    return (left >= right if reached else left > right).astype(np.int64)


def stored(exponent: np.ndarray) -> np.ndarray:
    """Codes of E8M0, saturating."""
    return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def codes(amax: np.ndarray, element: Format, dialect: str) -> np.ndarray:
    """E8M0 codes of finite amaxes, float32 (n,), by the rule of a dialect on what it rounds."""
    found = np.zeros(amax.shape, np.uint8)
    with np.errstate(all="ignore"):
        if dialect == "te":
            value, drop = amax * (f32(1) / f32(element.max)), 0
        elif dialect in ("floor-448", "nearest"):
            value, drop = amax / f32(element.max), 0
        else:
            value, drop = amax, EMAX[element]
    some = value > 0
    m, e = parts(value[some])
    if dialect in ("te", "ceil"):
        e = e + beyond(m, Fraction(1), reached=False)
    elif dialect == "even":
        e = e + beyond(m, CARRIES[element], reached=True)
    elif dialect == "compressed-tensors":
        e = e + beyond(m, CARRIES[E2M3] if element is E2M3 else Fraction(7, 4), reached=True)
    elif dialect == "nearest":
        e = e + (m * m > 2 << 46)  # never equal: 2 is no square of a fraction
    found[some] = stored(e - drop)
    return found


def codes_of_quotient(amax: np.ndarray, element: Format, dialect: str) -> np.ndarray:
    """The same of te, floor-448 and nearest by the exact quotient amax/max: r = m/w, between ½ and 2."""
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


# One number at a time.


def step(magnitude: Fraction, fmt: Format) -> Fraction:
    """Distance of the grid points of `fmt` from |x| upward, as if it had no largest one."""
    points = scalar.grid(fmt)
    above = next((i for i, point in enumerate(points) if point > magnitude), len(points) - 1)
    return points[above] - points[above - 1]


def stochastic(x: float, byte: int, fmt: Format) -> int:
    """Code of x under one random byte: docs/numerics.md#stochastic-rounding, on the grid of any format; the sum rounds
    once."""
    if math.isnan(x):
        return fmt.max_code if fmt.nan_code is None else fmt.nan_code
    sign = fmt.sign_code if math.copysign(1.0, x) < 0 else 0
    points = scalar.grid(fmt)[: fmt.max_code + 1]
    if math.isinf(x) or abs(x) >= points[-1]:
        return sign | fmt.max_code
    t = scalar.nearest(abs(Fraction(x)) + Fraction(byte, 256) * step(abs(Fraction(x)), fmt), "float32")
    return sign | max(code for code, point in enumerate(points) if point <= Fraction(t))


def quantize(
    x: np.ndarray, element: Format, dialect: str = "te", *, height: int = 1, nan: str = "ignore",
    random: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Codes, one a byte, and scale bytes of a float32 matrix. `random`: a byte for every element."""
    rows, columns = x.shape
    elements, scales = np.zeros((rows, columns), np.uint8), np.zeros((rows, -(-columns // 32)), np.uint8)
    for top in range(0, rows, height):
        for left in range(0, columns, 32):
            tile = x[top : top + height, left : left + 32]
            amax = scalar.largest(tile.ravel(), propagate=nan == "propagate")
            code = scale_code(amax, element, dialect)
            scales[top : top + height, left // 32] = code
            for i, j in np.ndindex(tile.shape):
                value = scaled(tile[i, j], code)
                byte = None if random is None else int(random[top + i, left + j])
                found = scalar.encode(value, element) if byte is None else stochastic(value, byte, element)
                elements[top + i, left + j] = found
    return elements, scales


def scale_code(amax: np.float32, element: Format, dialect: str) -> int:
    """The code of any amax: NaN gives NaN, infinity the largest of `te` and of a quotient, else 2^128·2^-emax."""
    if np.isnan(amax):
        return 255
    if np.isinf(amax):
        return 254 if dialect in ("te", "floor-448", "nearest") else 255 - EMAX[element]
    return int(codes(np.array([amax], f32), element, dialect)[0])


def scaled(x: np.float32, code: int) -> float:
    """fl(x·2^(127 − code)), exactly and then rounded; NaN of code 255."""
    if code == 255 or np.isnan(x):
        return math.nan
    if np.isinf(x) or x == 0:
        return float(x)
    return math.copysign(scalar.nearest(abs(Fraction(float(x))) * Fraction(2) ** (127 - code), "float32"), x)
