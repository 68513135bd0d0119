"""Operands of a GEMM as float64 numbers: elements, scales and their products."""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.decode import decode, decode_stored
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.zero_points import without_zeros
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


def promotes(recipe: Recipe) -> bool:
    """Whether a GEMM multiplies each block sum by its two float32 scales: FP8 with block scales."""
    return recipe.scale is FP32 and not recipe.spans_k


def operand(q: Quantized) -> torch.Tensor:
    """code·scale of every element, exact, float64 (M, K). The tensor scale and float32 scales are left out."""
    out = element_values(q)
    return out if q.recipe.scale is FP32 else multiply_blocks(out, scale_values(q), q.recipe.block[1])


def element_values(q: Quantized) -> torch.Tensor:
    """The elements without scales: float64 (M, K), contiguous."""
    values = decode_stored(rowwise_codes(q), q.recipe.element, q.shape[1], torch.float64)
    return without_zeros(values, q).contiguous()


def scale_values(q: Quantized) -> torch.Tensor:
    """The block scales of every row: float64 (M, ⌈K/block⌉); (M, 1) for a scale that spans K."""
    scales = linear_scales(q)
    if q.recipe.scale is not FP32:
        return decode(scales, q.recipe.scale, torch.float64)
    if q.recipe.whole:
        return scales.double().expand(q.shape[0], 1)
    return scales.double().repeat_interleave(q.recipe.stored_rows, dim=0)[: q.shape[0]]


def multiply_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """`values` (M, K), contiguous, multiplied in place by the block scales (M, ⌈K/block⌉)."""
    rows, columns = values.shape
    full = columns // block
    values[:, : full * block].view(rows, full, block).mul_(scales[:, :full].unsqueeze(2))
    if full * block < columns:
        values[:, full * block :].mul_(scales[:, -1:])
    return values


def format_span(fmt: Format) -> float:
    """The largest number of a format divided by the smallest, a divisor of all numbers of the format."""
    return fmt.largest_magnitude / fmt.value(1)
