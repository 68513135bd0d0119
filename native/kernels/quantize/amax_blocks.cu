// amax_blocks: amaxes before and after a rotation, of a tensor, its sections, rows or columns, in one read.
//
//   Parameters: struct AmaxBlocksParameters. The caller sets both outputs to 0.
//   amax_blocks: any matrix. Launch: GENERAL_THREADS threads in a block, `parts` blocks for every strip of 64 rows, which
//   share its columns; ceil(M/64) strips, or with sections 1 more per section. With 256 threads, a thread has every
//   ceil(64 * parts)th column or block. On a CPU there are 8 threads with 32 times the work, and no barrier.
//   amax_tiles: contiguous bfloat16, M a multiple of 64 and K of 128, both below 2^23, one section. Launch: the grid of
//   TileSchedule (shared_tile.cuh), 256 threads in a block.
//   Exact: magnitudes are compared as integers; NaN is left out unless propagate_nan is set. The rotation is the one of
//   hadamard.cuh.

#include "common/blocks.cuh"
#include "common/hadamard.cuh"
#include "common/nvfp4.cuh"
#include "common/reduce.cuh"
#include "common/sections.cuh"
#include "quantize/shared_tile.cuh"

namespace narrowgauge {

#ifndef AMAX_THREADS
#ifdef __CUDA_ARCH__
#define AMAX_THREADS 256
#else
#define AMAX_THREADS 8
#endif
#endif

constexpr int THREADS = 256;
constexpr int GENERAL_THREADS = AMAX_THREADS;  // threads of the kernel for any matrix
constexpr int TILE = 64;                       // columns
constexpr int BLOCKS_PER_THREAD = STRIP * TILE / BLOCK / GENERAL_THREADS;
static_assert(BLOCKS_PER_THREAD * BLOCK * GENERAL_THREADS == STRIP * TILE, "threads cover the tile");

struct AmaxBlocksParameters {
    const void* x;           // (M, K), any strides, float32, bfloat16 or float16
    i64 row_stride;
    i64 column_stride;
    i64 rows;                // M
    i64 columns;             // K
    const i64* sizes;        // rows of each section along M, or null: the whole tensor is a section
    int sections;
    u32* plain;              // amaxes of x, float32 as bits: of each section; of each row or column if per_line; or null
    u32* rotated;            // amaxes of the rotated groups of 16, float32 as bits, of each section; or null
    TileSchedule schedule;   // of amax_tiles
    int parts;               // thread blocks of a strip
    int along_rows;          // groups of 16 and lines extend along K, else along M
    int per_line;            // plain has an amax per row (along_rows) or column
    u32 signs;               // of the rotation
    int propagate_nan;
};

#ifdef HAS_SIMD
// Amaxes of 16 rows of SIMD_LANES columns, a column in each lane, before and after the rotation.
struct ColumnAmaxes {
    UintVector plain, rotated;
};

template <class T>
__forceinline__ ColumnAmaxes amaxes_of_columns(const T* source, i64 stride, bool rotates, u32 signs, u32 limit) {
    FloatVector v[BLOCK];
    for (int i = 0; i < BLOCK; ++i) v[i] = to_float_vector(source + i * stride);
    ColumnAmaxes amaxes = {};
    for (int i = 0; i < BLOCK; ++i) update_amax_vector(v[i], limit, amaxes.plain);
    if (rotates) {
        rotate16_elementwise(v, signs);
        for (int i = 0; i < BLOCK; ++i) update_amax_vector(v[i], limit, amaxes.rotated);
    }
    return amaxes;
}
#endif

template <class T>
__device__ __forceinline__ void amax_blocks(const AmaxBlocksParameters& p) {
    __shared__ u32 plain_maxima[WARPS_OF<GENERAL_THREADS>], rotated_maxima[WARPS_OF<GENERAL_THREADS>];
    const Strip strip = find_strip<BLOCK, 2>(Sections{p.sizes, p.sections, p.rows}, blockIdx.x / p.parts, p.columns);
    if (strip.section_rows == 0) return;
    const i64 step = p.along_rows ? p.column_stride : p.row_stride;
    const u32 limit = amax_limit(p.propagate_nan);

    u32 largest = 0, largest_rotated = 0;
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        // A row of the tile has four blocks along rows; a row of column blocks has 64.
        const int number = static_cast<int>(threadIdx.x) * BLOCKS_PER_THREAD + n;
        const i64 row = strip.start + (p.along_rows ? number / 4 : number / TILE * BLOCK);
        const int offset = p.along_rows ? number % 4 * BLOCK : number % TILE;
        const i64 rows_left = strip.section_rows - row;
        u32 largest_of_line = 0;
        for (i64 start = static_cast<i64>(blockIdx.x % p.parts) * TILE; start < p.columns;
             start += static_cast<i64>(p.parts) * TILE) {
            const i64 column = start + offset;
            const i64 left = rows_left <= 0 || column >= p.columns ? 0 : p.along_rows ? p.columns - column : rows_left;
            const int count = valid_count<BLOCK>(left);
            const T* source =
                static_cast<const T*>(p.x) + (strip.section_start + row) * p.row_stride + column * p.column_stride;
#ifdef HAS_SIMD
            const i64 columns_left = p.columns - column + n % SIMD_LANES;  // from the first lane on
            if (BLOCKS_PER_THREAD % SIMD_LANES == 0 && !p.along_rows && p.column_stride == 1 && rows_left >= BLOCK &&
                columns_left >= SIMD_LANES) {
                if (n % SIMD_LANES != 0) continue;
                const ColumnAmaxes amaxes =
                    amaxes_of_columns(source, p.row_stride, p.rotated != nullptr, p.signs, limit);
                for (int i = 0; p.per_line && i < SIMD_LANES; ++i) atomicMax(p.plain + column + i, amaxes.plain[i]);
                const u32 plain = reduce_max(amaxes.plain), rotated = reduce_max(amaxes.rotated);
                largest_of_line = plain > largest_of_line ? plain : largest_of_line;
                largest_rotated = rotated > largest_rotated ? rotated : largest_rotated;
                continue;
            }
#endif
            float values[BLOCK];
            load_block(source, step, count, values);
            const u32 plain = amax_of_block(values, limit);
            if (p.per_line && !p.along_rows) {
                if (count > 0) atomicMax(p.plain + column, plain);
            } else {
                largest_of_line = plain > largest_of_line ? plain : largest_of_line;
            }
            if (p.rotated != nullptr) {
                rotate16(values, p.signs);
                const u32 rotated = amax_of_block(values, limit);
                largest_rotated = rotated > largest_rotated ? rotated : largest_rotated;
            }
        }
        if (p.plain != nullptr && p.per_line && p.along_rows && rows_left > 0) {
            atomicMax(p.plain + strip.section_start + row, largest_of_line);
        }
        largest = largest_of_line > largest ? largest_of_line : largest;
    }
    if (p.plain != nullptr && !p.per_line) atomic_max_of_threads<GENERAL_THREADS>(plain_maxima, largest, p.plain + strip.section);
    if (p.rotated != nullptr) atomic_max_of_threads<GENERAL_THREADS>(rotated_maxima, largest_rotated, p.rotated + strip.section);
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_tiles_bf16(const __grid_constant__ AmaxBlocksParameters p) {
    __shared__ Tiles tiles;
    __shared__ u32 plain_maxima[THREADS / 32], rotated_maxima[THREADS / 32];
    constexpr int TILE_BLOCKS_PER_THREAD = TILE_ROWS * ROW_BLOCKS / THREADS;
    static_assert(TILE_BLOCKS_PER_THREAD == 2, "blocks of a row and the next row, or of two neighbouring chunks");
    // Copies of parameters: ptxas would load the parameters again after every barrier.
    const u32 signs = p.signs;
    const int along_rows = p.along_rows;
    u32 *const plain_out = p.plain, *const rotated_out = p.rotated;
    u32 first = along_rows
                    ? chunk_index(threadIdx.x / ROW_BLOCKS * TILE_BLOCKS_PER_THREAD, threadIdx.x % ROW_BLOCKS * 2)
                    : column_index<ADJACENT>(threadIdx.x / 32 * TILE_BLOCKS_PER_THREAD);
    const u32 limit = amax_limit(p.propagate_nan);
    u32 largest = 0, largest_rotated = 0;
    TileIterator tile(static_cast<const bf16*>(p.x), p.rows, p.columns, p.schedule);
    tile.copy_async<THREADS>(tiles);
    for (; tile.valid(); first ^= TILE_WORDS) {
        wait_for_tile();
        tile.advance();
        if (tile.valid()) tile.copy_async<THREADS>(tiles);
#pragma unroll
        for (int b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
            PackedBf16 block = along_rows ? block_of_row(tiles, first, b) : blocks_of_columns(tiles, first, b);
            const u32 plain = amax_of_packed(block, magnitude_bound(block), limit);
            largest = plain > largest ? plain : largest;
            if (rotated_out != nullptr) {
                rotate_packed(block, signs);
                const u32 rotated = amax_of_packed(block, magnitude_bound(block), limit);
                largest_rotated = rotated > largest_rotated ? rotated : largest_rotated;
            }
        }
    }
    if (plain_out != nullptr) block_atomic_max(plain_maxima, largest, plain_out);
    if (rotated_out != nullptr) block_atomic_max(rotated_maxima, largest_rotated, rotated_out);
}

#define AMAX_BLOCKS(TYPE, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                      \
        amax_blocks_##TYPE(const __grid_constant__ AmaxBlocksParameters p) {                                           \
        amax_blocks<T>(p);                                                                                             \
    }

AMAX_BLOCKS(fp32, float)
AMAX_BLOCKS(bf16, bf16)
AMAX_BLOCKS(fp16, fp16)

}  // namespace narrowgauge
