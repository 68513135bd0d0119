"""Row-scaled NVFP4: every row a tensor of its own."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.ops import dequantize, quantize, quantize_both
from tests.reference.samples import MATRICES, matrix
from tests.reference.twins import assert_same

NAMES = {"nvfp4-rowscaled": "nvfp4"} | {
    f"nvfp4-rowscaled-4over6-{most}-{error}": f"nvfp4-4over6-{most}-{error}"
    for most in (448, 256)
    for error in ("mae", "mse")
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("columns", [1, 16, 37, 80])
@pytest.mark.parametrize("family", MATRICES)
@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_what_the_plain_recipe_makes_of_it_alone(name: str, family: str, columns: int) -> None:
    x = matrix(family, columns, 9, columns)
    q = quantize(x, name)
    values = dequantize(q)
    assert q.amax is not None
    assert q.tensor_scale is not None
    assert tuple(q.amax.shape) == tuple(q.tensor_scale.shape) == (9,)
    for i in range(9):
        alone = quantize(x[i : i + 1], NAMES[name])
        assert torch.equal(q.codes[i : i + 1], alone.codes)
        assert torch.equal(q.scales[i : i + 1], alone.scales)
        assert torch.equal(q.amax[i : i + 1], alone.amax)
        assert torch.equal(q.tensor_scale[i : i + 1], alone.tensor_scale)
        assert torch.equal(values[i : i + 1].nan_to_num(7.7), dequantize(alone).nan_to_num(7.7))


def test_the_columnwise_half_has_an_amax_for_each_column() -> None:
    x = matrix("spread", 1, 20, 33)
    column = quantize_both(x, "nvfp4-rowscaled", rowwise=False)[1]
    assert column is not None
    assert torch.equal(column.amax, x.abs().amax(0))
    assert_same(column, quantize(x.T.contiguous(), "nvfp4-rowscaled"))
