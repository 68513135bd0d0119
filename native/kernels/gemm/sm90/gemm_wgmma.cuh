// gemm_wgmma.cuh: the pipeline of bfloat16 tiles that `pack` has written. The contract of its kernels: gemm_wgmma.cu.
#pragma once

#include "gemm/sm90/dequantize_tiles.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace narrowgauge {

struct WgmmaParameters {
    const u8* a;  // tiles
    const u8* b;
    const u32* refused;
    EpilogueParameters epilogue;
    i64 m, n, k;
    int slices;       // of K; on a GPU the macro SLICES
    i64 slice_steps;  // steps of each
};

// The steps of K of a row of tiles are contiguous.
struct PackedTiles : CopyingSource {
    const u8* a;
    const u8* b;
    i64 steps;

    __device__ __forceinline__ void load(Stage& stage, ptx::Mbarrier& full, const OutputTile& tile, i64 step) const {
        const u8* a_source = a + (tile.a_tile * steps + step) * TILE_BYTES;
        const u8* b_source = b + (tile.b_tile * steps + step) * TILE_BYTES;
        ptx::cp_async_bulk_shared_global<TILE_BYTES>(stage.a, a_source, full);
        ptx::cp_async_bulk_shared_global<TILE_BYTES>(stage.b[0], b_source, full);
        ptx::cp_async_bulk_shared_global<TILE_BYTES>(stage.b[1], b_source + steps * TILE_BYTES, full);
    }
};

// One accumulator for a slice of K. The wgmma of a step run while the next step is queued.
struct Bf16Sums {
    static constexpr bool CAST_BEFORE_C = false, ROWS = false;

    i64 steps;  // of a slice

    __device__ __forceinline__ void accumulate(float (&d)[SUMS], WgmmaShared& shared, u32& iteration, const OutputTile&,
                                               int warpgroup, int lane) const {
        for (i64 step = 0; step < steps; ++step, ++iteration) {
            const u32 stage = iteration % STAGES, phase = iteration / STAGES % 2;
            const Stage& from = shared.stages[stage];
            ptx::mbarrier_try_wait_parity(shared.full[stage], phase);
            ptx::wgmma_fence();
            multiply_tiles(d, from.a + warpgroup * WGMMA_M * ROW_BYTES, from.b[0]);
            ptx::wgmma_wait_group<1>();  // the step before is complete, and its stage is free
            if (step > 0) release(shared.empty[(iteration - 1) % STAGES], lane);
        }
        wait_for_sums(d);
        if (steps > 0) release(shared.empty[(iteration - 1) % STAGES], lane);
    }
};

template <class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void multiply_packed_tiles(const WgmmaParameters& p, const Sections& sections,
                                                      const AlphaOf& alpha_of, const EpilogueOf& epilogue_of) {
    const i64 steps = (p.k + TILE_COLUMNS - 1) / TILE_COLUMNS;
#ifdef __CUDA_ARCH__
    constexpr int slices = 1;  // of a block
#else
    const int slices = p.slices;
#endif
    multiply_tiles_persistent(PackedTiles{{}, p.a, p.b, steps}, Bf16Sums{p.slice_steps}, {slices, p.slice_steps}, sections, p.n,
                              alpha_of, epilogue_of);
}

}  // namespace narrowgauge
