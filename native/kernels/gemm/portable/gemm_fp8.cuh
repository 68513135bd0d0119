// gemm_fp8.cuh: scaling policies of the GEMMs of FP8 with float32 scales. Their contracts: gemm_fp8.cu.
#pragma once

#include "gemm/portable/gemm.cuh"

namespace narrowgauge {

struct Fp8BlockScaling {
    using Scale = float;
    static constexpr int WIDTH = 128, FACTORS = 1;
    static constexpr bool CAST_BEFORE_C = true;

    static __device__ __forceinline__ void decode_scale(int, float scale, float (&factors)[FACTORS]) { factors[0] = scale; }

    static __device__ __forceinline__ float add_block(float acc, float block_sum, const float (&a)[FACTORS],
                                                      const float (&b)[FACTORS]) {
        return __fmaf_rn(block_sum * a[0], b[0], acc);
    }

    __device__ __forceinline__ float scale_output(float sum, i64, i64) const { return sum; }
};

struct Fp8TensorScaling {
    static constexpr int WIDTH = 0, FACTORS = 1;
    static constexpr bool CAST_BEFORE_C = false;

    const float* a_scale;
    const float* b_scale;

    __device__ __forceinline__ float scale_output(float sum, i64, i64) const { return *a_scale * *b_scale * sum; }
};

__device__ __forceinline__ Fp8TensorScaling tensor_scaling(const GemmParameters& p) {
    return {static_cast<const float*>(p.a.scales), static_cast<const float*>(p.b.scales)};
}

}  // namespace narrowgauge
