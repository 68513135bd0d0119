"""Tiles of scales: their permutations against the formulas and against `narrowgauge.swizzle`."""

from __future__ import annotations

import pytest
import torch

import narrowgauge
from narrowgauge.adapt.scale_layouts import TILE_ROWS, from_tiles, tiled_shape, to_tiles

SHAPES = [(1, 1), (8, 4), (9, 5), (127, 4), (128, 8), (130, 13), (256, 3), (0, 4), (5, 0)]


def offset(row: int, column: int, columns: int, layout: str) -> int:
    """Byte of a scale among `columns` padded columns."""
    if layout == "8x4":
        return (row // 8 * (columns // 4) + column // 4) * 32 + row % 8 * 4 + column % 4
    tile = row // 128 * (columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.parametrize("layout", TILE_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_scale_lies_at_its_offset(shape: tuple[int, int], layout: str) -> None:
    rows, columns = tiled_shape(shape, layout)
    assert rows % TILE_ROWS[layout] == columns % 4 == 0
    assert 0 <= rows - shape[0] < TILE_ROWS[layout]
    assert 0 <= columns - shape[1] < 4
    numbers = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    flat = to_tiles(numbers, layout).flatten().tolist()
    for row in range(rows):
        for column in range(columns):
            assert flat[offset(row, column, columns, layout)] == row * columns + column
    assert torch.equal(from_tiles(to_tiles(numbers, layout), layout), numbers)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_128x4_is_the_layout_of_swizzle(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    rows, columns = tiled_shape(shape, "128x4")
    padded = torch.nn.functional.pad(scales, (0, columns - shape[1], 0, rows - shape[0]))
    swizzled = narrowgauge.swizzle(scales)
    assert torch.equal(to_tiles(padded, "128x4"), swizzled)
    linear = from_tiles(swizzled, "128x4")
    assert torch.equal(linear[: shape[0], : shape[1]], narrowgauge.unswizzle(swizzled, shape))


def test_128x4_is_the_layout_of_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao==0.18.*")
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.arange(256 * 8, dtype=torch.int32).view(256, 8)
    assert torch.equal(to_tiles(scales, "128x4").flatten(), to_blocked(scales).flatten())
