// store_outputs.cuh: the epilogue of eight neighbouring outputs of a row.
#pragma once

#include "gemm/epilogue.cuh"

namespace narrowgauge {

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
