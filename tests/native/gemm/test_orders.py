"""The threads of a block in every order, and on any number of workers, give the same bytes:
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
from narrowgauge.native.ops import Quantized
from narrowgauge.native.quantize.amax import another_grid, oriented_amax
from narrowgauge.native.runtime import host, sources
from narrowgauge.native.runtime.arguments import GENERAL_THREADS
from narrowgauge.native.runtime.launch import launch
from tests.golden import bits
from tests.native.launching import Source
from tests.native.operands import random_operand
from tests.native.samples import DTYPES, MX_NAMES, NAMES, RECIPES, ROTATED, dtypes, matrix, nearly_tied, sample, seeded
from tests.thinned import thinned, thinned_rows

CPU = torch.device("cpu")


def outputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """What every door gives, in several tiles, blocks of threads and steps of K, with tails."""
    x = matrix("outliers", 150, 301, dtype)
    q = ops.quantize(x, RECIPES["te"])
    yield from (bits(ops.amax(x)), bits(ops.amax(matrix("normal", 1, 300_001, dtype))), q.codes, q.scales, bits(q.amax))
    yield bits(ops.dequantize(q, dtype))
    yield bits(ops.gemm(q, q, out_dtype=dtype, c=matrix("normal", 150, 150, dtype)))
    for name in NAMES:
        r = ops.find_recipe(name)
        if dtype in dtypes(r):
            y = sample(r, "outliers", 80, 140, dtype)
            yield from parts(*ops.quantize_both(y, r, random=seeded(r), swizzled=True))
            yield from parts(ops.quantize(y.T, r, random=seeded(r)))
            yield from parts(*ops.quantize_both(sample(r, "outliers", 64, 128, dtype), r, random=seeded(r)))
    if dtype == torch.bfloat16:  # eight tiles, and so many blocks, or fewer that take several
        tiles = matrix("outliers", 128, 512, dtype)
        for name in ("nvfp4", "nvfp4-2d", "nvfp4-rht-sr"):
            yield from parts(*ops.quantize_both(tiles, name, random=seeded(ops.find_recipe(name))))
        for along_rows in (False, True):
            amaxes = oriented_amax(tiles, plain=True, rotated=True, along_rows=along_rows, signs=5)
            yield from (bits(amax) for amax in amaxes if amax is not None)
    sizes = torch.tensor([70, 0, 80])
    for name in ("nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-sr", "mxfp8-2d", "mxfp4-sr"):
        for columnwise in (False, True):
            grouped = ops.quantize_grouped(x, sizes, name, columnwise=columnwise, random=seeded(ops.find_recipe(name)))
            yield from parts(*grouped.sections())
    yield bits(ops.gemm_grouped(ops.quantize_grouped(x, sizes, "nvfp4"), [q] * 3, out_dtype=dtype))
    yield from (ops.swizzle(q.scales), ops.unswizzle(ops.swizzle(q.scales), tuple(q.scales.shape)))
    if dtype == torch.bfloat16:
        yield from (bits(ops.transform(matrix("outliers", 33, 384, dtype), name)) for name in ROTATED)


def parts(*some: Quantized | None) -> Iterator[torch.Tensor]:
    """Everything that kernels have written of each."""
    for q in some:
        assert q is not None
        yield from (q.codes, q.scales)
        yield from (bits(part) for part in (q.amax, q.tensor_scale) if part is not None)


@contextmanager
def workers(count: int) -> Iterator[None]:
    """Within the context so many threads run the blocks of a launch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_every_order_worker_and_grid_gives_the_same_bytes(dtype: torch.dtype) -> None:
    variations = ops.variations(CPU)
    assert list(variations) == ["forward threads", "reverse threads", "shuffled threads"]
    with workers(1):
        first = list(outputs(dtype))
    others = {**variations, "2 workers": partial(workers, 2), "5 workers": partial(workers, 5), "grid": another_grid}
    for name, context in list(others.items())[1:]:
        with context():
            assert "threads" not in name or name.startswith(host._order.get())
            for one, other in zip(first, outputs(dtype), strict=True):
                assert torch.equal(one, other), name


# A lost barrier of the project's own kernels.


TEXTS = {name: sources.text(name) for name in ("amax", "amax_blocks", "quantize_nvfp4", "quantize_mx", "gemm_mx")}


def without_barrier(name: str, which: int) -> str:
    """The text of a source of `native`, its headers put in, whose `which`-th __syncthreads() is taken out."""
    text = TEXTS[name]
    start, end = list(re.finditer(r"__syncthreads\(\);", text))[which].span()
    return text[:start] + text[end:]


