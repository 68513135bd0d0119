// gemm_skinny_mx: out = a @ b.T (+ c) (+ bias), MXFP8 with E4M3 elements, with few rows of a.
//
//   a.codes  (M, K); a.scales (M, K/32); b likewise with N rows. Codes begin at a multiple of 16 bytes, scales of 4
//   K        a multiple of 128; any M; N and K to 2^20
//   Launch: `early`, 256 threads, sizeof(BlockShared) of dynamic shared memory, grid (ceil(M/16), ceil(ceil(N/16)/strips)): a
//   block has 16 rows of a and `strips` strips of 16 rows of b.
//   Numerics: sums as in gemm_skinny_e4m3.cuh. The sum P of a block of 32 starts at 0, becomes fl(P * 2^(ea+eb)) and is added
//   to the sum of the blocks before it. Then + c and + bias; each of these sums rounds to float32, and the last step is one
//   cast.

#include "gemm/portable/gemm_mx.cuh"
#include "gemm/skinny/gemm_skinny_e4m3.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1) gemm_skinny_mx(GemmParameters p, SkinnyParameters skinny) {
    multiply_skinny(MxScaling{}, p, skinny);
}

}  // namespace narrowgauge
