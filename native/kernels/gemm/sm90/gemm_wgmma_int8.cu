// gemm_wgmma_int8: out = alpha * (a @ b.T) (+ bias), a and b INT8 with a float32 scale for each row, by the tensor cores of Hopper.
//
//   Operands, alpha, the macros TILES_OF_B and FEW_ROWS, and the launch: gemm_wgmma_fp8.cu, gemm_wgmma_fp8_batch. K is at most
//   131 071, so that no int32 sum overflows
//   Numerics: sums are exact in int32, and converted to float32. Then alpha * sum and + bias each round to float32, and the last
//   step is one cast.
#include "gemm/sm90/gemm_wgmma_fp8.cuh"

namespace narrowgauge {

// d (+)= a * b^T: 64 rows of a tile and 128 rows of a tile, over all 128 columns; `add`: whether d is added. Asynchronous on a GPU.
__device__ __forceinline__ void multiply_integers(int (&d)[FP8_SUMS], const u8* a, const u8* b, bool add) {
#ifdef HAS_WGMMA
    const u64 left = matrix_descriptor(a), right = matrix_descriptor(b);
#pragma unroll
    for (int step = 0; step < ROW_BYTES / FP8_WGMMA_K; ++step) {
        ptx::wgmma_m64n128k32_s32(d, left + step * (FP8_WGMMA_K >> 4), right + step * (FP8_WGMMA_K >> 4), add || step > 0);
    }
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    const int thread = static_cast<int>(threadIdx.x) % WARPGROUP, lane = thread % WARP, top = thread / WARP * 16 + lane / 4;
    const auto code = [](const u8* tile, int row, int column) {
        return static_cast<signed char>(tile[swizzled_offset(row, column / 16) + column % 16]);
    };
    for (int i = 0; i < FP8_SUMS; ++i) {
        int sum = add ? d[i] : 0;
        for (int k = 0; k < ROW_BYTES; ++k) sum += code(a, top + i / 2 % 2 * 8, k) * code(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
        d[i] = sum;
    }
#endif
}

// One accumulator for all of K. The wgmma of a step run while the next step is queued.
struct IntegerSums {
    static constexpr bool CAST_BEFORE_C = false, ROWS = true;

    i64 steps;

    __device__ __forceinline__ void accumulate(float (&d)[TILE_SUMS], WgmmaShared& shared, u32& iteration, const OutputTile&,
                                               int warpgroup, int lane) const {
        int sums[B_TILES][FP8_SUMS];
        for (i64 step = 0; step < steps; ++step, ++iteration) {
            const u32 stage = iteration % STAGES, phase = iteration / STAGES % 2;
            const Stage& from = shared.stages[stage];
            ptx::mbarrier_try_wait_parity(shared.full[stage], phase);
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < B_TILES; ++i) {
                multiply_integers(sums[i], from.a + warpgroup * WGMMA_M * ROW_BYTES, from.b[i], step > 0);
            }
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<1>();  // the step before is complete, and its stage is free
            if (step > 0) release(shared.empty[(iteration - 1) % STAGES], lane);
        }
#pragma unroll
        for (int i = 0; i < B_TILES; ++i) wait_for_sums(sums[i]);
        release(shared.empty[(iteration - 1) % STAGES], lane);
#pragma unroll
        for (int i = 0; i < TILE_SUMS; ++i) d[i] = static_cast<float>(sums[i / FP8_SUMS][i % FP8_SUMS]);
    }
};

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS)
    gemm_wgmma_int8(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, WgmmaFp8Parameters p, Alpha alpha,
                    int products) {
    multiply_tiles_persistent(
        MappedBatch{{}, a, b, p.a_box_rows, p.n}, IntegerSums{p.slice_steps}, {1, p.slice_steps}, {nullptr, products, p.m}, p.n,
        [&](const OutputTile& tile) { return of_product(alpha, tile, p.n); },
        [&](const OutputTile& tile) { return Epilogue{p.epilogue, tile.section_start * p.n, tile.section * p.n}; });
}

}  // namespace narrowgauge
