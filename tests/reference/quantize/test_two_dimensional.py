"""2-D NVFP4: a scale for each tile of 16×16, and a columnwise half that is the transpose of the rowwise half."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.ops import quantize, quantize_both
from tests.reference.samples import MATRICES, matrix
from tests.reference.twins import elements

SHAPES = [(1, 1), (16, 16), (15, 17), (17, 15), (33, 31), (48, 80), (1, 40), (40, 1)]
NAMES = ["nvfp4-2d", *(f"nvfp4-2d-4over6-{most}-{error}" for most in (448, 256) for error in ("mae", "mse"))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_tile_has_one_scale_stored_for_each_of_its_rows(name: str, shape: tuple[int, int]) -> None:
    q = quantize(matrix("spread", 1, *shape), name)
    assert tuple(q.scales.shape) == (shape[0], -(-shape[1] // 16))
    for top in range(0, shape[0], 16):
        tile = q.scales[top : top + 16]
        assert torch.equal(tile, tile[:1].expand_as(tile))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_scale_is_that_of_the_tiles_amax(shape: tuple[int, int]) -> None:
    """As of a plain block with the same amax in the same tensor."""
    x = matrix("spread", 2, *shape)
    q = quantize(x, "nvfp4-2d")
    for top in range(0, shape[0], 16):
        for block in range(q.scales.shape[1]):
            amax = x[top : top + 16, 16 * block : 16 * block + 16].abs().max()
            assert q.scales[top, block] == quantize(amax.view(1, 1), "nvfp4", amax=q.amax).scales[0, 0]


def test_each_element_of_a_tile_can_set_its_scale() -> None:
    for row in range(32):
        for column in range(32):
            x = torch.ones(32, 32)
            x[row, column] = 4.0
            scales = quantize(x, "nvfp4-2d", amax=torch.tensor([2688.0])).scales
            expected = torch.tensor([[0x23, 0x23], [0x23, 0x23]], dtype=torch.uint8)  # E4M3 of 1/6 is 0.171875
            expected[row // 16, column // 16] = 0x33  # and of 4/6 0.6875
            assert torch.equal(scales, expected.repeat_interleave(16, 0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", MATRICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_columnwise_half_is_the_transpose(name: str, family: str, shape: tuple[int, int]) -> None:
    row, column = quantize_both(matrix(family, 3, *shape), name)
    assert row is not None
    assert column is not None
    assert column.shape == (shape[1], shape[0])
    assert torch.equal(elements(column), elements(row).T)
    assert torch.equal(column.scales[::16], row.scales[::16].T)
    assert torch.equal(column.scales, column.scales[::16].repeat_interleave(16, 0)[: shape[1]])
