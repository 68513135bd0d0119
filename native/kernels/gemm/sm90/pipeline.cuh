// pipeline.cuh: the persistent GEMM of the wgmma kernels.
//
// A block computes output tiles of 128 rows by 256 or 128 columns, one after the other. Warps are specialized: a thread of the
// producer warpgroup copies operand tiles into a pipeline of shared memory stages, a stage for every step of K; two consumer
// warpgroups multiply 64 rows of the stage. With slices of K, on a GPU a cluster of blocks computes a tile: each block sums a
// slice, then adds the sums of all slices, in order, for a part of the columns. A kernel defines
//   Source: load(stage, full, tile, step)   queues the copies of a step of K, `bytes(tile)`, into a stage
//           wait_for(tile)                  called before the first step of an output tile
//           use_idle_warp()                 work of the other three warps of the producer warpgroup
//           PRODUCER_REGISTERS, Order       registers of a thread; order of the sections, such as TiledSection
//   Sums: accumulate(d, shared, iteration, tile, warpgroup, lane)   the sums of a thread over the slice of K; waits for the
//         stages and releases them. `iteration` is that of the pipeline
//         CAST_BEFORE_C                     whether an output is cast before c is added
//         ROWS                              whether alpha has factors of rows of a or of b
#pragma once

#include "gemm/cluster.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/sm90/tile.cuh"

namespace narrowgauge {

constexpr int CONSUMERS = 2, WGMMA_THREADS = (1 + CONSUMERS) * WARPGROUP;  // consumer warpgroups, and one producer
// Tiles of b of a step of K, 1 or 2. One tile makes twice as many blocks.
#ifndef TILES_OF_B
#define TILES_OF_B 2
#endif
constexpr int B_TILES = TILES_OF_B, OUT_ROWS = CONSUMERS * WGMMA_M, OUT_COLUMNS = B_TILES * TILE_ROWS;
constexpr int TILE_SUMS = WGMMA_M * OUT_COLUMNS / WARPGROUP;  // of a thread
static_assert(OUT_ROWS == TILE_ROWS, "a step of K has one tile of a");

// Whether most output tiles have at most WGMMA_M rows: a warpgroup skips the products of rows beyond the last.
#ifndef FEW_ROWS
#define FEW_ROWS 0
#endif

// Pipeline stages: the maximum in shared memory beside the epilogue's buffer.
constexpr int STAGES = B_TILES == 1 ? 6 : 4;
// Registers of three threads, of the producer and of two consumers, which hold the sums: what ptxas gives 384 threads of 65536.
constexpr int REGISTERS_OF_THREE = 504;
// The epilogue moves this many columns of a warp's sums at a time. The stride of the buffer avoids bank conflicts between
// the eight rows of a write.
constexpr int EPILOGUE_COLUMNS = 32, EPILOGUE_STRIDE = EPILOGUE_COLUMNS + 8;
// Rows of output tiles that the scheduler groups: 16 by 8 tiles at a time read the fewest bytes. On an H200 8192^3 of NVFP4
// takes 1.381 ms with 8, 1.382 with 16 and 1.396 with 32, without packing.
constexpr int GROUP_ROWS_OF_TILES = 16;

struct Stage {
    u8 a[TILE_BYTES], b[B_TILES][TILE_BYTES];
};

struct alignas(1024) WgmmaShared {
    Stage stages[STAGES];
    float sums[CONSUMERS * 4][16][EPILOGUE_STRIDE];
    ptx::Mbarrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(WgmmaShared) == 213 * 1024, "native/gemm/wgmma.py asks for this size");

// Slices of K that a block sums, and the steps of each.
struct SlicedSteps {
    int slices;
    i64 steps;
};

struct OutputTile {
    int section;
    i64 row, column;     // first output of the tile in its section
    i64 section_rows;
    i64 section_start;   // first row of the section in c and out
    i64 a_tile, b_tile;  // rows of operand tiles
    int slice;           // first slice of the block
};

// Tile scheduler: block b computes b, b + gridDim.x, ... of the slices of the output tiles of all sections. The blocks of a
// cluster have the slices of a tile.
template <class Order>
struct TileScheduler {
    Order at;
    i64 columns;
    SlicedSteps k;
    i64 next;  // slice of a tile of the section

