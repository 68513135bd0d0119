"""Products of a few rows in blocks of 64 rows of b, in another order than the products of `test_gemm_skinny`."""

from __future__ import annotations

import pytest

from narrowgauge.native.gemm import skinny as gemm_skinny
from tests.native import skinny
from tests.native.devices import ON_EVERY_DEVICE, on_every_device
from tests.native.gemm.test_gemm_skinny import (
    FP32,
    SHAPES,
    hold_every_code_and_scale,
    hold_every_order,
    hold_order,
    operands,
)
from tests.native.gemm.test_orders import TEXTS, lost, seen_in_orders
from tests.native.launching import Source

WIDE_SHAPES = [*SHAPES, (3, 70, 4608)]
"""The last shape: three runs of 512 columns for a team, two for the other teams."""

SOURCE = skinny.text("nvfp4_wide")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the wide kernel for every shape."""
    monkeypatch.setattr(gemm_skinny, "wide", lambda m, n, k: k % 512 == 0)


@pytest.mark.sampled(24)
@on_every_device("name", ("nvfp4", "nvfp4-2d", "nvfp4-rowscaled"), 3)
@pytest.mark.parametrize(("m", "n", "k"), WIDE_SHAPES, ids=str)
def test_sums_are_in_the_declared_order(name: str, m: int, n: int, k: int) -> None:
    hold_order(name, m, n, k)


@pytest.mark.sampled(0)
@ON_EVERY_DEVICE
def test_every_code_and_every_scale_is_multiplied() -> None:
    hold_every_code_and_scale("nvfp4", columns=512)


@pytest.mark.long
def test_every_order_of_threads_gives_the_same_bits() -> None:
    hold_every_order(*operands("nvfp4", 3, 67, 2560))


@pytest.mark.long
@pytest.mark.parametrize(
    "waiting",
    [
        "sync_team(team);",  # for codes that other threads load and decode
        "__syncthreads();",  # for the sums of the teams
    ],
)
def test_a_lost_barrier_changes_bits(waiting: str, cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    before, here, after = SOURCE.rpartition(f" {waiting}")
    assert here
    # `lost` removes a barrier of all threads.
    monkeypatch.setitem(TEXTS, "gemm_skinny_nvfp4_wide", f"{before} __syncthreads();{after}")
    a, b = operands("nvfp4", 16, 64, 2560)
    others = operands("nvfp4", 16, 64, 512)
    which = before.count("__syncthreads();")
    with lost("gemm.skinny", "gemm_skinny_nvfp4_wide", which, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([skinny.product(*((a, b) if real else others), out_dtype=FP32)]))
    assert len(seen) > 1


def test_the_shape_selects_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wave of an H200's 132 multiprocessors, more than half of it, and whole runs of columns, eight or more."""
    monkeypatch.undo()
    taken = [(16, 8192, 8192), (1, 8448, 4096), (32, 4096, 14336), (16, 66 * 64 + 1, 8192), (64, 2112, 4096)]
    not_taken = [(16, 8449, 8192), (16, 66 * 64, 8192), (16, 8192, 8320), (16, 8192, 3584), (16, 4096, 4096)]
    assert all(gemm_skinny.wide(*shape) for shape in taken)
    assert not any(gemm_skinny.wide(*shape) for shape in not_taken)
