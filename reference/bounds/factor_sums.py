"""Bounds of the sums of products of two matrices of known numbers, in any order.

Source: docs/tolerance.md#products-of-known-numbers. A kernel adds the products step by step: a tensor core aligns the
products of a step and the accumulator, truncates them behind F fraction bits and adds them; a float32 addition is a
step of one product. Float32 sums of slices of K are added besides.
"""

from __future__ import annotations

import torch

from narrowgauge.reference.bounds.running_error import error_growth
from narrowgauge.reference.gemm.tensor_core import Factors
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.summation import (
    ACCUMULATOR_BITS,
    FLT_MAX,
    SMALLEST_SUBNORMAL,
    UNIT,
)

FLOAT32_FRACTION = 23
"""Fraction bits of float32."""


def factor_bounds(
    left: Factors, right: Factors, total: torch.Tensor, fraction: int, width: int, *, joined: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(error, exact, overflow) of the sums (…, M, N) of the products of `left` (…, M, K) and `right` (…, N, K).

    `total`: the float64 sums, with infinities and NaN, whose error is 0. `fraction`, `width`: fraction bits F of an
    accumulator and products L of a step. `joined`: whether float32 sums of steps are added besides. exact, bool: every
    kernel has the sum. overflow, bool: a partial sum may exceed the largest float32 number. The error covers the
    rounding of `total`.

    Let n be the number of nonzero products and T = min(n, ⌈K/L⌉) the steps with one. P = (A + |S|)/2 is the larger sum
    of magnitudes of one sign. Truncation toward zero keeps every partial sum in [−S⁻, S⁺]. A term, or the accumulator,
    is truncated by less than 2^-F times the largest power of two of the step, which is at most P, or the power of a
    product with a subnormal factor. A result is truncated by 2^-min(F, 23)·P, and a further float32 addition rounds by
    u·P. So the error is at most ((n + T)·2^-F + T·2^-min(F, 23) + T·u)·P. That of float32 additions in any tree,
    (n − 1)·u·P, is less for F ≤ 24. If no term and no sum can lose a bit, the sum is exact.
    """
    x, w = left.values, right.values
    columns = x.shape[-1]
    size = x.abs() @ w.abs().mT
    finite = total.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    part = (size + finite.abs()) / 2
    # A subnormal factor has the exponent of the smallest normal number, which may exceed its magnitude.
    reach = torch.maximum(x.abs(), left.powers), torch.maximum(w.abs(), right.powers)
    normal = torch.equal(reach[0], x.abs()) and torch.equal(reach[1], w.abs())
    largest = part if normal else torch.maximum(part, reach[0] @ reach[1].mT)
    n = (x != 0).double() @ (w != 0).double().mT
    quantum = lowest_bit(x).unsqueeze(-1) * lowest_bit(w).unsqueeze(-2)
    fits = (quantum >= SMALLEST_SUBNORMAL) | (size == 0)
    exact = (largest <= 2.0 ** min(fraction, ACCUMULATOR_BITS) * quantum) & (part <= FLT_MAX) & fits
    exact |= (n <= 1) & (finite.float() == finite) & (part <= FLT_MAX)
    exact |= ~total.isfinite()

    steps = n.clamp(max=-(-columns // width))
    truncated = (n + steps) * 2.0**-fraction * largest
    last = steps * (2.0 ** -min(fraction, FLOAT32_FRACTION) + UNIT * joined)
    error = (truncated + last * part) * error_growth(columns, UNIT) + n * (SMALLEST_SUBNORMAL * ~fits)
    error = (error * (1 + 2.0**-20) + columns * 2.0**-52 * size).masked_fill_(exact, 0.0)
    return error, exact, (part + error > FLT_MAX) & ~exact
