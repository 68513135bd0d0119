// blocks.cuh: a block of neighbouring elements of a row or column, which one thread loads.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

// a / b for numbers that are not negative. On a GPU a division of 32-bit numbers takes a tenth of the instructions.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
#ifdef __CUDA_ARCH__
    if (((a | b) >> 32) == 0) return static_cast<u32>(a) / static_cast<u32>(b);
#endif
    return a / b;
}

// Number of elements of a block that lie inside the matrix, if its line has `left` elements from the block's start on.
template <int BLOCK>
__device__ __forceinline__ int valid_count(i64 left) {
    return left <= 0 ? 0 : left < BLOCK ? static_cast<int>(left) : BLOCK;
}

// Loads `count` elements that are `stride` apart and pads the block with zeros.
template <class T, int BLOCK>
__device__ __forceinline__ void load_block(const T* source, i64 stride, int count, float (&v)[BLOCK]) {
    if (count == BLOCK && stride == 1) {
        load_elements(source, v);
    } else {
        for (int i = 0; i < BLOCK; ++i) v[i] = i < count ? to_float(source[i * stride]) : 0.0f;
    }
}

// A matrix in memory. A kernel for any matrix can have another source, whose elements are made when it loads a block.
template <class T>
struct Matrix {
    const T* x;
    i64 row_stride, column_stride;

    // `count` elements of a row from a column on, and zeros behind them.
    template <int BLOCK>
    __device__ __forceinline__ void load(i64 row, i64 column, int count, float (&v)[BLOCK]) const {
        load_block(x + row * row_stride + column * column_stride, column_stride, count, v);
    }
};

#ifdef HAS_SIMD
__forceinline__ void update_amax_vector(FloatVector x, u32 limit, UintVector& largest) {
    const UintVector magnitude = bit_cast<UintVector>(x) & 0x7FFFFFFFu;
    largest = vector_max(largest, magnitude <= limit ? magnitude : UintVector{});
}
#endif

// Largest magnitude of a block, as bits of float32. Magnitudes above `limit` are left out.
template <int BLOCK>
__device__ __forceinline__ u32 amax_of_block(const float (&v)[BLOCK], u32 limit) {
#ifdef __CUDA_ARCH__
    if (limit == FLOAT_INF_BITS) {  // fmaxf leaves NaN out, in one instruction for each element
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) largest = fmaxf(largest, fabsf(v[i]));
        return __float_as_uint(largest);
    }
#endif
#ifdef HAS_SIMD
    if constexpr (BLOCK % SIMD_LANES == 0) {
        UintVector amaxes = {};
        for (int i = 0; i < BLOCK; i += SIMD_LANES) update_amax_vector(load_vector<FloatVector>(v + i), limit, amaxes);
        return reduce_max(amaxes);
    }
#endif
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) update_amax(v[i], limit, largest);
    return largest;
}

// A block of a contiguous matrix by its index in memory order: its line of `length` elements, and its start in the line.
struct LinearBlock {
    i64 line, start, length;
    int count;
};

// If the columns are a multiple of BLOCK, the whole matrix counts as one line, and no division by the row length is needed.
template <int BLOCK>
__device__ __forceinline__ LinearBlock linear_block(i64 rows, i64 columns, i64 index) {
    const i64 blocks = (columns + BLOCK - 1) / BLOCK;
    const bool one_line = columns % BLOCK == 0;
    const i64 row = one_line ? 0 : quotient(index, blocks);
    const i64 column = (index - row * blocks) * BLOCK;
    const i64 length = one_line ? rows * columns : columns;
    return {row, column, length, valid_count<BLOCK>(length - column)};
}

}  // namespace narrowgauge
