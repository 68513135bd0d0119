// gemm_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), a and b NVFP4 with blocks of 16 along K.
// gemm_grouped_nvfp4: the same for each section of a, with a matrix of b of its own.
//
//   a_codes (M, ceil(K/2)), a_scales (M, ceil(K/16)), a_amax float32 (1,), or (M,) where a_each; b likewise with N rows
//   c       (M, N) or null; bias (N,) or null
//   out     (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: sizes (G,) rows of each section, a_amax (G,), b_codes, b_scales, b_amax the addresses of G matrices of one
//   shape, b_layouts (G,), bias (G, N); grid.z = G, and blocks beyond the end of a section do nothing.
//   Numerics: elements are decoded to float32; the inner product of a block of 16 and its two scales are exact
//   (docs/numerics.md#nvfp4-gemm: at most 20 bits); blocks are added in order of K, one float32 rounding each. Then
//   alpha * acc, + c, + bias round to float32, and one cast to nearest even ends it.

#include "gemm/portable/gemm_nvfp4.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_nvfp4(GEMM_PARAMETERS, const float* a_amax, int a_each, const float* b_amax, int b_each, int alpha_order,
               float divisor, float reciprocal) {
    multiply(Nvfp4{a_amax, b_amax, a_each, b_each, alpha_order, divisor, reciprocal}, GEMM_OPERANDS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_grouped_nvfp4(GROUPED_PARAMETERS, const float* a_amax, const float* const* b_amax, int alpha_order, float divisor,
                       float reciprocal) {
    const Nvfp4 rule = {a_amax + blockIdx.z, b_amax[blockIdx.z], 0, 0, alpha_order, divisor, reciprocal};
    MULTIPLY_SECTION(rule);
}
