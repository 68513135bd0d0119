// hadamard: rotates groups of 2 to 128 elements along K.
//
//   x       (M, K) bfloat16, any strides; K a multiple of the group
//   out     (M, K) bfloat16, contiguous
//   Launch: 256 threads a block, one thread for every 16 * MANY elements; groups above 16 * MANY are shared by up to 8
//   lanes. MANY is 1, on a CPU 8: a thread then has whole groups and waits for no other.
//   Numerics: docs/numerics.md#hadamard-transform:
//   products x * (+-c) are exact in float32, c a bfloat16 number; the sum's order is
//   declared: stages 1, 2, 4 ... group/2, stage h adds and subtracts elements h apart, every addition rounds to float32;
//   one rounding to bfloat16, nearest even. Exact to the bit in that order.

#include "common/blocks.cuh"
#include "common/hadamard.cuh"

#ifndef HADAMARD_MANY
#ifdef __CUDA_ARCH__
#define HADAMARD_MANY 1
#else
#define HADAMARD_MANY 8
#endif
#endif

constexpr int THREADS = 256;
constexpr int MANY = HADAMARD_MANY;

struct Group {
    float each[16];
};

// Those of the lane whose number differs by the bit `lanes`. A CPU changes threads once for all of them.
__device__ __forceinline__ Group from_lane(const Group& mine, int lanes) {
#ifdef __CUDA_ARCH__
    Group other;
#pragma unroll
    for (int i = 0; i < 16; ++i) other.each[i] = __shfl_xor_sync(0xFFFFFFFFu, mine.each[i], lanes);
    return other;
#else
    return simt::exchange(0xFFFFFFFFu, mine, static_cast<unsigned>(lanes));
#endif
}

// 16 elements of a row, or what is left of it; none where there is no such block.
struct Place {
    i64 row, column;
    int count;
};

__device__ __forceinline__ Place place_of(int n, i64 rows, i64 columns) {
    const i64 blocks = (columns + 15) / 16;
    const i64 index = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * MANY + n;
    if (index >= rows * blocks) return {0, 0, 0};
    const i64 row = quotient(index, blocks), column = (index - row * blocks) * 16;
    return {row, column, count_of<16>(columns - column)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hadamard(const bf16* x, bf16* out, i64 rows, i64 columns, i64 row_stride, i64 column_stride, int group, int signs,
             float c) {
    const int period = group < 16 ? group : 16;
    Group mine[MANY];
    Place places[MANY];
#pragma unroll
    for (int n = 0; n < MANY; ++n) {  // no thread returns before the exchanges of its warp
        const Place place = places[n] = place_of(n, rows, columns);
        float(&v)[16] = mine[n].each;
        load_block(x + place.row * row_stride + place.column * column_stride, column_stride, place.count, v);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] *= (signs >> (i & (period - 1)) & 1) != 0 ? -c : c;
        butterfly(v, group / 2);
    }
    for (int apart = 1; apart < group / 16; apart *= 2) {
#pragma unroll
        for (int n = 0; n < MANY; ++n) {
            if (apart >= MANY) {
                const int lanes = apart / MANY;
                const bool upper = (threadIdx.x & lanes) != 0;
                const Group other = from_lane(mine[n], lanes);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    mine[n].each[i] = upper ? other.each[i] - mine[n].each[i] : mine[n].each[i] + other.each[i];
                }
            } else if ((n & apart) == 0) {
                const Group low = mine[n], high = mine[n + apart];
                for (int i = 0; i < 16; ++i) {
                    mine[n].each[i] = low.each[i] + high.each[i];
                    mine[n + apart].each[i] = low.each[i] - high.each[i];
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const Place place = places[n];
        bf16* target = out + place.row * columns + place.column;
        if (place.count == 16) {
            store_elements(mine[n].each, target);
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i < place.count) from_float(mine[n].each[i], target[i]);
            }
        }
    }
}
