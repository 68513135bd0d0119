// gemm_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), a and b NVFP4 with blocks of 16 along K.
// gemm_grouped_nvfp4: the same for every section of a, with its own matrix b.
//
//   a.codes  (M, ceil(K/2)); a.scales (M, ceil(K/16)); b likewise with N rows
//   alpha    from the tensor amaxes: float32 (1,), or (M,) or (N,) with an amax for each row
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: grid.z is the number of sections. Blocks of threads beyond the end of a section do nothing.
//   Numerics: elements are decoded to float32; the inner product of a block of 16 and its two scales are exact
//   (docs/numerics.md#nvfp4-gemm: at most 20 bits); blocks are added in order of K, one float32 rounding each. Then
//   alpha * acc, + c and + bias each round to float32, and the last step is one cast to nearest even.

#include "gemm/portable/gemm_nvfp4.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(THREADS) gemm_nvfp4(GemmParameters p, Alpha alpha) {
    multiply(Nvfp4Scaling{alpha}, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_nvfp4(GroupedGemmParameters p, const i64* starts, GroupedAlpha alpha) {
    multiply_section(Nvfp4Scaling{alpha.section(blockIdx.z)}, p, starts);
}

}  // namespace narrowgauge
