"""Operands of a GEMM as numbers: what codes and scales stand for, in float64."""

from __future__ import annotations

import torch

from reference.decode import decode, decode_stored
from reference.exact import lowest_bit
from reference.formats import FP32, Format
from reference.layout import linear_scales, rowwise_codes
from reference.quantized import Quantized
from reference.recipes import Recipe


def promotes(recipe: Recipe) -> bool:
    """Whether a GEMM multiplies the sum of each block by its two float32 scales: FP8 with scales of blocks."""
    return recipe.scale is FP32 and not recipe.whole


def element_values(q: Quantized) -> torch.Tensor:
    """What the codes stand for, without scales: float64 (M, K), contiguous."""
    return decode_stored(rowwise_codes(q), q.recipe.element, q.shape[1], torch.float64).contiguous()


def scale_values(q: Quantized) -> torch.Tensor:
    """The stored scales, once for each row: float64 (M, ⌈K/block⌉); (M, 1) of a tensor with one scale."""
    scales = linear_scales(q)
    if q.recipe.scale is not FP32:
        return decode(scales, q.recipe.scale, torch.float64)
    if q.recipe.whole:
        return scales.double().expand(q.shape[0], 1)
    return scales.double().repeat_interleave(q.recipe.stored_rows, dim=0)[: q.shape[0]]


def span(q: Quantized) -> float:
    """What an element of a row of the operand can be at most, in units of the lowest bit that one can have."""
    most = unit_span(q.recipe.element)
    if q.recipe.scale is FP32 or q.scales.numel() == 0:
        return most
    scales = scale_values(q)
    return most * float((scales.nan_to_num(nan=0.0).amax(1) / lowest_bit(scales)).amax())


def unit_span(fmt: Format) -> float:
    """The largest number of a format in units of its smallest, of which all are multiples."""
    return fmt.max / fmt.value(1)
