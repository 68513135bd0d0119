// words.cuh: blocks of 16 bfloat16 numbers as they lie in memory, two a word, the first one low.
#pragma once

#include "blocks.cuh"
#include "hadamard.cuh"

struct Words {
    u32 each[8];
};

__device__ __forceinline__ float low_of(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_of(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ __forceinline__ void to_floats(const Words& x, float (&v)[16]) {
#ifdef HAS_LANES
    for (int i = 0; i < 16; i += LANES) store_lanes(to_float_lanes(reinterpret_cast<const bf16*>(x.each) + i), v + i);
#else
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[2 * j] = low_of(x.each[j]);
        v[2 * j + 1] = high_of(x.each[j]);
    }
#endif
}

// 16 bytes each, where they lie aligned.
__device__ __forceinline__ Words load_words(const u32* source) {
    Words x;
#ifdef __CUDA_ARCH__
    const uint4 first = reinterpret_cast<const uint4*>(source)[0], second = reinterpret_cast<const uint4*>(source)[1];
    x = {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
#else
    for (int j = 0; j < 8; ++j) x.each[j] = source[j];
#endif
    return x;
}

__device__ __forceinline__ void store_words(const Words& x, u32* target) {
#ifdef __CUDA_ARCH__
    reinterpret_cast<uint4*>(target)[0] = {x.each[0], x.each[1], x.each[2], x.each[3]};
    reinterpret_cast<uint4*>(target)[1] = {x.each[4], x.each[5], x.each[6], x.each[7]};
#else
    for (int j = 0; j < 8; ++j) target[j] = x.each[j];
#endif
}

// The first numbers of two words, or their second ones, in one.
__device__ __forceinline__ u32 paired(u32 a, u32 b, bool second) {
    return second ? (a >> 16) | (b & 0xFFFF0000u) : (a & 0xFFFFu) | b << 16;
}

// The larger of two pairs of magnitudes, bfloat16 as integers.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    const u32 low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a : b, high = a >> 16 > b >> 16 ? a : b;
    return (high & 0xFFFF0000u) | (low & 0xFFFFu);
#endif
}

// The largest magnitude as bits of float32; those above `highest` are left out.
__device__ __forceinline__ u32 largest_of_words(const Words& x, u32 highest) {
    u32 pair = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) pair = larger_pair(pair, x.each[j] & 0x7FFF7FFFu);
    const u32 low = pair << 16, high = pair & 0xFFFF0000u;
    const u32 largest = low > high ? low : high;
    if (largest <= highest) return largest;
    float v[16];
    to_floats(x, v);
    return largest_magnitude(v, highest);
}

// A group rotated, as `rotate16` does it.
__device__ __forceinline__ void rotate_words(Words& x, u32 signs) {
    float v[16];
    to_floats(x, v);
    rotate16(v, signs);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.each[j] = __float_as_uint(v[2 * j]) >> 16 | (__float_as_uint(v[2 * j + 1]) & 0xFFFF0000u);
}

#ifdef HAS_E2M1_BY_SUMS
// Codes of the products of eight numbers and a factor, all of which are smaller than 7.
__device__ __forceinline__ u32 e2m1x8_of_products_below_7(const u32* x, float factor) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 magnitudes = x[j] & 0x7FFF7FFFu;
        const u32 low = e2m1_by_sum_below_7(low_of(magnitudes) * factor);
        const u32 high = e2m1_by_sum_below_7(high_of(magnitudes) * factor);
        // Signs from bits 15 and 31 to 3 and 7 of the low byte.
        pairs[j] = __umulhi(x[j] & 0x80008000u, (1u << 20) + (1u << 8)) + (high * 16u + low);
    }
    return __byte_perm(__byte_perm(pairs[0], pairs[1], 0x0040), __byte_perm(pairs[2], pairs[3], 0x0040), 0x5410);
}
#endif

// Codes of the products of 16 numbers and a factor, nearest even.
__device__ __forceinline__ void e2m1x16_of_words(const Words& x, float factor, u8 (&packed)[8]) {
#ifdef HAS_E2M1_BY_SUMS
    u32 pair = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) pair = larger_pair(pair, x.each[j] & 0x7FFF7FFFu);
    // Comparisons that NaN does not pass.
    if (low_of(pair) * factor < 7.0f && high_of(pair) * factor < 7.0f) {
        const u32 words[2] = {e2m1x8_of_products_below_7(x.each, factor), e2m1x8_of_products_below_7(x.each + 4, factor)};
#pragma unroll
        for (int j = 0; j < 8; ++j) packed[j] = static_cast<u8>(words[j / 4] >> j % 4 * 8);
        return;
    }
#endif
    float v[16];
    to_floats(x, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= factor;
    e2m1x16_from_float(v, packed);
}
