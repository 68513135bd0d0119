"""Layouts: nibbles in bytes, and scales in the tiles of 128×4 that block-scaled tensor cores read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import dequantize, gemm, quantize, swizzle, unswizzle
from narrowgauge.reference.quantize.layout import linear_scales, pack, unpack
from narrowgauge.spec.quantized import scales_shape
from narrowgauge.spec.recipes import find_recipe
from tests.golden import golden, load
from tests.reference.samples import matrix

SHAPES = [(0, 0), (0, 4), (3, 0), (1, 1), (127, 3), (128, 4), (129, 5), (100, 9), (256, 8), (300, 20), (5, 33)]


def place(i: int, j: int, columns: int) -> int:
    """docs/numerics.md#scale-layout, C = `columns` a multiple of 4."""
    return ((i // 128) * (columns // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Bytes from 1 to 255, different from padding."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(1, 256, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("path", golden("swizzle_*.npz"))
def test_swizzle_gives_the_golden_bytes_and_back(path: Path) -> None:
    arrays = load(path)
    padded, swizzled = torch.from_numpy(arrays["scales"]), torch.from_numpy(arrays["swizzled"])
    rows, columns = (int(n) for n in path.stem.removeprefix("swizzle_").split("x"))
    assert torch.equal(swizzle(padded), swizzled)
    assert torch.equal(unswizzle(swizzled, tuple(padded.shape)), padded)
    assert torch.equal(unswizzle(swizzled, (rows, columns)), padded[:rows, :columns])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_lies_at_its_index_and_padding_is_zero(shape: tuple[int, int]) -> None:
    scales = numbered(*shape)
    swizzled = swizzle(scales)
    assert tuple(swizzled.shape) == (-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4)
    assert swizzled.is_contiguous()
    expected = np.zeros(swizzled.numel(), np.uint8)
    for i, j in np.ndindex(shape):
        expected[place(i, j, swizzled.shape[1])] = scales[i, j]
    np.testing.assert_array_equal(swizzled.flatten(), expected)
    assert torch.equal(unswizzle(swizzled, shape), scales)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "nvfp4-rowscaled", "nvfp4-4over6-448-mae"])
@pytest.mark.parametrize("shape", [(1, 1), (130, 70), (0, 20), (20, 0)])
def test_quantize_gives_swizzled_scales_where_asked(name: str, shape: tuple[int, int]) -> None:
    x = matrix("normal", 1, *shape)
    linear, q = quantize(x, name), quantize(x, name, swizzled=True)
    assert q.swizzled
    assert not linear.swizzled
    assert torch.equal(q.codes, linear.codes)
    assert torch.equal(q.scales, swizzle(linear.scales))
    assert tuple(q.scales.shape) == scales_shape(shape, find_recipe(name), layout="128x4")
    assert torch.equal(linear_scales(q), linear.scales)
    assert linear_scales(linear) is linear.scales
    assert torch.equal(dequantize(q), dequantize(linear))
    for one, other in ((q, q), (q, linear), (linear, q)):
        expected = gemm(linear, linear, out_dtype=torch.float32)
        assert torch.equal(gemm(one, other, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 16, 17])
def test_unpacking_undoes_packing(columns: int) -> None:
    codes = torch.arange(5 * columns, dtype=torch.uint8).view(5, columns) % 16
    packed = pack(codes)
    assert tuple(packed.shape) == (5, -(-columns // 2))
    assert torch.equal(unpack(packed, columns), codes)
    assert torch.equal(pack(codes.T.contiguous().T), packed)
    if columns % 2:
        assert not (packed[:, -1] >> 4).any()


def test_every_pair_of_codes_is_the_byte_low_then_high() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert pack(pairs).flatten().tolist() == [low | high << 4 for low, high in pairs.tolist()]
