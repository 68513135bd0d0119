// pack: dequantizes an operand, its sections, or the matrices of sections to bfloat16 tiles (dequantize_tiles.cuh).
// pack_plain: a bfloat16 matrix (rows, K), contiguous, aligned to 16 bytes, in such tiles. K is a multiple of 64.
// gemm_tensor: out = alpha * (a @ b.T) (+ c) (+ bias) of tiles, on the tensor cores of a Hopper GPU.
// gemm_tensor_grouped: the same for every section of a, with its own matrix b.
// gemm_mx_refused, gemm_grouped_mx_refused: the GEMM of gemm_mx.cu, if packing has refused an operand.
//
//   operand  NVFP4, MX, or FP8 with a tensor scale, in any layout
//   tiles    128 rows by 64 columns each (tile.cuh). Tiles of the same rows are contiguous, with zeros beyond the last row
//            and column. A section begins with a new row of tiles. b has an even number of rows of tiles
//   refused  one flag, 0 before the first launch; null if no operand can be refused. gemm_mx_refused takes several flags
//   alpha    from tensor amaxes or tensor scales; its a is null if alpha is 1
//   slices   of K of gemm_tensor, 1, 2, 4 or 8; on a GPU the macro SLICES. A slice has a multiple of 64 columns
//   Launch: pack and pack_plain with 256 threads for every tile, grid ceil(K/64) * rows of tiles, grid.y the number of matrices. gemm_tensor
//   is a persistent kernel: 384 threads, any grid, best one block for each multiprocessor; with slices a block for each slice
//   of each tile. sizeof(WgmmaShared) + 1024 bytes of dynamic shared memory. Any M, N and K.
//   Numerics: a number in a tile is exact. Sums are those of Hopper's tensor cores (tensor_core_model.cuh): 16 columns at a
//   time, in order of K from 0 on. Sums of slices are added in float32, in order of K. Then alpha * sum, + c and + bias each round to float32, and the last step is one cast.

#include "gemm/portable/gemm_mx.cuh"
#include "gemm/sm90/gemm_wgmma.cuh"

namespace narrowgauge {

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS) CLUSTER_OF_SLICES gemm_tensor(WgmmaParameters p, Alpha alpha) {
    if (p.refused != nullptr && *p.refused != 0) return;
    const Epilogue epilogue = {p.epilogue, 0, 0};
    multiply_packed_tiles(p, {nullptr, 1, p.m}, [&](const OutputTile&) { return alpha; },
                          [&](const OutputTile&) { return epilogue; });
}

#if !defined(__CUDA_ARCH__) || SLICES == 1  // the other kernels are in the module without slices

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS, DEQUANTIZE_BLOCKS_PER_SM) pack(DequantizeParameters p) {
    const u32 steps = static_cast<u32>((p.k + TILE_COLUMNS - 1) / TILE_COLUMNS), tiles = gridDim.x / steps;
    const u32 step = blockIdx.x % steps;
    const i64 tile = blockIdx.x / steps, number = blockIdx.y;
    Operand from = {p.operand, p.rows};
    if (p.layouts != nullptr) {
        from.codes = reinterpret_cast<const u8* const*>(p.operand.codes)[number];
        from.scales = static_cast<const void* const*>(p.operand.scales)[number];
        from.layout = static_cast<int>(p.layouts[number]);
    }
    TiledSection at({p.sizes, p.sections, p.rows, p.starts});
    i64 first;
    if (!find_rows(p, tile, at, from, first)) return;
    u8* target = p.tiles + ((number * tiles + tile) * steps + step) * TILE_BYTES;
    dequantize_tile(p.block_scales, from, first, static_cast<i64>(step) * TILE_COLUMNS, p.k, target, p.refused);
}

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS) pack_plain(PlainParameters p) {
    const u32 steps = static_cast<u32>(p.k / TILE_COLUMNS), step = blockIdx.x % steps;
    const i64 tile = blockIdx.x / steps;
    u8* const target = p.tiles + i64{blockIdx.x} * TILE_BYTES;
    for (int place = threadIdx.x; place < TILE_ROWS * ROW_BYTES / 16; place += DEQUANTIZE_THREADS) {
        const int row = place / (ROW_BYTES / 16), chunk = place % (ROW_BYTES / 16);
        const i64 y = tile * TILE_ROWS + row;
        ptx::Vector4 numbers = {};
        if (y < p.rows) numbers = ptx::ld_global_nc_v4_u32(p.matrix + (y * p.k + i64{step} * TILE_COLUMNS) * 2 + chunk * 16);
        *reinterpret_cast<ptx::Vector4*>(target + swizzled_offset(row, chunk)) = numbers;
    }
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS)
    gemm_tensor_grouped(WgmmaParameters p, GroupedAlpha alpha, const i64* sizes, const i64* starts, int sections) {
    if (p.refused != nullptr && *p.refused != 0) return;
    multiply_packed_tiles(
        p, {sizes, sections, p.m, starts},
        [&](const OutputTile& tile) { return alpha.a == nullptr ? Alpha{} : alpha.section(tile.section); },
        [&](const OutputTile& tile) { return Epilogue{p.epilogue, tile.section_start * p.n, tile.section * p.n}; });
}

// Rows blockIdx.y, blockIdx.y + gridDim.y, ... of output tiles: few blocks return at once if none of `flags` flags is set.
template <class Multiply>
__device__ __forceinline__ void for_rows_of_tiles(const u32* refused, int flags, i64 m, const Multiply& multiply_row) {
    __shared__ u32 any;
    if (threadIdx.x == 0) any = 0;
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    __syncthreads();
    u32 own = 0;
#pragma unroll 4  // loads in flight at the same time
    for (int i = threadIdx.x; i < flags; i += THREADS) own |= refused[i];
    if (own != 0) any = 1;
    __syncthreads();
    if (any == 0) return;
    for (i64 tile_row = blockIdx.y; tile_row * TILE < m; tile_row += gridDim.y) {
        multiply_row(tile_row);
        __syncthreads();  // the next tile overwrites shared memory
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_mx_refused(GemmParameters p, const u32* refused, int flags) {
    for_rows_of_tiles(refused, flags, p.m, [&](i64 tile_row) { multiply(MxScaling{}, p, tile_row); });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_grouped_mx_refused(GroupedGemmParameters p, const i64* starts, const u32* refused, int flags) {
    for_rows_of_tiles(refused, flags, p.m, [&](i64 tile_row) { multiply_section(MxScaling{}, p, starts, tile_row); });
}

#endif

}  // namespace narrowgauge
