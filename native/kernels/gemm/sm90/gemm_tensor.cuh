// gemm_tensor.cuh: the GEMM of packed operands on tensor cores of a Hopper GPU. Its contract: gemm_tensor.cu.
//
// A block of threads stays and makes one tile of the output after the other, 128 rows by 256 columns. One of its threads
// copies tiles of the operands, some steps of K ahead; two groups of four warps make the products, 64 rows each.
#pragma once

#include "gemm/sm90/pack.cuh"

constexpr int CONSUMERS = 2, TENSOR_THREADS = (1 + CONSUMERS) * GROUP;
constexpr int OUT_ROWS = CONSUMERS * PRODUCT_ROWS, OUT_COLUMNS = PRODUCT_COLUMNS;
static_assert(OUT_ROWS == TILE_ROWS && OUT_COLUMNS == 2 * TILE_ROWS, "a step of K has one tile of a and two of b");

// Steps of K in shared memory: as many as fit beside the rest.
constexpr int STAGES = 4;
// Registers of a thread: two groups that make products have the sums, and what they need; of 65536 in all.
constexpr int COPYING_REGISTERS = 40, MULTIPLYING_REGISTERS = 232;
// Columns of sums that a warp moves at a time, and floats from one of its 16 rows to the next, so that the eight rows that
// are written at once lie in different banks.
constexpr int MOVED = 32, MOVED_STRIDE = MOVED + 8;
// Rows of tiles of the output that are made together: 16 by 8 tiles at a time read the fewest bytes. On an H200 8192^3 of
// NVFP4 takes 1.381 ms with 8, 1.382 with 16 and 1.396 with 32, without packing.
constexpr int TOGETHER = 16;

struct TensorStage {
    u8 a[TILE_BYTES], b[2][TILE_BYTES];
};

struct alignas(1024) TensorShared {
    TensorStage stages[STAGES];
    float sums[CONSUMERS * 4][16][MOVED_STRIDE];
    Barrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(TensorShared) == 213 * 1024, "what native/gemm/tensor_core.py asks for");

// What the scales of the two operands that all of K shares make of a sum: tensor amaxes, or scales of tensors.
struct Alpha {
    const float* a;  // null: 1
    const float* b;
    int a_each, b_each;  // whether every row has one of its own
    int order;           // 0: (a * b) / divisor; 1: (a * b) * reciprocal
    float divisor, reciprocal;

    __device__ __forceinline__ float of(i64 y, i64 x) const {
        if (a == nullptr) return 1.0f;
        const float product = a[a_each ? y : 0] * b[b_each ? x : 0];
        return order == 0 ? product / divisor : product * reciprocal;
    }
};

struct OutputTile {
    int section;
    i64 row, column;     // where it begins in the section's product
    i64 section_rows;
    i64 section_start;   // the section's first row in c and out
    i64 a_tile, b_tile;  // the rows of tiles where its operands begin
};

// The tiles of the output that a block has: every gridDim.x-th of those of all sections, one section after the other.
struct Schedule {
    TiledSection at;
    i64 columns;
    i64 next;  // of the section's tiles

    __device__ __forceinline__ Schedule(const Sections& all, i64 n)
        : at(all), columns((n + OUT_COLUMNS - 1) / OUT_COLUMNS), next(blockIdx.x) {}

    __device__ __forceinline__ bool take(OutputTile& tile) {
        while (next >= at.tiles() * columns) {
            next -= at.tiles() * columns;
            if (!at.next()) return false;
        }
        const i64 first = next / (TOGETHER * columns) * TOGETHER, left = at.tiles() - first;
        const i64 height = left < TOGETHER ? left : TOGETHER, place = next - first * columns;
        const i64 row = first + place % height, column = place / height;
        tile = {at.number, row * OUT_ROWS, column * OUT_COLUMNS, at.section.count, at.section.start, at.before + row,
                (at.number * columns + column) * 2};
        next += gridDim.x;
        return true;
    }
};

// Eight neighbouring outputs of their sums.
__device__ __forceinline__ void store_outputs(const Alpha& alpha, const Epilogue& epilogue, float (&v)[8], i64 y, i64 x, i64 n) {
    const int count = n - x < 8 ? static_cast<int>(n - x) : 8;
    const i64 first = epilogue.first + y * n + x;
    if (alpha.b_each == 0) {
        const float factor = alpha.of(y, 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= factor;
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= j < count ? alpha.of(y, x + j) : 0.0f;
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
    if (count == 8 && epilogue.out_type == 1) return store_elements(v, static_cast<bf16*>(epilogue.out) + first);
    if (count == 8 && epilogue.out_type == 0) return store_elements(v, static_cast<float*>(epilogue.out) + first);
    if (count == 8 && epilogue.out_type == 2) return store_elements(v, static_cast<fp16*>(epilogue.out) + first);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < count) store_as(epilogue.out, epilogue.out_type, first + j, v[j]);
    }
}

