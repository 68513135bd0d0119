// gemm_skinny_fp8_tensor: out = alpha * (a @ b.T) (+ c) (+ bias), FP8 with E4M3 elements and one float32 scale each, with few
// rows of a.
// gemm_skinny_fp8_block: out = a @ b.T (+ bias) (+ c), with float32 scales of 128 elements of K, of one row or 128.
//
//   a.codes  (M, K); a.scales float32 (1,) of a tensor, or (ceil(M/2^a_shift), K/128); b likewise with N rows. Codes begin at
//            a multiple of 16 bytes
//   K        a multiple of 128; any M; N and K to 2^20
//   Launch: as gemm_skinny_mx.
//   Numerics: sums as in gemm_skinny_e4m3.cuh. The sum P of 128 columns starts at 0. Block: acc = fma(fl(P * s_a), s_b, acc);
//   then + bias rounds to float32, the result is cast to the type of the output, c is added in float32, and the sum is cast
//   again. Tensor: acc + P; then fl(fl(s_a * s_b) * acc), + c and + bias, each rounded to float32, and one cast.

#include "gemm/portable/gemm_fp8.cuh"
#include "gemm/skinny/gemm_skinny_e4m3.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
    gemm_skinny_fp8_tensor(GemmParameters p, SkinnyParameters skinny) {
    multiply_skinny(tensor_scaling(p), p, skinny);
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
    gemm_skinny_fp8_block(GemmParameters p, SkinnyParameters skinny) {
    multiply_skinny(Fp8BlockScaling{}, p, skinny);
}

}  // namespace narrowgauge
