"""MX by its definition: scales in exact rational arithmetic, elements by ml_dtypes. No bit of a float is looked at."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from narrowgauge.spec.recipes import Recipe

TYPES: dict[str, Any] = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}


def rounded_value(amax: np.float32, recipe: Recipe) -> float:
    """What the scale rounds to a power of two."""
    largest = np.float32(recipe.element.max)
    with np.errstate(all="ignore"):
        match recipe.block_scale:
            case "amax*(1/max)":
                return float(amax * (np.float32(1) / largest))
            case "amax/max":
                return float(amax / largest)
            case _:  # on the exponent, where infinity is 2^128
                return math.ldexp(min(float(amax), 2.0**128), -math.floor(math.log2(recipe.element.max)))


def scale_code(amax: np.float32, recipe: Recipe) -> int:
    """The E8M0 code of a block whose amax is a float32 number."""
    value = rounded_value(amax, recipe)
    if math.isnan(amax):
        return 255
    if math.isinf(value):
        return 254
    if value == 0:
        return 0
    half, exponent = math.frexp(value)  # of a float64, in which no float32 is subnormal
    mantissa = 2 * Fraction(half)
    up = {
        "up": mantissa > 1,
        "down": False,
        "as-element": mantissa >= 2 - Fraction(1, 2 << recipe.element.mantissa_bits),
        "up-from-1.75": mantissa >= Fraction(7, 4),
        "nearest-log2": mantissa**2 > 2,
    }[recipe.scale_rounding]
    return min(max(exponent - 1 + up + 127, 0), 254)


def element_codes(x: np.ndarray, scale: int, recipe: Recipe) -> np.ndarray:
    """Codes, one a byte, of float32 `x` under a scale: x times its reciprocal, one rounding, to nearest even."""
    with np.errstate(all="ignore"):
        scaled = x * np.float32(math.nan if scale == 255 else 2.0 ** (127 - scale))
        limited = np.clip(scaled, -recipe.element.max, recipe.element.max)
        codes = limited.astype(TYPES[recipe.element.name]).view(np.uint8)
    return np.where(np.isnan(scaled), recipe.nan_code, codes).astype(np.uint8)


def packed(codes: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Codes (M, K) as they are stored: codes of four bits two a byte, the first code low."""
    if recipe.element.bits != 4:
        return codes
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return even[:, ::2] | even[:, 1::2] << 4


def quantize(x: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Stored codes and scales of float32 `x` (M, K), block by block; a block of tiles has 32 rows."""
    rows, columns = x.shape
    height, width = recipe.block
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((rows, -(-columns // width)), np.uint8)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            block = x[i : i + height, j : j + width]
            magnitudes = np.abs(block)
            ignored = magnitudes if recipe.nan == "propagate" else np.where(np.isnan(magnitudes), 0, magnitudes)
            scale = scale_code(ignored.max(), recipe)
            scales[i : i + height, j // width] = scale
            codes[i : i + height, j : j + width] = element_codes(block, scale, recipe)
    return packed(codes, recipe), scales
