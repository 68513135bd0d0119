"""MX: docs/numerics.md#mx, and the exponents of docs/dialects.md#e8m0-scales, in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from narrowgauge.reference.scalar.rounding import element_code, f32, largest, nearest, stochastic
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from narrowgauge.spec.recipes import Recipe

EMAX = {E4M3: 8, E5M2: 15, E3M2: 4, E2M3: 2, E2M1: 2}
"""Exponent of the largest number of a format: OCP MX 1.0, table 1."""


def quantize(
    x: np.ndarray, recipe: Recipe, *, random: np.ndarray | None = None, dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (M, K), one in a byte, and scale bytes (M, ⌈K/32⌉) of float32 `x`, converted from `dtype`.

    `random`: a byte for each element.
    """
    rows, columns = x.shape
    codes, scales = np.zeros((rows, columns), np.uint8), np.zeros((rows, -(-columns // 32)), np.uint8)
    height = recipe.block[0]
    for top in range(0, rows, height):
        for left in range(0, columns, 32):
            tile = x[top : top + height, left : left + 32]

            # Step 1: bamax.
            bamax = largest(tile.ravel(), propagate=recipe.nan == "propagate")

            # Steps 2 and 3: the code c of the scale, one in each row.
            c = scale_code(bamax, recipe, dtype)
            scales[top : top + height, left // 32] = c

            # Step 4: r.
            r = element_factor(c)
            for i, j in np.ndindex(tile.shape):
                # Step 5: q, to nearest even or stochastic. Step 6 packs MXFP4 codes; these are one in a byte.
                value = scaled(f32(tile[i, j]), r)
                byte = None if random is None else int(random[top + i, left + j])
                code = element_code(value, recipe) if byte is None else stochastic(value, byte, recipe.element)
                codes[top + i, left + j] = code
    return codes, scales


def scale_code(bamax: f32, recipe: Recipe, dtype: str = "float32") -> int:
    """Steps 2 and 3: the E8M0 code of the scale of a block of `dtype`, by the rule of the recipe's dialect."""
    # Step 2: v, and the exponent that the rule subtracts from the exponent of v.
    element = recipe.element
    if bamax < recipe.smallest_amax:
        bamax = f32(recipe.smallest_amax)
    with np.errstate(all="ignore"):
        if recipe.block_scale == "amax*(1/max)":
            v, subtracted = bamax * (f32(1) / f32(element.max)), 0
        elif recipe.block_scale == "amax/max":
            v, subtracted = bamax / f32(element.max), 0
        else:
            assert recipe.block_scale == "amax*2^-emax"
            v, subtracted = bamax, EMAX[element]
    if recipe.statistics == "input" and np.isfinite(v):
        v = f32(nearest(Fraction(float(v)), dtype))

    # Step 3: v = m·2^exponent with 1 ≤ m < 2, rounded to a power of two. The code saturates at 0 and 254.
    if np.isnan(v):
        return 255
    if v == 0:
        return 127 if recipe.zero_block == "1" else 0
    if np.isinf(v):
        m, exponent = Fraction(1), 128
    else:
        half, above = math.frexp(float(v))
        m, exponent = 2 * Fraction(half), above - 1
    logarithm = f32(exponent + math.log2(m))
    up = {
        "up": m > 1,
        "down": False,
        "as-element": m >= 2 - Fraction(1, 2 ** (element.mantissa_bits + 1)),
        "up-from-1.75": m >= Fraction(7, 4),
        "nearest-log2": m * m > 2,
        "up-log2": bool(logarithm > exponent),
        "down-log2": bool(logarithm >= exponent + 1),
    }[recipe.scale_rounding]
    return min(max(exponent + up - subtracted + 127, 0), 254)


def element_factor(c: int) -> Fraction | None:
    """Step 4: r = 2^(127 − c), exact; None, which stands for NaN, for c = 255."""
    return None if c == 255 else Fraction(2) ** (127 - c)


def scaled(x: f32, r: Fraction | None) -> float:
    """Step 5: fl(x·r)."""
    if r is None or np.isnan(x):
        return math.nan
    if np.isinf(x) or x == 0:
        return float(x)
    return math.copysign(nearest(abs(Fraction(float(x))) * r, "float32"), x)
