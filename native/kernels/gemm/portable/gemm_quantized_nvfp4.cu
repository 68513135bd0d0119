// gemm_quantized_nvfp4: quantized (alpha * (a @ b.T) (+ c) (+ bias)), a and b NVFP4. The product: gemm_nvfp4.cu; what
// becomes of it, in a format that has no scale of the whole output: gemm_quantized.cuh.

#include "gemm/portable/gemm_nvfp4.cuh"
#include "gemm/portable/gemm_quantized.cuh"

extern "C" __global__ void __launch_bounds__(WIDE_THREADS)
    gemm_quantized_nvfp4(GEMM_PARAMETERS, QUANTIZER_PARAMETERS, const float* a_amax, int a_each, const float* b_amax,
                         int b_each, int alpha_order, float divisor, float reciprocal) {
    multiply_quantized(Nvfp4{a_amax, b_amax, a_each, b_each, alpha_order, divisor, reciprocal}, GEMM_OPERANDS, QUANTIZER);
}
