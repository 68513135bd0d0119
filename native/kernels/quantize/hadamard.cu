// hadamard: rotates groups of 2 to 128 elements along K.
//
//   x    (M, K) bfloat16, any strides; K is a multiple of the group
//   out  (M, K) bfloat16, contiguous
//   Launch: 256 threads in a block, a thread for every 16 * BLOCKS_PER_THREAD elements. Up to 8 lanes share a larger group.
//   BLOCKS_PER_THREAD is 1, on a CPU 8: a thread then has whole groups and never waits.
//   Numerics: docs/numerics.md#hadamard-transform. The factor c is a bfloat16 number: products x * (+-c) are exact in
//   float32. The order of summation is declared: stages 1, 2, 4 ... group/2; stage h adds and subtracts elements h apart, every
//   addition rounds to float32. One rounding to bfloat16, nearest even. Exact to the bit in this order.

#include "common/blocks.cuh"
#include "common/hadamard.cuh"

namespace narrowgauge {

#ifndef HADAMARD_BLOCKS_PER_THREAD
#ifdef __CUDA_ARCH__
#define HADAMARD_BLOCKS_PER_THREAD 1
#else
#define HADAMARD_BLOCKS_PER_THREAD 8
#endif
#endif

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_THREAD = HADAMARD_BLOCKS_PER_THREAD;

struct Group {
    float elements[16];
};

// The group of lane `own lane ^ lane_mask`. A CPU exchanges the whole group in one switch of threads.
__device__ __forceinline__ Group shuffle_group_xor(const Group& group, int lane_mask) {
#ifdef __CUDA_ARCH__
    Group received;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        received.elements[i] = __shfl_xor_sync(0xFFFFFFFFu, group.elements[i], lane_mask);
    }
    return received;
#else
    return simt::exchange(0xFFFFFFFFu, group, static_cast<unsigned>(lane_mask));
#endif
}

// Up to 16 elements of a row; none if the block lies outside the matrix.
struct BlockPosition {
    i64 row, column;
    int count;
};

__device__ __forceinline__ BlockPosition block_position(int n, i64 rows, i64 columns) {
    const i64 blocks = (columns + 15) / 16;
    const i64 index = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * BLOCKS_PER_THREAD + n;
    if (index >= rows * blocks) return {0, 0, 0};
    const i64 row = quotient(index, blocks), column = (index - row * blocks) * 16;
    return {row, column, valid_count<16>(columns - column)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hadamard(const bf16* x, bf16* out, i64 rows, i64 columns, i64 row_stride, i64 column_stride, int group, int signs,
             float c) {
    const int period = group < 16 ? group : 16;
    Group groups[BLOCKS_PER_THREAD];
    BlockPosition positions[BLOCKS_PER_THREAD];
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {  // no thread returns before the shuffles of its warp
        const BlockPosition position = positions[n] = block_position(n, rows, columns);
        float(&v)[16] = groups[n].elements;
        load_block(x + position.row * row_stride + position.column * column_stride, column_stride, position.count, v);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] *= (signs >> (i & (period - 1)) & 1) != 0 ? -c : c;
        butterfly(v, group / 2);
    }
    for (int apart = 1; apart < group / 16; apart *= 2) {
#pragma unroll
        for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
            if (apart >= BLOCKS_PER_THREAD) {
                const int lane_mask = apart / BLOCKS_PER_THREAD;
                const bool upper = (threadIdx.x & lane_mask) != 0;
                const Group received = shuffle_group_xor(groups[n], lane_mask);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    groups[n].elements[i] = upper ? received.elements[i] - groups[n].elements[i]
                                                  : groups[n].elements[i] + received.elements[i];
                }
            } else if ((n & apart) == 0) {
                const Group low = groups[n], high = groups[n + apart];
                for (int i = 0; i < 16; ++i) {
                    groups[n].elements[i] = low.elements[i] + high.elements[i];
                    groups[n + apart].elements[i] = low.elements[i] - high.elements[i];
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const BlockPosition position = positions[n];
        bf16* target = out + position.row * columns + position.column;
        if (position.count == 16) {
            store_elements(groups[n].elements, target);
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i < position.count) from_float(groups[n].elements[i], target[i]);
            }
        }
    }
}

}  // namespace narrowgauge
