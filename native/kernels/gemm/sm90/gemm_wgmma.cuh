// gemm_wgmma.cuh: the persistent GEMM of bfloat16 tiles by wgmma. Its contract: gemm_wgmma.cu.
//
// A block computes output tiles of 128 rows by 256 columns, one after the other. Warps are specialized: a thread of the
// producer warpgroup copies operand tiles into a pipeline of shared memory stages, a stage for every step of K; two consumer
// warpgroups multiply 64 rows of the stage.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/sm90/dequantize_tiles.cuh"

namespace narrowgauge {

struct WgmmaParameters {
    const u8* a;  // tiles
    const u8* b;
    const u32* refused;
    EpilogueParameters epilogue;
    i64 m, n, k;
};

constexpr int CONSUMERS = 2, WGMMA_THREADS = (1 + CONSUMERS) * WARPGROUP;  // consumer warpgroups, and one producer
constexpr int OUT_ROWS = CONSUMERS * WGMMA_M, OUT_COLUMNS = WGMMA_N;
static_assert(OUT_ROWS == TILE_ROWS && OUT_COLUMNS == 2 * TILE_ROWS, "a step of K has one tile of a and two of b");

// Pipeline stages: the maximum in shared memory beside the epilogue's buffer.
constexpr int STAGES = 4;
// Registers of a thread, of 65536 for the block: consumers hold the sums.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
// The epilogue moves this many columns of a warp's sums at a time. The stride of the buffer avoids bank conflicts between
// the eight rows of a write.
constexpr int EPILOGUE_COLUMNS = 32, EPILOGUE_STRIDE = EPILOGUE_COLUMNS + 8;
// Rows of output tiles that the scheduler groups: 16 by 8 tiles at a time read the fewest bytes. On an H200 8192^3 of NVFP4
// takes 1.381 ms with 8, 1.382 with 16 and 1.396 with 32, without packing.
constexpr int GROUP_ROWS_OF_TILES = 16;

struct Stage {
    u8 a[TILE_BYTES], b[2][TILE_BYTES];
};

struct alignas(1024) WgmmaShared {
    Stage stages[STAGES];
    float sums[CONSUMERS * 4][16][EPILOGUE_STRIDE];
    ptx::Mbarrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(WgmmaShared) == 213 * 1024, "native/gemm/wgmma.py asks for this size");

struct OutputTile {
    int section;
    i64 row, column;     // first output of the tile in its section
    i64 section_rows;
    i64 section_start;   // first row of the section in c and out
    i64 a_tile, b_tile;  // rows of operand tiles
};

// Tile scheduler: block b computes output tiles b, b + gridDim.x, ... of all sections.
struct TileScheduler {
    TiledSection at;
    i64 columns;
    i64 next;  // tile of the section

    __device__ __forceinline__ TileScheduler(const Sections& sections, i64 n)
        : at(sections), columns((n + OUT_COLUMNS - 1) / OUT_COLUMNS), next(blockIdx.x) {}

    __device__ __forceinline__ bool take(OutputTile& tile) {
        while (next >= at.tiles() * columns) {
            next -= at.tiles() * columns;
            if (!at.next()) return false;
        }
        const i64 first = next / (GROUP_ROWS_OF_TILES * columns) * GROUP_ROWS_OF_TILES, left = at.tiles() - first;
        const i64 height = left < GROUP_ROWS_OF_TILES ? left : GROUP_ROWS_OF_TILES, place = next - first * columns;
        const i64 row = first + place % height, column = place / height;
        tile = {at.number, row * OUT_ROWS, column * OUT_COLUMNS, at.section.count, at.section.start, at.before + row,
                (at.number * columns + column) * 2};
        next += gridDim.x;
        return true;
    }
};

// Epilogue of eight neighbouring outputs of a row.
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
    if (epilogue.c != nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) v[j] += load_as(epilogue.c, epilogue.c_type, first + j);
        }
    }
    if (epilogue.bias != nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) v[j] += load_as(epilogue.bias, epilogue.bias_type, epilogue.first_bias + x + j);
        }
    }
    if (count == 8 && epilogue.out_type == DType::BFLOAT16) return store_elements(v, static_cast<bf16*>(epilogue.out) + first);
    if (count == 8 && epilogue.out_type == DType::FLOAT32) return store_elements(v, static_cast<float*>(epilogue.out) + first);
    if (count == 8 && epilogue.out_type == DType::FLOAT16) return store_elements(v, static_cast<fp16*>(epilogue.out) + first);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < count) store_as(epilogue.out, epilogue.out_type, first + j, v[j]);
    }
}

