"""Every order of threads and number of workers gives the same bytes, and a lost barrier gives other bytes:
docs/tolerance.md#memory-and-repetition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.quantize import fp8
from narrowgauge.native.quantize.amax import another_grid, oriented_amax
from narrowgauge.native.runtime import host, sources
from narrowgauge.native.runtime.arguments import GENERAL_THREADS
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.recipes import find_recipe
from tests.native.fp8 import KINDS, parts, threads
from tests.native.launching import Source
from tests.native.operands import FP8_PAIRS, MX_PAIRS, random_operand
from tests.native.samples import (
    DTYPES,
    MX_NAMES,
    NAMES,
    RECIPES,
    ROTATED,
    assert_equal,
    dtypes,
    matrix,
    nearly_tied,
    options_of,
    sample,
)

__all__ = ["threads"]

CPU = torch.device("cpu")


def outputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Outputs of every operation, in several tiles, blocks of threads and steps of K, with tails."""
    x = matrix("outliers", 150, 301, dtype)
    q = ops.quantize(x, RECIPES["te"])
    yield from (ops.amax(x), ops.amax(matrix("normal", 1, 300_001, dtype)), *parts(q), ops.dequantize(q, dtype))
    yield ops.gemm(q, q, out_dtype=dtype, c=matrix("normal", 150, 150, dtype))
    for name in NAMES:
        r = find_recipe(name)
        if dtype in dtypes(r):
            y = sample(r, "outliers", 80, 140, dtype)
            yield from parts(*ops.quantize_both(y, r, swizzled=True, **options_of(r)))
            yield from parts(ops.quantize(y.T, r, **options_of(r)))
            yield from parts(*ops.quantize_both(sample(r, "outliers", 64, 128, dtype), r, **options_of(r)))
    if dtype == torch.bfloat16:  # eight tiles, and eight blocks of threads, or fewer with several tiles each
        tiles = matrix("outliers", 128, 512, dtype)
        for name in ("nvfp4", "nvfp4-2d", "nvfp4-rht-sr"):
            yield from parts(*ops.quantize_both(tiles, name, **options_of(find_recipe(name))))
        for along_rows in (False, True):
            amaxes = oriented_amax(tiles, plain=True, rotated=True, along_rows=along_rows, signs=5)
            yield from (amax for amax in amaxes if amax is not None)
        yield from (ops.transform(matrix("outliers", 33, 384, dtype), name) for name in ROTATED)
    sizes = torch.tensor([70, 0, 80])
    for name in ("nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-sr", "mxfp8-2d", "mxfp4-sr"):
        for columnwise in (False, True):
            options = options_of(find_recipe(name))
            yield from parts(*ops.quantize_grouped(x, sizes, name, columnwise=columnwise, **options).sections())
    yield ops.gemm_grouped(ops.quantize_grouped(x, sizes, "nvfp4"), [q] * 3, out_dtype=dtype)
    yield from (ops.swizzle(q.scales), ops.unswizzle(ops.swizzle(q.scales), tuple(q.scales.shape)))
    for left, right in (MX_PAIRS[2], FP8_PAIRS[1], FP8_PAIRS[4]):
        a, b = random_operand(left, 70, 300, 1), random_operand(right, 133, 300, 2)
        yield ops.gemm(a, b, out_dtype=dtype)
        yield from parts(ops.gemm_quantized(a, b, "mxfp8-2d", out_dtype=dtype))
    padded, _ = ops.pad_sections(x, sizes, "nvfp4")
    yield from (padded, ops.unpad_sections(padded, sizes, "nvfp4"))
    for name in ("fp8-delayed-e4m3", "fp8-delayed-e4m3-bulk"):
        yield from ops.update_scale(matrix("normal", 40, 70, torch.float32), torch.ones(70), name)


def fp8_outputs() -> Iterator[torch.Tensor]:
    """Outputs of the kernels of FP8, in several tiles, with tails."""
    x, tiles = matrix("outliers", 150, 301, torch.bfloat16), matrix("outliers", 128, 256, torch.bfloat16)
    sizes = torch.tensor([70, 0, 80])
    for name in KINDS:
        r = find_recipe(name)
        for y in (x, tiles):
            yield from parts(*ops.quantize_both(y, r, **options_of(r)))
        for columnwise in (False, True):
            grouped = ops.quantize_grouped(x, sizes, r, columnwise=columnwise, **options_of(r, 3))
            yield from parts(*grouped.sections())


