"""Operands of a GEMM as numbers: what codes and scales stand for, in float64."""

from __future__ import annotations

from functools import lru_cache

import torch

from narrowgauge.reference.numbers.decode import decode, decode_stored
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


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


def row_ends(q: Quantized, *, look: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest that an element of each row of the operand can be, and a power of two that divides all of the row.

    float64 (M,) both, of the codes alone. Elements of 4 bits, and without a `look` those under scales of bytes, may be
    any.
    """
    fmt, scale = q.recipe.element, q.recipe.scale
    if scale is FP32:
        return code_ends(rowwise_codes(q), fmt)
    most, unit = code_ends(linear_scales(q), scale)
    if not look or fmt.bits == 4:
        return most * fmt.max, unit * fmt.value(1)
    own_most, own_unit = code_ends(rowwise_codes(q), fmt)
    return most * own_most, unit * own_unit


def code_ends(codes: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitude of each row and a power of two that divides all: codes (M, B), B not 0, to float64 (M,).

    Of the largest and the smallest code of a row, whose order is that of magnitudes. What is not finite counts as the
    largest number.
    """
    magnitudes = codes & (fmt.sign_code - 1) if fmt.signed else codes
    nonzero = magnitudes - 1 if fmt.signed else magnitudes  # 0 wraps around: all divide it
    # As bytes they are read fast, but compared slowly.
    ends = torch.cat([magnitudes.int().amax(1), nonzero.int().amin(1)])
    found = _sizes(fmt, str(codes.device)).index_select(1, ends).view(2, 2, -1)
    return found[0, 0], found[1, 1]


@lru_cache(maxsize=16)
def _sizes(fmt: Format, device: str) -> torch.Tensor:
    """Of bytes b that are codes without a sign the magnitude, the largest of NaN, float64 (256,), and below it a power
    of two that divides all numbers from code b on; of a signed format, whose code 0 is 0, from code b + 1 on."""
    sizes = [fmt.value(min(code, fmt.max_code)) for code in range(256)]
    units = [
        fmt.value(1) * 2.0 ** (max(1, min(code + 1, fmt.max_code) >> fmt.mantissa_bits) - 1) for code in range(256)
    ]
    return torch.tensor([sizes, units if fmt.signed else sizes], dtype=torch.float64, device=device)


def multiply_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """`values` (M, K), contiguous, each multiplied in place by the scale of its block, (M, ⌈K/block⌉)."""
    rows, columns = values.shape
    full = columns // block
    values[:, : full * block].view(rows, full, block).mul_(scales[:, :full].unsqueeze(2))
    if full * block < columns:
        values[:, full * block :].mul_(scales[:, -1:])
    return values


def widest_span(recipe: Recipe) -> float:
    """The largest element of an operand, in units of the smallest, under any scales."""
    return unit_span(recipe.element) * (1.0 if recipe.scale is FP32 else unit_span(recipe.scale))


def unit_span(fmt: Format) -> float:
    """The largest number of a format in units of its smallest, of which all are multiples."""
    return fmt.max / fmt.value(1)