// Producer thread: copies the tiles of each step of K into the next stage, as soon as the consumers have released it.
__device__ __forceinline__ void produce(WgmmaShared& shared, TileScheduler scheduler, const u8* a, const u8* b, i64 steps) {
    OutputTile tile;
    u32 iteration = 0;  // over the steps of all tiles; a stage is used every STAGES iterations, with alternating parity
    while (scheduler.take(tile)) {
        const u8* a_source = a + tile.a_tile * steps * TILE_BYTES;
        const u8* b_source = b + tile.b_tile * steps * TILE_BYTES;
        for (i64 step = 0; step < steps; ++step, ++iteration) {
            const u32 stage = iteration % STAGES, phase = iteration / STAGES % 2;
            Stage& target = shared.stages[stage];
            ptx::mbarrier_try_wait_parity(shared.empty[stage], phase ^ 1u);
            ptx::mbarrier_arrive_expect_tx(shared.full[stage], 3 * TILE_BYTES);
            ptx::cp_async_bulk_shared_global<TILE_BYTES>(target.a, a_source + step * TILE_BYTES, shared.full[stage]);
            ptx::cp_async_bulk_shared_global<TILE_BYTES>(target.b[0], b_source + step * TILE_BYTES, shared.full[stage]);
            ptx::cp_async_bulk_shared_global<TILE_BYTES>(target.b[1], b_source + (steps + step) * TILE_BYTES,
                                                         shared.full[stage]);
        }
    }
}

__device__ __forceinline__ void release(ptx::Mbarrier& empty, int lane) {
    ptx::bar_warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(empty);
}

// Consumer warpgroup. `alpha_of(tile)` and `epilogue_of(tile)` return the epilogue of an output tile.
template <class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void consume(WgmmaShared& shared, TileScheduler scheduler, i64 steps, i64 n,
                                        const AlphaOf& alpha_of, const EpilogueOf& epilogue_of) {
    const int thread = static_cast<int>(threadIdx.x) - WARPGROUP, lane = thread % WARP, warp = thread / WARP;
    const int warpgroup = thread / WARPGROUP;
    OutputTile tile;
    u32 iteration = 0;
    while (scheduler.take(tile)) {
        float d[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) d[i] = 0.0f;
        for (i64 step = 0; step < steps; ++step, ++iteration) {
            const u32 stage = iteration % STAGES, phase = iteration / STAGES % 2;
            const Stage& from = shared.stages[stage];
            ptx::mbarrier_try_wait_parity(shared.full[stage], phase);
            ptx::wgmma_fence();
            multiply_tiles(d, from.a + warpgroup * WGMMA_M * 128, from.b[0]);
            ptx::wgmma_wait_group<1>();  // the step before is complete, and its stage is free
            if (step > 0) release(shared.empty[(iteration - 1) % STAGES], lane);
        }
        wait_for_sums(d);
        if (steps > 0) release(shared.empty[(iteration - 1) % STAGES], lane);

        // Through shared memory, so that neighbouring threads write neighbouring outputs: 16 rows of a warp, EPILOGUE_COLUMNS
        // at a time.
        const Alpha alpha = alpha_of(tile);
        const Epilogue epilogue = epilogue_of(tile);
        float(*sums)[EPILOGUE_STRIDE] = shared.sums[warp];
        const i64 top = tile.row + warp * 16;
#pragma unroll 1
        for (int part = 0; part < OUT_COLUMNS / EPILOGUE_COLUMNS; ++part) {
            ptx::bar_warp_sync();
#pragma unroll
            for (int which = 0; which < OUT_COLUMNS / EPILOGUE_COLUMNS; ++which) {  // registers have constant indices only
                if (which != part) continue;
#pragma unroll
                for (int j = 0; j < EPILOGUE_COLUMNS / 8; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sums[lane / 4 + i / 2 * 8][8 * j + lane % 4 * 2 + i % 2] = d[which * (EPILOGUE_COLUMNS / 2) + 4 * j + i];
                    }
                }
            }
            ptx::bar_warp_sync();
            const i64 x = tile.column + part * EPILOGUE_COLUMNS + lane % 4 * 8;
#pragma unroll 1
            for (int row = lane / 4; row < 16; row += 8) {
                const i64 y = top + row;
                if (y >= tile.section_rows || x >= n) continue;
                float v[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = sums[row][lane % 4 * 8 + j];
                store_outputs(alpha, epilogue, v, y, x, n);
            }
        }
    }
}

template <class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void multiply_tiles_persistent(const WgmmaParameters& p, const Sections& sections,
                                                          const AlphaOf& alpha_of, const EpilogueOf& epilogue_of) {
#ifdef __CUDA_ARCH__
    extern __shared__ u8 dynamic_shared[];
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>((reinterpret_cast<u64>(dynamic_shared) + 1023u) & ~u64{1023});
#else
    __shared__ WgmmaShared shared;
#endif
    const int thread = threadIdx.x;
    const i64 steps = (p.k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::mbarrier_init(shared.full[stage], 1);
            ptx::mbarrier_init(shared.empty[stage], CONSUMERS * WARPGROUP / WARP);
        }
        ptx::fence_mbarrier_init_and_proxy_async();
    }
    __syncthreads();
    const TileScheduler scheduler(sections, p.n);
    if (thread < WARPGROUP) {
        ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread == 0) produce(shared, scheduler, p.a, p.b, steps);
    } else {
        ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, scheduler, steps, p.n, alpha_of, epilogue_of);
    }
}

}  // namespace narrowgauge
