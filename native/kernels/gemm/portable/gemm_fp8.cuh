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

__device__ const float ONE[1] = {1.0f};  // scale of an operand whose scales multiply its elements

struct Fp8TensorScaling {
    static constexpr int WIDTH = 0, FACTORS = 1;
    static constexpr bool CAST_BEFORE_C = false;

    const float* a_scales;
    const float* b_scales;
    bool a_per_row, b_per_row;

    __device__ __forceinline__ float scale_output(float sum, i64 y, i64 x) const {
        return a_scales[a_per_row ? y : 0] * b_scales[b_per_row ? x : 0] * sum;
    }
};

__device__ __forceinline__ Fp8TensorScaling tensor_scaling(const GemmParameters& p) {
    const auto scales = [](const OperandParameters& of) {
        return (of.layout & SCALES_IN_ELEMENTS) != 0 ? ONE : static_cast<const float*>(of.scales);
    };
    return {scales(p.a), scales(p.b), (p.a.layout & SCALE_OF_ROW) != 0,
            (p.b.layout & SCALE_OF_ROW) != 0};
}

}  // namespace narrowgauge
