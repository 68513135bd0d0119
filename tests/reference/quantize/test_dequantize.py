"""Dequantize: every code under every scale byte, against the scalar twin."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import dequantize, quantize
from narrowgauge.reference.scalar import nvfp4
from tests.golden import bits
from tests.reference.samples import quantized

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AMAXES = [0.0, 1e-45, 1e-38, 3.1e-36, 1.0, 65.0, 2688.0, 12345.678, 3.4028234663852886e38, math.inf, math.nan]

CODES = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
SCALES = np.arange(256, dtype=np.uint8).reshape(256, 1)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits, NaN as a class."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(bits(one)[~one.isnan()], bits(other)[~other.isnan()])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize(
    ("name", "most"), [("nvfp4", 448), ("nvfp4-4over6-448-mse", 448), ("nvfp4-4over6-256-mse", 256)]
)
def test_every_code_under_every_scale_byte_is_the_scalar_twins(amax: float, name: str, most: int) -> None:
    q = quantized(CODES, SCALES, amax, name=name)
    twin = [[nvfp4.dequantize(code, scale, np.float32(amax), most) for code in range(16)] for scale in range(256)]
    expected = torch.from_numpy(np.array(twin, dtype=np.float32))
    for dtype in DTYPES:
        values = dequantize(q, dtype)
        assert values.dtype == dtype
        assert same(values, expected.to(dtype))
    assert same(dequantize(q), expected)


def test_each_row_has_its_own_amax() -> None:
    amaxes = np.resize(np.array(AMAXES, np.float32), 256)
    q = dataclasses.replace(quantized(CODES, SCALES, name="nvfp4-rowscaled"), amax=torch.from_numpy(amaxes))
    twin = [[nvfp4.dequantize(code, row, amaxes[row]) for code in range(16)] for row in range(256)]
    assert same(dequantize(q), torch.from_numpy(np.array(twin, dtype=np.float32)))


def test_a_large_matrix_is_its_rows() -> None:
    """More than a slab of the reference."""
    x = torch.randn(300, 1025, generator=torch.Generator().manual_seed(0))
    q = quantize(x, "nvfp4")
    parts = [dequantize(quantize(x[rows : rows + 7], "nvfp4", amax=q.amax)) for rows in range(0, 300, 7)]
    assert same(dequantize(q), torch.cat(parts))
