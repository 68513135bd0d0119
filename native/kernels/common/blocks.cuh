// blocks.cuh: blocks of neighbouring elements of a line, as a thread takes them.
#pragma once

#include "common/formats.cuh"

// a / b of numbers that are not negative. A GPU takes a tenth of the instructions where both have 32 bits.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
#ifdef __CUDA_ARCH__
    if (((a | b) >> 32) == 0) return static_cast<u32>(a) / static_cast<u32>(b);
#endif
    return a / b;
}

// How many of a block's elements exist, where `left` are left of its line.
template <int BLOCK>
__device__ __forceinline__ int count_of(i64 left) {
    return left <= 0 ? 0 : left < BLOCK ? static_cast<int>(left) : BLOCK;
}

// The first `count` elements from `source` on, `stride` apart, and zeros.
template <class T, int BLOCK>
__device__ __forceinline__ void load_block(const T* source, i64 stride, int count, float (&v)[BLOCK]) {
    if (count == BLOCK && stride == 1) {
        load_elements(source, v);
    } else {
        for (int i = 0; i < BLOCK; ++i) v[i] = i < count ? to_float(source[i * stride]) : 0.0f;
    }
}

#ifdef HAS_LANES
__forceinline__ void take_magnitudes(Floats x, u32 highest, Bits& largest) {
    const Bits magnitude = same_bits<Bits>(x) & 0x7FFFFFFFu;
    largest = larger(largest, magnitude <= highest ? magnitude : Bits{});
}
#endif

template <int BLOCK>
__device__ __forceinline__ u32 largest_magnitude(const float (&v)[BLOCK], u32 highest) {
#ifdef __CUDA_ARCH__
    if (highest == FLOAT_INF_BITS) {  // one instruction an element, which leaves NaN out
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) largest = fmaxf(largest, fabsf(v[i]));
        return __float_as_uint(largest);
    }
#endif
#ifdef HAS_LANES
    if constexpr (BLOCK % LANES == 0) {
        Bits most = {};
        for (int i = 0; i < BLOCK; i += LANES) take_magnitudes(load_lanes<Floats>(v + i), highest, most);
        return largest_lane(most);
    }
#endif
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) take_magnitude(v[i], highest, largest);
    return largest;
}

// Block `index` of a contiguous matrix, in the order of memory: where it begins in a line of `length` elements.
struct Run {
    i64 line, start, length;
    int count;
};

// Where every block is full, rows follow each other without a gap, as one line, and no row number is needed.
template <int BLOCK>
__device__ __forceinline__ Run find_run(i64 rows, i64 columns, i64 index) {
    const i64 blocks = (columns + BLOCK - 1) / BLOCK;
    const bool one_line = columns % BLOCK == 0;
    const i64 row = one_line ? 0 : quotient(index, blocks);
    const i64 column = (index - row * blocks) * BLOCK;
    const i64 length = one_line ? rows * columns : columns;
    return {row, column, length, count_of<BLOCK>(length - column)};
}
