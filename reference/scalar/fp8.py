"""FP8 with float32 scales: docs/numerics.md#fp8-with-float32-scales and docs/numerics.md#delayed-scaling.

Every product and quotient is exact and then rounded once to float32.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from narrowgauge.reference.scalar.rounding import encode as encode_value
from narrowgauge.reference.scalar.rounding import f32, largest, nearest
from narrowgauge.spec.formats import Format
from narrowgauge.spec.recipes import Recipe

LARGEST = {"float32": (2 - Fraction(2) ** -23) * 2**127, "bfloat16": (2 - Fraction(2) ** -7) * 2**127, "float16": 65504}
"""Largest finite number of each dtype."""
FLT_MAX = float(LARGEST["float32"])


def quantize(x: np.ndarray, recipe: Recipe, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes (M, K) and stored scales of float32 `x`, converted from `dtype`, by block or current scaling."""
    rows, columns = x.shape
    height, width = (max(1, rows), max(1, columns)) if recipe.whole else recipe.block
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]

        # Steps 1 to 3: the encode scale.
        scale = encode_scale(float(largest(x[at].ravel())), recipe, dtype)

        # Step 4: q.
        codes[at] = [[encode(float(value), scale, recipe.element) for value in row] for row in x[at]]

        # Step 5: the stored scale.
        scales[i, j] = inverse(scale)
    return codes, scales


def encode_scale(amax: float, recipe: Recipe, dtype: str) -> float:
    """Steps 1 to 3: the scale of a block or a tensor of `dtype` with the largest magnitude `amax`."""
    # Step 1: amax = max(max|x|, eps).
    amax = math.nan if math.isnan(amax) else max(amax, float(f32(recipe.smallest_amax)))

    # Step 2: scale = fl(max/amax).
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    scale = quotient(recipe.element.max, amax)
    if math.isinf(scale):
        scale = float(LARGEST[dtype if recipe.largest_scale == "input" else "float32"])

    # Step 3: pow2 clears the mantissa.
    return 2.0 ** (math.frexp(scale)[1] - 1) if recipe.scale_rounding == "down" else scale


def encode(x: float, scale: float, element: Format) -> int:
    """Step 4: FP8(fl(x·scale))."""
    return encode_value(product(x, scale), element)


def inverse(scale: float) -> float:
    """Step 5: fl(1/scale), subnormal if necessary."""
    return quotient(1.0, scale)


def quotient(a: float, b: float) -> float:
    """fl(a/b) of numbers above 0."""
    return nearest(Fraction(a) / Fraction(b), "float32")


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
