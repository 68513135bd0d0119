// gemm_skinny.cuh: GEMMs with few rows of a, by mma.m16n8k16 with float16 or bfloat16 operands: 16 rows of b by 8 rows of a.
// Their contracts: gemm_skinny_nvfp4.cu, gemm_skinny_nvfp4_wide.cu, gemm_skinny_mx.cu, gemm_skinny_fp8.cu and
// gemm_skinny_weight_only.cu.
#pragma once

#include "gemm/portable/gemm.cuh"
#include "gemm/ptx.cuh"

namespace narrowgauge {

constexpr int STRIP_ROWS = 16, GROUP_ROWS = 8;            // rows of b and of a in one mma
constexpr int TOKENS = 16, GROUPS = TOKENS / GROUP_ROWS;  // rows of a of a block of threads

// d += b * a^T over 32 columns: four pairs of T of two rows of a strip of b, and of a row of a.
template <class T = fp16>
__device__ __forceinline__ void multiply_32_columns(float (&d)[4], const u32 (&top)[4], const u32 (&bottom)[4], const u32* a) {
    ptx::mma_m16n8k16_f32<T>(d, {top[0], bottom[0], top[1], bottom[1]}, {a[0], a[1]});
    ptx::mma_m16n8k16_f32<T>(d, {top[2], bottom[2], top[3], bottom[3]}, {a[2], a[3]});
}

}  // namespace narrowgauge
