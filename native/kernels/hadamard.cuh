// hadamard.cuh: the rotation of 16 elements, in the declared order of its sums. numerics.md, `nvfp4-rht`.
#pragma once

#include "formats.cuh"

// Stages 1, 2 ... last of the butterfly on 16 numbers: stage h adds and subtracts elements that are h apart.
__device__ __forceinline__ void butterfly(float (&v)[16], int last) {
#pragma unroll
    for (int half = 1; half < 16; half *= 2) {
        if (half > last) return;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if ((i & half) != 0) continue;
            const float a = v[i], b = v[i + half];
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

// A group of 16 bfloat16 numbers times diag(signs) * H16 * 1/4: exact products, float32 sums, one rounding to bfloat16.
__device__ __forceinline__ void rotate16(float (&v)[16], u32 signs) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= (signs >> i & 1u) != 0u ? -0.25f : 0.25f;
    butterfly(v, 8);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = rounded_to_bf16(v[i]);
}
