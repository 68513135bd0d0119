// gemm_mx: out = a @ b.T (+ c) (+ bias), a and b of MX formats, with E8M0 scales of blocks of 32 along K.
// gemm_grouped_mx: the same for each section of a, with a matrix of b of its own.
//
//   a_codes, a_scales  (M, K) bytes, or (M, ceil(K/2)) of E2M1, and (M, ceil(K/32)); either may be stored transposed
//                      (Layout); b likewise with N rows. The elements of the two may differ
//   c       (M, N) or null; bias (N,) or null
//   out     (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: sizes (G,) rows of each section, b_codes, b_scales the addresses of G matrices of one shape, b_layouts (G,),
//   bias (G, N); grid.z = G, and blocks beyond the end of a section do nothing.
//   Numerics: products of elements are exact in float32, and those of a block are added in order of K, one rounding
//   each. The sum P of a block becomes fl(P * 2^(ea+eb)), which rounds once wherever it lies (gemm_mx.cuh); blocks are
//   added in order of K. Then + c, + bias round to float32, and one cast to nearest even ends it. A scale of 255 is NaN.

#include "gemm/portable/gemm_mx.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) gemm_mx(GEMM_PARAMETERS) { multiply(Mx{}, GEMM_OPERANDS); }

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_mx(GROUPED_PARAMETERS) { MULTIPLY_SECTION(Mx{}); }
