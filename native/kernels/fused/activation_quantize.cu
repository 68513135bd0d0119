// activation_quantize: an activation of the gate, times the other half of the columns, quantized. x is read once.
//
//   Parameters: struct ActivationQuantizeParameters. Launch: `segments` thread blocks for each row, with a thread for every
//   ROW_CHUNKS * 16 elements, a multiple of 32, or ROW_LANES lanes for a row; on a CPU 32 threads. A recipe with a scale for a row has one segment.
//   y = R(f(gate) * up), with R the rounding to the dtype of x; the gate is the first half of a row of x. f: SiLU,
//   x / (1 + e^-x), GELU by tanh, x / (1 + e^(-2a)) with a = sqrt(2/pi) * (x + 0.044715 x^3), or by erf. SILU_ROUNDED:
//   R(R(silu(gate)) * up). SWIGLU_CLAMPED: R(g / (1 + e^(-alpha g)) * (u + 1)), g = min(gate, limit), u = up within +-limit. RELU_SQUARED: R(max(x, 0)^2).
//   Scales and codes of y: quantize_row.cuh.

#include "fused/functions.cuh"
#include "fused/quantize_row.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

enum Activation : int { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, SWIGLU_CLAMPED = 3, RELU_SQUARED = 4, SILU_ROUNDED = 5 };

// On a GPU the macro gives the activation, else the parameters do.
#ifndef ACTIVATION
#define ACTIVATION p.activation
#endif

struct ActivationQuantizeParameters {
    const void* x;  // (M, 2K), with RELU_SQUARED (M, K), any strides
    i64 row_stride;
    i64 column_stride;
    Activation activation;
    float limit;  // of SWIGLU_CLAMPED
    float alpha;
    QuantizeRowParameters result;
};

// NaN stays NaN.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

template <class T>
__device__ __forceinline__ float activated(float x, float up, Activation activation, const ActivationQuantizeParameters& p) {
    if (activation == SILU) return x * sigmoid_approx(x, false) * up;
    if (activation == SILU_ROUNDED) return rounded<T>(x * sigmoid_approx(x, false)) * up;
    if (activation == GELU_TANH) {
        return x * sigmoid_approx(1.5957691216f * (x + 0.044715f * (x * x * x)), true) * up;  // 2 sqrt(2/pi)
    }
    if (activation == GELU_ERF) return 0.5f * x * (1.0f + erf_approx(x * 0.7071067812f)) * up;  // sqrt(1/2)
    if (activation == SWIGLU_CLAMPED) {
        const float gate = at_most(x, p.limit), linear = -at_most(-at_most(up, p.limit), p.limit);
        return gate * sigmoid_approx(p.alpha * gate, true) * (linear + 1.0f);
    }
    const float positive = x > 0.0f || x != x ? x : 0.0f;
    return positive * positive;
}

template <class T>
__device__ __forceinline__ void activation_quantize(const ActivationQuantizeParameters& p) {
    __shared__ Words words;
    const Part part = part_of(p.result, variant_of(p.result).whole_chunks);
    const Activation activation = ACTIVATION;
    Rounded<T> y[ROW_CHUNKS];
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        const RowChunk chunk = chunk_of(part, i);
        const i64 stride = stride_of(chunk, p.column_stride);
        const T* source = static_cast<const T*>(p.x) + part.row * p.row_stride + chunk.column * stride;
        load_rounded(source, stride, chunk, y[i]);
        float gate[CHUNK], up[CHUNK];
        unpack_floats(y[i], gate);
        Rounded<T> other = y[i];
        if (activation != RELU_SQUARED) {
            load_rounded(source + p.result.columns * stride, stride, chunk, other);
        }
        unpack_floats(other, up);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) gate[j] = activated<T>(gate[j], up[j], activation, p);
        round_chunk<RESULT_ORDER>(gate, y[i]);
    }
    quantize_row(y, part, words, p.result, tensor_factors(p.result));
}

#define ACTIVATION_QUANTIZE(TYPE, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                              \
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
