// gemm_fp8.cuh: how the GEMMs of FP8 with float32 scales add blocks. Their contract: gemm_fp8.cu.
#pragma once

#include "gemm/portable/gemm.cuh"

struct Fp8Block {
    using Scale = float;
    static constexpr int WIDTH = 128, PARTS = 1;
    static constexpr bool CAST_FIRST = true;

    static __device__ __forceinline__ void decode(int, float scale, float (&parts)[PARTS]) { parts[0] = scale; }

    static __device__ __forceinline__ float add(float acc, float inner, const float (&a)[PARTS], const float (&b)[PARTS]) {
        return __fmaf_rn(inner * a[0], b[0], acc);
    }

    __device__ __forceinline__ float scaled(float sum, i64, i64) const { return sum; }
};

struct Fp8Tensor {
    static constexpr int WIDTH = 0, PARTS = 1;
    static constexpr bool CAST_FIRST = false;

    const float* a_scale;
    const float* b_scale;

    __device__ __forceinline__ float scaled(float sum, i64, i64) const { return *a_scale * *b_scale * sum; }
};
