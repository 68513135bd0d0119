"""Memory layout of codes and scales: two 4-bit codes in a byte, scales in the layouts of `spec.scale_layouts`."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.spec.arguments import check_packed_scales, check_scales_matrix, check_scales_to_pack, packing_of
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILES, Layout, ScaleLayout


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, uint8 (M, K), in bytes (M, ⌈K/2⌉): element 2j in the low nibble of byte j, 2j + 1 in the high."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # A pair of codes is a little-endian 16-bit word, low | high << 8; a shift by 4 moves the high code to its nibble.
    # The tensor is flat, because an empty matrix or a single row may have strides that `view` refuses.
    words = codes.flatten().contiguous().view(torch.int16)
    return (words | (words >> 4)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Codes (M, K), K = `columns`, of bytes (M, ⌈K/2⌉): the inverse of `pack`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).view(packed.shape[0], 2 * packed.shape[1])[:, :columns]


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes with the two nibbles of each byte exchanged."""
    return (packed >> 4) | (packed << 4)


def pack_codes(codes: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Step 8: codes (M, K), one in a byte, as they are stored: 4-bit codes two in a byte, in the order of the recipe.

    Source: docs/numerics.md#nvfp4, step 8.
    """
    if recipe.element.bits != 4:
        return codes
    packed = pack(codes)
    return packed if recipe.packing == "low-first" else swap_nibbles(packed)


def rowwise_codes(q: Quantized) -> torch.Tensor:
    """Codes of `q` along its rows: (M, K), or packed (M, ⌈K/2⌉) with the first of two codes in the low nibble."""
    codes = q.codes.T.contiguous() if q.transposed else q.codes
    return codes if q.recipe.packing == "low-first" else swap_nibbles(codes)


def elements(codes: torch.Tensor, columns: int, recipe: Recipe) -> torch.Tensor:
    """Codes (M, K), one in a byte, K = `columns`, of stored codes: the inverse of `pack_codes`."""
    if recipe.element.bits != 4:
        return codes
    return unpack(codes if recipe.packing == "low-first" else swap_nibbles(codes), columns)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Linear scales (R, C), uint8, padded with zeros and in the layout of block-scaled tensor cores.

    With C the padded number of columns, scale (i, j) lies at byte
    ((i/128)·(C/4) + j/4)·512 + (i%32)·16 + (i%128/32)·4 + j%4. Source: docs/numerics.md#scale-layout. Raises ValueError
    or TypeError for a wrong shape or dtype.
    """
    check_scales_matrix(scales)
    return LAYOUTS[TILES].pack(scales)


def unswizzle(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Linear scales of `shape` (R, C) from swizzled scales: the inverse of `swizzle`, without the padding.

    Raises ValueError if `scales` does not have the padded shape.
    """
    check_packed_scales(scales, shape)
    return LAYOUTS[TILES].unpack(scales, shape)


def pack_scales(
    scales: torch.Tensor, layout: ScaleLayout | Layout, *, sections: torch.Tensor | None = None
) -> torch.Tensor:
    """Linear scales in a layout: uint8 of `Packing.packed_shape`, all padding 0.

    scales: uint8 (R, C), or (B, R, C), whose batches are each padded alone; for a layout of E8M0 scales also float32
    powers of two, and 0, of which the exponent is stored. sections: int64 (G,), rows of each section, padded one by
    one. Words of 32 bits are given as four bytes each, the lowest first. Source: docs/numerics.md#scale-layout. Raises
    TypeError or ValueError for a wrong dtype, shape or layout, and for a float32 scale that is no power of two.
    """
    packing = packing_of(scales.shape, layout, sections)
    check_scales_to_pack(scales, packing)
    if scales.dtype == torch.float32:
        scales = scales.contiguous().view(torch.int32).bitwise_right_shift(23).to(torch.uint8)
    return packing.pack(scales)


def unpack_scales(
    packed: torch.Tensor,
    shape: tuple[int, ...],
    layout: ScaleLayout | Layout,
    *,
    sections: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear scales of `shape` (R, C) or (B, R, C), uint8: the inverse of `pack_scales`, without the padding.

    Raises TypeError or ValueError as `pack_scales` does, and if `packed` does not have the packed shape.
    """
    return packing_of(shape, layout, sections, packed).unpack(packed)


def linear_scales(q: Quantized) -> torch.Tensor:
    """Scales of `q`, linear and unpadded, along its rows, also if `q` has another layout or stores the transpose."""
    if q.scale_layout != LINEAR:
        shape = scales_shape(q.shape, q.recipe)
        check_packed_scales(q.scales, shape, q.scale_layout)
        return LAYOUTS[q.scale_layout].unpack(q.scales, shape)
    return q.scales.T.contiguous() if q.transposed else q.scales


def with_layout(q: Quantized, layout: ScaleLayout) -> Quantized:
    """`q` with its scales in a layout. Scales of one byte alone have other layouts than linear."""
    if q.scale_layout == layout:
        return q
    scales = linear_scales(q)
    if layout != LINEAR:
        scales = LAYOUTS[layout].pack(scales)
    elif q.transposed:
        scales = scales.T.contiguous()
    return replace(q, scales=scales, scale_layout=layout)