    __device__ __forceinline__ TileScheduler(const Sections& sections, i64 n, const SlicedSteps& k)
        : at(sections), columns((n + OUT_COLUMNS - 1) / OUT_COLUMNS), k(k), next(blockIdx.x) {}

    __device__ __forceinline__ bool take(OutputTile& tile) {
        while (next >= at.tiles() * columns * CLUSTER) {
            next -= at.tiles() * columns * CLUSTER;
            if (!at.next()) return false;
        }
        const i64 number = next / CLUSTER;
        const i64 first = number / (GROUP_ROWS_OF_TILES * columns) * GROUP_ROWS_OF_TILES, left = at.tiles() - first;
        const i64 height = left < GROUP_ROWS_OF_TILES ? left : GROUP_ROWS_OF_TILES, place = number - first * columns;
        const i64 row = first + place % height, column = place / height;
        tile = {at.number,
                row * OUT_ROWS,
                column * OUT_COLUMNS,
                at.section.count,
                at.section.start,
                at.before + row,
                (at.number * columns + column) * B_TILES,
                static_cast<int>(next - number * CLUSTER)};
        next += gridDim.x;
        return true;
    }
};

// A 4x4 matrix of words in four neighbouring lanes, transposed: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose_words(u32 (&words)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & distance) != 0) continue;
            const u32 received = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[i] : words[i + distance], distance);
            (upper ? words[i] : words[i + distance]) = received;
        }
    }
}

template <class T>
__device__ __forceinline__ u32 pair_of(float low, float high) {
    T numbers[2];
    from_float(low, numbers[0]);
    from_float(high, numbers[1]);
    return numbers[0].bits | static_cast<u32>(numbers[1].bits) << 16;
}

// Alpha of a thread's two rows: of the tensor, or products of scales of rows of a and of b.
struct TensorFactor {
    float factor;

    __device__ __forceinline__ float operator()(int, i64) const { return factor; }
};

struct RowFactors {
    float rows[2];
    const float* columns;  // of the output tile, in shared memory
    i64 left;              // first column of the output tile

    __device__ __forceinline__ RowFactors(const Alpha& alpha, i64 row, i64 last_row, const float* columns, i64 left)
        : columns(columns), left(left) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i64 of = row + 8 * i < last_row ? row + 8 * i : last_row;
            rows[i] = alpha.a[alpha.a_per_row != 0 ? of : 0];
        }
    }

    __device__ __forceinline__ float operator()(int row, i64 column) const {
        return rows[row] * columns[static_cast<int>(column - left)];
    }
};

// Brings the scales of b of an output tile to the buffer of a warp, asynchronously. On an H200 8192^3 takes 933 us, 1018 us with loads
// at the end of the tile, and 1198 us with all outputs through shared memory.
__device__ __forceinline__ void stage_columns(const Alpha& alpha, i64 left, i64 n, float (&sums)[16][EPILOGUE_STRIDE], int lane) {
    ptx::bar_warp_sync();
#pragma unroll
    for (int i = 0; i < OUT_COLUMNS / WARP; ++i) {
        const i64 column = left + i * WARP + lane, of = column < n ? column : n - 1;
        const float* const scale = alpha.b + (alpha.b_per_row != 0 ? of : 0);
        ptx::cp_async_ca_shared_global_4(&sums[0][0] + i * WARP + lane, reinterpret_cast<const u8*>(scale));
    }
    ptx::cp_async_commit_group();
}

