"""numerics.md in plain Python, one number at a time: the twin that the vectorised reference is tested against.

Numbers are NumPy float32 scalars, so every operation rounds to float32 by itself; roundings to a narrow format go
through exact fractions. Nothing here comes from `reference` except `Format.value`, which test_formats.py checks on
every code against two other libraries.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from functools import lru_cache

import numpy as np

from reference.formats import E2M1, E4M3, Format

f32 = np.float32
FLT_MAX = np.finfo(f32).max
SIXTH = np.uint32(0x3E2AAAAB).view(f32)

# Precision, exponent of the smallest subnormal, and the power of two that overflows, of IEEE-like formats.
IEEE = {"float32": (24, -149, 128), "bfloat16": (8, -133, 128), "float16": (11, -24, 16)}


# Rounding.


@lru_cache
def grid(fmt: Format) -> list[Fraction]:
    """Values of codes 0 to max_code, and the one that would come next if the exponent had no end."""
    finite = [Fraction(fmt.value(code)) for code in range(fmt.max_code + 1)]
    step = finite[-1] - finite[-2] if fmt.signed else finite[-1]
    return [*finite, finite[-1] + step]


def nearest_code(x: Fraction, fmt: Format) -> int:
    """Index in `grid` of the point nearest to x >= 0, a tie to the even one."""
    points = grid(fmt)
    above = bisect_left(points, x)
    if above == 0:
        return 0
    if above == len(points):
        return above - 1
    low, high = x - points[above - 1], points[above] - x
    if low == high:
        return above - 1 + (above - 1) % 2
    return above - 1 if low < high else above


def encode(x: float, fmt: Format) -> int:
    """Code of x, nearest even, saturating: `encode` of the reference for one number of a signed format."""
    if math.isnan(x):
        return fmt.max_code if fmt.nan_code is None else fmt.nan_code
    sign = fmt.sign_code if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return sign | fmt.max_code
    return sign | min(nearest_code(abs(Fraction(float(x))), fmt), fmt.max_code)


def nearest(x: Fraction, dtype: str) -> float:
    """x rounded once to an IEEE-like dtype, ties to even, overflow to infinity. A zero comes out positive."""
    precision, smallest, overflow = IEEE[dtype]
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    quantum = max(exponent - precision + 1, smallest)
    rounded = round(x / Fraction(2) ** quantum) * Fraction(2) ** quantum
    return math.copysign(math.inf, x) if abs(rounded) >= Fraction(2) ** overflow else float(rounded)


# NVFP4, 1×16.


def largest(values: list[f32], *, propagate: bool) -> f32:
    """Step 1: max|x|, without NaN unless it propagates."""
    amax = f32(0)
    for value in values:
        if np.isnan(value):
            if propagate:
                return f32(np.nan)
        elif abs(value) > amax:
            amax = abs(value)
    return amax


def limited(value: f32) -> f32:
    """min(value, FLT_MAX), NaN kept."""
    return FLT_MAX if value > FLT_MAX else value


def tensor_scale(gamax: f32) -> f32:
    """Step 2."""
    scale = limited(f32(2688) / gamax)
    return f32(1) if gamax == 0 or scale == 0 else scale


def block_scale(bamax: f32, scale: f32, dialect: str) -> int:
    """Steps 3 to 5: the stored byte."""
    d = bamax * (scale * SIXTH) if dialect == "te" else (bamax / f32(6)) * scale
    return encode(float(limited(d)), E4M3)


def element_factor(stored: int, scale: f32) -> f32:
    """Step 6."""
    p = f32(E4M3.value(stored)) * (f32(1) / scale)
    return limited(f32(1) / p)


def quantize(
    x: np.ndarray, *, dialect: str = "te", amax: float | None = None, nan: str = "ignore"
) -> tuple[np.ndarray, np.ndarray, f32]:
    """Packed codes, scale bytes and amax of a float32 matrix: steps 1 to 8."""
    rows, columns = x.shape
    codes = np.zeros((rows, -(-columns // 2)), np.uint8)
    scales = np.zeros((rows, -(-columns // 16)), np.uint8)
    propagate = nan == "propagate"
    with np.errstate(all="ignore"):
        gamax = largest(list(x.ravel()), propagate=propagate) if amax is None else f32(amax)
        scale = tensor_scale(gamax)
        for i in range(rows):
            for j in range(columns):
                block = j // 16
                if j % 16 == 0:
                    bamax = largest(list(x[i, j : j + 16]), propagate=propagate)
                    scales[i, block] = block_scale(bamax, scale, dialect)
                    factor = element_factor(int(scales[i, block]), scale)
                code = encode(float(x[i, j] * factor), E2M1)
                codes[i, j // 2] |= code << 4 * (j % 2)
    return codes, scales, gamax


def dequantize(code: int, stored: int, amax: f32) -> f32:
    """One element: fl(code·f), f = fl(fl(s·gamax)·fl(1/2688))."""
    with np.errstate(all="ignore"):
        factor = (f32(E4M3.value(stored)) * amax) * f32(1 / 2688)
        return f32(E2M1.value(code)) * factor


def alpha(a: f32, b: f32, expression: str) -> f32:
    """α of a GEMM, from the two amaxes, in the order of operations that the recipe names."""
    d = f32(36 * 448 * 448)
    with np.errstate(all="ignore"):
        return (a * b) / d if expression == "(a*b)/d" else (b * a) * (f32(1) / d)
