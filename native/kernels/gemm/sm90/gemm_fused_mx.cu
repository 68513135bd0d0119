// pack_interleaved: dequantizes a to tiles (dequantize_tiles.cuh), with interleaved columns.
// gemm_fused_64, gemm_fused_128: out = a @ b.T (+ c) (+ bias), MXFP8 of E4M3, on the tensor cores of a Hopper GPU: 64 or
// 128 rows of a in a block, b decoded in registers (gemm_fused.cuh).
// gemm_fused_grouped_64, gemm_fused_grouped_128: the same for every section of a, with its own matrix b.
//
//   codes    b: (N, K) through a tensor map, contiguous, aligned to 16 bytes; a in tiles. Of a grouped
//            GEMM maps, codes and scales of each matrix, in memory
//   scales   of b: (N, K/32), aligned to 16 bytes
//   refused  a flag for each block of pack_interleaved, then for each block of gemm_fused; of a grouped GEMM one flag, 0 before
//            the first launch. Set: an operand has numbers outside the range of tiles, and out has no meaning
//   slices   of K, 2, 4, 8 or 16; on a GPU half of them is the macro SLICES; 1 of a grouped GEMM. The last slice may be
//            shorter
//   Any M and N; K is a multiple of 512
//   Launch: pack_interleaved with 256 threads for every tile, grid K/64 * rows of tiles, of sections any grid; it waits for
//   the kernel before it.
//   gemm_fused next, also `early`: 640 threads, grid (ceil(N/128) * slices / 2, ceil(M/64 or M/128)), on a CPU without slices;
//   a grouped GEMM is persistent: any grid, best a block for each multiprocessor. sizeof(FusedShared) or sizeof(SectionsShared)
//   + 1024 bytes of dynamic shared memory.
//   Numerics: as gemm_tensor (gemm_wgmma.cu), but the sums of neighbouring slices are added first, then those of neighbours.

#include "gemm/sm90/gemm_fused.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS, PACKING_BLOCKS_PER_SM) pack_interleaved(DequantizeParameters p) {
    pack_interleaved_operand<MxCodes>(p);
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS) CLUSTER_OF_SLICES
    gemm_fused_64(const __grid_constant__ TensorMap codes, FusedParameters p) {
    multiply_fused<MxCodes, 64>(codes, p, Alpha{});
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS) CLUSTER_OF_SLICES
    gemm_fused_128(const __grid_constant__ TensorMap codes, FusedParameters p) {
    multiply_fused<MxCodes, 128>(codes, p, Alpha{});
}

#if !defined(__CUDA_ARCH__) || SLICES == 1  // the grouped kernels are in the module without clusters

extern "C" __global__ void __launch_bounds__(FUSED_THREADS)
    gemm_fused_grouped_64(FusedMatrices matrices, FusedParameters p) {
    multiply_sections_fused<MxCodes, 64>(matrices, p, GroupedAlpha{});
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS)
    gemm_fused_grouped_128(FusedMatrices matrices, FusedParameters p) {
    multiply_sections_fused<MxCodes, 128>(matrices, p, GroupedAlpha{});
}

#endif

}  // namespace narrowgauge
