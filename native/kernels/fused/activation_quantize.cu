// activation_quantize: an activation of the gate, times the other half of the columns, quantized. x is read once.
//
//   Parameters: struct ActivationQuantizeParameters. Launch: `segments` thread blocks for each row, with a thread for every
//   CHUNKS * 16 elements, a multiple of 32; on a CPU 8 threads. A recipe with a scale for a row has one segment.
//   y = R(f(gate) * up), or R(R(f(gate)) * up), with R the rounding to the dtype of x; the gate is the first half of a row of
//   x. f: SiLU x / (1 + e^-x), GELU by tanh, x / (1 + e^(-2a)) with a = sqrt(2/pi) * (x + 0.044715 x^3), or by erf, and
//   RELU_SQUARED, R(max(x, 0)^2) of all columns. IDENTITY: y = x. Scales and codes of y: quantize_row.cuh.

#include "fused/functions.cuh"
#include "fused/quantize_row.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

enum Activation : int { IDENTITY = 0, SILU = 1, GELU_TANH = 2, GELU_ERF = 3, RELU_SQUARED = 4 };

// On a GPU the macro gives the activation, else the parameters do.
#ifndef ACTIVATION
#define ACTIVATION p.activation
#endif

struct ActivationQuantizeParameters {
    const void* x;  // (M, K) with IDENTITY, else (M, 2K), any strides
    i64 row_stride;
    i64 column_stride;
    Activation activation;
    bool round_activation;  // f(gate) is rounded to the dtype of x
    QuantizeRowParameters result;
};

__device__ __forceinline__ float activated(float x, Activation activation) {
    if (activation == SILU) return divide_approx(x, 1.0f + exp_approx(-x));
    if (activation == GELU_TANH) {
        const float argument = 0.7978845608f * (x + 0.044715f * (x * x * x));  // sqrt(2/pi)
        return x / (1.0f + exp_approx(-2.0f * argument));
    }
    if (activation == GELU_ERF) return 0.5f * x * (1.0f + erf_approx(x * 0.7071067812f));  // sqrt(1/2)
    const float positive = x > 0.0f || x != x ? x : 0.0f;
    return positive * positive;
}

template <class T>
__device__ __forceinline__ void activation_quantize(const ActivationQuantizeParameters& p) {
    __shared__ Shared shared;
    const Part part = part_of(p.result);
    const Activation activation = ACTIVATION;
    float v[CHUNKS][CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        if (i >= part.steps) break;
        const auto [column, count] = chunk_of(part, i);
        const T* source = static_cast<const T*>(p.x) + part.row * p.row_stride + column * p.column_stride;
        load_block(source, p.column_stride, count, v[i]);
        if (activation == IDENTITY) continue;
        float up[CHUNK] = {};
        if (activation != RELU_SQUARED) load_block(source + p.result.columns * p.column_stride, p.column_stride, count, up);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const float y = activated(v[i][j], activation);
            v[i][j] = rounded<T>(activation == RELU_SQUARED ? y : (p.round_activation ? rounded<T>(y) : y) * up[j]);
        }
    }
    quantize_row(v, part, shared, p.result);
}

#define ACTIVATION_QUANTIZE(TYPE, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS)                                              \
        activation_quantize_##TYPE(const __grid_constant__ ActivationQuantizeParameters p) {               \
        activation_quantize<T>(p);                                                                         \
    }

#if IN_UNIT(UNIT_FP32)
ACTIVATION_QUANTIZE(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
ACTIVATION_QUANTIZE(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
ACTIVATION_QUANTIZE(fp16, fp16)
#endif

}  // namespace narrowgauge
