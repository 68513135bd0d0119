"""How codes and scales lie in memory: two 4-bit codes a byte, the first low; scales in tiles of 128×4."""

from __future__ import annotations

import torch

from narrowgauge.spec.arguments import check_scales_matrix, check_swizzled_scales
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.recipes import Recipe


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(M, K) codes below 16, uint8, to (M, ⌈K/2⌉) bytes: byte j holds element 2j low and 2j+1 high."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # Seen as little-endian 16-bit words, a pair is low | high << 8; one shift brings the high nibble down.
    words = codes.flatten().contiguous().view(torch.int16)  # flat, since an empty or one-row matrix keeps odd strides
    return (words | (words >> 4)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """(M, ⌈K/2⌉) bytes to (M, K) codes, K = `columns`: the inverse of `pack`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).view(packed.shape[0], 2 * packed.shape[1])[:, :columns]


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes with the two of every byte exchanged."""
    return (packed >> 4) | (packed << 4)


def rowwise_codes(q: Quantized) -> torch.Tensor:
    """The codes of `q` along its rows: (M, K), or packed (M, ⌈K/2⌉) with the first of two in the low nibble."""
    codes = q.codes.T.contiguous() if q.transposed else q.codes
    return codes if q.recipe.packing == "low-first" else swap_nibbles(codes)


def elements(codes: torch.Tensor, columns: int, recipe: Recipe) -> torch.Tensor:
    """Codes one a byte, (M, K), K = `columns`: packed ones taken apart in the order in which the recipe packs them."""
    if recipe.element.bits != 4:
        return codes
    return unpack(codes if recipe.packing == "low-first" else swap_nibbles(codes), columns)


def pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """(R, C) bytes with zeros to the right and below up to whole tiles: (⌈R/128⌉·128, ⌈C/4⌉·4)."""
    rows, columns = scales.shape
    return torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Linear scales (R, C), uint8, padded with zeros and in the layout that block-scaled tensor cores read.

    Tiles of 128×4 are 512 bytes; element (i, j) lies at ((i/128)·(C/4) + j/4)·512 + (i%32)·16 + (i%128/32)·4 + j%4 of
    the padded C. Source: docs/numerics.md#scale-layout. Raises ValueError or TypeError for another shape or
    dtype.
    """
    check_scales_matrix(scales)
    padded = pad_scales(scales)
    rows, columns = padded.shape
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where `swizzle` puts the byte at (row, column) of scales with `columns` columns."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4


def unswizzle(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The linear scales `shape`, (R, C), of swizzled ones: the inverse of `swizzle`, without the padding.

    Raises ValueError where `scales` has not the padded shape.
    """
    check_swizzled_scales(scales, shape)
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[: shape[0], : shape[1]].contiguous()


def linear_scales(q: Quantized) -> torch.Tensor:
    """The scales of `q`, linear and unpadded, along its rows, however it holds them."""
    if q.swizzled:
        return unswizzle(q.scales, scales_shape(q.shape, q.recipe))
    return q.scales.T.contiguous() if q.transposed else q.scales
