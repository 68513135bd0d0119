"""Products of a few rows in blocks of 64 rows of b, on a CPU: those of `test_gemm_skinny` in another order."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.native.gemm import skinny as gemm_skinny
from tests.native import skinny
from tests.native.gemm.test_gemm_skinny import (
    FP32,
    SHAPES,
    hold_every_code_and_scale,
    hold_every_order,
    hold_inside,
    hold_order,
    operands,
)
from tests.native.gemm.test_orders import TEXTS, lost, seen_in_orders
from tests.native.launching import Source
from tests.thinned import thinned

WIDE_SHAPES = [*SHAPES, (3, 70, 4608)]
"""The last one: three runs of 512 columns for a team, two for the others."""

SOURCE = skinny.text("nvfp4_wide")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every shape, so that small ones will do."""
    monkeypatch.setattr(gemm_skinny, "wide", lambda m, n, k: k % 512 == 0)


@pytest.mark.parametrize("name", thinned(["nvfp4", "nvfp4-2d", "nvfp4-rowscaled"], 3))
@pytest.mark.parametrize(("m", "n", "k"), WIDE_SHAPES, ids=str)
def test_sums_are_in_the_declared_order(name: str, m: int, n: int, k: int) -> None:
    hold_order(name, m, n, k)


def test_it_is_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands("nvfp4", 7, 40, 2560)
    other = skinny.product(a, b, out_dtype=FP32)
    monkeypatch.setattr(gemm_skinny, "wide", lambda *_: False)
    assert not torch.equal(skinny.product(a, b, out_dtype=FP32), other)


def test_every_code_and_every_scale_is_multiplied() -> None:
    hold_every_code_and_scale("nvfp4", columns=512)


def test_nothing_is_read_or_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k in ((67, 512), (5, 2560)):
        hold_inside("nvfp4", 5, n, k, monkeypatch)


def test_every_order_of_threads_gives_the_same_bits() -> None:
    hold_every_order(*operands("nvfp4", 3, 67, 2560))


@pytest.mark.parametrize(
    "waiting",
    [
        "sync_team(team);",  # for what others have loaded and decoded
        "__syncthreads();",  # for the sums of the teams
    ],
)
def test_a_lost_wait_shows(waiting: str, cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    before, here, after = SOURCE.rpartition(f" {waiting}")
    assert here
    # `lost` takes out what is a barrier of all threads.
    monkeypatch.setitem(TEXTS, "gemm_skinny_nvfp4_wide", f"{before} __syncthreads();{after}")
    a, b = operands("nvfp4", 16, 64, 2560)
    others = operands("nvfp4", 16, 64, 512)
    which = before.count("__syncthreads();")
    with lost("gemm.skinny", "gemm_skinny_nvfp4_wide", which, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([skinny.product(*((a, b) if real else others), out_dtype=FP32)]))
    assert len(seen) > 1


def test_the_shape_alone_says_which_kernel_makes_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wave of an H200's 132 multiprocessors, more than half of it, and whole runs of columns, eight or more."""
    monkeypatch.undo()
    taken = [(16, 8192, 8192), (1, 8448, 4096), (32, 4096, 14336), (16, 66 * 64 + 1, 8192), (64, 2112, 4096)]
    not_taken = [(16, 8449, 8192), (16, 66 * 64, 8192), (16, 8192, 8320), (16, 8192, 3584), (16, 4096, 4096)]
    assert all(gemm_skinny.wide(*shape) for shape in taken)
    assert not any(gemm_skinny.wide(*shape) for shape in not_taken)
