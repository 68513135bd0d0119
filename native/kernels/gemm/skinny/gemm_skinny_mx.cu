// gemm_skinny_mx: out = a @ b.T (+ c) (+ bias), MXFP8 of elements E4M3, where a has few rows.
//
//   a_codes  (M, K), a_scales (M, K/32); b likewise with N rows. Codes begin at a multiple of 16 bytes, scales of 4
//   K        a multiple of 128; any M; N and K to 2^20
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 256 threads, sizeof(Shared) of dynamic shared memory, grid (ceil(M/16), ceil(ceil(N/16)/each)): a block has
//   16 rows of a and `each` strips of 16 rows of b.
//   Numerics: sums as gemm_skinny_e4m3.cuh says. The sum P of a block of 32 begins at 0, becomes fl(P * 2^(ea+eb)) and
//   is added to that of the blocks before it. Then + c, + bias; each of these sums rounds to float32, and one cast ends
//   it.

#include "gemm/portable/gemm_mx.cuh"
#include "gemm/skinny/gemm_skinny_e4m3.cuh"

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
    gemm_skinny_mx(const u8* a_codes, const u8* a_scales, const u8* b_codes, const u8* b_scales, const void* c,
                   const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type,
                   int each) {
    const Work work = work_of(a_codes, a_scales, b_codes, b_scales, m, n, k);
    multiply_skinny(Mx{}, work, {c, bias, out, c_type, bias_type, out_type, 0, 0}, each);
}
