// hadamard: rotates groups of 2 to 128 elements along K.
//
//   x       (M, K) bfloat16, any strides; K a multiple of the group
//   out     (M, K) bfloat16, contiguous
//   Launch: 256 threads a block, one thread for every 16 elements of a row; groups above 16 are shared by up to 8 lanes.
//   Numerics: numerics.md, `nvfp4-rht`: products x * (+-c) are exact in float32, c a bfloat16 number; the sum's order is
//   declared: stages 1, 2, 4 ... group/2, stage h adds and subtracts elements h apart, every addition rounds to float32;
//   one rounding to bfloat16, nearest even. Exact to the bit in that order.

#include "blocks.cuh"
#include "hadamard.cuh"

constexpr int THREADS = 256;

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

extern "C" __global__ void __launch_bounds__(THREADS)
    hadamard(const bf16* x, bf16* out, i64 rows, i64 columns, i64 row_stride, i64 column_stride, int group, int signs,
             float c) {
    const i64 blocks = (columns + 15) / 16;
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const bool inside = index < rows * blocks;  // no thread returns before the exchanges of its warp
    const i64 row = inside ? quotient(index, blocks) : 0;
    const i64 column = inside ? (index - row * blocks) * 16 : 0;
    const int count = count_of<16>(inside ? columns - column : 0);

    Group group_of_thread;
    float(&v)[16] = group_of_thread.each;
    load_block(x + row * row_stride + column * column_stride, column_stride, count, v);
    const int period = group < 16 ? group : 16;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        v[i] *= (signs >> (i & (period - 1)) & 1) != 0 ? -c : c;
    }
    butterfly(v, group / 2);
    for (int lanes = 1; lanes < group / 16; lanes *= 2) {
        const bool upper = (threadIdx.x & lanes) != 0;
        const Group other = from_lane(group_of_thread, lanes);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = upper ? other.each[i] - v[i] : v[i] + other.each[i];
    }
    bf16* target = out + row * columns + column;
    if (count == 16) return store_elements(v, target);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (i < count) from_float(v[i], target[i]);
    }
}
