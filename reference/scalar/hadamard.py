"""The Hadamard transform: docs/numerics.md#hadamard-transform."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from narrowgauge.reference.scalar.rounding import f32, nearest

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
"""σ, the mask 0xD7E8."""


def coefficient(group: int) -> Fraction:
    """c = bf16(1/√group): a power of two, or 181/256, the bfloat16 nearest to 1/√2, times a power of two."""
    exponent = group.bit_length() - 1
    return Fraction(181 if exponent % 2 else 256, 256 << exponent // 2)


def rotation(group: int, *, signs: bool = True) -> list[list[Fraction]]:
    """R = diag(σ)·H·c, exact: H[i, j] = −1 if the binary numbers i and j share an odd number of set bits, else +1."""
    c = coefficient(group)
    return [
        [c * (SIGNS[i % 16] if signs else 1) * (-1) ** (i & j).bit_count() for j in range(group)] for i in range(group)
    ]


def rotate(x: list[f32], *, signs: bool = True) -> list[float]:
    """One group of bfloat16 numbers, rotated in the declared order of sums."""
    group = len(x)

    # Step 1: x_k·σ_k·c, exact in float32.
    c = f32(float(coefficient(group)))
    y = [value * c * f32(SIGNS[k % 16] if signs else 1) for k, value in enumerate(x)]

    # Step 2: butterflies of elements 1, 2, 4, … apart: fl(a + b) replaces a, fl(a − b) replaces b.
    distance = 1
    with np.errstate(all="ignore"):
        while distance < group:
            y = [y[k - distance] - y[k] if k & distance else y[k] + y[k + distance] for k in range(group)]
            distance *= 2

    # Step 3: one rounding to bfloat16.
    rounded = [nearest(Fraction(float(v)), "bfloat16") if np.isfinite(v) else float(v) for v in y]
    return [math.copysign(value, v) for value, v in zip(rounded, y, strict=True)]
