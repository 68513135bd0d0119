// gemm_mx: out = a @ b.T (+ c) (+ bias), a and b of MX formats, with E8M0 scales of blocks of 32 along K.
// gemm_grouped_mx: the same for every section of a, with its own matrix b.
//
//   a.codes  (M, K) bytes, or (M, ceil(K/2)) of E2M1; a.scales (M, ceil(K/32)); each may be stored transposed (Layout). b
//            likewise with N rows. The element formats of a and b may differ
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: grid.z is the number of sections. Blocks of threads beyond the end of a section do nothing.
//   Numerics: products of elements are exact in float32. The products of a block are added in order of K, one rounding
//   each. The sum P of a block becomes fl(P * 2^(ea+eb)), with one rounding for any exponent (gemm_mx.cuh). Blocks are
//   added in order of K. Then + c and + bias each round to float32, and the last step is one cast to nearest even. A scale
//   of 255 is NaN.

#include "gemm/portable/gemm_mx.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(THREADS) gemm_mx(GemmParameters p) { multiply(MxScaling{}, p); }

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_mx(GroupedGemmParameters p, const i64* starts) {
    multiply_section(MxScaling{}, p, starts);
}

}  // namespace narrowgauge
