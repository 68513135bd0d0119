// gemm_fp8_block: out = a @ b.T (+ bias) (+ c), a and b FP8 with float32 scales of 128 elements of K, of one row or 128.
// gemm_fp8_tensor: out = alpha * (a @ b.T) (+ c) (+ bias), a and b FP8 with one float32 scale each.
// gemm_grouped_fp8_block, gemm_grouped_fp8_tensor: the same for each section of a, with a matrix of b of its own.
//
//   a_codes (M, K), a_scales float32 (M, ceil(K/128)), or (ceil(M/128), ceil(K/128)) of tiles (Layout), or (1,) of a
//           tensor; b likewise with N rows. Codes and scales may be stored transposed
//   c       (M, N) or null; bias (N,) or null
//   out     (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: sizes (G,) rows of each section, whose scales follow each other as their rows of blocks do, one each of a
//   tensor; b_codes, b_scales the addresses of G matrices of one shape, b_layouts (G,), bias (G, N); grid.z = G, and
//   blocks beyond the end of a section do nothing.
//   Numerics: products of elements are exact in float32, and those of a block, or of all of K, are added in order of K,
//   one rounding each. Block: acc = fma(fl(P * s_a), s_b, acc) for the sum P of each block, in order of K from 0 on; this
//   is the one place where a product and a sum round together. Then + bias rounds to float32, a cast to the type of the
//   output follows, and only then c is added, in float32, and the sum cast again. Tensor: fl(fl(s_a * s_b) * acc), + c,
//   + bias, each rounded to float32, and one cast. Casts are to nearest even.

#include "gemm/portable/gemm_fp8.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) gemm_fp8_block(GEMM_PARAMETERS) { multiply(Fp8Block{}, GEMM_OPERANDS); }

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_fp8_block(GROUPED_PARAMETERS) {
    MULTIPLY_SECTION(Fp8Block{});
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_fp8_tensor(GEMM_PARAMETERS) {
    multiply(Fp8Tensor{static_cast<const float*>(a_scales), static_cast<const float*>(b_scales)}, GEMM_OPERANDS);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_fp8_tensor(GROUPED_PARAMETERS) {
    const Fp8Tensor rule = {static_cast<const float*>(a_scales) + blockIdx.z, static_cast<const float*>(b_scales[blockIdx.z])};
    MULTIPLY_SECTION(rule);
}
