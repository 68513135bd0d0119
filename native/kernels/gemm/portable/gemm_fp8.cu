// gemm_fp8_block: out = a @ b.T (+ bias) (+ c), a and b FP8 with a float32 scale for 128 elements of K, of one row or 128.
// gemm_fp8_tensor: out = alpha * (a @ b.T) (+ c) (+ bias), a and b FP8 with a float32 scale of the tensor or of each row.
// gemm_grouped_fp8_block, gemm_grouped_fp8_tensor: the same for every section of a, with its own matrix b.
//
//   a.codes  (M, K); a.scales float32 (M, ceil(K/128)), (ceil(M/128), ceil(K/128)) of tiles, (M, 1), or (1,) of a tensor; b
//            likewise with N rows. Codes and scales may be stored transposed (Layout). Either operand may be of an MX format
//            instead (SCALES_IN_ELEMENTS): its scales multiply its elements, in float32, and its factor s is 1
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: the scales of a are the concatenated scales of the sections. A section has its own rows of tiles, or a tensor
//   scale. grid.z is the number of sections. Blocks of threads beyond the end of a section do nothing.
//   Numerics: products of elements are exact in float32. The products of a block, or of all of K, are added in order of K,
//   one rounding each. Block: acc = fma(fl(P * s_a), s_b, acc) for the sum P of each block, in order of K from 0 on. Only
//   this product and sum round together. Then + bias rounds to float32, the result is cast to the type of the output, c is
//   added in float32, and the sum is cast again. Tensor: fl(fl(s_a * s_b) * acc), + c and + bias, each rounded to float32,
//   and one cast. Casts are to nearest even.

#include "gemm/portable/gemm_fp8.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(THREADS) gemm_fp8_block(GemmParameters p) { multiply(Fp8BlockScaling{}, p); }

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_fp8_block(GroupedGemmParameters p, const i64* starts) {
    multiply_section(Fp8BlockScaling{}, p, starts);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_fp8_tensor(GemmParameters p) { multiply(tensor_scaling(p), p); }

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_fp8_tensor(GroupedGemmParameters p, const i64* starts) {
    const auto* a_scales = static_cast<const float*>(p.a.scales);
    const Fp8TensorScaling scaling = {a_scales + blockIdx.z, static_cast<const float*>(p.b.scales[blockIdx.z]), false,
                                      false};
    multiply_section(scaling, p, starts);
}

}  // namespace narrowgauge
