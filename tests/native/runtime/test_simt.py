"""The host model of a GPU: a block of threads as fibers, in each order of turns."""

from __future__ import annotations

import re

import numpy as np
import pytest

from narrowgauge.native.runtime import host
from tests.native.launching import ONE, Source, run

EVERY_ORDER = pytest.mark.parametrize("order", host.ORDERS)

# One library of all kernels, since a compilation takes longer than all launches.
TEXT = """
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

template <bool MEET> __device__ void mirror(int* out) {
    __shared__ int values[64];
    const int t = threadIdx.x;
    values[t] = -1;
    __syncthreads();
    values[t] = t;
    if (MEET) __syncthreads();
    out[t] = values[63 - t];
}
extern "C" __global__ void mirror_without(int* out) { mirror<false>(out); }
extern "C" __global__ void mirror_with(int* out) { mirror<true>(out); }

extern "C" __global__ void turns(int* out, int rounds) {
    __shared__ int turn;
    for (int i = 0; i < rounds; ++i) {
        if (threadIdx.x == 0) turn = 0;
        __syncthreads();
        out[i * blockDim.x + threadIdx.x] = turn++;
        __syncthreads();
    }
}

extern "C" __global__ void blocks(int* order, int* count) { order[(*count)++] = blockIdx.x; }

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

template <class T> __device__ void shuffle(const T* x, T* out, int lanes) {
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, x[threadIdx.x], lanes);
}
extern "C" __global__ void shuffle1(const unsigned char* x, unsigned char* out, int lanes) { shuffle(x, out, lanes); }
extern "C" __global__ void shuffle4(const float* x, float* out, int lanes) { shuffle(x, out, lanes); }
extern "C" __global__ void shuffle8(const double* x, double* out, int lanes) { shuffle(x, out, lanes); }

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

extern "C" __global__ void maximum(const unsigned* x, unsigned* out, unsigned* before) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    before[i] = atomicMax(out, x[i]);
}

extern "C" __global__ void stuck(int* out, int block) {
    const int t = threadIdx.x;
    if (blockIdx.x == block && t < 16) __syncthreads();
    out[blockIdx.x * blockDim.x + t] = __shfl_xor_sync(0xFFFFFFFFu, t, 1);
    if (blockIdx.x != block || t >= 16) __syncthreads();
}
"""

# Indices.


@EVERY_ORDER
def test_every_thread_runs_once_and_knows_its_indices(cuda_source: Source, order: str) -> None:
    grid, block = (2, 3, 4), (3, 5, 2)
    out = np.zeros((4, 3, 2, 2, 5, 3, 12), np.uint32)
    with host.thread_order(order):
        run(cuda_source(TEXT), "indices", grid, block, out)
    bz, by, bx, tz, ty, tx = np.indices(out.shape[:-1])
    sizes = [np.full_like(bx, size) for size in (*grid, *block)]
    np.testing.assert_array_equal(out, np.stack([bx, by, bz, tx, ty, tz, *sizes], axis=-1))


# Shared memory and barriers.


@EVERY_ORDER
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_block_sums_in_shared_memory_in_any_order(cuda_source: Source, order: str, workers: int) -> None:
    x = np.random.default_rng(1).integers(-1000, 1000, (37, 256), dtype=np.int32)
    out = np.zeros(37, np.int32)
    with host.thread_order(order):
        run(cuda_source(TEXT), "sum", (37, 1, 1), (256, 1, 1), x, out, workers=workers)
    np.testing.assert_array_equal(out, x.sum(axis=1))


def mirrored(source: str, order: str, kernel: str) -> list[int]:
    out = np.full(64, -2, np.int32)
    with host.thread_order(order):
        run(source, kernel, ONE, (64, 1, 1), out)
    return out.tolist()


def test_a_missing_barrier_gives_other_bytes_in_each_order(cuda_source: Source) -> None:
    source = cuda_source(TEXT)
    forward, reverse, shuffled = (mirrored(source, order, "mirror_without") for order in host.ORDERS)
    assert forward == [-1] * 32 + list(range(31, -1, -1))
    assert reverse == list(range(63, 31, -1)) + [-1] * 32
    assert shuffled not in (forward, reverse)
    assert {-1} < set(shuffled)


@EVERY_ORDER
def test_with_the_barrier_every_order_gives_the_same_bytes(cuda_source: Source, order: str) -> None:
    assert mirrored(cuda_source(TEXT), order, "mirror_with") == list(range(63, -1, -1))


