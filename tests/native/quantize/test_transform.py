"""transform: every group, with and without signs, byte for byte the reference's result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from narrowgauge.native.quantize import hadamard
from narrowgauge.native.runtime.launch import launch
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import RHT_GROUPS, Hadamard, Recipe, find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_equal, matrix

EVERY_GROUP = pytest.mark.parametrize("group", RHT_GROUPS)
SIGNS = pytest.mark.parametrize("signs", [0xD7E8, 0, 0xFFFF, 0x8001])


def rotating(group: int, signs: int = 0xD7E8) -> Recipe:
    return replace(find_recipe("nvfp4-rht"), transform=Hadamard(group, signs))


def spread(rows: int, columns: int) -> torch.Tensor:
    """bfloat16 numbers of far exponents: sums round, and their order shows."""
    generator = torch.Generator().manual_seed(rows + columns)
    exponents = torch.randint(-30, 30, (rows, columns), generator=generator).float()
    return (torch.randn(rows, columns, generator=generator) * exponents.exp2()).bfloat16()


@ON_EVERY_DEVICE
@EVERY_GROUP
@SIGNS
def test_every_group_is_rotated_as_the_reference_does(group: int, signs: int) -> None:
    r = rotating(group, signs)
    for rows, groups in ((1, 1), (5, 1), (33, 3), (64, 9)):
        for x in (spread(rows, groups * group), matrix("normal", rows, groups * group, torch.bfloat16)):
            y = ops.transform(x, r)
            assert y.is_contiguous()
            assert_equal(y, reference.transform(x, r))


@ON_EVERY_DEVICE
@EVERY_GROUP
def test_every_bfloat16_is_rotated_as_the_reference_does(group: int) -> None:
    """Among zeros, to show a single coefficient, and among its neighbours."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    alone = torch.zeros(1 << 16, group, dtype=torch.bfloat16)
    alone[torch.arange(1 << 16), torch.arange(1 << 16) % group] = patterns
    for x in (patterns.view(-1, 128), alone[:: max(1, group // 16)]):
        assert_equal(ops.transform(x, rotating(group)), reference.transform(x, rotating(group)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_that_lanes_share_are_rotated_alike(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on a CPU a thread has whole groups."""
    monkeypatch.setitem(hadamard._BLOCKS_PER_THREAD, "cpu", 1)
    monkeypatch.setattr(hadamard, "launch", partial(launch, extra_flags=("-DHADAMARD_BLOCKS_PER_THREAD=1", "-O0")))
    for rows, groups in ((5, 1), (33, 3)):
        x = spread(rows, groups * group)
        assert_equal(ops.transform(x, rotating(group)), reference.transform(x, rotating(group)))


def test_the_order_of_the_sums_is_seen() -> None:
    """In half of the sums a large number and its negative cancel, after small numbers were added."""
    x = matrix("normal", 64, 16, torch.bfloat16)
    x[:, 0], x[:, 15] = 2.0**25, 2.0**25
    y, exact = ops.transform(x, "nvfp4-rht"), (x.double() @ hadamard16()).bfloat16()
    assert not torch.equal(y, exact)
    assert_equal(y, reference.transform(x, "nvfp4-rht"))


def hadamard16() -> torch.Tensor:
    """diag(σ)·H16·¼ of the recipe nvfp4-rht, float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.tensor([-1.0 if 0xD7E8 >> k & 1 else 1.0 for k in range(16)], dtype=torch.float64)
    return signs.unsqueeze(1) * h / 4
