// nvfp4.cuh: scales of NVFP4, every operation rounded to float32. docs/numerics.md#nvfp4, steps 2 to 6.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int BLOCK = 16;
constexpr float RECIPROCAL_6 = 0x1.555556p-3f;  // fl(1/6)
constexpr u32 FLT_MAX_BITS = 0x7F7FFFFFu;

// Order of operations of the block scale: amax * (enc * (1/6)), or (amax / 6) * enc.
enum BlockScaleOrder : int { AMAX_TIMES_ENC_SIXTH = 0, AMAX_SIXTH_TIMES_ENC = 1 };

// min(x, FLT_MAX) of a quotient that is not negative; NaN stays NaN. The comparison is one of bits: GCC 13.3 from -O1 on
// concludes from an infinite quotient that its divisor is 0, and then replaced every subnormal amax by 0 (seen with 3.7e-39).
__device__ __forceinline__ float clamp_to_flt_max(float x) {
    const u32 bits = __float_as_uint(x);
    return __uint_as_float(bits == FLOAT_INF_BITS ? FLT_MAX_BITS : bits);
}

// `max_product` is 2688 = 448 * 6, or 1536 = 256 * 6.
__device__ __forceinline__ float nvfp4_tensor_scale(float amax, float max_product) {
    const float scale = clamp_to_flt_max(max_product / amax);
    return amax == 0.0f || scale == 0.0f ? 1.0f : scale;
}

// The block scale in float32, before it is rounded to E4M3.
__device__ __forceinline__ float nvfp4_unrounded_scale(float block_amax, float tensor_scale, BlockScaleOrder order) {
    const float scale = order == AMAX_TIMES_ENC_SIXTH ? block_amax * (tensor_scale * RECIPROCAL_6)
                                                      : block_amax / 6.0f * tensor_scale;
#ifdef HAS_CVT_FP8
    return scale;  // cvt.satfinite maps infinity and FLT_MAX to the same code
#else
    return clamp_to_flt_max(scale);
#endif
}

__device__ __forceinline__ float nvfp4_element_factor(u8 scale, float tensor_scale) {
    return clamp_to_flt_max(1.0f / (e4m3_to_float(scale) * (1.0f / tensor_scale)));
}

}  // namespace narrowgauge
