// weight_only.cuh: products of a plain matrix a (M, K) of 16 bits and the numbers of a quantized matrix b (N, K). Their contracts:
// portable/gemm_weight_only.cu and skinny/gemm_skinny_weight_only.cu.
//
//   a        bfloat16 or float16, contiguous; the dtype of w and out
//   b.codes  (N, K/2) of E2M1, else (N, K); b.scales (N, K/16) of NVFP4, (N, K/32) of MX
//   w        element times block scale, rounded to the dtype of a once. With NVFP4 nothing is rounded; with FP8 the element alone
//   alpha    factor / divisor of the tensor, or of each row of b; null is 1. One float32 rounding, and one of alpha * sum
#pragma once

#include "gemm/epilogue.cuh"

namespace narrowgauge {

enum class Weight : int { NVFP4 = 0, MXFP4 = 1, MXFP8 = 2, FP8 = 3 };

struct WeightOnlyParameters {
    const u8* a;
    const u8* codes;
    const u8* scales;     // of blocks, or null
    const float* factor;  // (1,) or (N,), or null
    bool factor_of_rows;
    float divisor;
    void* out;
    Weight weight;        // on a GPU the macro WEIGHT
    i64 m, n, k;
};

#ifndef WEIGHT
#define WEIGHT p.weight
#endif

__device__ constexpr bool is_e2m1(Weight weight) { return weight == Weight::NVFP4 || weight == Weight::MXFP4; }
__device__ constexpr int scale_columns(Weight weight) { return weight == Weight::NVFP4 ? 16 : 32; }

// Output (y, x) from its sum over K. `divisor`: of `factor`.
template <class T>
__device__ __forceinline__ void store_output(const WeightOnlyParameters& p, float sum, i64 y, i64 x, float divisor) {
    if (p.factor != nullptr) sum *= p.factor[p.factor_of_rows ? x : 0] / divisor;
    from_float(sum, static_cast<T*>(p.out)[y * p.n + x]);
}

}  // namespace narrowgauge
