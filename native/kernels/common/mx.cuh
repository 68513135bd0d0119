// mx.cuh: scales of MX formats, powers of two. docs/numerics.md#mx; how exponents are rounded: docs/dialects.md#e8m0-scales.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int MX_BLOCK = 32;

// The quotient that is rounded to a power of two: amax * fl(1/max), amax / max, or amax / 2^emax. `max` is the largest
// element of the format, `emax` its exponent.
enum MxScaleOrder : int { AMAX_TIMES_RECIPROCAL = 0, AMAX_OVER_MAX = 1, AMAX_OVER_POWER = 2 };

// Scale of a block of elements F; 0 if amax is 0. The division by 2^emax is exact: it changes the exponent.
template <class F>
__device__ __forceinline__ u8 mx_scale(float amax, int order, u32 up_from) {
    const float max = __uint_as_float(F::MAX_BITS);
    constexpr int EMAX = static_cast<int>(F::MAX_BITS >> 23) - 127;
    const float x = order == AMAX_TIMES_RECIPROCAL ? amax * (1.0f / max) : order == AMAX_OVER_MAX ? amax / max : amax;
    return e8m0_from_float(x, up_from, order == AMAX_OVER_POWER ? EMAX : 0);
}

// 1/scale, exact: 2^(127 - code). Code 254 gives the subnormal number 2^-127, code 255 NaN.
__device__ __forceinline__ float mx_element_factor(u8 scale) {
    return e8m0_to_float(scale == 0xFFu ? 0xFFu : 254u - scale);
}

}  // namespace narrowgauge
