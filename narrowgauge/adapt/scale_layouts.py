"""Layouts of block scales of one byte: linear, and the tiles of block-scaled tensor cores."""

from __future__ import annotations

import torch

TILE_ROWS = {"128x4": 128, "8x4": 8}
"""Rows of a tile of each tiled layout. A tile has 4 columns."""


def tiled_shape(shape: tuple[int, int], layout: str) -> tuple[int, int]:
    """Shape of scales (R, C) after the padding to whole tiles."""
    height = TILE_ROWS[layout]
    return -(-shape[0] // height) * height, -(-shape[1] // 4) * 4


def to_tiles(padded: torch.Tensor, layout: str) -> torch.Tensor:
    """Scales of `tiled_shape` in the order of the tiles, in the same shape.

    With C the number of columns, scale (i, j) lies at byte
    128x4: ((i/128)·(C/4) + j/4)·512 + (i%32)·16 + (i%128/32)·4 + j%4 (docs/numerics.md#scale-layout);
    others, with tiles of h rows: ((i/h)·(C/4) + j/4)·4h + (i%h)·4 + j%4 (8x4: TensorRT-LLM and FlashInfer,
    `get_sf_out_offset_8x4`).
    """
    (rows, columns), height = padded.shape, TILE_ROWS[layout]
    if layout == "128x4":
        tiles = padded.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    else:
        tiles = padded.reshape(rows // height, height, columns // 4, 4).permute(0, 2, 1, 3)
    return tiles.reshape(rows, columns)


def from_tiles(tiled: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `to_tiles`: scales of `tiled_shape` in linear order, padding included."""
    (rows, columns), height = tiled.shape, TILE_ROWS[layout]
    if layout == "128x4":
        linear = tiled.reshape(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    else:
        linear = tiled.reshape(rows // height, columns // 4, height, 4).permute(0, 2, 1, 3)
    return linear.reshape(rows, columns)