@contextmanager
def workers(count: int) -> Iterator[None]:
    """Within the context so many threads run the blocks of a launch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hold(calls: Callable[[], Iterator[torch.Tensor]], variations: dict[str, Any]) -> None:
    """Asserts that outputs have the same bytes in every context of `variations`, orders of threads and workers."""
    contexts = {**ops.variations(CPU), **variations, "2 workers": partial(workers, 2), "5 workers": partial(workers, 5)}
    with workers(1):
        first = list(calls())
    for name, context in contexts.items():
        with context():
            assert "threads" not in name or name.startswith(host._order.get())
            for one, other in zip(first, calls(), strict=True):
                assert_equal(other, one, name)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_every_order_worker_and_grid_gives_the_same_bytes(dtype: torch.dtype) -> None:
    assert list(ops.variations(CPU)) == ["forward threads", "reverse threads", "shuffled threads"]
    hold(partial(outputs, dtype), {"grid": another_grid})


@pytest.mark.sampled(2)
def test_every_order_and_worker_gives_the_same_bytes_of_fp8(threads: int) -> None:
    hold(fp8_outputs, {})


# A lost barrier of the project's own kernels.


SOURCES = ("amax", "amax_blocks", "quantize_nvfp4", "quantize_mx", "quantize_fp8", "delayed", "gemm_mx")
TEXTS = {name: sources.text(name) for name in SOURCES}


def without_barrier(name: str, which: int) -> str:
    """Text of a source of `native` with its headers, without the barrier number `which`."""
    text = TEXTS[name]
    start, end = list(re.finditer(r"__syncthreads\(\);", text))[which].span()
    return text[:start] + text[end:]


@contextmanager
def lost(module: str, name: str, which: int, cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context `module` launches `name`.cu without the barrier number `which`."""
    mutant = cuda_source(without_barrier(name, which))
    monkeypatch.setitem(sources.KERNELS, mutant, sources.KERNELS[name])  # macros define some of them

    def launch_mutant(source: str, *arguments: Any, **options: Any) -> None:
        if source == name:
            flags = (*options.pop("extra_flags", ()), "-O0")  # less time to compile
            launch(mutant, *arguments, **options, extra_flags=flags)
        else:
            launch(source, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(f"narrowgauge.native.{module}.launch", launch_mutant)
        yield


def seen_in_orders(call: Callable[[bool], Iterator[torch.Tensor]]) -> set[bytes]:
    """Outputs of `call` as bytes, in the orders of threads up to the first difference.

    Before a call, a call with a different input fills the shared memory.
    """
    seen = set()
    for order in host.ORDERS:
        with host.thread_order(order):
            list(call(False))
            seen.add(b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in call(True)))
        if len(seen) > 1:
            break
    return seen


def barriers(name: str) -> range:
    return range(TEXTS[name].count("__syncthreads();"))


def test_a_lost_barrier_of_amax(cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4096.0)
    assert len(barriers("amax")) == 1
    with lost("quantize.amax", "amax", 0, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([ops.amax(x if real else 0 * x)]))
    assert len(seen) > 1
    assert x[-1:].numpy().tobytes() in seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rotated", [False, True])
