"""Steps behind a quantization: the values of codes and scales, and products of two quantized matrices."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.contracts.accepted import Ends, different
from narrowgauge.reference.contracts.interval import Interval, exactly, flushed
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.summation import SMALLEST_NORMAL


def quantized(
    y: Ends, recipe: str, scale: torch.Tensor | None, line: int, random: torch.Tensor | None = None
) -> Quantized:
    """The quantization of a matrix (M, K) that a kernel hides, rotated already.

    Raises ValueError unless every element is one number: the kernel has to show the quantization of others.
    """
    free = y.nan is not None and bool((y.nan & ~y.never).any())
    if free or bool(different(y.low, y.high, None).any()):
        raise ValueError(
            f"the quantization of line {line} is hidden, and several numbers are right for an element of its operand; "
            "let the kernel return the quantization"
        )
    return of_rotated(y.low, find_recipe(recipe), scale, random)


def of_rotated(y: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None, random: torch.Tensor | None) -> Quantized:
    """`quantize` of a matrix (M, K) that is rotated already, if the recipe rotates."""
    return replace(quantize(y, recipe.rowwise, scale=scale, random=random), recipe=recipe)


def values_of(q: Quantized, dtype: torch.dtype, *, flushes: bool = False) -> Interval:
    """The values (M, K) of codes and scales, rounded to a dtype once: docs/numerics.md#nvfp4, Dequantize.

    `flushes`: a scale of the tensor or of a block, or their product, may be subnormal and become 0. The value is then
    below 2^-126 times the largest code and, of two scales, the largest block scale.
    """
    values = exactly(dequantize(q, dtype))
    largest = 1.0 if q.recipe.tensor_scale == "none" else q.recipe.scale.max
    return flushed(values, SMALLEST_NORMAL * q.recipe.element.max * largest) if flushes else values


def product(a: Quantized, b: Quantized, order: str | None) -> Interval:
    """The numbers (M, N) that a kernel may hold for the product of (M, K) and (N, K), with a factor for their scales.

    The sum has any order, or the declared one (`spec.summation`). The factor may be fused with a later addition, so the
    number before its rounding is possible too. Source: docs/tolerance.md#gemm.
    """
    limits = bounds(a, b, out_dtype=torch.float32, order=order)
    lower, upper = (torch.where(limits.exact, limits.expected, end).double() for end in (limits.lower, limits.upper))
    radius = torch.where(limits.exact, 0.0, limits.budget)
    low, high = torch.fmin(lower, limits.centre - radius), torch.fmax(upper, limits.centre + radius)
    zero = limits.zero_sum & limits.exact  # with the sign of any order
    low, high = torch.where(zero, -0.0, low), torch.where(zero, 0.0, high)
    low, high = low.masked_fill(limits.undetermined, -torch.inf), high.masked_fill(limits.undetermined, torch.inf)
    nan = limits.expected.isnan() & ~limits.undetermined
    low, high = low.masked_fill(nan, torch.nan), high.masked_fill(nan, torch.nan)
    return Interval(low, high, limits.undetermined | nan)
