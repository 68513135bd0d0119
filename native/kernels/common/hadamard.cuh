// hadamard.cuh: rotation of 16 elements, in the declared order of summation. docs/numerics.md#hadamard-transform.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

// Stages first, 2 * first ... last of the butterfly on 16 numbers or 16 vectors: stage h adds and subtracts elements that
// are h apart.
template <class V>
__device__ __forceinline__ void butterfly(V (&v)[16], int last, int first = 1) {
#pragma unroll
    for (int half = 1; half < 16; half *= 2) {
        if (half < first || half > last) continue;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if ((i & half) != 0) continue;
            const V a = v[i], b = v[i + half];
            v[i] = a + b;
            v[i + half] = a - b;
        }
    }
}

__device__ __forceinline__ float round_to_bf16(float x) {
    bf16 narrow;
    from_float(x, narrow);
    return to_float(narrow);
}

#ifdef HAS_SIMD
__forceinline__ FloatVector round_to_bf16(FloatVector x) { return bit_cast<FloatVector>(to_bf16_vector(x) << 16); }

// Stage DISTANCE between lanes of a vector. The lower lane of a pair becomes the sum, the upper one the difference.
template <int DISTANCE>
__forceinline__ FloatVector butterfly_vector(FloatVector x) {
    const UintVector upper = (lane_indices() & static_cast<u32>(DISTANCE)) != 0u ? UintVector{} + 0x80000000u : UintVector{};
    return shuffle_xor<DISTANCE>(x) + bit_cast<FloatVector>(bit_cast<UintVector>(x) ^ upper);
}
#endif

// Rotates a group of 16 bfloat16 numbers: times diag(signs) * H16 * 1/4, with exact products, float32 sums, and one rounding
// to bfloat16. If V is a vector, each of its lanes is a group.
template <class V>
__device__ __forceinline__ void rotate16_elementwise(V (&v)[16], u32 signs) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= (signs >> i & 1u) != 0u ? -0.25f : 0.25f;
    butterfly(v, 8);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = round_to_bf16(v[i]);
}

__device__ __forceinline__ void rotate16(float (&v)[16], u32 signs) {
#ifdef HAS_SIMD
    constexpr int REGISTERS = 16 / SIMD_LANES;
    FloatVector x[REGISTERS];
    for (int r = 0; r < REGISTERS; ++r) {
        const UintVector negative = ((UintVector{} + signs) >> (lane_indices() + static_cast<u32>(r * SIMD_LANES))) << 31;
        x[r] = load_vector<FloatVector>(v + r * SIMD_LANES) * bit_cast<FloatVector>(negative ^ __float_as_uint(0.25f));
        x[r] = butterfly_vector<2>(butterfly_vector<1>(x[r]));
        if constexpr (SIMD_LANES > 4) x[r] = butterfly_vector<4>(x[r]);
        if constexpr (SIMD_LANES > 8) x[r] = butterfly_vector<8>(x[r]);
    }
    for (int half = 1; half < REGISTERS; half *= 2) {
        for (int r = 0; r < REGISTERS; ++r) {
            if ((r & half) != 0) continue;
            const FloatVector a = x[r], b = x[r + half];
            x[r] = a + b;
            x[r + half] = a - b;
        }
    }
    for (int r = 0; r < REGISTERS; ++r) store_vector(round_to_bf16(x[r]), v + r * SIMD_LANES);
#else
    rotate16_elementwise(v, signs);
#endif
}

}  // namespace narrowgauge
