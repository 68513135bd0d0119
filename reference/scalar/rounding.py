"""Roundings: docs/numerics.md#notation, docs/numerics.md#formats and docs/numerics.md#stochastic-rounding."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

import numpy as np

from narrowgauge.spec.formats import Format
from narrowgauge.spec.recipes import Recipe

f32 = np.float32
FLT_MAX = np.finfo(f32).max

IEEE = {"float32": (24, -149, 128), "bfloat16": (8, -133, 128), "float16": (11, -24, 16)}
"""Precision in bits, exponent of the smallest subnormal number, exponent of the power of two that overflows."""


def nearest(x: Fraction, dtype: str) -> float:
    """cast(x): rounded once to a dtype of `IEEE`, ties to even, overflow to infinity. A zero is positive."""
    precision, smallest, overflow = IEEE[dtype]
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    quantum = max(exponent - precision + 1, smallest)
    rounded = round(x / Fraction(2) ** quantum) * Fraction(2) ** quantum
    return math.copysign(math.inf, x) if abs(rounded) >= Fraction(2) ** overflow else float(rounded)


def limited(value: f32) -> f32:
    """min(value, FLT_MAX): +Inf becomes FLT_MAX, NaN stays."""
    return FLT_MAX if value > FLT_MAX else value


def largest(values: Iterable[f32], *, propagate: bool = False) -> f32:
    """max|x|, ignoring NaN, or NaN if `propagate` and an element is NaN. 0 for no element."""
    amax = f32(0)
    for value in values:
        if np.isnan(value):
            if propagate:
                return f32(np.nan)
        elif abs(value) > amax:
            amax = abs(value)
    return amax


@lru_cache
def grid(fmt: Format) -> list[Fraction]:
    """Values of codes 0 to max_code, and the value that would follow if the exponent had one more code."""
    finite = [Fraction(fmt.value(code)) for code in range(fmt.max_code + 1)]
    step = finite[-1] - finite[-2] if fmt.mantissa_bits else finite[-1]
    return [*finite, finite[-1] + step]


def nearest_code(x: Fraction, fmt: Format, ties: str = "even") -> int:
    """Index of the point of `grid` nearest to x ≥ 0; a tie to the even index, toward `zero` or `away` from zero."""
    points = grid(fmt)
    above = bisect_left(points, x)
    if above == 0:
        return 0
    if above == len(points):
        return above - 1
    low, high = x - points[above - 1], points[above] - x
    if low == high:
        return above - 1 + {"even": (above - 1) % 2, "zero": 0, "away": 1}[ties]
    return above - 1 if low < high else above


def encode(x: float, fmt: Format, ties: str = "even") -> int:
    """Code of x in a signed format, to nearest, saturating: docs/numerics.md#formats."""
    if math.isnan(x):
        return fmt.max_code if fmt.nan_code is None else fmt.nan_code
    sign = fmt.sign_code if math.copysign(1.0, x) < 0 else 0
    if fmt.complement and sign:
        magnitude = fmt.max_code + 1
        if not math.isinf(x):
            magnitude = min(nearest_code(abs(Fraction(float(x))), fmt, ties), magnitude)
        return -magnitude % fmt.codes
    if math.isinf(x):
        return sign | fmt.max_code
    magnitude = min(nearest_code(abs(Fraction(float(x))), fmt, ties), fmt.max_code)
    return magnitude if magnitude == 0 and not fmt.negative_zero else sign | magnitude


def element_code(scaled: float, recipe: Recipe) -> int:
    """Step 7 without random bits: the code of a scaled element, with the ties, −0 and NaN of the recipe.

    docs/numerics.md#nvfp4, step 7; docs/dialects.md#the-choices. The roundings that only E2M1 has are left out.
    """
    if math.isnan(scaled):
        return recipe.nan_code
    ties = {"nearest-even": "even", "nearest-toward-zero": "zero", "nearest-away": "away"}[recipe.rounding]
    code = encode(scaled, recipe.element, ties)
    no_sign = recipe.negative_zero == "never" or (recipe.negative_zero == "rounded" and scaled == 0)
    return 0 if no_sign and code == recipe.element.sign_code else code


def step(magnitude: Fraction, fmt: Format) -> Fraction:
    """Step 1 of stochastic rounding: distance from the grid point at or below |x| to the next point."""
    points = grid(fmt)
    above = min(bisect_right(points, magnitude), len(points) - 1)
    return points[above] - points[above - 1]


def stochastic(x: float, byte: int, fmt: Format) -> int:
    """Code of x under a random byte: docs/numerics.md#stochastic-rounding."""
    if math.isnan(x):
        return fmt.max_code if fmt.nan_code is None else fmt.nan_code
    sign = fmt.sign_code if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return sign | fmt.max_code
    magnitude = abs(Fraction(float(x)))

    # Step 2: t = min(fma(b/256, step, |v|), max).
    t = nearest(Fraction(byte, 256) * step(magnitude, fmt) + magnitude, "float32")
    t = min(t, fmt.max)

    # Step 3: ⌊t/step(t)⌋·step(t), the grid point at or below t.
    return sign | (bisect_right(grid(fmt), Fraction(t)) - 1)
