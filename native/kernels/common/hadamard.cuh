// hadamard.cuh: the rotation of 16 elements, in the declared order of its sums. docs/numerics.md#hadamard-transform.
#pragma once

#include "common/formats.cuh"

// Stages first, 2 * first ... last of the butterfly on 16 numbers, or vectors of them: stage h adds and subtracts elements
// that are h apart.
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

__device__ __forceinline__ float rounded_to_bf16(float x) {
    bf16 narrow;
    from_float(x, narrow);
    return to_float(narrow);
}

#ifdef HAS_LANES
__forceinline__ Floats rounded_to_bf16(Floats x) { return same_bits<Floats>(bf16_lanes(x) << 16); }

// Stage DISTANCE within lanes. The lower of two is their sum, the upper its difference from the lower.
template <int DISTANCE>
__forceinline__ Floats butterfly_lanes(Floats x) {
    const Bits upper = (lane_numbers() & static_cast<u32>(DISTANCE)) != 0u ? Bits{} + 0x80000000u : Bits{};
    return exchanged<DISTANCE>(x) + same_bits<Floats>(same_bits<Bits>(x) ^ upper);
}
#endif

// A group of 16 bfloat16 numbers times diag(signs) * H16 * 1/4: exact products, float32 sums, one rounding to bfloat16.
// Of vectors, one group a lane.
template <class V>
__device__ __forceinline__ void rotate_each(V (&v)[16], u32 signs) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= (signs >> i & 1u) != 0u ? -0.25f : 0.25f;
    butterfly(v, 8);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = rounded_to_bf16(v[i]);
}

__device__ __forceinline__ void rotate16(float (&v)[16], u32 signs) {
#ifdef HAS_LANES
    constexpr int REGISTERS = 16 / LANES;
    Floats x[REGISTERS];
    for (int r = 0; r < REGISTERS; ++r) {
        const Bits negative = ((Bits{} + signs) >> (lane_numbers() + static_cast<u32>(r * LANES))) << 31;
        x[r] = load_lanes<Floats>(v + r * LANES) * same_bits<Floats>(negative ^ __float_as_uint(0.25f));
        x[r] = butterfly_lanes<2>(butterfly_lanes<1>(x[r]));
        if constexpr (LANES > 4) x[r] = butterfly_lanes<4>(x[r]);
        if constexpr (LANES > 8) x[r] = butterfly_lanes<8>(x[r]);
    }
    for (int half = 1; half < REGISTERS; half *= 2) {
        for (int r = 0; r < REGISTERS; ++r) {
            if ((r & half) != 0) continue;
            const Floats a = x[r], b = x[r + half];
            x[r] = a + b;
            x[r + half] = a - b;
        }
    }
    for (int r = 0; r < REGISTERS; ++r) store_lanes(rounded_to_bf16(x[r]), v + r * LANES);
#else
    rotate_each(v, signs);
#endif
}
