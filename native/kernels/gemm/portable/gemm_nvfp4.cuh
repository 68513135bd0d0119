// gemm_nvfp4.cuh: scaling policy of the NVFP4 GEMM. Its contract: gemm_nvfp4.cu.
#pragma once

#include "gemm/portable/gemm.cuh"

namespace narrowgauge {

struct Nvfp4Scaling {
    using Scale = u8;
    static constexpr int WIDTH = 16, FACTORS = 1;
    static constexpr bool CAST_BEFORE_C = false;

    Alpha alpha;

    static __device__ __forceinline__ void decode_scale(int, u8 code, float (&factors)[FACTORS]) {
        factors[0] = e4m3_to_float(code);
    }

    static __device__ __forceinline__ float add_block(float acc, float block_sum, const float (&a)[FACTORS],
                                                      const float (&b)[FACTORS]) {
        return acc + block_sum * (a[0] * b[0]);
    }

    __device__ __forceinline__ float scale_output(float sum, i64 y, i64 x) const { return alpha.value(y, x) * sum; }
};

}  // namespace narrowgauge