@contextmanager
def lost(module: str, name: str, which: int, cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context the doors of `module` launch `name`.cu without its `which`-th barrier."""
    mutant = cuda_source(without_barrier(name, which))
    monkeypatch.setitem(sources.KERNELS, mutant, sources.KERNELS[name])  # of which some are made by macros

    def launch_mutant(source: str, *arguments: Any, **options: Any) -> None:
        if source == name:
            flags = (*options.pop("extra_flags", ()), "-O0")  # compiled sooner
            launch(mutant, *arguments, **options, extra_flags=flags)
        else:
            launch(source, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(f"narrowgauge.native.{module}.launch", launch_mutant)
        yield


def seen_in_orders(call: Callable[[bool], Iterator[torch.Tensor]]) -> set[bytes]:
    """What `call` gives in the orders of threads up to a difference, as bytes.

    Before each it has another input, which stays in shared memory.
    """
    seen = set()
    for order in host.ORDERS:
        with host.thread_order(order):
            list(call(False))
            seen.add(b"".join(part.numpy().tobytes() for part in call(True)))
        if len(seen) > 1:
            break
    return seen


def barriers(name: str) -> range:
    return range(TEXTS[name].count("__syncthreads();"))


def test_a_lost_barrier_of_amax_shows(cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4096.0)
    assert len(barriers("amax")) == 1
    with lost("quantize.amax", "amax", 0, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([ops.amax(x if real else 0 * x)]))
    assert len(seen) > 1
    assert x[-1:].numpy().tobytes() in seen


@pytest.mark.parametrize("rotated", [False, True])
def test_a_lost_barrier_of_amaxes_of_blocks_shows(
    rotated: bool, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a block's warps, and that of a tile that has come. In the shape of a GPU: fewer threads need no warps."""
    monkeypatch.setitem(TEXTS, "amax_blocks", "#define AMAX_THREADS 256\n" + TEXTS["amax_blocks"])
    monkeypatch.setitem(GENERAL_THREADS["amax_blocks"], "cpu", 256)
    assert len(barriers("amax_blocks")) == 2
    # In the last warp, on which thread 0 waits; in a row that is read by the first threads, and not copied by them.
    for which, columns, row in ((0, 64, 63), (1, 128, 1)):
        x = matrix("normal", 64, columns, torch.bfloat16)
        x[row] = 1000.0

        def call(real: bool, x: torch.Tensor = x) -> Iterator[torch.Tensor]:
            amaxes = oriented_amax(x if real else 0 * x, plain=not rotated, rotated=rotated, along_rows=True)
            return (amax for amax in amaxes if amax is not None)

        with lost("quantize.amax", "amax_blocks", which, cuda_source, monkeypatch):
            assert len(seen_in_orders(call)) > 1


# What each barrier of a quantizer stands between: a recipe that needs it, whether both halves do, and whether it is in
# the kernel of whole tiles of bfloat16.
NEEDED = [
    (0, "nvfp4", True, False),  # rows of the tile and the columns that are read of it
    (0, "nvfp4-2d", False, False),  # amaxes of the rows of a tile
    (1, "nvfp4-2d-4over6-256-mae", False, False),  # errors of the rows of a tile
    (2, "nvfp4-2d", True, False),  # amaxes of the columns of a tile
    (3, "nvfp4", True, True),  # rows of the tile and the columns that are read of it
    (3, "nvfp4-2d", False, True),  # the same of rows
    (4, "nvfp4-2d", False, True),  # amaxes of the rows of a tile
    (5, "nvfp4", True, True),  # scales of columns, and those that are stored together
    (0, "mxfp8-e4m3", True, False),
    (0, "mxfp8-2d", False, False),
    (1, "mxfp8-e4m3", True, True),  # largest magnitudes of pieces of the tile, and of its lines
    (2, "mxfp8-e4m3", True, True),  # factors, and the elements that they multiply
]


@pytest.mark.parametrize(("which", "name", "columnwise", "whole"), thinned_rows(NEEDED, 4))
def test_a_lost_barrier_of_quantize_shows(
    which: int, name: str, columnwise: bool, whole: bool, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "quantize_mx" if name in MX_NAMES else "quantize_nvfp4"
    assert {number for number, of, _, _ in NEEDED if (of in MX_NAMES) == (name in MX_NAMES)} == set(barriers(source))
    amax = None if name in MX_NAMES else (torch.tensor([8.0]),) * 2
    tiles = nearly_tied(192)  # some of which get a scale for 4
    if whole:
        tiles = torch.cat([tiles, tiles], 1).bfloat16()
    other, real = tiles[:64], tiles[-64:]

    def call(now: bool) -> Iterator[torch.Tensor]:
        halves = ops.quantize_both(real if now else other, name, columnwise=columnwise, amax=amax)
        return parts(*(half for half in halves if half is not None))

    if "4over6" in name:
        assert not columnwise, "given amaxes would make either half by itself"
    with lost(source.replace("quantize_", "quantize."), source, which, cuda_source, monkeypatch):
        assert len(seen_in_orders(call)) > 1


@pytest.mark.parametrize("which", thinned(barriers("gemm_mx"), 4))
def test_a_lost_barrier_of_gemm_shows(which: int, cuda_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other elements first, whose values stay in the tables of codes."""
    first, second = (
        [random_operand(name, 64, 128, seed=seed) for seed in (1, 2)] for name in ("mxfp8-e5m2", "mxfp8-e4m3")
    )
    with lost("gemm.gemm", "gemm_mx", which, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([ops.gemm(*(second if real else first), out_dtype=torch.float32)]))
    assert len(seen) > 1