// Stores the sums of a warp times `factor`, without addends, straight from registers. N is a multiple of 8. `top`, `left`: first
// row of the warp in the section, and first column.
template <class T, int COUNT, class FactorOf>
__device__ __forceinline__ void store_sums(const float (&d)[COUNT], const FactorOf& factor, const Epilogue& epilogue, i64 rows,
                                           i64 top, i64 left, i64 n, int lane) {
#pragma unroll
    for (int group = 0; group < COUNT / 16; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i64 y = top + lane / 4 + 8 * i;
            const float* sums = d + 16 * group + 2 * i;  // columns 8j + 2(lane % 4) of the group are sums[4j], sums[4j + 1]
            if constexpr (sizeof(T) == 4) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const i64 x = left + 32 * group + 8 * j + lane % 4 * 2;
                    if (y >= rows || x >= n) continue;
                    T* target = static_cast<T*>(epilogue.out) + epilogue.first + y * n + x;
                    from_float(sums[4 * j] * factor(i, x), target[0]);
                    from_float(sums[4 * j + 1] * factor(i, x + 1), target[1]);
                }
            } else {
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const i64 column = left + 32 * group + 8 * j + lane % 4 * 2;
                    words[j] = pair_of<T>(sums[4 * j] * factor(i, column), sums[4 * j + 1] * factor(i, column + 1));
                }
                transpose_words(words, lane);
                const i64 x = left + 32 * group + lane % 4 * 8;
                if (y >= rows || x >= n) continue;
                ptx::Vector4* target = reinterpret_cast<ptx::Vector4*>(static_cast<T*>(epilogue.out) + epilogue.first + y * n + x);
                *target = {words[0], words[1], words[2], words[3]};
            }
        }
    }
}

template <int COUNT, class FactorOf>
__device__ __forceinline__ void store_sums(const float (&d)[COUNT], const FactorOf& factor, const Epilogue& epilogue, i64 rows,
                                           i64 top, i64 left, i64 n, int lane) {
    if (epilogue.out_type == DType::BFLOAT16) return store_sums<bf16>(d, factor, epilogue, rows, top, left, n, lane);
    if (epilogue.out_type == DType::FLOAT16) return store_sums<fp16>(d, factor, epilogue, rows, top, left, n, lane);
    store_sums<float>(d, factor, epilogue, rows, top, left, n, lane);
}

// A Source without work for idle warps.
struct CopyingSource {
    using Order = TiledSection;
    static constexpr int PRODUCER_REGISTERS = 40;

    __device__ __forceinline__ u32 bytes(const OutputTile&) const { return sizeof(Stage); }
    __device__ __forceinline__ void wait_for(const OutputTile&) const {}
    __device__ __forceinline__ void use_idle_warp() const {}
};

// Producer thread: copies the tiles of each step of K into the next stage, as soon as the consumers have released it.
template <class Source, class Order>
__device__ __forceinline__ void produce(WgmmaShared& shared, TileScheduler<Order> scheduler, const Source& source) {
    OutputTile tile;
    u32 iteration = 0;  // over the steps of all tiles; a stage is used every STAGES iterations, with alternating parity
    while (scheduler.take(tile)) {
        source.wait_for(tile);
        for (i64 step = 0; step < scheduler.k.slices * scheduler.k.steps; ++step, ++iteration) {
            const u32 stage = iteration % STAGES, phase = iteration / STAGES % 2;
            ptx::mbarrier_try_wait_parity(shared.empty[stage], phase ^ 1u);
            ptx::mbarrier_arrive_expect_tx(shared.full[stage], source.bytes(tile));
            source.load(shared.stages[stage], shared.full[stage], tile, tile.slice * scheduler.k.steps + step);
        }
    }
}

// Waits for the stages of a warpgroup with all rows beyond the last row, so that the other warpgroup has the tensor cores.
__device__ __forceinline__ void skip_stages(WgmmaShared& shared, u32& iteration, i64 steps, int lane) {
    for (i64 step = 0; step < steps; ++step, ++iteration) {
        ptx::mbarrier_try_wait_parity(shared.full[iteration % STAGES], iteration / STAGES % 2);
        release(shared.empty[iteration % STAGES], lane);
    }
}

