// add_slices: out = alpha * (sums of the slices of K) (+ c) (+ bias).
//
//   sums   float32 (slices, M, N): the sums of a GEMM kernel over each slice of K; at most 8 slices
//   alpha  as in gemm_wgmma_fp8.cu
//   Launch: blocks of 256 threads, a thread for eight neighbouring outputs of a row: M * ceil(N/8) threads. Any M and N.
//   Numerics: slices are added in order of K in float32, each addition rounded to nearest. Then alpha * sum, + c and + bias each
//   round to float32, and the last step is one cast. cast_before_c: bias, cast and c as in gemm_fp8.cu instead.

#include "gemm/ptx.cuh"
#include "gemm/sm90/store_outputs.cuh"

namespace narrowgauge {

constexpr int ADD_THREADS = 256, MOST_SLICES = 8;

struct AddSlicesParameters {
    const float* sums;
    EpilogueParameters epilogue;
    i64 m, n;
    int slices, cast_before_c;
};

// Adds eight neighbouring sums of all slices. All loads are in flight at the same time.
template <bool ALIGNED>
__device__ __forceinline__ void add(const AddSlicesParameters& p, const float* from, int count, float (&v)[8]) {
    ptx::Vector4 parts[MOST_SLICES][2];
#pragma unroll
    for (int slice = 0; slice < MOST_SLICES; ++slice) {
        if (slice >= p.slices) continue;
        const float* part = from + slice * p.m * p.n;
        if constexpr (ALIGNED) {
            parts[slice][0] = reinterpret_cast<const ptx::Vector4*>(part)[0];
            parts[slice][1] = reinterpret_cast<const ptx::Vector4*>(part)[1];
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) parts[slice][j / 4].words[j % 4] = j < count ? __float_as_uint(part[j]) : 0u;
        }
    }
#pragma unroll
    for (int slice = 0; slice < MOST_SLICES; ++slice) {
        if (slice >= p.slices) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float part = __uint_as_float(parts[slice][j / 4].words[j % 4]);
            v[j] = slice == 0 ? part : v[j] + part;
        }
    }
}

extern "C" __global__ void __launch_bounds__(ADD_THREADS) add_slices(AddSlicesParameters p, Alpha alpha) {
    const i64 groups = (p.n + 7) / 8, number = static_cast<i64>(blockIdx.x) * ADD_THREADS + threadIdx.x;
    const i64 y = number / groups, x = number % groups * 8;
    if (y >= p.m) return;
    const float* from = p.sums + y * p.n + x;
    const int count = p.n - x < 8 ? static_cast<int>(p.n - x) : 8;
    float v[8] = {};
    if (count == 8 && p.n % 4 == 0) {
        add<true>(p, from, count, v);
    } else {
        add<false>(p, from, count, v);
    }
    const Epilogue epilogue = {p.epilogue, 0, 0};
    if (p.cast_before_c != 0) {
        store_outputs<true>(alpha, epilogue, v, y, x, p.n);
    } else {
        store_outputs<false>(alpha, epilogue, v, y, x, p.n);
    }
}

}  // namespace narrowgauge
