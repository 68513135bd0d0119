"""swizzle and unswizzle: golden bytes, every index by its formula, and back."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.reference import ops as reference
from narrowgauge.spec.scale_layouts import LAYOUTS, Packing
from tests.golden import golden, load
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_equal

SHAPES = [*product((1, 31, 32, 33, 127, 128, 129, 300), (1, 3, 4, 5, 20)), (1000, 65), (0, 0), (0, 4), (4, 0), (0, 3)]


def scales(rows: int, columns: int) -> torch.Tensor:
    """Bytes of every value but 0, the value of padding."""
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    return torch.randint(1, 256, (rows, columns), generator=generator, dtype=torch.uint8)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("path", golden("swizzle_*.npz"))
def test_the_layout_is_transformer_engines(path: Path) -> None:
    arrays = load(path)
    linear = torch.from_numpy(arrays["scales"])
    np.testing.assert_array_equal(ops.swizzle(linear), arrays["swizzled"])
    np.testing.assert_array_equal(ops.unswizzle(torch.from_numpy(arrays["swizzled"]), tuple(linear.shape)), linear)


@ON_EVERY_DEVICE
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_scale_lies_at_its_index_and_padding_is_zero(rows: int, columns: int) -> None:
    linear = scales(rows, columns)
    swizzled = ops.swizzle(linear)
    assert swizzled.shape == (-(-rows // 128) * 128, -(-columns // 4) * 4)
    i, j = np.indices((rows, columns))
    index = (i // 128 * (swizzled.shape[1] // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    expected = np.zeros(swizzled.numel(), np.uint8)
    expected[index.ravel()] = linear.numpy().ravel()
    np.testing.assert_array_equal(swizzled.numpy().ravel(), expected)
    assert_equal(swizzled, reference.swizzle(linear))
    assert_equal(ops.unswizzle(swizzled, (rows, columns)), linear)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_bytes_of_the_reference(name: str) -> None:
    layout = LAYOUTS[name]
    height, width = layout.tile
    for shape in [
        (2 * height, 3 * width),
        (height + 1, width + 1),
        (3, height + 1, 1),
        (1, 1),
        (0, width),
        (height, 0),
    ]:
        if layout.problem(shape[-2:]):
            continue
        linear = scales(math.prod(shape[:-1]), shape[-1]).view(shape)
        packing = Packing(layout, shape)
        free = packing.cells("any") | packing.cells("absent")
        packed = ops.pack_scales(linear, name)
        assert packed.shape == packing.packed_shape
        assert_equal(packed.masked_fill(free, 0), reference.pack_scales(linear, name))
        assert_equal(ops.unpack_scales(packed, shape, name), linear)
    if layout.divisible_rows:
        sizes = torch.tensor([0, 1, 127, 128, 0, 129]) * (height if layout.padding == "none" else 1)
        linear = scales(int(sizes.sum()), width if layout.padding == "none" else width + 1)
        packed = ops.pack_scales(linear, name, sections=sizes)
        free = Packing(layout, tuple(linear.shape), tuple(sizes.tolist())).cells("any")
        assert_equal(packed.masked_fill(free, 0), reference.pack_scales(linear, name, sections=sizes))
        assert_equal(ops.unpack_scales(packed, tuple(linear.shape), name, sections=sizes), linear)


@ON_EVERY_DEVICE
def test_every_exponent_is_packed_and_padding_is_left() -> None:
    powers = (torch.arange(255, dtype=torch.int32) << 23).view(torch.float32).view(17, 15)
    packed = ops.pack_scales(powers, "ue8m0-int32")
    assert packed.shape == (4, 80)
    linear = ops.unpack_scales(packed, (17, 15), "ue8m0-int32")
    assert_equal(linear, torch.arange(255, dtype=torch.uint8).view(17, 15))


def test_strided_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales of shape \(4, 4\) has strides \(1, 4\).* pass .*contiguous"):
        ops.swizzle(scales(4, 4).T)
    with pytest.raises(ValueError, match=r"scales of shape \(128, 128\) has strides \(1, 128\).* pass .*contiguous"):
        ops.unswizzle(scales(128, 128).T, (128, 128))


def test_scales_of_another_layout_are_refused() -> None:
    x = torch.ones(16, 64)
    with pytest.raises(NotImplementedError, match="write scales in layout linear or 128x4, not 8x4"):
        ops.quantize(x, "nvfp4", scales="8x4")
    tiles = reference.quantize(x, "nvfp4", scales="8x4")
    for call in (lambda: ops.dequantize(tiles), lambda: ops.gemm(tiles, tiles, out_dtype=torch.float32)):
        with pytest.raises(NotImplementedError, match="scales in layout 8x4; kernels read linear and 128x4"):
            call()
    halves = (side.quantize_both(x, "nvfp4", scales="128x4") for side in (ops, reference))
    for one, other in zip(*halves, strict=True):
        assert one.scale_layout == other.scale_layout == "128x4"
        assert torch.equal(one.scales, other.scales)
