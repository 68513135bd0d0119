"""Residuals are a float32 addition, bit for bit; sums of rows lie inside in any order, or are exact."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.high_precision.additions import column_sum, residual_sum
from tests.reference.inside import inside, width

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_one_float32_addition(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a = (torch.randn(64, 32) * torch.exp2(torch.randint(-12, 12, (64, 32)).float())).to(dtype)
    b = torch.randn(64, 32).to(dtype)
    expected = residual_sum(a, b)
    assert not bool(expected.error.any())
    assert bool(inside(a.float() + b.float(), expected, dtype).all())
    assert bool(inside((a + b).float(), expected, dtype).all())
    off = torch.nextafter((a + b), torch.full_like(a, torch.inf))
    assert not bool(inside(off.float(), expected, dtype).any())


def test_residuals_that_overflow_or_are_nan() -> None:
    a, b = torch.tensor([3e38, torch.nan, torch.inf]), torch.tensor([3e38, 1.0, 1.0])
    expected = residual_sum(a, b)
    assert inside(a + b, expected).tolist() == [True, True, True]
    assert inside(torch.ones(3), expected).tolist() == [False, False, False]


def test_rows_are_summed_in_any_order() -> None:
    torch.manual_seed(2)
    dy = torch.randn(500, 24).bfloat16()
    expected = column_sum(dy)
    for order in (torch.arange(500), torch.randperm(500), torch.arange(499, -1, -1)):
        assert bool(inside(dy.float()[order].cumsum(0, dtype=torch.float32)[-1], expected, torch.bfloat16).all())
    assert float(width(expected, torch.bfloat16).mean()) < 1
    assert not bool(inside(expected.value.float() * (1 + 2.0**-6), expected, torch.bfloat16).any())
    assert float(inside(dy[:-1].float().sum(0), expected, torch.bfloat16).double().mean()) < 0.5


def test_sums_of_a_lattice_are_right_to_the_bit() -> None:
    dy = torch.randint(-8, 9, (500, 24), generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = column_sum(dy)
    assert not bool(expected.error.any())
    assert bool(inside(dy.float().sum(0), expected).all())
    assert not bool(inside(torch.nextafter(dy.float().sum(0), torch.full((24,), torch.inf)), expected).any())