// Epilogue of the sums of a thread, of COUNT / 16 * 32 columns from `left` on. `factor`: alpha, if all outputs have the same alpha.
template <bool CAST_BEFORE_C, bool ROWS, int COUNT>
__device__ __forceinline__ void store_tile(const float (&d)[COUNT], const Alpha& alpha, float factor, const Epilogue& epilogue,
                                           const OutputTile& tile, i64 left, i64 n, float (&sums)[16][EPILOGUE_STRIDE], int warp,
                                           int lane) {
    const i64 top = tile.row + warp * 16, rows = tile.section_rows;
    const bool direct = epilogue.c == nullptr && epilogue.bias == nullptr && n % 8 == 0 && reinterpret_cast<u64>(epilogue.out) % 16 == 0;
    if constexpr (ROWS) {
        ptx::cp_async_wait_group<0>();
        ptx::bar_warp_sync();
        if (direct) {
            const RowFactors factors(alpha, top + lane / 4, rows - 1, &sums[0][0], tile.column);
            return store_sums(d, factors, epilogue, rows, top, left, n, lane);
        }
    } else if (direct && alpha.a_per_row + alpha.b_per_row == 0) {
        return store_sums(d, TensorFactor{factor}, epilogue, rows, top, left, n, lane);
    }

    // Through shared memory, so that neighbouring threads write neighbouring outputs: 16 rows of a warp, EPILOGUE_COLUMNS
    // at a time.
    constexpr int PARTS = COUNT / (EPILOGUE_COLUMNS / 2);
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
        ptx::bar_warp_sync();
#pragma unroll
        for (int which = 0; which < PARTS; ++which) {  // registers have constant indices only
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
        const i64 x = left + part * EPILOGUE_COLUMNS + lane % 4 * 8;
#pragma unroll 1
        for (int row = lane / 4; row < 16; row += 8) {
            const i64 y = top + row;
            if (y >= rows || x >= n) continue;
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = sums[row][lane % 4 * 8 + j];
            store_outputs<CAST_BEFORE_C>(alpha, epilogue, v, y, x, n);
        }
    }
}

// The sums of all slices, added in order of K, for part `slice` of the sums of a thread. Sums of a block replace its stages.
__device__ __forceinline__ void join_slices(const float (&d)[TILE_SUMS], float (&joined)[TILE_SUMS / CLUSTER], WgmmaShared& shared,
                                            int slice, int thread) {
    constexpr int THREADS = CONSUMERS * WARPGROUP, PARTS = TILE_SUMS / 4 / CLUSTER;
    static_assert(TILE_SUMS * THREADS * sizeof(float) <= sizeof(shared.stages), "the sums of a block fit into its stages");
    ptx::Vector4(*sums)[THREADS] = reinterpret_cast<ptx::Vector4(*)[THREADS]>(shared.stages);
    ptx::bar_sync<THREADS>(1);  // both warpgroups have read the stages
#pragma unroll
    for (int part = 0; part < TILE_SUMS / 4; ++part) {
        ptx::Vector4 words;
#pragma unroll
        for (int j = 0; j < 4; ++j) words.words[j] = __float_as_uint(d[4 * part + j]);
        sums[part][thread] = words;
    }
    ptx::barrier_cluster();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        ptx::Vector4 parts[CLUSTER];
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            parts[rank] = ptx::ld_shared_cluster(&sums[slice * PARTS + part][thread], rank);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float sum = __uint_as_float(parts[0].words[j]);
#pragma unroll
            for (int rank = 1; rank < CLUSTER; ++rank) sum += __uint_as_float(parts[rank].words[j]);
            joined[4 * part + j] = sum;
        }
    }
    ptx::barrier_cluster();  // all blocks have read this block's sums
}

