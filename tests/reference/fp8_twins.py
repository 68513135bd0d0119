"""FP8 with float32 scales in plain Python, one number at a time: docs/numerics.md#fp8-with-float32-scales.

Every division and product is exact and rounded once to float32. Nothing here comes from `reference` but `Format.value`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from narrowgauge.spec.formats import Format
from tests.reference import scalar

LARGEST = {"float32": (2 - Fraction(2) ** -23) * 2**127, "bfloat16": (2 - Fraction(2) ** -7) * 2**127, "float16": 65504}
FLT_MAX = float(LARGEST["float32"])


def quotient(a: float, b: float) -> float:
    """fl(a/b) of numbers above 0."""
    return scalar.nearest(Fraction(a) / Fraction(b), "float32")


def product(a: float, b: float) -> float:
    """fl(a·b), signs, infinities and NaN as in IEEE 754."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return math.copysign(scalar.nearest(abs(Fraction(a) * Fraction(b)), "float32"), a * math.copysign(1.0, b))


def encode_scale(amax: float, element: Format, dtype: str, *, eps: float = 0.0, pow2: bool = False) -> float:
    """max/amax; 1 where amax is 0, infinite or NaN; the largest number of `dtype` where the quotient is infinite."""
    amax = math.nan if math.isnan(amax) else max(amax, float(np.float32(eps)))
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    scale = quotient(element.max, amax)
    scale = float(LARGEST[dtype]) if math.isinf(scale) else scale
    return 2.0 ** (math.frexp(scale)[1] - 1) if pow2 else scale


def inverse(scale: float) -> float:
    """fl(1/scale), subnormal where it has to be."""
    return quotient(1.0, scale)


def encode(x: float, scale: float, element: Format) -> int:
    return scalar.encode(product(x, scale), element)


def quantize(
    x: np.ndarray, element: Format, dtype: str, *, block: tuple[int, int], eps: float = 0.0, pow2: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (M, K) and stored scales of the blocks of a float32 matrix whose numbers are those of `dtype`."""
    rows, columns = x.shape
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((high, wide), np.float32)
    for i, j in np.ndindex(high, wide):
        at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scale = encode_scale(float(scalar.largest(x[at].ravel())), element, dtype, eps=eps, pow2=pow2)
        scales[i, j] = inverse(scale)
        codes[at] = [[encode(float(value), scale, element) for value in row] for row in x[at]]
    return codes, scales


def update(history: list[float], scale: float, most: float, rule: tuple[str, int, str]) -> tuple[list[float], float]:
    """One tensor's history and scale after a step; `rule` is (algorithm, margin, kernel)."""
    algorithm, margin, kernel = rule
    last = history[0]
    if kernel == "bulk" and last == 0:
        return history, scale
    rolled = [*history[1:], last]
    rolled[0] = 0.0
    known = [amax for amax in history if not math.isnan(amax)]
    amax = last if algorithm == "most-recent" else max(known, default=0.0)
    if math.isfinite(amax) and amax > 0:
        scale = min(quotient(most * 2.0**-margin, amax), FLT_MAX)
    return rolled, scale
