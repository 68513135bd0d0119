"""Whole numbers with zero points: an element is (c − z)·s, of codes c and z from 0 to 15 or 255.

Source: docs/numerics.md#whole-numbers.
"""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.blocks import pad_columns
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.reference.quantize.scaling import over_elements
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


def quantize_with_zeros(x: torch.Tensor, recipe: Recipe) -> Quantized:
    """Quantize `x` (M, K) by the range of each group that holds 0: s = (max − min)/largest, in groups rounded to the
    dtype of x; whole numbers z = −min/s and c = x/s + z from 0 to `largest`, 15 or 255, in float32. A group of zeros
    has the scale 1. NaN counts as 0.
    """
    rows, columns = x.shape
    numbers = x.float().nan_to_num(nan=0.0)
    width, largest = min(recipe.block[1], max(1, columns)), recipe.element.max
    groups = pad_columns(numbers, width).view(rows, -(-columns // width), width)
    least, most = (end.clamp(*limits) for end, limits in ((groups.amin(2), (None, 0)), (groups.amax(2), (0, None))))
    scales = (most - least) / torch.full_like(most, largest)
    scales = scales if recipe.spans_k else scales.to(x.dtype).float()
    scales = torch.where(scales == 0, 1.0, scales)
    zeros = (-least / scales).round_().clamp_(0, largest)
    quotients = over_elements(numbers, scales, recipe, torch.div)
    codes = over_elements(quotients, zeros, recipe, torch.add).round_().clamp_(0, largest).to(torch.uint8)
    return Quantized(pack_codes(codes, recipe), scales, None, recipe, (rows, columns), zeros=zeros.to(torch.uint8))


def without_zeros(values: torch.Tensor, q: Quantized, rows: slice = slice(None)) -> torch.Tensor:
    """The codes of some rows of `q` as numbers (M, K), less their zero points if there are any."""
    if not q.recipe.zero_points:
        return values
    if q.zeros is None:
        raise ValueError(f"zeros is None; recipe {q.recipe} has a zero point for each scale: set zeros")
    return over_elements(values, q.zeros[rows].to(values.dtype), q.recipe, torch.sub)
