"""The GEMM of NVFP4 and MX: docs/numerics.md#nvfp4-gemm."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from narrowgauge.reference.scalar.rounding import f32, nearest


def alpha(gamax_a: f32, gamax_b: f32, expression: str, scale_max: tuple[float, float] = (448, 448)) -> f32:
    """Step 2: α of two operands, by the `alpha` expression of their recipe. `scale_max`: E of each operand."""
    d = f32(36 * scale_max[0] * scale_max[1])
    with np.errstate(all="ignore"):
        return (gamax_a * gamax_b) / d if expression == "(a*b)/d" else (gamax_b * gamax_a) * (f32(1) / d)


def output(total: Fraction, factor: f32, c: float | None, bias: float | None, dtype: str) -> float:
    """Steps 1 and 3 to 5: an output from its exact sum S, its factor α, c and bias. Finite numbers, no −0."""
    # Step 1: fl(S).
    y = nearest(total, "float32")

    # Step 3: fl(α·fl(S)).
    y = nearest(Fraction(float(factor)) * Fraction(y), "float32")

    # Step 4: c, then bias.
    for addend in (c, bias):
        if addend is not None:
            y = nearest(Fraction(y) + Fraction(addend), "float32")

    # Step 5: the cast.
    return nearest(Fraction(y), dtype)