// The thread that copies: for each tile and each step of K, once nobody reads what was there before.
__device__ __forceinline__ void copy_operands(TensorShared& shared, Schedule schedule, const u8* a, const u8* b, i64 steps) {
    OutputTile tile;
    u32 turn = 0;  // steps so far; a stage comes again every STAGES of them, in the other phase
    while (schedule.take(tile)) {
        const u8* a_source = a + tile.a_tile * steps * TILE_BYTES;
        const u8* b_source = b + tile.b_tile * steps * TILE_BYTES;
        for (i64 step = 0; step < steps; ++step, ++turn) {
            const u32 stage = turn % STAGES, phase = turn / STAGES % 2;
            TensorStage& target = shared.stages[stage];
            shared.empty[stage].wait_for(phase ^ 1u);
            shared.full[stage].arrive_before(3 * TILE_BYTES);
            copy_tile(target.a, a_source + step * TILE_BYTES, shared.full[stage]);
            copy_tile(target.b[0], b_source + step * TILE_BYTES, shared.full[stage]);
            copy_tile(target.b[1], b_source + (steps + step) * TILE_BYTES, shared.full[stage]);
        }
    }
}

__device__ __forceinline__ void release(Barrier& empty, int lane) {
    meet_in_warp();
    if (lane == 0) empty.arrive();
}

// A group of warps that makes products; `alpha_of(tile)` and `epilogue_of(tile)` say what becomes of the sums of a tile.
template <class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void multiply_operands(TensorShared& shared, Schedule schedule, i64 steps, i64 n,
                                                  const AlphaOf& alpha_of, const EpilogueOf& epilogue_of) {
    const int thread = static_cast<int>(threadIdx.x) - GROUP, lane = thread % WARP, warp = thread / WARP;
    const int group = thread / GROUP;
    OutputTile tile;
    u32 turn = 0;
    while (schedule.take(tile)) {
        float d[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) d[i] = 0.0f;
        for (i64 step = 0; step < steps; ++step, ++turn) {
            const u32 stage = turn % STAGES, phase = turn / STAGES % 2;
            const TensorStage& from = shared.stages[stage];
            shared.full[stage].wait_for(phase);
            begin_products();
            multiply_tiles(d, from.a + group * PRODUCT_ROWS * 128, from.b[0]);
            wait_for_products<1>();  // those of the step before, whose tiles are free now
            if (step > 0) release(shared.empty[(turn - 1) % STAGES], lane);
        }
        finish_products(d);
        if (steps > 0) release(shared.empty[(turn - 1) % STAGES], lane);

        // Through shared memory, so that neighbours write neighbours: 16 rows of a warp, MOVED columns at a time.
        const Alpha alpha = alpha_of(tile);
        const Epilogue epilogue = epilogue_of(tile);
        float(*sums)[MOVED_STRIDE] = shared.sums[warp];
        const i64 top = tile.row + warp * 16;
#pragma unroll 1
        for (int part = 0; part < OUT_COLUMNS / MOVED; ++part) {
            meet_in_warp();
#pragma unroll
            for (int which = 0; which < OUT_COLUMNS / MOVED; ++which) {  // registers have no index that is not known here
                if (which != part) continue;
#pragma unroll
                for (int j = 0; j < MOVED / 8; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sums[lane / 4 + i / 2 * 8][8 * j + lane % 4 * 2 + i % 2] = d[which * (MOVED / 2) + 4 * j + i];
                    }
                }
            }
            meet_in_warp();
            const i64 x = tile.column + part * MOVED + lane % 4 * 8;
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

// All of it, by the threads of a block.
template <class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void multiply_packed(const u8* a, const u8* b, const Sections& sections, i64 n, i64 k,
                                                const AlphaOf& alpha_of, const EpilogueOf& epilogue_of) {
#ifdef __CUDA_ARCH__
    extern __shared__ u8 room[];
    TensorShared& shared = *reinterpret_cast<TensorShared*>((reinterpret_cast<u64>(room) + 1023u) & ~u64{1023});
#else
    __shared__ TensorShared shared;
#endif
    const int thread = threadIdx.x;
    const i64 steps = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            shared.full[stage].begin(1);
            shared.empty[stage].begin(CONSUMERS * GROUP / WARP);
        }
        fence_barriers();
    }
    __syncthreads();
    const Schedule schedule(sections, n);
    if (thread < GROUP) {
        leave_registers<COPYING_REGISTERS>();
        if (thread == 0) copy_operands(shared, schedule, a, b, steps);
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply_operands(shared, schedule, steps, n, alpha_of, epilogue_of);
    }
}
