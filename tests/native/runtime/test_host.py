"""The host toolchain: several libraries in a process, arithmetic, and errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.native.runtime import host
from narrowgauge.native.runtime.sources import ToolchainError
from tests.native.launching import ARITHMETIC, ONE, Source, arithmetic, run

EVERY_ORDER = pytest.mark.parametrize("order", host.ORDERS)

# Two libraries in one process.

KEPT = """
template <class T> __device__ void kept(T* out, int write) {
    __shared__ T values[COUNT];
    const int t = threadIdx.x;
    if (write) values[t] = t + COUNT;
    __syncthreads();
    out[t] = values[t];
}
extern "C" __global__ void keep(int* out, int write) { kept(out, write); }
"""


def test_kernels_of_one_name_do_not_share_their_shared_memory(cuda_source: Source) -> None:
    source, out = cuda_source(KEPT), np.zeros(64, np.int32)
    run(source, "keep", ONE, (64, 1, 1), out, np.int32(1), flags=("-DCOUNT=64",))
    assert out[0] == 64
    run(source, "keep", ONE, (64, 1, 1), out, np.int32(0), flags=("-DCOUNT=100",))
    assert not out.any(), "what the first one wrote"


# Both ways to switch stacks, and both to start threads.

TEXT = (
    ARITHMETIC
    + """
extern "C" __global__ void mixed(const float* x, float* out) {
    __shared__ float values[128];
    const int t = threadIdx.x;
    double sum = x[blockIdx.x * 128 + t];
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += 1.5 * __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    values[t] = static_cast<float>(sum);
    __syncthreads();
    out[blockIdx.x * 128 + t] = values[127 - t] / 3.0f;
}
extern "C" __global__ void halved(const float* x, float* out) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    __syncthreads();
    out[i] = x[i] * 0.5f;
}
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
extern "C" __global__ void meet(unsigned* arrived, unsigned* threads) {  // blocks that wait for each other
    threads[blockIdx.x] = syscall(SYS_gettid);
    __atomic_fetch_add(arrived, 1u, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(arrived, __ATOMIC_SEQ_CST) < gridDim.x) {
    }
}
#endif
"""
)


@pytest.mark.long
@EVERY_ORDER
def test_the_portable_forms_give_the_same_bytes(cuda_source: Source, order: str) -> None:
    x = np.random.default_rng(6).standard_normal(9 * 128, np.float32)
    outs = []
    for flags in ((), ("-DSIMT_UCONTEXT",), ("-fno-openmp",)):
        outs.append(np.zeros_like(x))
        with host.thread_order(order):
            run(cuda_source(TEXT), "mixed", (9, 1, 1), (128, 1, 1), x, outs[-1], workers=2, flags=flags)
    assert outs[0].any()
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)


def threads_of_launches(source: str, workers: int, flags: tuple[str, ...]) -> list[set[int]]:
    """The OS threads on which as many blocks ran, of three launches."""
    found = []
    for _ in range(3):
        arrived, threads = np.zeros(1, np.uint32), np.zeros(workers, np.uint32)
        run(source, "meet", (workers, 1, 1), ONE, arrived, threads, workers=workers, flags=flags)
        found.append(set(threads.tolist()))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the number of an OS thread is asked of Linux")
def test_launches_run_on_the_same_threads_with_openmp(cuda_source: Source) -> None:
    if host.is_clang():
        pytest.skip("kernels are compiled without OpenMP where the compiler is Clang")
    launches = threads_of_launches(cuda_source(TEXT), 3, ())
    assert [len(threads) for threads in launches] == [3, 3, 3]
    assert launches[0] == launches[1] == launches[2]
    apart = threads_of_launches(cuda_source(TEXT), 3, ("-fno-openmp",))
    assert [len(threads) for threads in apart] == [3, 3, 3]
    assert all(len(threads & launches[0]) == 1 for threads in apart), "all but the caller's are new"


# Arithmetic.


@pytest.mark.parametrize("kernel", ["multiply_add", "divide"])
def test_every_operation_rounds_by_itself(cuda_source: Source, kernel: str) -> None:
    x, expected = arithmetic(kernel)
    out = np.zeros_like(expected)
    run(cuda_source(TEXT), kernel, (79, 1, 1), (256, 1, 1), x, out, np.int32(len(out)))
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.fixture
def flush_to_zero() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers to zero")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flush_to_zero")
@pytest.mark.parametrize("flags", [(), ("-DSIMT_UCONTEXT",)])
@pytest.mark.parametrize("workers", [1, 3])
def test_subnormal_numbers_are_kept_if_the_caller_flushes_them(
    cuda_source: Source, workers: int, flags: tuple[str, ...]
) -> None:
    bits = np.arange(2, 2 + 2 * 256, 2, dtype=np.uint32)
    out = np.zeros_like(bits)
    run(cuda_source(TEXT), "halved", (8, 1, 1), (32, 1, 1), bits, out, workers=workers, flags=flags)
    np.testing.assert_array_equal(out, bits // 2)
    assert not (bits.view(np.float32) * np.float32(0.5)).any(), "and the caller flushes still"


@pytest.mark.parametrize("arguments", [[], [np.uintp(0)], [np.uintp(0)] * 3])
def test_a_wrong_number_of_arguments_is_refused(cuda_source: Source, arguments: list[np.generic]) -> None:
    message = f"kernel halved has 2 parameters, but {len(arguments)} arguments were given"
    with pytest.raises(TypeError, match=message):
        run(cuda_source(TEXT), "halved", ONE, ONE, *arguments)


@pytest.mark.parametrize("block", [(1025, 1, 1), (32, 33, 1), (1, 1, 2000), (0, 1, 1)])
def test_a_block_that_no_gpu_runs_is_refused(cuda_source: Source, block: tuple[int, int, int]) -> None:
    out = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=re.escape(f"kernel halved: a block has 1 to 1024 threads, not {block}")):
        run(cuda_source(TEXT), "halved", ONE, block, out, out)


# What is refused.


def test_an_unknown_order_is_refused_and_the_last_one_stays() -> None:
    with host.thread_order("reverse"):
        with pytest.raises(ValueError, match="threads can run forward, reverse, shuffled, not 'backward'"):
            host.thread_order("backward").__enter__()
        assert host._order.get() == "reverse"
    assert host._order.get() == "forward"


BROKEN = """#include "first.cuh"
#include "second.cuh"

extern "C" __global__ void broken(float* out) {
    out[0] = undeclared_name;
}
"""


def test_a_mistake_in_a_kernel_is_named_by_file_and_line(cuda_source: Source, folder: Path) -> None:
    (folder / "first.cuh").write_text('// a comment\n#pragma once\n#include "second.cuh"\nusing first = int;\n')
    (folder / "second.cuh").write_text("#pragma once\nusing second = int;\n\n\n")
    source = cuda_source(BROKEN)
    with pytest.raises(ToolchainError, match=rf"{source}\.cu:5:.*undeclared_name") as caught:
        host.library(source)
    assert str(caught.value).startswith(f"{source}.cu does not compile: ")
