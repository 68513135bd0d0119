// gemm_skinny_fp8_tensor: out = alpha * (a @ b.T) (+ c) (+ bias), FP8 of elements E4M3 with one float32 scale each,
// where a has few rows.
// gemm_skinny_fp8_block: out = a @ b.T (+ bias) (+ c), with float32 scales of 128 elements of K, of one row or 128.
//
//   a_codes  (M, K), a_scales float32 (1,) of a tensor, or (ceil(M/2^a_shift), K/128); b likewise with N rows. Codes
//            begin at a multiple of 16 bytes
//   K        a multiple of 128; any M; N and K to 2^20
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: as gemm_skinny_mx.
//   Numerics: sums as gemm_skinny_e4m3.cuh says. The sum P of 128 columns begins at 0. Block: acc = fma(fl(P * s_a),
//   s_b, acc); then + bias rounds to float32, a cast to the type of the output follows, and only then c is added, in
//   float32, and the sum cast again. Tensor: acc + P; then fl(fl(s_a * s_b) * acc), + c, + bias, each rounded to
//   float32, and one cast.

#include "gemm/portable/gemm_fp8.cuh"
#include "gemm/skinny/gemm_skinny_e4m3.cuh"

__device__ __forceinline__ const u8* bytes_of(const float* scales) { return reinterpret_cast<const u8*>(scales); }

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
    gemm_skinny_fp8_tensor(const u8* a_codes, const float* a_scales, const u8* b_codes, const float* b_scales,
                           const void* c, const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type,
                           int out_type, int each) {
    const Work work = work_of(a_codes, nullptr, b_codes, nullptr, m, n, k);
    multiply_skinny(Fp8Tensor{a_scales, b_scales}, work, {c, bias, out, c_type, bias_type, out_type, 0, 0}, each);
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
    gemm_skinny_fp8_block(const u8* a_codes, const float* a_scales, const u8* b_codes, const float* b_scales,
                          const void* c, const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type,
                          int out_type, int each, int a_shift, int b_shift) {
    Work work = work_of(a_codes, bytes_of(a_scales), b_codes, bytes_of(b_scales), m, n, k);
    work.a_shift = a_shift;
    work.b_shift = b_shift;
    multiply_skinny(Fp8Block{}, work, {c, bias, out, c_type, bias_type, out_type, 0, 0}, each);
}