def test_a_lost_barrier_of_amaxes_of_blocks(
    rotated: bool, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier of the warps of a block, and the barrier after the copy of a tile. In the shape of a GPU."""
    monkeypatch.setitem(TEXTS, "amax_blocks", "#define AMAX_THREADS 256\n" + TEXTS["amax_blocks"])
    monkeypatch.setitem(GENERAL_THREADS["amax_blocks"], "cpu", 256)
    assert len(barriers("amax_blocks")) == 2
    # The largest element lies in the last warp, for which thread 0 waits, or in a row of another thread.
    for which, columns, row in ((0, 64, 63), (1, 128, 1)):
        x = matrix("normal", 64, columns, torch.bfloat16)
        x[row] = 1000.0

        def call(real: bool, x: torch.Tensor = x) -> Iterator[torch.Tensor]:
            amaxes = oriented_amax(x if real else 0 * x, plain=not rotated, rotated=rotated, along_rows=True)
            return (amax for amax in amaxes if amax is not None)

        with lost("quantize.amax", "amax_blocks", which, cuda_source, monkeypatch):
            assert len(seen_in_orders(call)) > 1


# Barriers of quantizers: number, a recipe that needs the barrier, if both halves need it, and if it is in the kernel of
# whole tiles of bfloat16.
NEEDED = [
    (0, "nvfp4", True, False),  # rows of the tile, and its columns
    (0, "nvfp4-2d", False, False),  # amaxes of the rows of a tile
    (1, "nvfp4-2d-4over6-256-mae", False, False),  # errors of the rows of a tile
    (2, "nvfp4-2d", True, False),  # amaxes of the columns of a tile
    (3, "nvfp4", True, True),  # rows of the tile, and its columns
    (3, "nvfp4-2d", False, True),  # the same for rows
    (4, "nvfp4-2d", False, True),  # amaxes of the rows of a tile
    (5, "nvfp4", True, True),  # scales of columns, and their store
    (0, "mxfp8-e4m3", True, False),
    (0, "mxfp8-2d", False, False),
    (1, "mxfp8-e4m3", True, True),  # largest magnitudes of pieces of the tile, and of its lines
    (2, "mxfp8-e4m3", True, True),  # factors, and their multiplication
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("which", "name", "columnwise", "whole"), NEEDED)
def test_a_lost_barrier_of_quantize(
    which: int, name: str, columnwise: bool, whole: bool, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "quantize_mx" if name in MX_NAMES else "quantize_nvfp4"
    assert {number for number, of, _, _ in NEEDED if (of in MX_NAMES) == (name in MX_NAMES)} == set(barriers(source))
    amax = None if name in MX_NAMES else (torch.tensor([8.0]),) * 2
    tiles = nearly_tied(192)  # with some scales for 4
    if whole:
        tiles = torch.cat([tiles, tiles], 1).bfloat16()
    other, real = tiles[:64], tiles[-64:]

    def call(now: bool) -> Iterator[torch.Tensor]:
        halves = ops.quantize_both(real if now else other, name, columnwise=columnwise, amax=amax)
        return parts(*(half for half in halves if half is not None))

    if "4over6" in name:
        assert not columnwise, "given amaxes separate the halves"
    with lost(source.replace("quantize_", "quantize."), source, which, cuda_source, monkeypatch):
        assert len(seen_in_orders(call)) > 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("which", barriers("gemm_mx"))
def test_a_lost_barrier_of_gemm(which: int, cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """First elements of a different format, whose values stay in the tables of codes."""
    first, second = (
        [random_operand(name, 64, 128, seed=seed) for seed in (1, 2)] for name in ("mxfp8-e5m2", "mxfp8-e4m3")
    )
    with lost("gemm.gemm", "gemm_mx", which, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([ops.gemm(*(second if real else first), out_dtype=torch.float32)]))
    assert len(seen) > 1


# Barriers of quantize_fp8.cu, a recipe that needs the barrier, and the dtype for which its kernel runs on whole tiles.
NEEDED_BY_FP8 = [
    (0, "fp8-delayed-e4m3", torch.bfloat16),  # reduce.cuh: amaxes of warps, and the amax of the tile
    (1, "fp8-block-1x128-e4m3-fp32", torch.float32),  # amaxes of chunks, and of lines
    (2, "fp8-block-128x128-e4m3-fp32", torch.float32),  # amaxes of rows, and of the tile
    (3, "fp8-block-1x128-e4m3-fp32", torch.float32),  # scales, and their multiplication
    (4, "fp8-current-e4m3", torch.float32),  # codes of rows, and of columns
    (5, "fp8-block-1x128-e4m3-fp32", torch.bfloat16),  # largest magnitudes of pieces, and of lines
    (6, "fp8-block-1x128-e4m3-fp32", torch.bfloat16),  # scales, and their multiplication
    (7, "fp8-block-128x128-e4m3-fp32", torch.bfloat16),  # largest magnitudes of pieces, and of columns of pieces
    (8, "fp8-block-128x128-e4m3-fp32", torch.bfloat16),  # largest magnitudes of columns, and of the tile
    (9, "fp8-current-e4m3", torch.bfloat16),  # codes of rows, and of columns
    (10, "fp8-block-1x128-e4m3", torch.bfloat16),  # scales of a tile, and their store by blocks of a line
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("which", "name", "dtype"), NEEDED_BY_FP8)
def test_a_lost_barrier_of_fp8(
    which: int, name: str, dtype: torch.dtype, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shape of a GPU: with eight threads, a thread reads only its own columns."""
    monkeypatch.setitem(TEXTS, "quantize_fp8", "#define FP8_THREADS 256\n" + TEXTS["quantize_fp8"])
    for threads_of in (GENERAL_THREADS["quantize_fp8"], fp8._TILE_THREADS):
        monkeypatch.setitem(threads_of, "cpu", 256)
    if which == 10:
        monkeypatch.setattr(fp8, "_SCALES_BY_TILE", 1)
    assert {number for number, _, _ in NEEDED_BY_FP8} == set(barriers("quantize_fp8"))
    one, other = (matrix("normal", 128, 128, dtype, seed=seed) * 3.0**seed for seed in (0, 1))

    def call(real: bool) -> Iterator[torch.Tensor]:
        return parts(*ops.quantize_both(one if real else other, name, **options_of(find_recipe(name))))

    with lost("quantize.fp8", "quantize_fp8", which, cuda_source, monkeypatch):
        assert len(seen_in_orders(call)) > 1


def test_a_lost_barrier_of_scale_updates(cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(barriers("delayed")) == 1
    history = torch.arange(1.0, 257.0).view(8, 32)  # the largest in the last part, for which the first part waits

    def call(real: bool) -> Iterator[torch.Tensor]:
        return iter(ops.update_scale(history if real else history.flip(0), torch.ones(32), "fp8-delayed-e4m3"))

    with lost("quantize.delayed", "delayed", 0, cuda_source, monkeypatch):
        assert len(seen_in_orders(call)) > 1
