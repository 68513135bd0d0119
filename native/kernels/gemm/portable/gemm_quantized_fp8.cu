// gemm_quantized_fp8_block, gemm_quantized_fp8_tensor: quantized (a @ b.T (+ c) (+ bias)), a and b FP8 with float32 scales
// of blocks, or one each. The product: gemm_fp8.cu; what becomes of it: gemm_quantized.cuh.

#include "gemm/portable/gemm_fp8.cuh"
#include "gemm/portable/gemm_quantized.cuh"

extern "C" __global__ void __launch_bounds__(WIDE_THREADS) gemm_quantized_fp8_block(GEMM_PARAMETERS, QUANTIZER_PARAMETERS) {
    multiply_quantized(Fp8Block{}, GEMM_OPERANDS, QUANTIZER);
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS) gemm_quantized_fp8_tensor(GEMM_PARAMETERS, QUANTIZER_PARAMETERS) {
    multiply_quantized(Fp8Tensor{static_cast<const float*>(a_scales), static_cast<const float*>(b_scales)}, GEMM_OPERANDS,
                       QUANTIZER);
}
