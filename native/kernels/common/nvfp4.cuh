// nvfp4.cuh: the scales of NVFP4, every operation rounded to float32. docs/numerics.md#nvfp4, steps 2 to 6.
#pragma once

#include "common/formats.cuh"

constexpr int BLOCK = 16;
constexpr float RECIPROCAL_6 = 0x1.555556p-3f;       // fl(1/6)
constexpr u32 LARGEST_BITS = 0x7F7FFFFFu;

// Order of operations of the block scale.
enum BlockScale { AMAX_TIMES_ENC_SIXTH = 0, AMAX_SIXTH_TIMES_ENC = 1 };

// min(x, FLT_MAX) of a quotient that is not negative; NaN stays. On the bits, because GCC 13.3 from -O1 on takes an
// infinite quotient for proof that its divisor is 0, and so took every subnormal amax for 0 (seen with 3.7e-39).
__device__ __forceinline__ float at_most_largest(float x) {
    const u32 bits = __float_as_uint(x);
    return __uint_as_float(bits == FLOAT_INF_BITS ? LARGEST_BITS : bits);
}

// `max_product` is 2688 = 448 * 6, or 1536 = 256 * 6.
__device__ __forceinline__ float nvfp4_tensor_scale(float amax, float max_product) {
    const float scale = at_most_largest(max_product / amax);
    return amax == 0.0f || scale == 0.0f ? 1.0f : scale;
}

// The float32 number that the stored scale rounds.
__device__ __forceinline__ float nvfp4_unrounded_scale(float block_amax, float tensor_scale, int order) {
    const float scale = order == AMAX_TIMES_ENC_SIXTH ? block_amax * (tensor_scale * RECIPROCAL_6)
                                                      : block_amax / 6.0f * tensor_scale;
#ifdef HAS_CVT_FP8
    return scale;  // which saturates infinity as it does FLT_MAX
#else
    return at_most_largest(scale);
#endif
}

__device__ __forceinline__ float nvfp4_element_factor(u8 scale, float tensor_scale) {
    return at_most_largest(1.0f / (e4m3_to_float(scale) * (1.0f / tensor_scale)));
}
