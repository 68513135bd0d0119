// produced_mx: MX formats of a matrix that the kernel makes (producers.cuh): rowwise, columnwise, or both in one pass.
//
//   Parameters: struct QuantizeMxParameters, of which x and its strides and sections are not used, and struct
//   ProducerParameters. Launch and numerics: quantize_mx of quantize/quantize_mx.cu.

#define AS_HEADER 1
#include "quantize/quantize_mx.cu"
#undef AS_HEADER
#define AS_HEADER 0
#include "fused/producers.cuh"

namespace narrowgauge {

#define PRODUCED_MX(TYPE, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                      \
        produced_mx_##TYPE(const __grid_constant__ QuantizeMxParameters p,                                             \
                           const __grid_constant__ ProducerParameters producer) {                                      \
        quantize(Produced<T>{producer, variant_of(producer)}, p.columns, Sections{nullptr, 1, p.rows}, p.row,          \
                 p.column, Settings{p.variant, 0u});                                                                   \
    }

#if IN_UNIT(UNIT_FP32)
PRODUCED_MX(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
PRODUCED_MX(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
PRODUCED_MX(fp16, fp16)
#endif

}  // namespace narrowgauge
