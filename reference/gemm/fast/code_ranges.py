"""Ranges of rows and blocks of codes, computed on the codes: they prove that a float64 matrix product is exact."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from narrowgauge.reference.gemm.operands import format_span
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.spec.formats import E8M0, FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


def operand_span(recipe: Recipe) -> float:
    """Upper bound of the largest operand element divided by the smallest, for any codes and scales."""
    return format_span(recipe.element) * (1.0 if recipe.scale is FP32 else format_span(recipe.scale))


def row_ranges(q: Quantized, *, read_elements: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper bound of the magnitudes in each row of the operand, and a power of two that divides the row.

    float64 (M,) each. For recipes with float32 scales: of the elements alone. Elements of 4 bits count as any element
    of their format, and without `read_elements` so do all elements under scales of bytes.
    """
    element, scale = q.recipe.element, q.recipe.scale
    if scale is FP32:
        return code_ranges(rowwise_codes(q), element)
    scale_most, scale_quantum = code_ranges(linear_scales(q), scale)
    if not read_elements or element.bits == 4:
        return scale_most * element.largest_magnitude, scale_quantum * element.value(1)
    most, quantum = code_ranges(rowwise_codes(q), element)
    return scale_most * most, scale_quantum * quantum


def code_ranges(codes: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitude of each row and a power of two that divides the row: codes (M, B), B > 0, to float64 (M,).

    Found from the largest and the smallest nonzero code of a row: codes without sign are ordered by magnitude.
    Infinity and NaN count as the largest number of the format, the NaN of fnuz formats as 0: its sums are NaN anyway.
    """
    magnitudes = _magnitudes(codes, fmt)
    nonzero = magnitudes if fmt is E8M0 else magnitudes - 1  # code 0 wraps around to 255: every quantum divides 0
    # Integers are compared faster than bytes.
    ends = torch.cat([magnitudes.int().amax(1), nonzero.int().amin(1)])
    values = _code_table(fmt, str(codes.device)).index_select(1, ends).view(2, 2, -1)
    return values[0, 0], values[1, 1]


def _magnitudes(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes without sign, in order of the magnitude."""
    if not fmt.signed:
        return codes
    if fmt.complement:
        return torch.where(codes < fmt.sign_code, codes, -codes & (fmt.codes - 1))
    return codes & (fmt.sign_code - 1)


@lru_cache(maxsize=16)
def _code_table(fmt: Format, device: str) -> torch.Tensor:
    """float64 (2, 256): magnitudes of codes without sign, and a power of two that divides all larger codes.

    Row 0: magnitude of code b; the largest number for NaN. Row 1: a power of two that divides the numbers of all codes
    from b + 1 on, since code 0 is the number 0; of E8M0, which has no 0, from b on.
    """
    if fmt.complement:
        sizes = [fmt.value(1) * code for code in range(256)]
    else:
        sizes = [fmt.value(min(code, fmt.max_code)) for code in range(256)]
    quanta = [
        fmt.value(1) * 2.0 ** (max(1, min(code + 1, fmt.max_code) >> fmt.mantissa_bits) - 1) for code in range(256)
    ]
    return torch.tensor([sizes, sizes if fmt is E8M0 else quanta], dtype=torch.float64, device=device)


def float64_exact_blocks(
    codes: tuple[torch.Tensor, torch.Tensor], formats: tuple[Format, Format], width: int
) -> list[bool]:
    """For every block of `width` columns: whether a float64 product of the elements (M, K) and (N, K) is exact.

    A block is exact if `width` times the largest product is below 2^53 quanta, with a quantum that divides all
    products. Largest product and quantum are those of the formats or, for formats too wide, of the codes of the block.
    """
    columns = codes[0].shape[1]
    blocks, limit = -(-columns // width), FLOAT64_EXACT / width
    if math.prod(map(format_span, formats)) < limit or 0 in (len(codes[0]), *codes[1].shape):
        return [True] * blocks
    spans = torch.ones(blocks, dtype=torch.float64, device=codes[0].device)
    for side, fmt in zip(codes, formats, strict=True):
        magnitudes = _magnitudes(side, fmt)
        # The largest and the smallest nonzero code of each column; 0 − 1 wraps around to 255. Bytes are reduced fast
        # down the columns, not along rows.
        ends = torch.stack([magnitudes.amax(0), (magnitudes - 1).amin(0) + 1])
        ends = torch.nn.functional.pad(ends, (0, -columns % width)).view(2, blocks, width)
        most, quantum = code_ranges(ends.transpose(0, 1).flatten(1), fmt)
        spans *= most / quantum
    exact: list[bool] = (spans < limit).tolist()
    return exact
