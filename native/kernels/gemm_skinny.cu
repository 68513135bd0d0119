// gemm_skinny_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), NVFP4, where a has few rows.
// gemm_skinny_mx: out = a @ b.T (+ c) (+ bias), the same of MXFP8, elements E4M3.
//
//   a_codes  (M, K/2) or (M, K), a_scales (M, K/16) or (M, K/32); b likewise with N rows. Codes begin at a multiple of 16
//            bytes, scales of 2
//   K        a multiple of 128 of NVFP4, of 64 of MXFP8; any M; N and K to 2^20
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 256 threads for 16 rows of a and 32 of b, grid (ceil(M/16), ceil(N/32)): blocks that read the same rows of b
//   run at the same time, so that they come from memory once.
//   Numerics: elements become float16, those of NVFP4 with the scale of their block, exactly. Tensor cores add 16 products
//   at a time to a float32 number, cut off as they do it (aligned_halves); of MXFP8 the sum P of a block of 32, which
//   begins at 0, then becomes fl(P * 2^(ea+eb)) and is added to that of the blocks before it. Which 16 columns: thread t
//   of the four with a row has 32 that follow each other in a chunk of 128 (8 in a block of 32), and gives four of each
//   eight to an mma, of NVFP4 the even ones to the first and the odd ones to the second, of MXFP8 the first four and the
//   last. Chunks are taken by eight warps in turn, in order of K; the sums of the warps are added in their order, one
//   float32 rounding each. Then alpha * sum, + c, + bias round to float32, and one cast ends it.

#include "gemm_skinny.cuh"

#define SKINNY_PARAMETERS                                                                                              \
    const u8 *a_codes, const u8 *a_scales, const u8 *b_codes, const u8 *b_scales, const void *c, const void *bias,     \
        void *out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type
#define SKINNY_ARGUMENTS                                                                                               \
    a_codes, a_scales, b_codes, b_scales, Epilogue{c, bias, out, c_type, bias_type, out_type, 0, 0}, m, n, k

#define NVFP4_PARAMETERS                                                                                               \
    const float *a_amax, int a_each, const float *b_amax, int b_each, int alpha_order, float divisor, float reciprocal
#define NVFP4_RULE                                                                                                     \
    Nvfp4 { a_amax, b_amax, a_each, b_each, alpha_order, divisor, reciprocal }

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 2) gemm_skinny_nvfp4(SKINNY_PARAMETERS, NVFP4_PARAMETERS) {
    multiply_skinny<SkinnyNvfp4, 2>(NVFP4_RULE, SKINNY_ARGUMENTS);
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 2) gemm_skinny_mx(SKINNY_PARAMETERS) {
    multiply_skinny<SkinnyMx, 2>(Mx{}, SKINNY_ARGUMENTS);
}

