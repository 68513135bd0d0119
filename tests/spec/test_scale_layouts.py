"""Layouts of scales: the digit orders against the formulas of the offsets, and against `narrowgauge.swizzle`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import narrowgauge
from narrowgauge.reference.quantize.layout import linear_scales, with_layout
from narrowgauge.spec.scale_layouts import LAYOUTS, TILED, Layout

SHAPES = [(1, 1), (8, 4), (9, 5), (127, 4), (128, 8), (130, 13), (256, 3), (0, 4), (5, 0)]
# Not a layout of `LAYOUTS`: the columns are the slowest, and the digit without a size is the fastest of the row.
TRANSPOSED = replace(LAYOUTS["8x4"], name="other", rows="c:2 A", columns="G h:4", order="G A c h")
TILES_OF = {"linear": (1, 1), "128x4": (128, 4), "8x4": (8, 4), "other": (2, 4)}


def offset(layout: Layout, row: int, column: int, rows: int, columns: int) -> int:
    """Offset of a scale by the formula of the library; `rows`, `columns`: padded. docs/numerics.md#scale-layout."""
    if layout.name == "linear":
        return row * columns + column
    if layout.name == "8x4":
        return (row // 8 * (columns // 4) + column // 4) * 32 + row % 8 * 4 + column % 4
    if layout.name == "other":
        half = rows // 2
        return column // 4 * rows * 4 + row % half * 8 + row // half * 4 + column % 4
    tile = row // 128 * (columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), TRANSPOSED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_scale_lies_at_its_offset(shape: tuple[int, int], layout: Layout) -> None:
    height, width = TILES_OF[layout.name]
    rows, columns = layout.padded_shape(shape)
    assert (rows, columns) == (-(-shape[0] // height) * height, -(-shape[1] // width) * width)
    numbers = torch.arange(1, 1 + shape[0] * shape[1], dtype=torch.int32).view(shape)
    packed = layout.pack(numbers)
    assert tuple(packed.shape) == (rows, columns)
    expected = torch.zeros(rows * columns, dtype=torch.int32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            place = offset(layout, row, column, rows, columns)
            expected[place] = numbers[row, column]
            assert layout.offset(row, column, shape) == place
    assert torch.equal(packed.flatten(), expected)
    places = layout.offset(torch.arange(shape[0]).unsqueeze(1), torch.arange(shape[1]), shape)
    assert torch.equal(packed.flatten()[places], numbers)
    assert torch.equal(layout.unpack(packed, shape), numbers)
    padded = layout.unpack(packed, packed.shape)
    assert torch.equal(padded, layout.pad(numbers))
    assert torch.equal(padded[: shape[0], : shape[1]], numbers)
    assert not padded[shape[0] :].any()
    assert not padded[:, shape[1] :].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_128x4_is_the_layout_of_swizzle(shape: tuple[int, int]) -> None:
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    swizzled = narrowgauge.swizzle(scales)
    assert torch.equal(LAYOUTS["128x4"].pack(scales), swizzled)
    assert torch.equal(narrowgauge.unswizzle(swizzled, shape), scales)


def test_128x4_is_the_layout_of_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao==0.18.*")
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.arange(256 * 8, dtype=torch.int32).view(256, 8)
    assert torch.equal(LAYOUTS["128x4"].pack(scales).flatten(), to_blocked(scales).flatten())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3"])
def test_quantize_gives_scales_in_every_layout(recipe: str, layout: str) -> None:
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    for linear, q in zip(
        (narrowgauge.quantize(x, recipe), *narrowgauge.quantize_both(x, recipe)),
        (narrowgauge.quantize(x, recipe, scales=layout), *narrowgauge.quantize_both(x, recipe, scales=layout)),
        strict=True,
    ):
        assert q.scale_layout == layout
        assert q.swizzled == (layout == "128x4")
        assert torch.equal(linear_scales(q), linear_scales(linear))
        assert torch.equal(narrowgauge.dequantize(q), narrowgauge.dequantize(linear))
        back = with_layout(q, "linear")
        assert torch.equal(back.scales, linear.scales)
        assert repr(back) == repr(linear)
        if layout in TILED:
            assert torch.equal(q.scales, TILED[layout].pack(linear_scales(linear)))
            assert f"scales {layout}" in repr(q)


def test_wrong_layouts_are_named() -> None:
    x = torch.ones(4, 32)
    with pytest.raises(ValueError, match="scales is '4x4'; it can be 'linear', '128x4', '8x4'"):
        narrowgauge.quantize(x, "nvfp4", scales="4x4")
    with pytest.raises(ValueError, match="swizzled=True is the layout 128x4, and scales is '8x4'"):
        narrowgauge.quantize(x, "nvfp4", scales="8x4", swizzled=True)
    with pytest.raises(ValueError, match="float32 scales; the 8×4 layout holds bytes: omit scales='8x4'"):
        narrowgauge.quantize(x, "fp8-current", scales="8x4")
