"""dequantize on a CPU: every code under every scale byte, byte for byte what the reference gives."""

from __future__ import annotations

import math

import pytest
import torch

from native import ops
from reference import ops as reference
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import DTYPES, RECIPES, assert_equal, codes_under_every_scale, matrix

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
AMAXES = [0.0, 1e-45, 1e-38, 3e-36, 0.1, 1.0, 65.0, 2688.0, 1e4, 1e30, 3.4028235e38, math.inf, math.nan]


@EVERY_DTYPE
@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("columns", [15, 16])
def test_every_code_under_every_scale_has_its_value(columns: int, amax: float, dtype: torch.dtype) -> None:
    q = codes_under_every_scale(amax, columns)
    assert_equal(ops.dequantize(q, dtype), reference.dequantize(q, dtype))


def test_the_values_are_those_of_the_formats() -> None:
    """amax 2688 makes the tensor's factor 1; scale 0x38 is 1, 0x7F is NaN."""
    y = ops.dequantize(codes_under_every_scale(2688.0))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert y[0x38].tolist() == magnitudes + [-m for m in magnitudes]
    assert torch.equal(y[0x38].signbit(), torch.arange(16) >= 8)
    assert y[0x7E].tolist() == [448 * v for v in y[0x38].tolist()]
    assert y.isnan().any(dim=1).nonzero().ravel().tolist() == [0x7F, 0xFF]


@EVERY_DTYPE
@pytest.mark.parametrize("columns", [*range(1, 34), 47, 63, 65, 4097])
def test_any_shape_is_dequantized_as_the_reference_does(columns: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 17, 129):
        q = reference.quantize(matrix("outliers", rows, columns, torch.float32), "nvfp4")
        assert_equal(ops.dequantize(q, dtype), reference.dequantize(q, dtype))


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 32), (5, 0)])
def test_an_empty_matrix_stays_empty(rows: int, columns: int) -> None:
    q = ops.quantize(torch.empty(rows, columns), "nvfp4")
    assert ops.dequantize(q).shape == (rows, columns)


def test_float32_is_the_default() -> None:
    assert ops.dequantize(codes_under_every_scale(1.0)).dtype == torch.float32


@pytest.mark.parametrize("rule", RECIPES)
def test_every_recipe_is_dequantized_alike(rule: str) -> None:
    q = ops.quantize(matrix("e4m3 ties", 33, 77, torch.float32), RECIPES[rule])
    assert_equal(ops.dequantize(q), reference.dequantize(q))


@EVERY_DTYPE
@pytest.mark.parametrize("columns", [1, 16, 17, 31, 77])
def test_nothing_outside_the_operand_is_read_and_nothing_outside_the_output_is_written(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = reference.quantize(matrix("outliers", 19, columns, torch.float32), "nvfp4")
    expected = reference.dequantize(q, dtype)
    before = [part.clone() for part in (q.codes, q.scales, q.amax)]
    q.codes, q.scales, q.amax = (embedded(part) for part in before)
    with guarded_outputs(monkeypatch):
        y = ops.dequantize(q, dtype)
    assert_equal(y, expected)
    for part, was in zip((q.codes, q.scales, q.amax), before, strict=True):
        assert torch.equal(part, was)
