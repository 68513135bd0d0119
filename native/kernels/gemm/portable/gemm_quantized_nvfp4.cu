// gemm_quantized_nvfp4: quantized (alpha * (a @ b.T) (+ c) (+ bias)), a and b NVFP4. GEMM: gemm_nvfp4.cu. Quantization of the
// output, to a format without a scale of the whole output: gemm_quantized.cuh.

#include "gemm/portable/gemm_nvfp4.cuh"
#include "gemm/portable/gemm_quantized.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS)
    gemm_quantized_nvfp4(GemmParameters p, QuantizerParameters quantizer, Alpha alpha) {
    multiply_quantized(Nvfp4Scaling{alpha}, p, quantizer);
}

}  // namespace narrowgauge
