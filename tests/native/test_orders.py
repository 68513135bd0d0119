"""The threads of a block in every order, and on any number of workers, give the same bytes: tolerance.md, rule 5."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch

from native import host, ops
from tests.golden import bits
from tests.native.launching import ONE, Source, run
from tests.native.samples import DTYPES, RECIPES, matrix

CPU = torch.device("cpu")


def outputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """What every door gives, in several tiles, blocks of threads and steps of K, with tails."""
    x = matrix("outliers", 150, 301, dtype)
    q = ops.quantize(x, RECIPES["te"])
    yield from (bits(ops.amax(x)), bits(ops.amax(matrix("normal", 1, 300_001, dtype))), q.codes, q.scales, bits(q.amax))
    yield bits(ops.dequantize(q, dtype))
    yield bits(ops.gemm(q, q, out_dtype=dtype, c=matrix("normal", 150, 150, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_every_variation_of_a_cpu_gives_the_same_bytes(dtype: torch.dtype) -> None:
    variations = ops.variations(CPU)
    assert list(variations) == ["forward threads", "reverse threads", "shuffled threads"]
    results = {}
    for name, context in variations.items():
        with context():
            assert name.startswith(host._order.get())
            results[name] = list(outputs(dtype))
    for one, other in combinations(results, 2):
        for left, right in zip(results[one], results[other], strict=True):
            assert torch.equal(left, right), (one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_any_number_of_workers_gives_the_same_bytes(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(list(outputs(dtype)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert torch.equal(left, right)


# A lost barrier of the project's own kernels.


def without_barrier(name: str, which: int) -> str:
    """The text of a source of `native` whose `which`-th __syncthreads() is taken out."""
    text = (host.FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    start, end = list(re.finditer(r"__syncthreads\(\);", text))[which].span()
    return text[:start] + text[end:]


def test_a_lost_barrier_of_amax_shows(cuda_source: Source) -> None:
    source = cuda_source(without_barrier("amax", 0))
    zeros, x = np.zeros(4096, np.float32), np.arange(4096, dtype=np.float32)
    seen = set()
    for order in host.ORDERS:
        out = np.zeros(1, np.float32)
        with host.thread_order(order):
            for given in (zeros, x):  # zeros first: shared memory keeps what the last block left
                run(source, "amax_fp32", ONE, (256, 1, 1), given, out, np.int64(4096), np.int32(0))
        seen.add(out.item())
    assert len(seen) > 1
    assert 4095.0 in seen


@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_barrier_of_gemm_shows(cuda_source: Source, which: int) -> None:
    source = cuda_source(without_barrier("gemm_nvfp4", which))
    a, b = (ops.quantize(matrix("normal", 64, 128, torch.float32, seed=seed), "nvfp4") for seed in (1, 2))
    parts = [part.numpy() for q in (a, b) for part in (q.codes, q.scales, q.amax)]
    sizes = [np.int64(64), np.int64(64), np.int64(128)]
    seen = set()
    for order in host.ORDERS:
        out = np.zeros((64, 64), np.float32)
        with host.thread_order(order):
            run(
                source, "gemm_nvfp4", ONE, (64, 1, 1),
                *parts, np.uintp(0), np.uintp(0), out, *sizes, *[np.int32(0)] * 4,
            )  # fmt: skip
        seen.add(out.tobytes())
    assert len(seen) > 1
