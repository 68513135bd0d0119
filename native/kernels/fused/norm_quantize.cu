// norm_quantize: RMSNorm or LayerNorm of the rows of x, of x + residual, quantized. Each input is read once.
//
//   Parameters: struct NormQuantizeParameters. Launch: a thread block for each row, with a thread for every CHUNKS * 16
//   elements, a multiple of 32; on a CPU 8 threads.
//   z = fl(x + residual), stored rounded to the dtype of x. RMSNorm: r = rsqrt(mean z^2 + eps), y = R(R(z * r) * w), with R the
//   rounding to the dtype of x. LayerNorm: m = mean z, r = rsqrt(mean (z - m)^2 + eps), y = R((z - m) * r * w + bias).
//   Sums are float32, in a tree over the threads; docs/contracts.md bounds any order. Scales and codes of y: quantize_row.cuh.

#include "fused/functions.cuh"
#include "fused/quantize_row.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

enum ElementType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct NormQuantizeParameters {
    const void* x;  // (M, K), any strides
    i64 row_stride;
    i64 column_stride;
    const void* residual;  // (M, K), contiguous, of the dtype of x; or null
    void* residual_out;    // (M, K), R(x + residual); or null
    const void* weight;    // (K,)
    i64 weight_stride;
    ElementType weight_type;
    const void* bias;      // (K,), of the type of the weight; or null
    i64 bias_stride;
    bool zero_centred;     // the factor is 1 + weight
    float eps;
    float columns;         // K as a float32 number
    bool layer_norm;
    QuantizeRowParameters result;
};

// Elements of a vector of one of three types. Those behind `count` are 0.
__device__ __forceinline__ void load_vector_of(const void* source, ElementType type, i64 stride, i64 start, int count,
                                               float (&v)[CHUNK]) {
    if (type == BFLOAT16) {
        load_block(static_cast<const bf16*>(source) + start * stride, stride, count, v);
    } else if (type == FLOAT16) {
        load_block(static_cast<const fp16*>(source) + start * stride, stride, count, v);
    } else {
        load_block(static_cast<const float*>(source) + start * stride, stride, count, v);
    }
}

template <class T>
__device__ __forceinline__ void store_row(const float (&v)[CHUNK], int count, T* target) {
    if (count == CHUNK) {
        store_elements(v, target);
        return;
    }
    for (int i = 0; i < count; ++i) from_float(v[i], target[i]);
}

template <class T>
__device__ __forceinline__ void norm_quantize(const NormQuantizeParameters& p) {
    __shared__ Shared shared;
    const Part part = part_of(p.result);
    float v[CHUNKS][CHUNK];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        if (i >= part.steps) break;
        const auto [column, count] = chunk_of(part, i);
        load_block(static_cast<const T*>(p.x) + part.row * p.row_stride + column * p.column_stride, p.column_stride, count, v[i]);
        if (p.residual != nullptr) {
            float r[CHUNK];
            const i64 start = part.row * p.result.columns + column;
            load_block(static_cast<const T*>(p.residual) + start, 1, count, r);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) v[i][j] += r[j];
            if (p.residual_out != nullptr) store_row(v[i], count, static_cast<T*>(p.residual_out) + start);
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) total += p.layer_norm ? v[i][j] : v[i][j] * v[i][j];
    }
    total = sum_over_block(total, shared.words[0]);
    float mean = 0.0f;
    if (p.layer_norm) {
        mean = total / p.columns;
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            if (i >= part.steps) break;
            const int count = chunk_of(part, i).count;
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                v[i][j] = j < count ? v[i][j] - mean : 0.0f;
                total += v[i][j] * v[i][j];
            }
        }
        total = sum_over_block(total, shared.words[1]);
    }
    const float factor = rsqrt_approx(total / p.columns + p.eps);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        if (i >= part.steps) break;
        const auto [column, count] = chunk_of(part, i);
        float weight[CHUNK], bias[CHUNK] = {};
        load_vector_of(p.weight, p.weight_type, p.weight_stride, column, count, weight);
        if (p.bias != nullptr) load_vector_of(p.bias, p.weight_type, p.bias_stride, column, count, bias);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const float normalized = v[i][j] * factor, w = p.zero_centred ? 1.0f + weight[j] : weight[j];
            v[i][j] = p.layer_norm ? rounded<T>(normalized * w + bias[j]) : rounded<T>(rounded<T>(normalized) * w);
        }
        if (count < CHUNK) {  // a factor of NaN or infinity leaves no zeros behind the row
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) v[i][j] = j < count ? v[i][j] : 0.0f;
        }
    }
    quantize_row(v, part, shared, p.result);
}

#define NORM_QUANTIZE(TYPE, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS)                                           \
        norm_quantize_##TYPE(const __grid_constant__ NormQuantizeParameters p) {                        \
        norm_quantize<T>(p);                                                                            \
    }

#if IN_UNIT(UNIT_FP32)
NORM_QUANTIZE(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
NORM_QUANTIZE(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
NORM_QUANTIZE(fp16, fp16)
#endif

}  // namespace narrowgauge
