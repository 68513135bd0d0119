// gemm_wgmma_fp8_tensor: out = alpha * (a @ b.T) (+ c) (+ bias), a and b FP8 with a float32 scale of the tensor.
// gemm_wgmma_fp8_rows:   the same with a float32 scale for each row of a or of b, or of both.
// gemm_wgmma_fp8_batch:  the same for the products of a batch, of operands (B, M, K) and (B, N, K).
// gemm_wgmma_fp8_block: out = a @ b.T (+ bias) (+ c), a FP8 with a float32 scale for 128 elements of K of a row, b with
//                       tiles of 128x128.
// gemm_wgmma_fp8_grouped_tensor, gemm_wgmma_fp8_grouped_block: the same for every section of a, with its own matrix b.
// All on the FP8 tensor cores of a Hopper GPU.
//
//   a.codes  (M, K), contiguous, aligned to 16 bytes, K a multiple of 16; b.codes (N, K) likewise. Both through tensor maps,
//            of sections with a map of each matrix in memory
//   a.scales as in gemm_fp8.cu, in any Layout
//   alpha    from scales of tensors or rows; its a is null for block scales
//   slices   of K, 1, 2, 4 or 8; on a GPU the macro SLICES; 1 of a batch and of a grouped GEMM
//   The macro TILES_OF_B, 1 or 2, with 8 slices 2: an output tile has 128 or 256 columns. The macro FEW_ROWS, 1 or 0: whether
//   products of 64 rows beyond the last are skipped
//   Launch: `early`, 384 threads. A persistent kernel with any grid: a block for each multiprocessor is best. With slices the
//   grid has a block for each slice of each tile. sizeof(WgmmaShared) + 1024 bytes of dynamic shared memory. Any M and N.
//   Numerics: a sum of 128 columns is that of Hopper's tensor cores: 32 columns at a time from 0 on, aligned and truncated
//   behind 13 fraction bits (tensor_core_model.cuh). Tensor scales: the sums of 128 columns are added in float32, in order of
//   K. Then alpha * sum, + c and + bias each round to float32, and the last step is one cast. Block scales:
//   acc = fma(fl(P * s_a), s_b, acc) for the sum P of each block, then bias, cast and c as in gemm_fp8.cu. The sums of slices
//   are added in float32, in order of K.

#include "gemm/sm90/gemm_wgmma_fp8.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS) CLUSTER_OF_SLICES
    gemm_wgmma_fp8_tensor(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, WgmmaFp8Parameters p,
                          Alpha alpha) {
    multiply_mapped_codes(MappedCodes{{}, a, b, p.a_box_rows}, p, Unscaled{}, {nullptr, 1, p.m},
                          [&](const OutputTile&) { return alpha; });
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS) CLUSTER_OF_SLICES
    gemm_wgmma_fp8_rows(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, WgmmaFp8Parameters p, Alpha alpha) {
    multiply_mapped_codes(MappedCodes{{}, a, b, p.a_box_rows}, p, UnscaledRows{}, {nullptr, 1, p.m},
                          [&](const OutputTile&) { return alpha; });
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS) CLUSTER_OF_SLICES
    gemm_wgmma_fp8_block(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, WgmmaFp8Parameters p) {
    multiply_mapped_codes(MappedCodes{{}, a, b, p.a_box_rows}, p, BlockScaled(p), {nullptr, 1, p.m},
                          [](const OutputTile&) { return Alpha{}; });
}

#if !defined(__CUDA_ARCH__) || SLICES == 1  // batches and the grouped kernels are in the module without slices

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS)
    gemm_wgmma_fp8_batch(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, WgmmaFp8Parameters p, Alpha alpha,
                         int products) {
    multiply_mapped_codes(MappedBatch{{}, a, b, p.a_box_rows, p.n}, p, UnscaledRows{}, {nullptr, products, p.m},
                          [&](const OutputTile& tile) { return of_product(alpha, tile, p.n); });
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS)
    gemm_wgmma_fp8_grouped_tensor(const __grid_constant__ TensorMap a, const TensorMap* b, WgmmaFp8Parameters p,
                                  GroupedAlpha alpha, const i64* sizes, const i64* starts, int sections) {
    multiply_mapped_codes(MappedSections{{}, a, b, p.a_box_rows}, p, Unscaled{}, {sizes, sections, p.m, starts},
                          [&](const OutputTile& tile) { return alpha.section(tile.section); });
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS)
    gemm_wgmma_fp8_grouped_block(const __grid_constant__ TensorMap a, const TensorMap* b, WgmmaFp8Parameters p,
                                 const float* const* b_scales, const i64* sizes, const i64* starts, int sections) {
    multiply_mapped_codes(MappedSections{{}, a, b, p.a_box_rows}, p, SectionBlockScaled(p, b_scales), {sizes, sections, p.m, starts},
                          [](const OutputTile&) { return Alpha{}; });
}

#endif

}  // namespace narrowgauge
