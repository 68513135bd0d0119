// producers.cuh: matrices of training that a kernel makes while it loads them: norms and activations, forward and backward.
//
// With R the rounding to the dtype of x, and w = weight, or 1 + weight:
//   RMSNORM            R(x * rs * w)
//   SILU_MUL           R(silu(gate) * up), x = (gate, up) in halves of the columns
//   RMSNORM_BACKWARD   R(rs * (g - projection * n)), g = dy * w, n = x * rs
//   SILU_MUL_BACKWARD  (R(dgate), R(dup)) in halves of the columns: dgate = s * (gate * (1 - s) + 1) * (dy * up),
//                      dup = dy * gate * s, s = 1 / (1 + e^-gate) by a division: 1 - s of a large gate would magnify an error
#pragma once

#include "common/blocks.cuh"
#include "fused/functions.cuh"
#include "fused/rounded.cuh"

namespace narrowgauge {

enum Producer : int { RMSNORM = 0, SILU_MUL = 1, RMSNORM_BACKWARD = 2, SILU_MUL_BACKWARD = 3 };

// On a GPU the macro PRODUCER gives the values.
struct ProducerVariant {
    Producer producer;
    bool zero_centered;
    ElementType weight_type;
    bool whole_chunks;  // the operands have whole chunks (RowChunk), and so has each half of the columns
};

struct ProducerParameters {
    const void* x;  // (M, half), or (M, 2 * half) in halves; any strides
    i64 row_stride;
    i64 column_stride;
    const void* dy;           // (M, half), contiguous, of the dtype of x; or null
    const float* rs;          // (M,), 1 / sqrt(mean x^2 + eps), of norms
    const float* projection;  // (M,), mean(g * n), of RMSNORM_BACKWARD
    const void* weight;       // (half,), of norms
    i64 weight_stride;
    int half;
    ProducerVariant variant;
};

__device__ __forceinline__ ProducerVariant variant_of(const ProducerParameters& p) {
#ifdef PRODUCER
    return PRODUCER;
#else
    return p.variant;
#endif
}

__device__ __forceinline__ bool is_backward(Producer producer) { return producer >= RMSNORM_BACKWARD; }
__device__ __forceinline__ bool is_gated(Producer producer) { return producer == SILU_MUL || producer == SILU_MUL_BACKWARD; }

// Operands of 16 neighbouring elements of the result. Behind the row they are 0.
struct Operands {
    float x[CHUNK], up[CHUNK], dy[CHUNK], weight[CHUNK];
};

template <class T>
__device__ __forceinline__ void load_operands(const ProducerParameters& p, const ProducerVariant& variant, i64 row,
                                              const RowChunk& chunk, Operands& operands) {
    const bool gated = is_gated(variant.producer), backward = is_backward(variant.producer);
    const i64 start = row * p.row_stride, dy_start = row * p.half, stride = stride_of(chunk, p.column_stride);
    if (chunk.whole) {
        const RowChunk own = {chunk.column < p.half ? chunk.column : chunk.column - p.half, chunk.count, true};
        load_as_floats<T>(p.x, type_of<T>, start, stride, own, operands.x);
        if (gated) load_as_floats<T>(p.x, type_of<T>, start + p.half, stride, own, operands.up);
        if (backward) load_as_floats<T>(p.dy, type_of<T>, dy_start, 1, own, operands.dy);
        if (!gated) load_as_floats<T>(p.weight, variant.weight_type, 0, p.weight_stride, own, operands.weight);
    } else {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const bool inside = j < chunk.count;
            const int column = chunk.column + j;
            const i64 own = column < p.half ? column : column - p.half;
            const T *x = static_cast<const T*>(p.x) + start, *dy = static_cast<const T*>(p.dy) + dy_start;
            operands.x[j] = inside ? to_float(x[own * stride]) : 0.0f;
            operands.up[j] = inside && gated ? to_float(x[(own + p.half) * stride]) : 0.0f;
            operands.dy[j] = inside && backward ? to_float(dy[own]) : 0.0f;
            operands.weight[j] = inside && !gated ? load_element(p.weight, variant.weight_type, own * p.weight_stride) : 0.0f;
        }
    }
    if (!variant.zero_centered) return;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) operands.weight[j] += 1.0f;
}

struct SiluGradients {
    float gate, up;
};

__device__ __forceinline__ SiluGradients silu_gradients(float gate, float up, float dy) {
    const float s = 1.0f / (1.0f + exp_accurate(-gate));
    return {s * (gate * (1.0f - s) + 1.0f) * (dy * up), dy * gate * s};
}

__device__ __forceinline__ float rmsnorm_gradient(float x, float dy, float weight, float rs, float projection) {
    return rs * (dy * weight - projection * (x * rs));
}

// 16 elements of a row of the result, from column chunk.column on, before they are rounded; zeros behind the row.
template <class T>
__device__ __forceinline__ void produce(const ProducerParameters& p, const ProducerVariant& variant, i64 row,
                                        const RowChunk& chunk, float (&y)[CHUNK]) {
    const Producer producer = variant.producer;
    const bool has_row = !is_gated(producer) && chunk.count > 0;
    const float rs = has_row ? p.rs[row] : 0.0f;
    const float projection = has_row && producer == RMSNORM_BACKWARD ? p.projection[row] : 0.0f;
    Operands operands;
    load_operands<T>(p, variant, row, chunk, operands);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
        const float x = operands.x[j], up = operands.up[j], dy = operands.dy[j], weight = operands.weight[j];
        if (producer == RMSNORM) {
            y[j] = x * rs * weight;
        } else if (producer == SILU_MUL) {
            y[j] = x * sigmoid_approx(x, false) * up;
        } else if (producer == RMSNORM_BACKWARD) {
            y[j] = rmsnorm_gradient(x, dy, weight, rs, projection);
        } else {
            const SiluGradients gradients = silu_gradients(x, up, dy);
            y[j] = chunk.column + j < p.half ? gradients.gate : gradients.up;
        }
        y[j] = variant.whole_chunks || j < chunk.count ? y[j] : 0.0f;  // rs may be infinite or NaN
    }
}

// The rounded elements, as the source of a kernel that quantizes any matrix (blocks.cuh, Matrix).
template <class T>
struct Produced {
    const ProducerParameters& p;
    ProducerVariant variant;

    template <int BLOCK>
    __device__ __forceinline__ void load(i64 row, i64 column, int count, float (&v)[BLOCK]) const {
        static_assert(BLOCK % CHUNK == 0, "whole chunks");
#pragma unroll
        for (int start = 0; start < BLOCK; start += CHUNK) {
            float y[CHUNK];
            const RowChunk chunk = {static_cast<int>(column) + start, valid_count<CHUNK>(count - start), variant.whole_chunks};
            produce<T>(p, variant, row, chunk, y);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) v[start + j] = rounded<T>(y[j]);
        }
    }
};

}  // namespace narrowgauge
