// gemm_quantized_fp8_block, gemm_quantized_fp8_tensor: quantized (a @ b.T (+ c) (+ bias)), a and b FP8 with float32 scales
// of blocks, or of tensors. GEMM: gemm_fp8.cu. Quantization of the output: gemm_quantized.cuh.

#include "gemm/portable/gemm_fp8.cuh"
#include "gemm/portable/gemm_quantized.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS)
    gemm_quantized_fp8_block(GemmParameters p, QuantizerParameters quantizer) {
    multiply_quantized(Fp8BlockScaling{}, p, quantizer);
}

extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS)
    gemm_quantized_fp8_tensor(GemmParameters p, QuantizerParameters quantizer) {
    multiply_quantized(tensor_scaling(p), p, quantizer);
}

}  // namespace narrowgauge
