// gemm_nvfp4.cuh: how the GEMM of NVFP4 adds blocks and forms alpha. Its contract: gemm_nvfp4.cu.
#pragma once

#include "gemm/portable/gemm.cuh"

enum Alpha { DIVIDED = 0, TIMES_RECIPROCAL = 1 };

struct Nvfp4 {
    using Scale = u8;
    static constexpr int WIDTH = 16, PARTS = 1;
    static constexpr bool CAST_FIRST = false;

    const float* a_amax;
    const float* b_amax;
    int a_each, b_each;  // whether every row has an amax of its own
    int alpha_order;
    float divisor, reciprocal;

    static __device__ __forceinline__ void decode(int, u8 code, float (&parts)[PARTS]) { parts[0] = e4m3_to_float(code); }

    static __device__ __forceinline__ float add(float acc, float inner, const float (&a)[PARTS], const float (&b)[PARTS]) {
        return acc + inner * (a[0] * b[0]);
    }

    __device__ __forceinline__ float scaled(float sum, i64 y, i64 x) const {
        const float product = a_amax[a_each ? y : 0] * b_amax[b_each ? x : 0];
        return (alpha_order == DIVIDED ? product / divisor : product * reciprocal) * sum;
    }
};