def test_threads_take_turns_as_the_order_says(cuda_source: Source) -> None:
    """A shuffled order changes after each barrier."""
    turns = {order: np.zeros((3, 50), np.int32) for order in host.ORDERS}
    for order, out in turns.items():
        with host.thread_order(order):
            run(cuda_source(TEXT), "turns", ONE, (50, 1, 1), out, np.int32(3))
    assert (turns["forward"] == np.arange(50)).all()
    assert (turns["reverse"] == np.arange(49, -1, -1)).all()
    assert (np.sort(turns["shuffled"], axis=1) == np.arange(50)).all()
    assert len({tuple(row) for row in turns["shuffled"]}) == 3


@pytest.mark.parametrize("count", [1, 2, 3, 6, 30, 97])
def test_blocks_take_turns_as_the_order_says(cuda_source: Source, count: int) -> None:
    seen = {}
    for order in host.ORDERS:
        out = np.zeros(count, np.int32)
        with host.thread_order(order):
            run(cuda_source(TEXT), "blocks", (count, 1, 1), ONE, out, np.zeros(1, np.int32))
        seen[order] = out.tolist()
    assert seen["forward"] == list(range(count))
    assert seen["reverse"] == list(range(count - 1, -1, -1))
    assert sorted(seen["shuffled"]) == list(range(count))
    if count > 2:
        assert seen["shuffled"] not in (seen["forward"], seen["reverse"])


@EVERY_ORDER
@pytest.mark.parametrize("stay", [1, 31, 48, 96])
def test_a_barrier_does_not_wait_for_threads_that_have_returned(cuda_source: Source, order: str, stay: int) -> None:
    out = np.zeros(96, np.int32)
    with host.thread_order(order):
        run(cuda_source(TEXT), "leaving", ONE, (96, 1, 1), out, np.int32(stay))
    expected = np.zeros(96, np.int32)
    expected[:stay] = np.arange(stay)[::-1]
    expected[:stay:2] -= 1000
    np.testing.assert_array_equal(out, expected)


# Exchanges between the lanes of a warp.


@EVERY_ORDER
@pytest.mark.parametrize(("kernel", "dtype"), [("shuffle1", "u1"), ("shuffle4", "u4"), ("shuffle8", "u8")])
@pytest.mark.parametrize("threads", [32, 128, 40])
def test_a_lane_gets_the_value_of_its_partner(
    cuda_source: Source, order: str, kernel: str, dtype: str, threads: int
) -> None:
    """Also in the last warp of 40 threads, with 8 lanes; every bit pattern passes, also NaN."""
    x = np.frombuffer(np.random.default_rng(2).bytes(threads * np.dtype(dtype).itemsize), dtype)
    for lanes in [1, 2, 3, 4, 7] + ([8, 16, 31] if threads % 32 == 0 else []):
        out = np.zeros_like(x)
        with host.thread_order(order):
            run(cuda_source(TEXT), kernel, ONE, (threads, 1, 1), x, out, np.int32(lanes))
        np.testing.assert_array_equal(out, x[np.arange(threads) ^ lanes])


# Atomics.


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_atomic_max_keeps_the_largest_of_all_blocks(cuda_source: Source, workers: int) -> None:
    """The values increase, so concurrent blocks conflict at nearly every step."""
    x = np.arange(1, 512 * 256 + 1, dtype=np.uint32) + np.uint32(2**31)
    out, before = np.zeros(1, np.uint32), np.zeros_like(x)
    run(cuda_source(TEXT), "maximum", (512, 1, 1), (256, 1, 1), x, out, before, workers=workers)
    assert out[0] == x[-1]
    replaced = before[before < x]
    assert len(np.unique(replaced)) == len(replaced), "no value is replaced twice"
    if workers == 1:
        np.testing.assert_array_equal(before[1:], x[:-1])


# Deadlocks.


@EVERY_ORDER
@pytest.mark.parametrize("workers", [1, 3])
def test_threads_that_wait_forever_are_an_error_with_their_block(cuda_source: Source, order: str, workers: int) -> None:
    """Half a warp waits at the barrier, the other half for the first one's values. Every thread holds a stack."""
    source, out = cuda_source(TEXT), np.zeros((5, 1024), np.int32)
    message = "kernel stuck: the threads of block 3 of grid (5, 1, 1) wait for each other forever"
    with host.thread_order(order):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=re.escape(message)):
                run(source, "stuck", (5, 1, 1), (1024, 1, 1), out, np.int32(3), workers=workers)
            out[:] = -1
            run(source, "stuck", (5, 1, 1), (1024, 1, 1), out, np.int32(-1), workers=workers)
            assert (out == np.arange(1024) ^ 1).all()