// Consumer warpgroup. `alpha_of(tile)` and `epilogue_of(tile)` return the epilogue of an output tile.
template <class Order, class Sums, class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void consume(WgmmaShared& shared, TileScheduler<Order> scheduler, const Sums& all, i64 n,
                                        const AlphaOf& alpha_of, const EpilogueOf& epilogue_of) {
    const int thread = static_cast<int>(threadIdx.x) - WARPGROUP, lane = thread % WARP, warp = thread / WARP;
    int warpgroup = thread / WARPGROUP;
#ifdef __CUDA_ARCH__
    warpgroup = __shfl_sync(0xFFFFFFFFu, warpgroup, 0);  // so that the compiler keeps addresses of stages in uniform registers
#endif
    OutputTile tile;
    u32 iteration = 0;
    while (scheduler.take(tile)) {
        float d[TILE_SUMS];
#pragma unroll
        for (int i = 0; i < TILE_SUMS; ++i) d[i] = 0.0f;
        const Alpha alpha = alpha_of(tile);
        const float factor = alpha.a == nullptr ? 1.0f : alpha.value(0, 0);  // early: the loads take as long as 300 sums
        if constexpr (Sums::ROWS) stage_columns(alpha, tile.column, n, shared.sums[warp], lane);
        // With many rows the branch would cost more than it saves: 8192^3 of FP8 takes 894 us on an H200 and not 785.
        const bool beyond = (CLUSTER > 1 || FEW_ROWS) && tile.row + warpgroup * WGMMA_M >= tile.section_rows;
        if (beyond) {
            skip_stages(shared, iteration, scheduler.k.steps, lane);
        } else {
            all.accumulate(d, shared, iteration, tile, warpgroup, lane);
        }
        const Epilogue epilogue = epilogue_of(tile);
        if constexpr (CLUSTER > 1) {
            float joined[TILE_SUMS / CLUSTER];
            join_slices(d, joined, shared, tile.slice, thread);
            const i64 left = tile.column + tile.slice * (OUT_COLUMNS / CLUSTER);
            store_tile<Sums::CAST_BEFORE_C, Sums::ROWS>(joined, alpha, factor, epilogue, tile, left, n, shared.sums[warp], warp, lane);
            continue;
        }
#ifndef __CUDA_ARCH__
        for (tile.slice = 1; tile.slice < scheduler.k.slices; ++tile.slice) {
            float slice[TILE_SUMS] = {};
            all.accumulate(slice, shared, iteration, tile, warpgroup, lane);
            for (int i = 0; i < TILE_SUMS; ++i) d[i] += slice[i];
        }
#endif
        store_tile<Sums::CAST_BEFORE_C, Sums::ROWS>(d, alpha, factor, epilogue, tile, tile.column, n, shared.sums[warp], warp, lane);
    }
}

template <class Source, class Sums, class AlphaOf, class EpilogueOf>
__device__ __forceinline__ void multiply_tiles_persistent(const Source& source, const Sums& sums, const SlicedSteps& k,
                                                          const Sections& sections, i64 n, const AlphaOf& alpha_of,
                                                          const EpilogueOf& epilogue_of) {
#ifdef __CUDA_ARCH__
    extern __shared__ u8 dynamic_shared[];
    // An offset, and not an address: the compiler has to see that it is shared memory.
    const u32 skipped = -static_cast<u32>(__cvta_generic_to_shared(dynamic_shared)) & 1023u;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(dynamic_shared + skipped);
#else
    __shared__ WgmmaShared shared;
#endif
    const int thread = threadIdx.x;
    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::mbarrier_init(shared.full[stage], 1);
            ptx::mbarrier_init(shared.empty[stage], CONSUMERS * WARPGROUP / WARP);
        }
        ptx::fence_mbarrier_init_and_proxy_async();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    using Scheduler = TileScheduler<typename Source::Order>;
    if (thread < WARPGROUP) {
        ptx::setmaxnreg_dec<Source::PRODUCER_REGISTERS>();
        if (thread == 0) produce(shared, Scheduler(sections, n, k), source);
        if (thread >= WARP) source.use_idle_warp();
        return;
    }
    ptx::setmaxnreg_inc<(REGISTERS_OF_THREE - Source::PRODUCER_REGISTERS) / 2>();
    consume(shared, Scheduler(sections, n, k), sums, n, alpha_of, epilogue_of);
}

}  // namespace narrowgauge
