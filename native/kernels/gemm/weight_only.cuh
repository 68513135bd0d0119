// weight_only.cuh: products of a plain matrix a (M, K) of 16 bits and the numbers of a quantized matrix b (N, K). Their contracts:
// portable/gemm_weight_only.cu and skinny/gemm_skinny_weight_only.cu.
//
//   a        bfloat16 or float16, contiguous; the dtype of w and out
//   b.codes  (N, K/2) of 4 bits, else (N, K); b.scales (N, K/16) of NVFP4, (N, K/32) of MX, float32 (N, K/group) of INT4
//   b.zeros  a byte for each scale of UINT4, whose element is a code less the zero point
//   w        element times block scale, rounded to the dtype of a once. With NVFP4 nothing is rounded; with FP8 the element alone;
//            the scale of INT4 and UINT4 is rounded to the dtype of a first
//   alpha    factor / divisor of the tensor, or of each row of b; null is 1. One float32 rounding, and one of alpha * sum
//   bias     (N,), of the dtype of a, added in float32; null is none
//   A batch has a block for each product along z: all tensors have a further axis in front.
#pragma once

#include "gemm/epilogue.cuh"

namespace narrowgauge {

enum class Weight : int { NVFP4 = 0, MXFP4 = 1, MXFP8 = 2, FP8 = 3, INT4 = 4, UINT4 = 5 };

struct WeightOnlyParameters {
    const u8* a;
    const u8* codes;
    const u8* scales;     // of blocks, or null
    const u8* zeros;      // zero points, or null
    const float* factor;  // (1,) or (N,), or null
    bool factor_of_rows;
    float divisor;
    const void* bias;     // (N,), or null
    void* out;
    i64 group;            // columns of a scale of INT4
    Weight weight;        // on a GPU the macro WEIGHT
    i64 m, n, k;
};

#ifndef WEIGHT
#define WEIGHT p.weight
#endif

__device__ constexpr bool is_e2m1(Weight weight) { return weight == Weight::NVFP4 || weight == Weight::MXFP4; }
__device__ constexpr bool is_integer(Weight weight) { return weight == Weight::INT4 || weight == Weight::UINT4; }
__device__ constexpr bool has_nibbles(Weight weight) { return is_e2m1(weight) || is_integer(weight); }
__device__ constexpr int scale_columns(Weight weight) { return weight == Weight::NVFP4 ? 16 : 32; }

__device__ __forceinline__ i64 scales_of_row(const WeightOnlyParameters& p, Weight weight) {
    const i64 width = is_integer(weight) ? p.group : scale_columns(weight);
    return (p.k + width - 1) / width;
}

// The parameters of a product of a batch, by its number. T: of a.
template <class T>
__device__ __forceinline__ WeightOnlyParameters product_of(WeightOnlyParameters p, i64 number) {
    const Weight weight = WEIGHT;
    const i64 row_bytes = has_nibbles(weight) ? (p.k + 1) / 2 : p.k, scales = number * p.n * scales_of_row(p, weight);
    p.a += number * p.m * p.k * static_cast<i64>(sizeof(T));
    p.codes += number * p.n * row_bytes;
    if (p.scales != nullptr) p.scales += is_integer(weight) ? scales * static_cast<i64>(sizeof(float)) : scales;
    if (p.zeros != nullptr) p.zeros += scales;
    if (p.factor != nullptr) p.factor += number * (p.factor_of_rows ? p.n : 1);
    if (p.bias != nullptr) p.bias = static_cast<const T*>(p.bias) + number * p.n;
    p.out = static_cast<T*>(p.out) + number * p.m * p.n;
    return p;
}

// Factor of the sums, if it is not of rows.
__device__ __forceinline__ float factor_of_sums(const WeightOnlyParameters& p, float divisor) {
    return p.factor == nullptr || p.factor_of_rows ? 1.0f : p.factor[0] / divisor;
}

// Output (y, x) from its sum over K. `alpha`: factor_of_sums. `divisor`: of `factor`.
template <class T>
__device__ __forceinline__ void store_output(const WeightOnlyParameters& p, float sum, i64 y, i64 x, float alpha, float divisor) {
    if (p.factor != nullptr) sum *= p.factor_of_rows ? p.factor[x] / divisor : alpha;
    if (p.bias != nullptr) sum += to_float(static_cast<const T*>(p.bias)[x]);
    from_float(sum, static_cast<T*>(p.out)[y * p.n + x]);
}

}  // namespace narrowgauge
