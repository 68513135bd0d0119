"""Bounds of a GEMM that decodes its operands to float32 or bfloat16 before it multiplies them.

Source: docs/tolerance.md#decoded-operands. A decoded operand is element times block scale times tensor factor, rounded
to float32 in every operation and then, once, to the dtype of the operands. The products are summed in any order. There
is no α after the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from narrowgauge.reference.bounds.flushing import extended_to_zero, is_subnormal
from narrowgauge.reference.bounds.promotion_bounds import SumBounds
from narrowgauge.reference.bounds.running_error import error_growth
from narrowgauge.reference.gemm.operands import element_values, operand, promotes, scale_values
from narrowgauge.reference.numbers.exact import float32_ends, lowest_bit
from narrowgauge.reference.quantize.scaling import over_elements, used_tensor_scale
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import (
    ACCUMULATOR_BITS,
    FLT_MAX,
    SMALLEST_NORMAL,
    SMALLEST_SUBNORMAL,
    UNIT,
    Summation,
)

DTYPES = {"decoded-float32": torch.float32, "decoded-bfloat16": torch.bfloat16}
"""Dtype of the operands, by the declaration of `Summation.operands`."""
# Roundings of a decoded number with a tensor factor: at most 3 of the factor (fl(fl(amax·fl(1/6))·fl(1/448)), or
# 1/fl(d/amax)) with 1 of its constant, and 2 of the products with the block scale and the element.
_ROUNDINGS = 6
# An intermediate result of the decoding below this number may be subnormal in some order of the multiplications.
_SMALL = 2.0**-116


@dataclass
class TensorFactor:
    """Factor of a whole operand: float64 (M, 1) or (1, 1), not negative."""

    values: torch.Tensor
    rounded: bool
    """Whether a kernel computes the factor itself, with roundings. If not, the factor is a float32 number."""

    def select(self, rows: torch.Tensor) -> TensorFactor:
        """The factor of these rows, given by their numbers."""
        return TensorFactor(self.values[rows] if len(self.values) > 1 else self.values, self.rounded)


@dataclass
class Decoded:
    """A decoded operand (M, K), float64: every number of the kernel lies within `radius` of `centre`."""

    centre: torch.Tensor
    """Nearest number of the dtype. NaN and infinities are the numbers of every kernel, except in rows of `unknown`."""
    radius: torch.Tensor
    unknown: torch.Tensor
    """bool (M,): a number of the row may be finite or infinite."""


def tensor_factor(q: Quantized) -> TensorFactor:
    """The factor of dequantization besides elements and block scales: amax/2688, 1/enc, the only scale, or 1."""
    recipe = q.recipe
    if recipe.spans_k:
        return TensorFactor(q.scales.double(), rounded=False)
    if recipe.alpha == "1":
        return TensorFactor(torch.ones(1, 1, dtype=torch.float64, device=q.codes.device), rounded=False)
    if recipe.alpha in ("1/(a_enc*b_enc)", "a_dec*b_dec"):
        scale = used_tensor_scale(q).double().unsqueeze(1)
        if recipe.alpha == "1/(a_enc*b_enc)":
            scale = torch.where(scale == 0, 0.0, 1 / scale)
        return TensorFactor(scale, rounded=True)
    return TensorFactor(q.required_amax.double().unsqueeze(1) / recipe.max_product, rounded=True)


def decoded(q: Quantized, factor: TensorFactor, dtype: torch.dtype, *, flushes: bool = False) -> Decoded:
    """The operand (M, K) times `factor`, decoded to `dtype`, with every order of the multiplications in float32.

    Without a rounded factor, element times scale is exact in float64, so the result of its two roundings is known.
    """
    scales = scale_values(q)
    values = operand(q)
    if promotes(q.recipe):
        values = over_elements(element_values(q), scales, q.recipe, torch.mul).contiguous()
    exact = values * factor.values
    slack = torch.zeros_like(exact)
    small = torch.zeros_like(exact, dtype=torch.bool)
    unknown = small
    if factor.rounded:
        slack = _ROUNDINGS * UNIT * (1 + 2.0**-20) * _finite(exact).abs()
        magnitudes = _finite(scales).abs()
        sizes = pad(magnitudes, (0, 1), value=1.0).amin(1, keepdim=True)  # at most 1, and K may be 0
        small = (sizes * factor.values < _SMALL) & (exact != 0)
        # Half a step of a subnormal product is multiplied by the element. A factor below 2^-126 has a relative error of
        # up to 1, and 1/enc is at least 2^-128.
        steps = 4 * SMALLEST_SUBNORMAL * (1 + q.recipe.element.max)
        least = torch.maximum(factor.values, torch.full_like(factor.values, 2.0**-127))
        slack += torch.where(factor.values < SMALLEST_NORMAL, 2 * _finite(values).abs() * least, 0.0)
        slack = torch.where(small, slack + steps, slack)
        # amax times a block scale, an order of some dialects, may overflow.
        largest = pad(magnitudes, (0, 1)).amax(1, keepdim=True)
        unknown = (largest * factor.values * q.recipe.max_product * (1 + 2.0**-20) > FLT_MAX) & exact.isfinite()
    elif flushes:
        small = (is_subnormal(factor.values) | is_subnormal(scales).any(1, keepdim=True)) & (exact != 0)
    ends = _rounded(exact - slack, dtype), _rounded(exact + slack, dtype)
    centre = _rounded(exact, dtype)
    if flushes:
        ends = extended_to_zero(*ends, small)
    low, high = ends
    unknown = unknown | ((low.isinf() | high.isinf()) & ~((low == high) & (low == centre)))
    radius = torch.maximum(high - centre, centre - low).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Decoded(centre, radius, unknown.expand_as(exact).any(1))


def decoded_bounds(left: Decoded, right: Decoded, declared: Summation) -> SumBounds:
    """Bounds of the float32 sums (M, N) of the products of two decoded operands, in any order.

    Let x and w be the centres, r and s the radii, n the number of products that may be nonzero. A product of the kernel
    is within |x|·s + r·(|w| + s) of x·w. A product and n − 1 additions round at most n times on the way of a term to
    the result, with or without FMA, in any tree. So the error is at most m / (1 − m)·B + R with m = n·v, R the sum of
    the distances of the products and B = Σ|x·w| + R, besides underflow. If R = 0 and no product and no partial sum can
    round, the sum is exact.
    """
    x, w = _finite(left.centre), _finite(right.centre)
    total = left.centre @ right.centre.T
    size = x.abs() @ w.abs().T
    distance = x.abs() @ right.radius.T + left.radius @ (w.abs() + right.radius).T
    columns = x.shape[1]
    nonzero = [((number != 0) | (radius != 0)).double() for number, radius in ((x, left.radius), (w, right.radius))]
    n = nonzero[0] @ nonzero[1].T
    quantum = torch.outer(lowest_bit(x), lowest_bit(w))
    largest_part = (size + _finite(total).abs()) / 2
    exact = (distance == 0) & (largest_part <= 2.0**ACCUMULATOR_BITS * quantum) & (largest_part <= FLT_MAX)
    exact &= (quantum >= declared.smallest_term) | (size == 0)

    evaluated = 1 + columns * 2.0**-50
    roundings = n * declared.roundoff
    most = (size + distance) * evaluated
    error = roundings / (1 - roundings) * most + distance * evaluated + columns * 2.0**-52 * most
    error += n * declared.underflow_error * error_growth(columns, declared.roundoff)
    error = (error * (1 + 2.0**-20)).masked_fill_(exact, 0.0)
    unknown = left.unknown.unsqueeze(1) | right.unknown
    overflow = (most + error > FLT_MAX) & ~exact | unknown
    not_finite = ~total.isfinite()
    error = error.masked_fill(not_finite, 0.0)
    lower, upper = float32_ends(total - error, total + error)
    if declared.flushes:
        rounds = ~(exact | not_finite)
        flushed = extended_to_zero(lower, upper)
        lower, upper = (torch.where(rounds, end, known) for end, known in zip(flushed, (lower, upper), strict=True))
    lower, upper = lower.masked_fill(unknown, -torch.inf), upper.masked_fill(unknown, torch.inf)
    exact = (exact | not_finite) & ~overflow
    return SumBounds(total.float(), lower, upper, exact, exact, overflow, total)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 numbers rounded to float32 and then to `dtype`, as float64. Both roundings are monotone."""
    return x.float().to(dtype).double()


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
