"""The threads of a block that quantizes to FP8, updates scales or pads, in every order:
docs/tolerance.md#memory-and-repetition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.quantize import fp8
from narrowgauge.native.runtime import host, sources
from narrowgauge.native.runtime.arguments import GENERAL_THREADS
from narrowgauge.spec.recipes import find_recipe
from tests.native.fp8 import KINDS, given_scale, parts, threads
from tests.native.gemm import test_orders
from tests.native.gemm.test_orders import lost, seen_in_orders
from tests.native.launching import Source
from tests.native.samples import assert_equal, matrix
from tests.thinned import thinned_rows

__all__ = ["threads"]

TEXTS = {name: sources.text(name) for name in ("quantize_fp8", "delayed")}


def outputs() -> Iterator[torch.Tensor]:
    """What every door gives, in several tiles, with tails."""
    x, tiles = matrix("outliers", 150, 301, torch.bfloat16), matrix("outliers", 128, 256, torch.bfloat16)
    sizes = torch.tensor([70, 0, 80])
    for name in KINDS:
        r = find_recipe(name)
        for y in (x, tiles):
            yield from parts(*ops.quantize_both(y, r, **given_scale(r)))
        for columnwise in (False, True):
            grouped = ops.quantize_grouped(x, sizes, r, columnwise=columnwise, **given_scale(r, 3))
            yield from parts(*grouped.sections())
    history = matrix("normal", 40, 70, torch.float32)
    for name in ("fp8-delayed-e4m3", "fp8-delayed-e4m3-bulk"):
        yield from ops.update_scale(history, torch.ones(70), name)
    padded, _ = ops.pad_sections(x, sizes, "nvfp4")
    yield from (padded, ops.unpad_sections(padded, sizes, "nvfp4"))


def test_every_order_and_number_of_workers_gives_the_same_bytes(threads: int) -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for order, workers in (*((order, before) for order in host.ORDERS), ("forward", 1), ("forward", 5)):
            torch.set_num_threads(workers)
            with host.thread_order(order):
                results.append(list(outputs()))
    finally:
        torch.set_num_threads(before)
    for one, other in combinations(results, 2):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)


# What each barrier of quantize_fp8.cu stands between, and the dtype of which whole tiles go to its kernel.
NEEDED = [
    (0, "fp8-delayed-e4m3", torch.bfloat16),  # of reduce.cuh: the largest of warps, and that of the tile
    (1, "fp8-block-1x128-e4m3-fp32", torch.float32),  # amaxes of chunks, and those of lines
    (2, "fp8-block-128x128-e4m3-fp32", torch.float32),  # amaxes of rows, and that of the tile
    (3, "fp8-block-1x128-e4m3-fp32", torch.float32),  # scales, and the elements that they multiply
    (4, "fp8-current-e4m3", torch.float32),  # codes of rows, and the columns that are written of them
    (5, "fp8-block-1x128-e4m3-fp32", torch.bfloat16),  # largest magnitudes of pieces, and those of lines
    (6, "fp8-block-1x128-e4m3-fp32", torch.bfloat16),  # scales, and the elements that they multiply
    (7, "fp8-block-128x128-e4m3-fp32", torch.bfloat16),  # largest magnitudes of pieces, and those of pieces in a column
    (8, "fp8-block-128x128-e4m3-fp32", torch.bfloat16),  # those, and that of the tile
    (9, "fp8-current-e4m3", torch.bfloat16),  # codes of rows, and the columns that are written of them
]


@pytest.mark.parametrize(("which", "name", "dtype"), thinned_rows(NEEDED, 4))
def test_a_lost_barrier_of_quantize_shows(
    which: int, name: str, dtype: torch.dtype, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shape of a GPU: of eight threads, each reads the columns that it has written itself."""
    monkeypatch.setitem(test_orders.TEXTS, "quantize_fp8", "#define FP8_THREADS 256\n" + TEXTS["quantize_fp8"])
    for threads_of in (GENERAL_THREADS["quantize_fp8"], fp8._TILE_THREADS):
        monkeypatch.setitem(threads_of, "cpu", 256)
    assert {number for number, _, _ in NEEDED} == set(test_orders.barriers("quantize_fp8"))
    one, other = (matrix("normal", 128, 128, dtype, seed=seed) * 3.0**seed for seed in (0, 1))

    def call(real: bool) -> Iterator[torch.Tensor]:
        return parts(*ops.quantize_both(one if real else other, name, **given_scale(find_recipe(name))))

    with lost("quantize.fp8", "quantize_fp8", which, cuda_source, monkeypatch):
        assert len(seen_in_orders(call)) > 1


def test_a_lost_barrier_of_scale_updates_shows(cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_orders.TEXTS, "delayed", TEXTS["delayed"])
    assert len(test_orders.barriers("delayed")) == 1
    history = torch.arange(1.0, 257.0).view(8, 32)  # the largest in the last part, on which the first waits

    def call(real: bool) -> Iterator[torch.Tensor]:
        return iter(ops.update_scale(history if real else history.flip(0), torch.ones(32), "fp8-delayed-e4m3"))

    with lost("quantize.delayed", "delayed", 0, cuda_source, monkeypatch):
        assert len(seen_in_orders(call)) > 1
