// pack_first: dequantizes the matrix of the largest section to bfloat16 tiles.
// gemm_tensor_dequantizing: a grouped GEMM whose idle warps dequantize the other matrices beside the products.
//
//   operand  the matrices: NVFP4, MX, or FP8 with a tensor scale; codes contiguous along K. N is a multiple of 256, K of 64
//   tiles    as in gemm_wgmma.cu. a is packed by `pack` before
//   counts   0 before the launch: one of tiles taken, then of tiles written, one for 256 rows of a matrix
//   refused, alpha, numerics: as gemm_tensor_grouped of gemm_wgmma.cu
//   Launch: pack_first with 256 threads for every tile of a matrix. gemm_tensor_dequantizing as gemm_tensor_grouped.
//
// Sections are multiplied from the largest to the smallest. Three idle warps of each producer warpgroup take the tiles of the
// other matrices in the same order, by a counter. A producer waits for the tiles of an output tile. These tiles are taken by
// warps that run and wait for nothing, so no block waits for a block that does not run.

#include "gemm/sm90/gemm_wgmma.cuh"

namespace narrowgauge {

// Iterator over the sections that have rows, from the largest to the smallest, equal ones in their order. It scans all sizes
// for each section.
struct LargestSection {
    Sections sections;
    int number;
    Section section;
    i64 before;  // rows of tiles of the sections before this one in memory

    __device__ __forceinline__ LargestSection(const Sections& all) : sections(all), number(-1), section{0, all.rows}, before(0) {
        next();
    }

    __device__ __forceinline__ i64 tiles() const { return (section.count + TILE_ROWS - 1) / TILE_ROWS; }

    // Moves to the next section. False at the end.
    __device__ __forceinline__ bool next() {
        const i64 last = section.count;
        const int last_number = number;
        Section at = {0, 0};
        i64 tiles_before = 0;
        section.count = 0;
        for (int s = 0; s < sections.count; ++s) {
            at = section_after(sections, s, at.start + at.count);
            const bool later = at.count < last || (at.count == last && s > last_number);
            if (later && at.count > section.count) {
                section = at;
                number = s;
                before = tiles_before;
            }
            tiles_before += (at.count + TILE_ROWS - 1) / TILE_ROWS;
        }
        return section.count > 0;
    }
};

// Matrices that idle warps dequantize.
struct DequantizedMatrices {
    MatricesParameters operand;
    BlockScales block_scales;
    u8* tiles;
    u32* refused;
    u32* counts;
};

// Tiles of a and of the first matrix, which are packed, and of the other matrices.
struct DequantizingSource {
    using Order = LargestSection;

    // The consumers have 208. With 72 and 216 MXFP8 takes 1.92 ms on an H200, 1.70 ms with these.
    static constexpr int PRODUCER_REGISTERS = 88;

    PackedTiles packed;
    DequantizedMatrices matrices;
    Sections sections;
    i64 n, k;

    __device__ __forceinline__ u32 bytes(const OutputTile&) const { return sizeof(Stage); }

    __device__ __forceinline__ u32* written(i64 matrix, i64 column) const {
        return matrices.counts + 1 + (matrix * n + column) / OUT_COLUMNS;
    }

    __device__ __forceinline__ void load(Stage& stage, ptx::Mbarrier& full, const OutputTile& tile, i64 step) const {
        packed.load(stage, full, tile, step);
    }

    __device__ __forceinline__ void wait_for(const OutputTile& tile) const {
        if (tile.section == LargestSection(sections).number) return;
        const u32* count = written(tile.section, tile.column);
        while (ptx::ld_acquire_gpu(count) < 2 * packed.steps) ptx::nanosleep();
        ptx::fence_proxy_async_global();
    }

    __device__ __forceinline__ void use_idle_warp() const {
        const int lane = threadIdx.x % WARP;
        const u32 steps = static_cast<u32>(packed.steps), tiles = static_cast<u32>(n / TILE_ROWS) * steps;
        LargestSection at(sections);
        u32 end = 0;  // of the tiles of the matrices up to this one
        for (;;) {
            const u32 taken = lane == 0 ? ptx::atom_inc_relaxed_gpu(matrices.counts) : 0;
            const u32 tile = __shfl_sync(0xFFFFFFFFu, taken, 0);
            while (tile >= end) {
                if (!at.next()) return;
                end += tiles;
            }
            const u32 place = tile - (end - tiles), row = place / steps * TILE_ROWS;
            const Operand from = {{matrices.operand.codes[at.number], matrices.operand.scales[at.number],
                                   matrices.operand.element, 0},
                                  n};
            u8* target = matrices.tiles + (static_cast<i64>(at.number) * tiles + place) * TILE_BYTES;
            dequantize_tile<true>(matrices.block_scales, from, row, static_cast<i64>(place % steps) * TILE_COLUMNS, k, target,
                                  matrices.refused);
            ptx::fence_proxy_async_global();
            ptx::bar_warp_sync();
            if (lane == 0) ptx::red_inc_release_gpu(written(at.number, row));
        }
    }
};

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_THREADS, DEQUANTIZE_BLOCKS_PER_SM)
    pack_first(DequantizedMatrices matrices, i64 n, i64 k, const i64* sizes, const i64* starts, int sections, i64 rows) {
    const int first = LargestSection({sizes, sections, rows, starts}).number;
    if (first < 0) return;
    const u32 steps = static_cast<u32>(k / TILE_COLUMNS), tile = blockIdx.x / steps, step = blockIdx.x % steps;
    const Operand from = {{matrices.operand.codes[first], matrices.operand.scales[first], matrices.operand.element, 0}, n};
    u8* target = matrices.tiles + (static_cast<i64>(first) * gridDim.x + blockIdx.x) * TILE_BYTES;
    dequantize_tile(matrices.block_scales, from, static_cast<i64>(tile) * TILE_ROWS, static_cast<i64>(step) * TILE_COLUMNS, k,
                    target, matrices.refused);
}

extern "C" __global__ void __launch_bounds__(WGMMA_THREADS)
    gemm_tensor_dequantizing(WgmmaParameters p, GroupedAlpha alpha, const i64* sizes, const i64* starts, int sections,
                             DequantizedMatrices matrices) {
    const Sections all = {sizes, sections, p.m, starts};
    const i64 steps = p.k / TILE_COLUMNS;
    multiply_tiles_persistent(
        DequantizingSource{{{}, p.a, p.b, steps}, matrices, all, p.n, p.k}, Bf16Sums{steps}, {1, steps}, all, p.n,
        [&](const OutputTile& tile) { return alpha.a == nullptr ? Alpha{} : alpha.section(tile.section); },
        [&](const OutputTile& tile) { return Epilogue{p.epilogue, tile.section_start * p.n, tile.section * p.n}; });
}

}  // namespace narrowgauge
