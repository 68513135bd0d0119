"""FP8 with float32 scales: docs/numerics.md#fp8-with-float32-scales and docs/numerics.md#delayed-scaling.

Every product and quotient is exact and then rounded once to float32.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from narrowgauge.reference.scalar.rounding import element_code, f32, largest, nearest
from narrowgauge.reference.scalar.rounding import encode as encode_value
from narrowgauge.spec.formats import Format
from narrowgauge.spec.recipes import Recipe

LARGEST = {"float32": (2 - Fraction(2) ** -23) * 2**127, "bfloat16": (2 - Fraction(2) ** -7) * 2**127, "float16": 65504}
"""Largest finite number of each dtype."""
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next number of each dtype."""
FLT_MAX = float(LARGEST["float32"])


def quantize(x: np.ndarray, recipe: Recipe, dtype: str, *, given: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes (M, K) and stored scales of float32 `x`, converted from `dtype`. `given`: the scale of the caller."""
    rows, columns = x.shape
    height = max(1, rows) if recipe.whole else recipe.block[0]
    width = max(1, columns) if recipe.spans_k else recipe.block[1]
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]

        amax = float(largest(x[at].ravel(), propagate=recipe.nan == "propagate"))
        if recipe.block_scale not in ("1/(max/amax)", "1/enc"):
            # A decode scale: docs/numerics.md#fp8-with-a-decode-scale.
            stored = decode_scale(amax, recipe, dtype) if given is None else given
            codes[at] = [[divided(float(value), stored, amax, recipe, dtype) for value in row] for row in x[at]]
            scales[i, j] = stored
            continue

        # Steps 1 to 3: the encode scale.
        scale = encode_scale(amax, recipe, dtype) if given is None else given

        # Step 4: q.
        codes[at] = [[element_code(product(float(value), scale), recipe) for value in row] for row in x[at]]

        # Step 5: the stored scale.
        scales[i, j] = inverse(scale)
    return codes, scales


def encode_scale(amax: float, recipe: Recipe, dtype: str) -> float:
    """Steps 1 to 3: the scale of a block or a tensor of `dtype` with the largest magnitude `amax`."""
    # Step 1: amax = max(max|x|, eps).
    amax = math.nan if math.isnan(amax) else max(amax, float(f32(recipe.smallest_amax)))

    # Step 2: scale = fl(max/amax).
    limited = recipe.largest_scale != "none"
    if limited and (amax == 0 or not math.isfinite(amax)):
        return 1.0
    scale = quotient(recipe.element.max, amax)
    if not math.isfinite(scale) and not limited:
        return scale
    if math.isinf(scale):
        scale = float(LARGEST[dtype if recipe.largest_scale == "input" else "float32"])

    # Step 3: pow2 clears the mantissa.
    return 2.0 ** (math.frexp(scale)[1] - 1) if recipe.scale_rounding == "down" and scale else scale


def decode_scale(amax: float, recipe: Recipe, dtype: str) -> float:
    """docs/numerics.md#fp8-with-a-decode-scale, steps 1 to 3: the scale of elements of `dtype` with this amax."""
    # Step 1: amax, at least eps.
    amax = math.nan if math.isnan(amax) else max(amax, float(f32(recipe.smallest_amax)))

    # Step 2: fl(amax/max) or fl(amax·fl(1/max)), rounded to the dtype of x if the recipe says so.
    largest_code = recipe.element.max
    by_product = recipe.block_scale == "amax*(1/max)"
    scale = product(amax, quotient(1.0, largest_code)) if by_product else quotient(amax, largest_code)
    if recipe.statistics == "input":
        scale = rounded(scale, dtype)
    if scale == 0 and recipe.zero_block == "eps":
        scale = EPS[dtype]

    # Step 3: pow2 rounds up, and infinity and NaN give 2^127.
    if recipe.scale_rounding != "up":
        return scale
    if not math.isfinite(scale):
        return 2.0**127
    fraction, power = math.frexp(scale)
    return min(2.0 ** (power - (fraction == 0.5)), 2.0**127) if scale > 2.0**-126 else 2.0**-126


def divided(x: float, stored: float, amax: float, recipe: Recipe, dtype: str) -> int:
    """docs/numerics.md#fp8-with-a-decode-scale, step 4: FP8(fl(x/s)), FP8(R(fl(x/s))), FP8(fl(x·fl(1/s))) or
    FP8(fl(x·fl(max/amax)))."""
    if recipe.element_scale == "x*(max/amax)" and recipe.scale_rounding != "up":
        limited = math.nan if math.isnan(amax) else max(amax, float(f32(recipe.smallest_amax)))
        return element_code(product(x, quotient(recipe.element.max, limited)), recipe)
    if recipe.element_scale in ("x*(1/s)", "x*(max/amax)"):
        return element_code(product(x, quotient(1.0, stored)), recipe)
    scaled = quotient(x, stored)
    return element_code(rounded(scaled, dtype) if recipe.element_scale == "R(x/s)" else scaled, recipe)


def rounded(x: float, dtype: str) -> float:
    """R(x), with signs, infinities and NaN."""
    return math.copysign(nearest(abs(Fraction(x)), dtype), x) if math.isfinite(x) else x


def encode(x: float, scale: float, element: Format) -> int:
    """Step 4: FP8(fl(x·scale))."""
    return encode_value(product(x, scale), element)


def inverse(scale: float) -> float:
    """Step 5: fl(1/scale), subnormal if necessary."""
    return quotient(1.0, scale)


def quotient(a: float, b: float) -> float:
    """fl(a/b), with signs, infinities and NaN as in IEEE 754; b is not negative."""
    if not (math.isfinite(a) and math.isfinite(b)) or b == 0:
        return float(np.float64(a) / np.float64(b))
    return math.copysign(nearest(abs(Fraction(a)) / Fraction(b), "float32"), a)


def product(a: float, b: float) -> float:
    """fl(a·b), with signs, infinities and NaN as in IEEE 754."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return math.copysign(nearest(abs(Fraction(a) * Fraction(b)), "float32"), a * math.copysign(1.0, b))


def update_scale(history: list[float], scale: float, recipe: Recipe) -> tuple[list[float], float]:
    """docs/numerics.md#delayed-scaling: history and scale of one tensor after a step."""
    delayed = recipe.delayed
    assert delayed is not None

    # Step 1: the newest amax.
    last = history[0]

    # Step 2: -bulk leaves a tensor with amax 0 as it is, but for step 6.
    if delayed.update == "bulk" and last == 0:
        return history, FLT_MAX if math.isinf(scale) else scale

    # Step 3: the amax of the history.
    known = [amax for amax in history if not math.isnan(amax)]
    amax = last if delayed.algorithm == "most-recent" else max(known, default=0.0)

    # Step 4: the new scale.
    if math.isfinite(amax) and amax > 0:
        scale = quotient(recipe.element.max * 2.0**-delayed.margin, amax)

    # Step 5: the history moves by a row.
    rolled = [*history[1:], last]
    rolled[0] = 0.0

    # Step 6: no scale is infinite.
    return rolled, FLT_MAX if math.isinf(scale) else scale
