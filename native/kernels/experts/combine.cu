// combine_TYPE: out[t] = sum over the choices j of token t of weights[t, j] * y[positions[t, j]].
//
//   y          (rows, N) contiguous: float32, bfloat16 or float16
//   positions  (T, k) rows of y; a negative position is no row, and its weight is not read
//   weights    (T, k) float32
//   out        (T, N) of the dtype of y
//   `vectors`: N is a multiple of 8, and y and out are aligned to 16 bytes, or to 32 of float32.
//   Launch: 128 threads, grid (parts of a row, tokens); a thread has 8 columns, or one without vectors.
//   Numerics: products and sums round to float32 each, in the order of the choices from 0 on; one cast to nearest even.

#include "common/formats.cuh"

namespace narrowgauge {

struct CombineParameters {
    const void* y;
    const i64* positions;
    const float* weights;
    void* out;
    i64 columns, choices;
    bool vectors;
};

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Numbers {
    T values[COUNT];
};

template <class T, int COUNT>
__device__ __forceinline__ void combine_columns(const CombineParameters& p) {
    using Vector = Numbers<T, COUNT>;
    const i64 columns = p.columns / COUNT, token = blockIdx.y;
    const i64 column = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sums[COUNT] = {};
    for (i64 choice = token * p.choices; choice < (token + 1) * p.choices; ++choice) {
        const i64 row = p.positions[choice];
        if (row < 0) continue;
        const Vector numbers = static_cast<const Vector*>(p.y)[row * columns + column];
        const float weight = p.weights[choice];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] += weight * to_float(numbers.values[i]);
    }
    Vector result;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) from_float(sums[i], result.values[i]);
    static_cast<Vector*>(p.out)[token * columns + column] = result;
}

template <class T>
__device__ __forceinline__ void combine(const CombineParameters& p) {
    if (p.vectors) {
        combine_columns<T, 8>(p);
    } else {
        combine_columns<T, 1>(p);
    }
}

extern "C" __global__ void __launch_bounds__(128) combine_fp32(CombineParameters p) { combine<float>(p); }

extern "C" __global__ void __launch_bounds__(128) combine_bf16(CombineParameters p) { combine<bf16>(p); }

extern "C" __global__ void __launch_bounds__(128) combine_fp16(CombineParameters p) { combine<fp16>(p); }

}  // namespace narrowgauge
