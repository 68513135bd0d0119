// gemm_quantized_mx: quantized (a @ b.T (+ c) (+ bias)), a and b of MX formats. GEMM: gemm_mx.cu. Quantization of the output:
// gemm_quantized.cuh.

#include "gemm/portable/gemm_mx.cuh"
#include "gemm/portable/gemm_quantized.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS)
    gemm_quantized_mx(GemmParameters p, QuantizerParameters quantizer) {
    multiply_quantized(MxScaling{}, p, quantizer);
}

}  // namespace narrowgauge
