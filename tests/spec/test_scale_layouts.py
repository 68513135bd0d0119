"""Layouts of scales: the digit orders against the formulas of the offsets, and against `narrowgauge.swizzle`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import narrowgauge
from narrowgauge.reference.quantize.layout import linear_scales, with_layout
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, TILED, Layout, Packing

SHAPES = [(1, 1), (8, 4), (9, 5), (127, 4), (128, 8), (130, 13), (256, 3), (0, 4), (5, 0)]
# Not a layout of `LAYOUTS`: the columns are the slowest, and the digit without a size is the fastest of the row.
TRANSPOSED = replace(LAYOUTS["8x4"], name="other", rows="c:2 A", columns="G h:4", order="G A c h")
TILES_OF = {
    "linear": (1, 1), "128x4": (128, 4), "8x4": (8, 4), "other": (2, 4), "ue8m0-int32": (4, 4),
    "ue8m0-int32-flashinfer": (4, 4), "ue4m3-int32": (4, 4), "hopper-mxfp4": (256, 2), "hopper-mxfp4-4": (128, 2),
    "cdna4-mxfp4": (32, 8), "blackwell-ragged": (128, 8), "kv-v-swizzled": (4, 4),
    **{f"marlin-{width}{swapped}": (1, width) for width in (64, 32) for swapped in ("", "-swapped")},
}  # fmt: skip


def offset(layout: Layout, row: int, column: int, rows: int, columns: int) -> int:
    """Offset of a scale by the formula of the library; `rows`, `columns`: padded. docs/numerics.md#scale-layout."""
    name = layout.name
    if name == "linear":
        return row * columns + column
    if name == "8x4":
        return (row // 8 * (columns // 4) + column // 4) * 32 + row % 8 * 4 + column % 4
    if name == "other":
        half = rows // 2
        return column // 4 * rows * 4 + row % half * 8 + row // half * 4 + column % 4
    if "int32" in name:
        return (column // 4 * rows + row) * 4 + column % 4
    if name.startswith("hopper"):  # `HopperMXScaleLayout`: reshape, permute(0, 2, 5, 1, 4, 6, 3)
        warps = 4 if name.endswith("4-4") else 8
        place = (row // (32 * warps) * warps + row // 16 % warps) * (columns // 2) + column // 2
        return (((place * 2 + row // (16 * warps) % 2) * 8 + row % 8) * 2 + column % 2) * 2 + row // 8 % 2
    if name == "cdna4-mxfp4":  # view(M/32, 2, 16, K/8, 2, 4).permute(0, 3, 5, 2, 4, 1)
        place = ((row // 32 * (columns // 8) + column // 8) * 4 + column % 4) * 16 + row % 16
        return (place * 2 + column // 4 % 2) * 2 + row // 16 % 2
    if name == "kv-v-swizzled":
        quarter = columns // 4
        return row // 4 * 4 * columns + (column // quarter * quarter + column % quarter) * 4 + row % 4
    if name.startswith("marlin"):  # `scale_perm` and `scale_perm_single`
        if "64" in name:
            perm = [i + 8 * j for i in range(8) for j in range(8)]
        else:
            perm = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        place = perm.index(column % len(perm))
        if name.endswith("swapped"):  # view(-1, 4)[:, [0, 2, 1, 3]]
            place = place // 4 * 4 + (0, 2, 1, 3)[place % 4]
        return row * columns + column // len(perm) * len(perm) + place
    tile = row // 128 * (columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), TRANSPOSED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_scale_lies_at_its_offset(shape: tuple[int, int], layout: Layout) -> None:
    height, width = TILES_OF[layout.name]
    if layout.padding == "none":
        wrong = (shape[0] * height + 1, shape[1] * width + 1)
        if layout.tile != (1, 1):
            with pytest.raises(ValueError, match=f"multiple of {height}, columns of {width}; these are"):
                layout.pack(torch.zeros(wrong))
        shape = (min(shape[0], 9) * height, min(shape[1], 5) * width)
    rows, columns = layout.padded_shape(shape)
    assert (rows, columns) == (-(-shape[0] // height) * height, -(-shape[1] // width) * width)
    numbers = torch.arange(1, 1 + shape[0] * shape[1], dtype=torch.int32).view(shape)
    packed = layout.pack(numbers)
    assert tuple(packed.shape) == layout.packed_shape(shape)
    assert packed.numel() == rows * columns
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
    padded = layout.unpack(packed, (rows, columns))
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
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    row = LAYOUTS[layout]
    if row.by_group or row.scale not in ("", find_recipe(recipe).scale.name):
        with pytest.raises(ValueError, match=f"layout {layout} holds .*; recipe {recipe} has rows of"):
            narrowgauge.quantize(x, recipe, scales=layout)
        return
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
    with pytest.raises(ValueError, match="scales is '4x4'; it can be 'linear', '128x4', '8x4', "):
        narrowgauge.quantize(x, "nvfp4", scales="4x4")
    with pytest.raises(ValueError, match="swizzled=True is the layout 128x4, and scales is '8x4'"):
        narrowgauge.quantize(x, "nvfp4", scales="8x4", swizzled=True)
    with pytest.raises(ValueError, match="float32 scales; the 8×4 layout holds bytes: omit scales='8x4'"):
        narrowgauge.quantize(x, "fp8-current", scales="8x4")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_every_part_is_padded_by_itself(layout: Layout) -> None:
    """Batches and sections against the layout of each part, and the contents of the cells around the parts."""
    height, width = layout.tile
    rows = 2 * height if layout.padding == "none" else height + 1
    columns = 2 * width if layout.padding == "none" else width + 1
    numbers = torch.arange(1, 1 + 3 * rows * columns, dtype=torch.int32).view(3, rows, columns)
    batches = Packing(layout, (3, rows, columns))
    packed = batches.pack(numbers)
    assert packed.shape == batches.packed_shape == (3, *layout.packed_shape((rows, columns)))
    assert all(torch.equal(one, layout.pack(part)) for one, part in zip(packed, numbers, strict=True))
    assert torch.equal(batches.unpack(packed), numbers)
    contents = torch.stack([batches.cells(content) for content in ("0", "any", "absent")])
    assert torch.equal(contents.sum(0), (packed == 0).int())
    assert batches.has_padding == bool((contents[0] | contents[2]).any())
    below = Packing(replace(layout, padding="0", row_padding="absent"), (rows, columns))
    if layout.padding != "none":
        cells = layout.unpack(below.cells("absent").int(), layout.padded_shape((rows, columns)))
        assert bool(cells[rows:].all())
        assert not bool(cells[:rows].any())
    sizes = tuple(count * (height if layout.padding == "none" else 1) for count in (0, 1, 2, 0, 1))
    flat = numbers.view(-1, columns)[: sum(sizes)]
    if not layout.divisible_rows:
        with pytest.raises(ValueError, match=f"layout {layout.name} has no sections: its slowest digit is of the col"):
            Packing(layout, tuple(flat.shape), sizes)
        return
    sections = Packing(layout, tuple(flat.shape), sizes)
    parts = [layout.pack(part) for part in flat.split(list(sizes))]
    packed = sections.pack(flat)
    assert packed.shape == sections.packed_shape
    assert torch.equal(packed.flatten(), torch.cat([part.flatten() for part in parts]))
    assert torch.equal(sections.unpack(packed), flat)


def test_exponents_are_packed_as_deepgemm_packs_them() -> None:
    """`get_mn_major_tma_aligned_packed_ue8m0_tensor` in numpy: exponents, four to an int32, columns of words."""
    generator = torch.Generator().manual_seed(4)
    exponents = torch.randint(0, 255, (33, 9), generator=generator, dtype=torch.int32)
    scales = (exponents << 23).view(torch.float32)
    padded = torch.zeros(33, 12, dtype=torch.int32)
    padded[:, :9] = exponents
    words = sum(padded[:, byte::4].long() << 8 * byte for byte in range(4))
    packed = narrowgauge.pack_scales(scales, "ue8m0-int32")
    assert packed.shape == (3, 36 * 4)
    assert torch.equal(packed.view(torch.int32)[:, :33], words.T.to(torch.int32))
    assert torch.equal(narrowgauge.unpack_scales(packed, (33, 9), "ue8m0-int32"), exponents.to(torch.uint8))
    with pytest.raises(ValueError, match=r"scales\[0, 0\] is .*, no power of two; layout ue8m0-int32 has exponents"):
        narrowgauge.pack_scales(torch.full((2, 2), 1.5), "ue8m0-int32")
