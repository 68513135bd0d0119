"""The host model of a GPU: a block of threads as fibers, in each order of turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from native import host, sources
from native.sources import ToolchainError

Source = Callable[[str], str]
EVERY_ORDER = pytest.mark.parametrize("order", host.ORDERS)
ONE = (1, 1, 1)


def run(
    source: str, kernel: str, grid: Sequence[int], block: Sequence[int], *arguments: object, **options: object
) -> None:
    """Launches with arrays in place of their addresses."""
    plain = [np.uintp(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
    host.launch(source, kernel, grid, block, plain, **{"workers": 1, **options})


# Indices.

INDICES = """
extern "C" __global__ void indices(unsigned* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned* mine = out + 12 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
    const uint3 all[4] = {blockIdx, threadIdx, gridDim, blockDim};
    for (int i = 0; i < 4; ++i) {
        mine[3 * i] += all[i].x;
        mine[3 * i + 1] += all[i].y;
        mine[3 * i + 2] += all[i].z;
    }
}
"""


@EVERY_ORDER
def test_every_thread_runs_once_and_knows_where_it_is_in_three_dimensions(cuda_source: Source, order: str) -> None:
    grid, block = (2, 3, 4), (3, 5, 2)
    out = np.zeros((4, 3, 2, 2, 5, 3, 12), np.uint32)
    with host.thread_order(order):
        run(cuda_source(INDICES), "indices", grid, block, out)
    bz, by, bx, tz, ty, tx = np.indices(out.shape[:-1])
    sizes = [np.full_like(bx, size) for size in (*grid, *block)]
    np.testing.assert_array_equal(out, np.stack([bx, by, bz, tx, ty, tz, *sizes], axis=-1))


# Shared memory and barriers.

SUM = """
extern "C" __global__ void sum(const int* x, int* out) {
    __shared__ int part[256];
    const unsigned t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    for (unsigned half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) out[blockIdx.x] = part[0];
}
"""


@EVERY_ORDER
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_block_sums_in_shared_memory_whatever_the_order_and_however_many_run_at_once(
    cuda_source: Source, order: str, workers: int
) -> None:
    x = np.random.default_rng(1).integers(-1000, 1000, (37, 256), dtype=np.int32)
    out = np.zeros(37, np.int32)
    with host.thread_order(order):
        run(cuda_source(SUM), "sum", (37, 1, 1), (256, 1, 1), x, out, workers=workers)
    np.testing.assert_array_equal(out, x.sum(axis=1))


MIRROR = """
#ifndef BARRIER
#define BARRIER
#endif
extern "C" __global__ void mirror(int* out) {
    __shared__ int values[64];
    const int t = threadIdx.x;
    values[t] = -1;
    __syncthreads();
    values[t] = t;
    BARRIER
    out[t] = values[63 - t];
}
"""


def mirrored(source: str, order: str, *flags: str) -> list[int]:
    out = np.full(64, -2, np.int32)
    with host.thread_order(order):
        run(source, "mirror", ONE, (64, 1, 1), out, extra_flags=flags)
    return out.tolist()


def test_a_missing_barrier_gives_other_bytes_in_each_order(cuda_source: Source) -> None:
    source = cuda_source(MIRROR)
    forward, reverse, shuffled = (mirrored(source, order) for order in host.ORDERS)
    assert forward == [-1] * 32 + list(range(31, -1, -1))
    assert reverse == list(range(63, 31, -1)) + [-1] * 32
    assert shuffled not in (forward, reverse)
    assert {-1} < set(shuffled)


@EVERY_ORDER
def test_with_the_barrier_every_order_gives_the_same_bytes(cuda_source: Source, order: str) -> None:
    assert mirrored(cuda_source(MIRROR), order, "-DBARRIER=__syncthreads();") == list(range(63, -1, -1))


TURNS = """
extern "C" __global__ void turns(int* out, int rounds) {
    __shared__ int turn;
    for (int i = 0; i < rounds; ++i) {
        if (threadIdx.x == 0) turn = 0;
        __syncthreads();
        out[i * blockDim.x + threadIdx.x] = turn++;
        __syncthreads();
    }
}
"""


def test_threads_take_turns_as_the_order_says_and_shuffled_ones_differently_after_each_barrier(
    cuda_source: Source,
) -> None:
    turns = {order: np.zeros((3, 50), np.int32) for order in host.ORDERS}
    for order, out in turns.items():
        with host.thread_order(order):
            run(cuda_source(TURNS), "turns", ONE, (50, 1, 1), out, np.int32(3))
    assert (turns["forward"] == np.arange(50)).all()
    assert (turns["reverse"] == np.arange(49, -1, -1)).all()
    assert (np.sort(turns["shuffled"], axis=1) == np.arange(50)).all()
    assert len({tuple(row) for row in turns["shuffled"]}) == 3


BLOCKS = """
extern "C" __global__ void blocks(int* order, int* count) { order[(*count)++] = blockIdx.x; }
"""


@pytest.mark.parametrize("count", [1, 2, 3, 6, 30, 97])
def test_blocks_take_turns_as_the_order_says(cuda_source: Source, count: int) -> None:
    seen = {}
    for order in host.ORDERS:
        out = np.zeros(count, np.int32)
        with host.thread_order(order):
            run(cuda_source(BLOCKS), "blocks", (count, 1, 1), ONE, out, np.zeros(1, np.int32))
        seen[order] = out.tolist()
    assert seen["forward"] == list(range(count))
    assert seen["reverse"] == list(range(count - 1, -1, -1))
    assert sorted(seen["shuffled"]) == list(range(count))
    if count > 2:
        assert seen["shuffled"] not in (seen["forward"], seen["reverse"])


LEAVING = """
extern "C" __global__ void leaving(int* out, int stay) {
    __shared__ int values[96];
    const int t = threadIdx.x;
    values[t] = t;
    if (t >= stay) return;
    __syncthreads();
    out[t] = values[stay - 1 - t];
    __syncthreads();
    values[t] = -1;
    if (t % 2) return;
    __syncthreads();
    out[t] += 1000 * values[stay - 1 - t];
}
"""


@EVERY_ORDER
@pytest.mark.parametrize("stay", [1, 31, 48, 96])
def test_a_barrier_does_not_wait_for_threads_that_have_returned(cuda_source: Source, order: str, stay: int) -> None:
    out = np.zeros(96, np.int32)
    with host.thread_order(order):
        run(cuda_source(LEAVING), "leaving", ONE, (96, 1, 1), out, np.int32(stay))
    expected = np.zeros(96, np.int32)
    expected[:stay] = np.arange(stay)[::-1]
    expected[:stay:2] -= 1000
    np.testing.assert_array_equal(out, expected)


# Exchanges between the lanes of a warp.

SHUFFLE = """
template <class T> __device__ void shuffle(const T* x, T* out, int lanes) {
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, x[threadIdx.x], lanes);
}
extern "C" __global__ void shuffle1(const unsigned char* x, unsigned char* out, int lanes) { shuffle(x, out, lanes); }
extern "C" __global__ void shuffle4(const float* x, float* out, int lanes) { shuffle(x, out, lanes); }
extern "C" __global__ void shuffle8(const double* x, double* out, int lanes) { shuffle(x, out, lanes); }
"""


@EVERY_ORDER
@pytest.mark.parametrize(("kernel", "dtype"), [("shuffle1", "u1"), ("shuffle4", "u4"), ("shuffle8", "u8")])
@pytest.mark.parametrize("threads", [32, 128, 40])
def test_a_lane_gets_the_value_of_its_partner(
    cuda_source: Source, order: str, kernel: str, dtype: str, threads: int
) -> None:
    """Also in the last warp of 40 threads, which has 8 lanes; every bit pattern passes, NaN among them."""
    x = np.frombuffer(np.random.default_rng(2).bytes(threads * np.dtype(dtype).itemsize), dtype)
    for lanes in [1, 2, 3, 4, 7] + ([8, 16, 31] if threads % 32 == 0 else []):
        out = np.zeros_like(x)
        with host.thread_order(order):
            run(cuda_source(SHUFFLE), kernel, ONE, (threads, 1, 1), x, out, np.int32(lanes))
        np.testing.assert_array_equal(out, x[np.arange(threads) ^ lanes])


PREFIX = """
extern "C" __global__ void rounds(const int* x, int* out) {
    const int t = threadIdx.x;
    int value = x[t], mixed = 0;
    for (int round = 0; round < 7; ++round) {
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            value = 3 * value + __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
            if (lanes == 4) __syncthreads();
        }
        mixed ^= value;
    }
    out[t] = mixed;
}
"""


@EVERY_ORDER
def test_exchanges_follow_each_other(cuda_source: Source, order: str) -> None:
    x = np.random.default_rng(3).integers(-1000, 1000, 96, dtype=np.int32)
    out = np.zeros_like(x)
    with host.thread_order(order):
        run(cuda_source(PREFIX), "rounds", ONE, (96, 1, 1), x, out)
    value, mixed = x.copy(), np.zeros_like(x)
    for _ in range(7):
        for lanes in (1, 2, 4, 8, 16):
            value = 3 * value + value[np.arange(96) ^ lanes]
        mixed ^= value
    np.testing.assert_array_equal(out, mixed)


HALVES = """
extern "C" __global__ void halves(const int* x, int* out) {
    const int t = threadIdx.x;
    int value = x[t];
    if (t % 32 < 16)
        for (int lanes = 1; lanes < 8; lanes *= 2) value += __shfl_xor_sync(0x0000FFFFu, value, lanes);
    out[t] = __shfl_xor_sync(0xFFFFFFFFu, value, 16);
}
"""


@EVERY_ORDER
def test_half_a_warp_exchanges_alone_while_the_other_half_waits_for_the_next_exchange(
    cuda_source: Source, order: str
) -> None:
    x = np.random.default_rng(4).integers(-1000, 1000, 64, dtype=np.int32)
    out = np.zeros_like(x)
    with host.thread_order(order):
        run(cuda_source(HALVES), "halves", ONE, (64, 1, 1), x, out)
    halves = x.reshape(2, 2, 2, 8).copy()
    halves[:, 0] = halves[:, 0].sum(axis=2, keepdims=True)
    np.testing.assert_array_equal(out, halves[:, ::-1].ravel())


# Atomics.

MAXIMUM = """
extern "C" __global__ void maximum(const unsigned* x, unsigned* out, unsigned* before) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    before[i] = atomicMax(out, x[i]);
}
"""


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_atomic_max_keeps_the_largest_of_all_blocks(cuda_source: Source, workers: int) -> None:
    x = np.random.default_rng(5).integers(0, 2**32, 64 * 128, dtype=np.uint32)
    out, before = np.zeros(1, np.uint32), np.zeros_like(x)
    run(cuda_source(MAXIMUM), "maximum", (64, 1, 1), (128, 1, 1), x, out, before, workers=workers)
    assert out[0] == x.max()
    if workers == 1:
        np.testing.assert_array_equal(before[1:], np.maximum.accumulate(x)[:-1])
    assert before[0] == 0 or workers > 1


# Threads that wait for each other forever.

STUCK = """
extern "C" __global__ void stuck(int* out, int block) {
    const int t = threadIdx.x;
    if (blockIdx.x == block && t < 16) __syncthreads();
    out[blockIdx.x * 32 + t] = __shfl_xor_sync(0xFFFFFFFFu, t, 1);
    if (blockIdx.x != block || t >= 16) __syncthreads();
}
"""


@EVERY_ORDER
@pytest.mark.parametrize("workers", [1, 3])
def test_threads_that_wait_forever_are_an_error_with_their_block_and_leave_the_toolchain_usable(
    cuda_source: Source, order: str, workers: int
) -> None:
    source, out = cuda_source(STUCK), np.zeros((5, 32), np.int32)
    message = "kernel stuck: the threads of block 3 of grid (5, 1, 1) wait for each other forever"
    with host.thread_order(order):
        for _ in range(3):
            with pytest.raises(RuntimeError, match=re.escape(message)):
                run(source, "stuck", (5, 1, 1), (32, 1, 1), out, np.int32(3), workers=workers)
            run(source, "stuck", (5, 1, 1), (32, 1, 1), out, np.int32(-1), workers=workers)
            assert (out == np.arange(32) ^ 1).all()


# Both ways to switch stacks.

MIXED = """
extern "C" __global__ void mixed(const float* x, float* out) {
    __shared__ float values[128];
    const int t = threadIdx.x;
    double sum = x[blockIdx.x * 128 + t];
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += 1.5 * __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    values[t] = static_cast<float>(sum);
    __syncthreads();
    out[blockIdx.x * 128 + t] = values[127 - t] / 3.0f;
}
"""


@EVERY_ORDER
def test_the_portable_switch_of_stacks_gives_the_same_bytes(cuda_source: Source, order: str) -> None:
    x = np.random.default_rng(6).standard_normal(9 * 128, np.float32)
    outs = []
    for flags in ((), ("-DSIMT_UCONTEXT",)):
        outs.append(np.zeros_like(x))
        with host.thread_order(order):
            run(cuda_source(MIXED), "mixed", (9, 1, 1), (128, 1, 1), x, outs[-1], workers=2, extra_flags=flags)
    assert outs[0].any()
    assert outs[0].tobytes() == outs[1].tobytes()


# Arithmetic.

HALVED = """
extern "C" __global__ void halved(const float* x, float* out) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    __syncthreads();
    out[i] = x[i] * 0.5f;
}
"""


@pytest.fixture
def flush_to_zero() -> object:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers to zero")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flush_to_zero")
@pytest.mark.parametrize("flags", [(), ("-DSIMT_UCONTEXT",)])
@pytest.mark.parametrize("workers", [1, 3])
def test_subnormal_numbers_are_kept_where_the_caller_flushes_them(
    cuda_source: Source, workers: int, flags: tuple[str, ...]
) -> None:
    bits = np.arange(2, 2 + 2 * 256, 2, dtype=np.uint32)
    out = np.zeros_like(bits)
    run(cuda_source(HALVED), "halved", (8, 1, 1), (32, 1, 1), bits, out, workers=workers, extra_flags=flags)
    np.testing.assert_array_equal(out, bits // 2)
    assert not (bits.view(np.float32) * np.float32(0.5)).any(), "and the caller flushes still"


# What is refused.


@pytest.mark.parametrize("arguments", [[], [np.uintp(0)], [np.uintp(0)] * 3])
def test_a_wrong_number_of_arguments_is_refused(cuda_source: Source, arguments: list[np.generic]) -> None:
    message = f"kernel halved has 2 parameters, but {len(arguments)} arguments were given"
    with pytest.raises(TypeError, match=message):
        run(cuda_source(HALVED), "halved", ONE, ONE, *arguments)


@pytest.mark.parametrize("block", [(1025, 1, 1), (32, 33, 1), (1, 1, 2000), (0, 1, 1)])
def test_a_block_that_no_gpu_runs_is_refused(cuda_source: Source, block: tuple[int, int, int]) -> None:
    out = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=re.escape(f"kernel halved: a block has 1 to 1024 threads, not {block}")):
        run(cuda_source(HALVED), "halved", ONE, block, out, out)


def test_an_order_that_does_not_exist_is_refused_and_the_last_one_stays() -> None:
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


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words_file_and_line(
    cuda_source: Source, folder: object
) -> None:
    (folder / "first.cuh").write_text('// a comment\n#pragma once\n#include "second.cuh"\nusing first = int;\n')
    (folder / "second.cuh").write_text("#pragma once\nusing second = int;\n\n\n")
    source = cuda_source(BROKEN)
    with pytest.raises(ToolchainError, match=rf"{source}\.cu:5:.*undeclared_name") as caught:
        host.library(source)
    assert str(caught.value).startswith(f"{source}.cu does not compile: ")


def test_a_mistake_in_a_header_is_named_by_the_headers_file_and_line(cuda_source: Source, folder: object) -> None:
    (folder / "first.cuh").write_text('#pragma once\n#include "second.cuh"\nusing first = nonsense;\n')
    (folder / "second.cuh").write_text("#pragma once\nusing second = rubbish;\n")
    with pytest.raises(ToolchainError) as caught:
        host.library(cuda_source("\n\n" + BROKEN))
    for where in (r"first\.cuh:3:.*nonsense", r"second\.cuh:2:.*rubbish", r"\.cu:7:.*undeclared_name"):
        assert re.search(where, str(caught.value))


def test_what_the_host_model_refuses_is_named_by_its_own_line(cuda_source: Source) -> None:
    text = "struct wide { long long a[2]; };\n" + SHUFFLE.replace("const float* x, float* out", "wide* x, wide* out")
    lines = (host.FOLDER / "simt.h").read_text().splitlines()
    at = 1 + next(i for i, line in enumerate(lines) if "a lane exchanges up to eight bytes" in line)
    with pytest.raises(ToolchainError, match=rf"simt\.h:{at}:.*a lane exchanges up to eight bytes"):
        host.library(cuda_source(text))


# A lost barrier of the project's own kernels.


def without_barrier(source: str, which: int) -> str:
    """The text of a kernel source with its `which`-th __syncthreads() taken out."""
    pieces = (host.FOLDER / f"{source}.cu").read_text().split("__syncthreads();")
    assert len(pieces) > which + 1
    return "__syncthreads();".join(pieces[: which + 1]) + "".join(pieces[which + 1 : which + 2]) + "".join(
        "__syncthreads();" + piece for piece in pieces[which + 2 :]
    )


def test_sources_are_restored_after_a_test() -> None:
    assert sources.FOLDER == host.FOLDER
