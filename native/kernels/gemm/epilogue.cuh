// epilogue.cuh: from the float32 sum of an output to memory: alpha, c, bias and the cast.
#pragma once

#include "gemm/parameters.cuh"

namespace narrowgauge {

// The epilogue of a GEMM, or of a section of a grouped GEMM.
struct Epilogue : EpilogueParameters {
    i64 first;       // element of c and out at which the product begins
    i64 first_bias;  // element of bias
};

__device__ __forceinline__ float load_as(const void* source, DType type, i64 index) {
    if (type == DType::FLOAT32) return to_float(static_cast<const float*>(source)[index]);
    if (type == DType::BFLOAT16) return to_float(static_cast<const bf16*>(source)[index]);
    return to_float(static_cast<const fp16*>(source)[index]);
}

__device__ __forceinline__ void store_as(void* target, DType type, i64 index, float value) {
    if (type == DType::FLOAT32) from_float(value, static_cast<float*>(target)[index]);
    if (type == DType::BFLOAT16) from_float(value, static_cast<bf16*>(target)[index]);
    if (type == DType::FLOAT16) from_float(value, static_cast<fp16*>(target)[index]);
}

template <class T>
__device__ __forceinline__ float rounded_to(float value) {
    T narrow;
    from_float(value, narrow);
    return to_float(narrow);
}

__device__ __forceinline__ float rounded_as(DType type, float value) {
    if (type == DType::FLOAT32) return value;
    return type == DType::BFLOAT16 ? rounded_to<bf16>(value) : rounded_to<fp16>(value);
}

// Output (y, x) before its cast, from its sum over K. `Scaling`: policy of portable/gemm.cuh.
template <class Scaling>
__device__ __forceinline__ float output(const Scaling& scaling, const Epilogue& epilogue, float sum, i64 y, i64 x,
                                        i64 columns) {
    float value = scaling.scale_output(sum, y, x);
    const bool add_c = epilogue.c != nullptr;
    const float c = add_c ? load_as(epilogue.c, epilogue.c_type, epilogue.first + y * columns + x) : 0.0f;
    if (!Scaling::CAST_BEFORE_C && add_c) value += c;
    if (epilogue.bias != nullptr) value += load_as(epilogue.bias, epilogue.bias_type, epilogue.first_bias + x);
    if (Scaling::CAST_BEFORE_C && add_c) value = rounded_as(epilogue.out_type, value) + c;
    return value;
}

// Stores outputs (y, x) to (y, x + 7) of n columns, as far as they exist. `v`: their sums.
template <bool CAST_BEFORE_C>
__device__ __forceinline__ void store_outputs(const Alpha& alpha, const Epilogue& epilogue, float (&v)[8], i64 y, i64 x, i64 n) {
    const int count = n - x < 8 ? static_cast<int>(n - x) : 8;
    const i64 first = epilogue.first + y * n + x;
    if (alpha.b_per_row == 0) {
        const float factor = alpha.a == nullptr ? 1.0f : alpha.value(y, 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= factor;
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= j < count ? (alpha.a == nullptr ? 1.0f : alpha.value(y, x + j)) : 0.0f;
    }
    const auto add_c = [&] {
        if (epilogue.c == nullptr) return;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (CAST_BEFORE_C) v[j] = rounded_as(epilogue.out_type, v[j]);
            if (j < count) v[j] += load_as(epilogue.c, epilogue.c_type, first + j);
        }
    };
    if (!CAST_BEFORE_C) add_c();
    if (epilogue.bias != nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) v[j] += load_as(epilogue.bias, epilogue.bias_type, epilogue.first_bias + x + j);
        }
    }
    if (CAST_BEFORE_C) add_c();
    if (count == 8 && epilogue.out_type == DType::BFLOAT16) return store_elements(v, static_cast<bf16*>(epilogue.out) + first);
    if (count == 8 && epilogue.out_type == DType::FLOAT32) return store_elements(v, static_cast<float*>(epilogue.out) + first);
    if (count == 8 && epilogue.out_type == DType::FLOAT16) return store_elements(v, static_cast<fp16*>(epilogue.out) + first);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < count) store_as(epilogue.out, epilogue.out_type, first + j, v[j]);
    }
}

}  // namespace narrowgauge
