// fp8.cuh: float32 scales of FP8, every operation rounded to float32. docs/numerics.md#fp8-with-float32-scales.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

// Parameters of the map from an amax to a scale.
struct Fp8ScaleParameters {
    float largest_element;  // the amax is scaled to it: 448, or 57344
    float smallest_amax;    // a smaller amax is replaced by it
    float largest_scale;    // an infinite scale is replaced by it
    int power_of_two;       // if set, the mantissa of the scale is truncated
};

// fl(max/amax); 1 if the amax is 0, infinite or NaN. The comparisons are ones of bits: GCC 13.3 concludes from an infinite
// quotient that its divisor is 0 (nvfp4.cuh, clamp_to_flt_max).
__device__ __forceinline__ float fp8_scale(float amax, const Fp8ScaleParameters& parameters) {
    const float raised = amax < parameters.smallest_amax ? parameters.smallest_amax : amax;  // NaN stays NaN
    const u32 divisor = __float_as_uint(raised) & 0x7FFFFFFFu;
    const u32 quotient = __float_as_uint(parameters.largest_element / raised);
    const u32 finite = quotient == FLOAT_INF_BITS ? __float_as_uint(parameters.largest_scale) : quotient;
    const u32 scale = parameters.power_of_two ? finite & FLOAT_INF_BITS : finite;
    return divisor == 0u || divisor >= FLOAT_INF_BITS ? 1.0f : __uint_as_float(scale);
}

// Codes of 16 elements that share a scale.
template <class F>
__device__ __forceinline__ void encode_row(const float (&v)[16], float scale, u8 (&codes)[16]) {
    if constexpr (F::HAS_CVT) {
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const u16 pair = F::cvt_rn_satfinite_x2(v[i] * scale, v[i + 1] * scale);
            codes[i] = static_cast<u8>(pair);
            codes[i + 1] = static_cast<u8>(pair >> 8);
        }
    } else {
        u32 wide[16];  // codes as wide as elements; a CPU vectorizes the loop
        for (int i = 0; i < 16; ++i) wide[i] = nearest_even<F>(v[i] * scale);
        for (int i = 0; i < 16; ++i) codes[i] = static_cast<u8>(wide[i]);
    }
}

// Codes of four rows of 16 columns, each column with its scale: a word per column, the first row in the low byte.
template <class F>
__device__ __forceinline__ void encode_columns(const float (&v)[4][16], const float (&scales)[16], u32 (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if constexpr (F::HAS_CVT) {
            const u32 low = F::cvt_rn_satfinite_x2(v[0][i] * scales[i], v[1][i] * scales[i]);
            const u32 high = F::cvt_rn_satfinite_x2(v[2][i] * scales[i], v[3][i] * scales[i]);
            words[i] = low | high << 16;
        } else {
            words[i] = nearest_even<F>(v[0][i] * scales[i]) | nearest_even<F>(v[1][i] * scales[i]) << 8 |
                       nearest_even<F>(v[2][i] * scales[i]) << 16 | nearest_even<F>(v[3][i] * scales[i]) << 24;
        }
    }
}

// Stores the first `count` of 16 bytes. The case `count < 16` returns early: with `count == 16` in one condition with the
// alignment, NVRTC 13.0 stored all 16 bytes of short rows too, in the first of four rows of E5M2 only (seen on an H200, with
// ptxas -O1 as well).
__device__ __forceinline__ void store_partial(const u8 (&bytes)[16], int count, u8* target) {
    if (count < 16) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // a constant trip count keeps `bytes` in registers
            if (i < count) target[i] = bytes[i];
        }
        return;
    }
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(target) % 16 == 0) {
        struct alignas(16) Chunk {
            u32 words[4];
        };
        Chunk chunk;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            chunk.words[w] = bytes[4 * w] | bytes[4 * w + 1] << 8 | bytes[4 * w + 2] << 16 |
                            static_cast<u32>(bytes[4 * w + 3]) << 24;
        }
        *reinterpret_cast<Chunk*>(target) = chunk;
        return;
    }
#endif
    for (int i = 0; i < 16; ++i) target[i] = bytes[i];
}

}  // namespace narrowgauge
