// gemm_skinny.cuh: what products of a few rows are made of: float16 numbers in pairs, codes of E4M3 as such, and sums of
// products of 16 rows of b and 8 of a on tensor cores. Their contracts: gemm_skinny_nvfp4.cu, gemm_skinny_nvfp4_wide.cu,
// gemm_skinny_mx.cu and gemm_skinny_fp8.cu.
#pragma once

#include "gemm/portable/gemm.cuh"
#include "gemm/sm90/hopper.cuh"

constexpr int STRIP_ROWS = 16, GROUP_ROWS = 8;  // of b and of a in one mma
constexpr int TOKENS = 16, GROUPS = TOKENS / GROUP_ROWS;  // rows of a that a block has

// ---- float16, two in a word --------------------------------------------------------------------------------------------

__device__ __forceinline__ float low_half(u32 pair) { return to_float(fp16{static_cast<u16>(pair)}); }
__device__ __forceinline__ float high_half(u32 pair) { return to_float(fp16{static_cast<u16>(pair >> 16)}); }

__device__ __forceinline__ u32 half_pair(float low, float high) {
    fp16 halves[2];
    from_float(low, halves[0]);
    from_float(high, halves[1]);
    return halves[0].bits | static_cast<u32>(halves[1].bits) << 16;
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    return half_pair(low_half(a) * low_half(b), high_half(a) * high_half(b));
#endif
}

// A pair, each times the first or the second of another one.
__device__ __forceinline__ u32 multiply_by_low(u32 pair, u32 factors) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.rn.f16x2 %0, %1, t; }"
        : "=r"(product) : "r"(pair), "r"(factors));
    return product;
#else
    return multiply_pairs(pair, (factors & 0xFFFFu) | factors << 16);
#endif
}

__device__ __forceinline__ u32 multiply_by_high(u32 pair, u32 factors) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.rn.f16x2 %0, %1, t; }"
        : "=r"(product) : "r"(pair), "r"(factors));
    return product;
#else
    return multiply_pairs(pair, factors >> 16 | (factors & 0xFFFF0000u));
#endif
}

// Two codes of E4M3, exactly.
__device__ __forceinline__ u32 e4m3_pair(u32 codes) {
#ifdef HAS_CVT_FP8
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(codes)));
    return pair;
#else
    return half_pair(e4m3_to_float(codes & 0xFFu), e4m3_to_float(codes >> 8 & 0xFFu));
#endif
}

// Four of them.
__device__ __forceinline__ void e4m3_pairs(u32 codes, u32& low, u32& high) {
#ifdef HAS_CVT_FP8
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(codes));
#else
    low = e4m3_pair(codes);
    high = e4m3_pair(codes >> 16);
#endif
}

// Eight codes of E2M1 as those of E4M3, which stand for 2^-6 of it: the even ones, the odd ones.
__device__ __forceinline__ u32 even_as_e4m3(u32 codes) { return (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu); }
__device__ __forceinline__ u32 odd_as_e4m3(u32 codes) { return (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu); }

// ---- tensor cores ------------------------------------------------------------------------------------------------------

#ifndef __CUDA_ARCH__
constexpr int KEPT_BITS = 25;

// acc + a[0]*b[0] + ... + a[15]*b[15] as tensor cores of Hopper add float16: the exact products and acc are aligned to the
// largest exponent among them, that of a product being the sum of its factors', and cut off behind 25 bits; their sum is
// cut off to a float32. The sum is judged by docs/tolerance.md#gemm.
inline float aligned_halves(float acc, const float (&a)[16], const float (&b)[16]) {
    int largest = -100000, exponents[17];
    double terms[17];
    float special = 0.0f;
    for (int i = 0; i < 17; ++i) {
        const float x = i < 16 ? a[i] : acc, y = i < 16 ? b[i] : 1.0f;
        terms[i] = static_cast<double>(x) * static_cast<double>(y);
        if (!__builtin_isfinite(terms[i])) special += static_cast<float>(terms[i]);
        int left = 0, right = 0;
        __builtin_frexp(static_cast<double>(x), &left);
        __builtin_frexp(static_cast<double>(y), &right);
        exponents[i] = left + right - 2;
        if (terms[i] != 0.0 && exponents[i] > largest) largest = exponents[i];
    }
    if (special != 0.0f) return special;  // NaN, too
    if (largest == -100000) return 0.0f;
    double sum = 0.0;  // of numbers of at most 32 bits on one grid: exact
    for (const double term : terms) sum += __builtin_trunc(__builtin_ldexp(term, KEPT_BITS - largest));
    sum = __builtin_ldexp(sum, largest - KEPT_BITS);
    const float near = static_cast<float>(sum);
    if (__builtin_fabs(static_cast<double>(near)) <= __builtin_fabs(sum)) return near;
    return __uint_as_float(__float_as_uint(near) - 1u);
}
#endif

// d += a * b^T of 16 rows of a (four pairs of float16 a thread) and 8 of b (two), over 16 columns: mma.m16n8k16 of PTX,
// where thread 4·g + t has rows g and g + 8 of a and g of b, columns 2t, 2t + 1 and those 8 behind them.
__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const u32 lane = threadIdx.x % WARP;
    u64 upper[WARP], lower[WARP], others[WARP];
    const u64 mine[3] = {a[0] | static_cast<u64>(a[2]) << 32, a[1] | static_cast<u64>(a[3]) << 32, b[0] | static_cast<u64>(b[1]) << 32};
    for (u32 lanes = 0; lanes < WARP; ++lanes) {
        upper[lane ^ lanes] = __shfl_xor_sync(0xFFFFFFFFu, mine[0], lanes);
        lower[lane ^ lanes] = __shfl_xor_sync(0xFFFFFFFFu, mine[1], lanes);
        others[lane ^ lanes] = __shfl_xor_sync(0xFFFFFFFFu, mine[2], lanes);
    }
    const auto row = [](const u64* from, u32 first, float (&values)[16]) {
        for (u32 t = 0; t < 4; ++t) {
            for (u32 half = 0; half < 2; ++half) {
                const u32 pair = static_cast<u32>(from[first + t] >> 32 * half);
                values[2 * t + 8 * half] = low_half(pair);
                values[2 * t + 8 * half + 1] = high_half(pair);
            }
        }
    };
    float left[16], right[16];
    for (u32 i = 0; i < 4; ++i) {
        row(i < 2 ? upper : lower, lane / 4 * 4, left);
        row(others, (lane % 4 * 2 + i % 2) * 4, right);
        d[i] = aligned_halves(d[i], left, right);
    }
#endif
}

// The same over 32 columns: four pairs of two rows of a strip, and of a row of tokens.
__device__ __forceinline__ void multiply_eight(float (&d)[4], const u32 (&top)[4], const u32 (&bottom)[4], const u32* right) {
    multiply_halves(d, {top[0], bottom[0], top[1], bottom[1]}, {right[0], right[1]});
    multiply_halves(d, {top[2], bottom[2], top[3], bottom[3]}, {right[2], right[3]});
}
