// gemm_quantized_mx: quantized (a @ b.T (+ c) (+ bias)), a and b of MX formats. The product: gemm_mx.cu; what becomes of
// it: gemm_quantized.cuh.

#include "gemm/portable/gemm_mx.cuh"
#include "gemm/portable/gemm_quantized.cuh"

extern "C" __global__ void __launch_bounds__(WIDE_THREADS) gemm_quantized_mx(GEMM_PARAMETERS, QUANTIZER_PARAMETERS) {
    multiply_quantized(Mx{}, GEMM_OPERANDS, QUANTIZER);
}
