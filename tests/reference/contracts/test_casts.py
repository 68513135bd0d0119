"""Casts of float64 numbers round once: against exact rational arithmetic, at every tie and beside it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from narrowgauge.reference.contracts.accepted import order_of
from narrowgauge.reference.contracts.casts import below, nearest, truncated

DTYPES = [torch.bfloat16, torch.float16]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a 16-bit dtype that are not NaN, in order, without −0."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    kept = every[~every.isnan() & ~((every == 0) & every.signbit())]
    return kept[order_of(kept, None).argsort()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tie_and_its_neighbours(dtype: torch.dtype) -> None:
    """A tie goes to the even number, and the float64 numbers beside it to the nearer one."""
    finite = numbers(dtype)
    finite = finite[finite.isfinite()]
    low, high = finite[:-1].double(), finite[1:].double()
    tie = (low + high) / 2
    even = torch.where((finite[:-1].view(torch.int16) & 1) == 0, low, high)
    assert torch.equal(nearest(tie, dtype).double(), even)
    beside = [torch.nextafter(tie, torch.full_like(tie, to)) for to in (-torch.inf, torch.inf)]
    assert torch.equal(nearest(beside[0], dtype).double(), low)
    assert torch.equal(nearest(beside[1], dtype).double(), high)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_numbers_by_rational_arithmetic(dtype: torch.dtype) -> None:
    every = numbers(dtype)
    finite = every[every.isfinite()].double()
    draw = torch.Generator().manual_seed(0)
    at = torch.randint(1, len(finite) - 1, (300,), generator=draw)
    x = finite[at] + (finite[at + 1] - finite[at]) * torch.rand(300, dtype=torch.float64, generator=draw)
    for value, found in zip(x.tolist(), nearest(x, dtype).double().tolist(), strict=True):
        distance = abs(Fraction(value) - Fraction(found))
        place = int((finite == found).nonzero()[0])
        others = [finite[n].item() for n in (place - 1, place + 1) if 0 <= n < len(finite)]
        assert all(distance <= abs(Fraction(value) - Fraction(other)) for other in others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    second = numbers(dtype)[-3].item()
    beyond = most + (most - second) / 2  # the tie between the largest number and infinity
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e300, -1e300, beyond, -1e-300], dtype=torch.float64)
    found = nearest(x, dtype)
    assert found[:2].signbit().tolist() == [False, True]
    assert found[4].isnan()
    assert found[[2, 3, 5, 6, 7]].tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf, torch.inf]
    assert found[8] == 0
    assert found[8].signbit()


def test_float32_ends_and_truncation() -> None:
    x = torch.tensor([1 + 2.0**-40, -1 - 2.0**-40, 1e300, -1e300, -0.0, 1.0, torch.nan], dtype=torch.float64)
    most = torch.finfo(torch.float32).max
    assert below(x)[:6].tolist() == [1.0, -1 - 2.0**-23, most, -torch.inf, -0.0, 1.0]
    assert below(x)[4].signbit()
    assert below(x)[6].isnan()
    assert truncated(x[:2], torch.bfloat16).tolist() == [1.0, -1.0]
    assert truncated(torch.tensor([1.999, -1.999], dtype=torch.float64), torch.bfloat16).tolist() == [
        1.9921875,
        -1.9921875,
    ]
