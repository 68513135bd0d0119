// fp8.cuh: float32 scales of FP8, every operation rounded to float32. docs/numerics.md#fp8-with-float32-scales.
#pragma once

#include "common/formats.cuh"

// How an amax becomes a scale.
struct ScaleRule {
    float largest_element;  // what the amax is mapped to: 448, or 57344
    float smallest_amax;    // what amaxes are raised to
    float largest_scale;    // instead of an infinite scale
    int power_of_two;       // the mantissa is cut off
};

// fl(max/amax); 1 for an amax that is 0, infinite or NaN. What is infinite, zero or NaN is told by the bits: GCC 13.3
// takes an infinite quotient for proof that its divisor is 0 (nvfp4.cuh, at_most_largest).
__device__ __forceinline__ float fp8_scale(float amax, const ScaleRule& rule) {
    const float raised = amax < rule.smallest_amax ? rule.smallest_amax : amax;  // NaN stays
    const u32 divisor = __float_as_uint(raised) & 0x7FFFFFFFu;
    const u32 quotient = __float_as_uint(rule.largest_element / raised);
    const u32 finite = quotient == FLOAT_INF_BITS ? __float_as_uint(rule.largest_scale) : quotient;
    const u32 scale = rule.power_of_two ? finite & FLOAT_INF_BITS : finite;
    return divisor == 0u || divisor >= FLOAT_INF_BITS ? 1.0f : __uint_as_float(scale);
}

// 16 elements of one scale to their codes.
template <class F>
__device__ __forceinline__ void encode_row(const float (&v)[16], float scale, u8 (&codes)[16]) {
    if constexpr (F::HAS_CVT) {
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const u16 pair = F::cvt_pair(v[i] * scale, v[i + 1] * scale);
            codes[i] = static_cast<u8>(pair);
            codes[i + 1] = static_cast<u8>(pair >> 8);
        }
    } else {
        u32 wide[16];  // as wide as elements, so that a CPU takes 16 at once
        for (int i = 0; i < 16; ++i) wide[i] = nearest_even<F>(v[i] * scale);
        for (int i = 0; i < 16; ++i) codes[i] = static_cast<u8>(wide[i]);
    }
}

// Four rows of 16 columns, each with its scale, to a word for each column: the code of the first row is the low byte.
template <class F>
__device__ __forceinline__ void encode_columns(const float (&v)[4][16], const float (&scales)[16], u32 (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if constexpr (F::HAS_CVT) {
            const u32 low = F::cvt_pair(v[0][i] * scales[i], v[1][i] * scales[i]);
            const u32 high = F::cvt_pair(v[2][i] * scales[i], v[3][i] * scales[i]);
            words[i] = low | high << 16;
        } else {
            words[i] = nearest_even<F>(v[0][i] * scales[i]) | nearest_even<F>(v[1][i] * scales[i]) << 8 |
                       nearest_even<F>(v[2][i] * scales[i]) << 16 | nearest_even<F>(v[3][i] * scales[i]) << 24;
        }
    }
}

// The first `count` of 16 bytes. Short runs leave first: with `count == 16` asked beside the alignment, NVRTC 13.0 stored all
// 16 of short runs too, of the first of four rows of E5M2 alone (seen on an H200, with ptxas -O1 as well).
__device__ __forceinline__ void store_some(const u8 (&bytes)[16], int count, u8* target) {
    if (count < 16) {
        for (int i = 0; i < count; ++i) target[i] = bytes[i];
        return;
    }
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(target) % 16 == 0) {
        struct alignas(16) Words {
            u32 each[4];
        };
        Words words;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words.each[w] = bytes[4 * w] | bytes[4 * w + 1] << 8 | bytes[4 * w + 2] << 16 |
                            static_cast<u32>(bytes[4 * w + 3]) << 24;
        }
        *reinterpret_cast<Words*>(target) = words;
        return;
    }
#endif
    for (int i = 0; i < 16; ++i) target[i] = bytes[i];
}
