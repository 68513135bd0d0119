// gemm_weight_only: out = alpha * (a @ w.T), of every shape. Operands and alpha: weight_only.cuh.
//
//   Launch: gemm_weight_only_TYPE with a thread for each output, 256 threads, grid (ceil(M*N/256), 1, products of a batch).
//   Numerics: one fused multiply-add for each column, in their order.
#include "gemm/weight_only.cuh"

namespace narrowgauge {

// A number of b, rounded to T.
template <class T>
__device__ __forceinline__ float number_of(const WeightOnlyParameters& p, Weight weight, i64 row, i64 column) {
    const i64 row_bytes = has_nibbles(weight) ? (p.k + 1) / 2 : p.k;
    const u8 code = p.codes[row * row_bytes + (has_nibbles(weight) ? column / 2 : column)];
    if (is_integer(weight)) {
        const i64 place = row * scales_of_row(p, weight) + column / p.group;
        const int nibble = code >> column % 2 * 4 & 0xF;
        const int element = weight == Weight::UINT4 ? nibble - p.zeros[place] : (nibble ^ 8) - 8;
        return rounded_to<T>(static_cast<float>(element) * rounded_to<T>(reinterpret_cast<const float*>(p.scales)[place]));
    }
    float number = is_e2m1(weight) ? e2m1_to_float(code >> column % 2 * 4 & 0xFu) : e4m3_to_float(code);
    if (weight != Weight::FP8) {
        const u8 scale = p.scales[row * scales_of_row(p, weight) + column / scale_columns(weight)];
        number *= weight == Weight::NVFP4 ? e4m3_to_float(scale) : e8m0_to_float(scale);
    }
    return rounded_to<T>(number);
}

template <class T>
__device__ __forceinline__ void multiply_weight_only(const WeightOnlyParameters& batch) {
    const WeightOnlyParameters p = product_of<T>(batch, blockIdx.z);
    const i64 place = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, y = place / p.n, x = place % p.n;
    if (y >= p.m) return;
    const T* a = reinterpret_cast<const T*>(p.a) + y * p.k;
    float sum = 0.0f;
    for (i64 column = 0; column < p.k; ++column) sum = __fmaf_rn(to_float(a[column]), number_of<T>(p, WEIGHT, x, column), sum);
    store_output<T>(p, sum, y, x, factor_of_sums(p, p.divisor), p.divisor);
}

extern "C" __global__ void __launch_bounds__(256) gemm_weight_only_bf16(const __grid_constant__ WeightOnlyParameters p) {
    multiply_weight_only<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(256) gemm_weight_only_fp16(const __grid_constant__ WeightOnlyParameters p) {
    multiply_weight_only<fp16>(p);
}

}  // namespace narrowgauge
