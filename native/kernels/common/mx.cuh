// mx.cuh: the scales of MX formats, powers of two. docs/numerics.md#mx; the rules for their exponents: docs/dialects.md#e8m0-scales.
#pragma once

#include "common/formats.cuh"

constexpr int BLOCK = 32;

// What is rounded to a power of two: amax * fl(1/max), amax / max, or amax / 2^emax; emax is the exponent of max, the
// largest element.
enum BlockScale { AMAX_TIMES_RECIPROCAL = 0, AMAX_OVER_MAX = 1, AMAX_OVER_POWER = 2 };

// The scale of a block of elements F: 0 of amax 0. The last of the three is exact, on the exponent.
template <class F>
__device__ __forceinline__ u8 mx_scale(float amax, int order, u32 up_from) {
    const float max = __uint_as_float(F::MAX_BITS);
    constexpr int EMAX = static_cast<int>(F::MAX_BITS >> 23) - 127;
    const float x = order == AMAX_TIMES_RECIPROCAL ? amax * (1.0f / max) : order == AMAX_OVER_MAX ? amax / max : amax;
    return e8m0_from_float(x, up_from, order == AMAX_OVER_POWER ? EMAX : 0);
}

// 1/scale, exact: 2^(127 - code), 2^-127, which is subnormal, of code 254, NaN of 255.
__device__ __forceinline__ float mx_element_factor(u8 scale) {
    return e8m0_to_float(static_cast<u8>(scale == 0xFFu ? 0xFFu : 254u - scale));
}
