"""dequantize: every code under every scale byte, byte for byte the reference's result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.quantized import scales_shape
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import (
    DTYPES,
    assert_equal,
    codes_under_every_power,
    codes_under_every_scale,
)

pytestmark = ON_EVERY_DEVICE

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
MX_ELEMENTS = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
FP8 = ("fp8-block-1x128-e4m3", "fp8-block-1x128-e5m2", "fp8-block-128x128", "fp8-current-e4m3", "fp8-current-e5m2")
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


@pytest.mark.sampled(60)
@EVERY_DTYPE
@pytest.mark.parametrize("name", MX_ELEMENTS)
def test_every_code_under_every_power_of_two_has_its_value(name: str, dtype: torch.dtype) -> None:
    """By the definitions in float64, rounded to float32 and then to the dtype; also stored transposed."""
    q = codes_under_every_power(name)
    element = q.recipe.element
    values = torch.tensor(element.values, dtype=torch.float64)[torch.arange(q.shape[1]) % element.codes]
    scales = torch.tensor(E8M0.values, dtype=torch.float64).unsqueeze(1)
    expected = (values * scales).float().to(dtype)
    assert_equal(ops.dequantize(q, dtype), expected)
    assert_equal(reference.dequantize(q, dtype), expected)
    swizzled = replace(q, scales=ops.swizzle(q.scales), swizzled=True)
    assert_equal(ops.dequantize(swizzled, dtype), expected)
    if element.bits != 4:
        codes, scales_t = q.codes.T.contiguous(), q.scales.T.contiguous()
        assert_equal(ops.dequantize(replace(q, codes=codes, scales=scales_t, transposed=True), dtype), expected)
        assert_equal(ops.dequantize(replace(swizzled, codes=codes, transposed=True), dtype), expected)


@EVERY_DTYPE
@pytest.mark.parametrize("name", FP8)
def test_codes_under_float32_scales_have_their_values(name: str, dtype: torch.dtype) -> None:
    """Every code in every block, scales of every exponent; blocks of 1x128, of 128x128 and of the whole matrix."""
    r = find_recipe(name)
    rows, columns = 260, 300
    codes = torch.arange(rows * columns).view(rows, columns) % 256
    high, wide = scales_shape((rows, columns), r)
    generator = torch.Generator().manual_seed(high)
    scales = torch.randint(0, 1 << 31, (high, wide), generator=generator, dtype=torch.int64).int().view(torch.float32)
    scales.view(-1)[:4] = torch.tensor([1.0, torch.inf, torch.nan, 2.0**-149])[: scales.numel()]
    q = Quantized(codes.byte(), scales, torch.ones(1) if r.whole else None, r, (rows, columns))
    height, width = min(r.stored_rows, rows), min(r.block[1], columns)
    of_elements = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    values = torch.tensor(r.element.values, dtype=torch.float64)[codes]
    expected = (values * of_elements.double()).float().to(dtype)
    assert_equal(ops.dequantize(q, dtype), expected)
    assert_equal(reference.dequantize(q, dtype), expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3", "fp8-block-1x128"])
def test_strided_codes_and_scales_have_the_same_values(name: str) -> None:
    q = ops.quantize(torch.randn(32, 256, generator=torch.Generator().manual_seed(4)), name)
    strided = replace(q, codes=q.codes.T.contiguous().T, scales=q.scales.T.contiguous().T)
    assert not strided.codes.is_contiguous()
    assert torch.equal(ops.dequantize(strided), reference.dequantize(q))
