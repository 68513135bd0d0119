// amax_blocks: largest magnitudes before and after a rotation, of sections, rows or columns of a tensor, in one read.
//
//   x         (M, K), any strides, float32, bfloat16 or float16
//   sizes     rows of each of `sections` sections along M, or null: the whole tensor is one section
//   plain     float32 as bits, of what is in x: one a section; where `each`, one a row (along_rows) or one a column; or
//             null
//   rotated   float32 as bits, one a section, of groups of 16 rotated (along_rows: along K, else along M); or null
//   The caller sets both to 0.
//   Launch: ANY_THREADS threads a block, `parts` blocks for every strip of 64 rows, which share its columns; ceil(M/64)
//   strips, or with sections one more for each. Of 256 threads, each takes every ceil(64 * parts)th column or block; on a
//   CPU there are 8, which take 32 times as much and need no barrier.
//   amax_tiles: bfloat16, contiguous, M a multiple of 64 and K of 128, both below 2^23, one section; 256 threads for
//   `deep` or `few` tiles of 64x128, one below the other: shared_tile.cuh's Deal.
//   Exact: magnitudes are compared as integers, NaN left out unless propagate_nan; the rotation is hadamard.cuh's.

#include "common/blocks.cuh"
#include "common/hadamard.cuh"
#include "common/nvfp4.cuh"
#include "common/reduce.cuh"
#include "common/sections.cuh"
#include "quantize/shared_tile.cuh"

#ifndef AMAX_THREADS
#ifdef __CUDA_ARCH__
#define AMAX_THREADS 256
#else
#define AMAX_THREADS 8
#endif
#endif

constexpr int THREADS = 256;
constexpr int ANY_THREADS = AMAX_THREADS;            // of the kernel that takes any tensor
constexpr int TILE = 64;                             // columns
constexpr int MANY = STRIP * TILE / BLOCK / ANY_THREADS;  // blocks of a tile that a thread takes
static_assert(MANY * BLOCK * ANY_THREADS == STRIP * TILE, "threads cover the tile");

constexpr int WARPS = ANY_THREADS < 32 ? 1 : ANY_THREADS / 32;

__device__ __forceinline__ void largest_of_any(u32 (&warps)[WARPS], u32 largest, u32* out) {
    if constexpr (ANY_THREADS < 32) {  // fewer than a warp need none of its exchanges
        atomicMax(out, largest);
    } else {
        largest_of_block(warps, largest, out);
    }
}

#ifdef HAS_LANES
// Of 16 rows of as many columns as there are lanes, the largest magnitudes of each, as they are and rotated.
struct Columns {
    Bits plain, rotated;
};

template <class T>
__forceinline__ Columns largest_of_columns(const T* source, i64 stride, bool rotates, u32 signs, u32 highest) {
    Floats v[BLOCK];
    for (int i = 0; i < BLOCK; ++i) v[i] = to_float_lanes(source + i * stride);
    Columns found = {};
    for (int i = 0; i < BLOCK; ++i) take_magnitudes(v[i], highest, found.plain);
    if (rotates) {
        rotate_each(v, signs);
        for (int i = 0; i < BLOCK; ++i) take_magnitudes(v[i], highest, found.rotated);
    }
    return found;
}
#endif

template <class T>
__device__ void amax_blocks(const T* x, i64 row_stride, i64 column_stride, i64 columns, Sections sections, u32* plain,
                            u32* rotated, int parts, int along_rows, int each, int signs, int propagate_nan) {
    __shared__ u32 plain_warps[WARPS], rotated_warps[WARPS];
    const Strip strip = find_strip<BLOCK, 2>(sections, blockIdx.x / parts, columns);
    if (strip.section_rows == 0) return;
    const i64 step = along_rows ? column_stride : row_stride;
    const u32 highest = highest_counted(propagate_nan);

    u32 largest = 0, largest_rotated = 0;
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        // Along rows, four blocks lie side by side in a row of the tile; along columns, 64.
        const int number = static_cast<int>(threadIdx.x) * MANY + n;
        const i64 row = strip.start + (along_rows ? number / 4 : number / TILE * BLOCK);
        const int offset = along_rows ? number % 4 * BLOCK : number % TILE;
        const i64 rows_left = strip.section_rows - row;
        u32 largest_of_line = 0;
        for (i64 start = static_cast<i64>(blockIdx.x % parts) * TILE; start < columns; start += static_cast<i64>(parts) * TILE) {
            const i64 column = start + offset;
            const int count = count_of<BLOCK>(rows_left <= 0 || column >= columns ? 0 : along_rows ? columns - column : rows_left);
            const T* source = x + (strip.section_start + row) * row_stride + column * column_stride;
#ifdef HAS_LANES
            const i64 columns_left = columns - column + n % LANES;  // from the first lane on
            if (MANY % LANES == 0 && !along_rows && column_stride == 1 && rows_left >= BLOCK && columns_left >= LANES) {
                if (n % LANES != 0) continue;
                const Columns found =
                    largest_of_columns(source, row_stride, rotated != nullptr, static_cast<u32>(signs), highest);
                for (int i = 0; each && i < LANES; ++i) atomicMax(plain + column + i, found.plain[i]);
                const u32 most = largest_lane(found.plain), turned = largest_lane(found.rotated);
                largest_of_line = most > largest_of_line ? most : largest_of_line;
                largest_rotated = turned > largest_rotated ? turned : largest_rotated;
                continue;
            }
#endif
            float values[BLOCK];
            load_block(source, step, count, values);
            const u32 most = largest_magnitude(values, highest);
            if (each && !along_rows) {
                if (count > 0) atomicMax(plain + column, most);
            } else {
                largest_of_line = most > largest_of_line ? most : largest_of_line;
            }
            if (rotated != nullptr) {
                rotate16(values, static_cast<u32>(signs));
                const u32 turned = largest_magnitude(values, highest);
                largest_rotated = turned > largest_rotated ? turned : largest_rotated;
            }
        }
        if (plain != nullptr && each && along_rows && rows_left > 0) {
            atomicMax(plain + strip.section_start + row, largest_of_line);
        }
        largest = largest_of_line > largest ? largest_of_line : largest;
    }
    if (plain != nullptr && !each) largest_of_any(plain_warps, largest, plain + strip.section);
    if (rotated != nullptr) largest_of_any(rotated_warps, largest_rotated, rotated + strip.section);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    amax_tiles_bf16(const bf16* x, i64 rows, i64 columns, int deep, int whole, int few, u32* plain, u32* rotated,
                    int along_rows, int signs, int propagate_nan) {
    __shared__ Tiles tiles;
    __shared__ u32 plain_warps[THREADS / 32], rotated_warps[THREADS / 32];
    constexpr int EACH = TILE_ROWS * ROW_BLOCKS / THREADS;  // blocks of a thread
    static_assert(EACH == 2, "of a row and the next one, or of two chunks");
    u32 first = along_rows ? chunk_index(threadIdx.x / ROW_BLOCKS * EACH, threadIdx.x % ROW_BLOCKS * 2)
                           : column_index<NEIGHBOURS>(threadIdx.x / 32 * EACH);
    const u32 highest = highest_counted(propagate_nan);
    u32 largest = 0, largest_rotated = 0;
    TileWalk walk(x, rows, columns, Deal{deep, whole, few});
    walk.fetch<THREADS>(tiles);
    for (; walk.inside(); first ^= TILE_WORDS) {
        tile_comes();
        walk.step();
        if (walk.inside()) walk.fetch<THREADS>(tiles);
#pragma unroll
        for (int b = 0; b < EACH; ++b) {
            Words line = along_rows ? block_of_row(tiles, first, b) : blocks_of_columns(tiles, first, b);
            const u32 most = largest_of_words(line, bound_of_words(line), highest);
            largest = most > largest ? most : largest;
            if (rotated != nullptr) {
                rotate_words(line, static_cast<u32>(signs));
                const u32 turned = largest_of_words(line, bound_of_words(line), highest);
                largest_rotated = turned > largest_rotated ? turned : largest_rotated;
            }
        }
    }
    if (plain != nullptr) largest_of_block(plain_warps, largest, plain);
    if (rotated != nullptr) largest_of_block(rotated_warps, largest_rotated, rotated);
}

#define AMAX_BLOCKS(NAME, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(ANY_THREADS)                                                          \
        NAME(const T* x, i64 row_stride, i64 column_stride, i64 rows, i64 columns, const i64* sizes, int sections,     \
             u32* plain, u32* rotated, int parts, int along_rows, int each, int signs, int propagate_nan) {            \
        amax_blocks(x, row_stride, column_stride, columns, Sections{sizes, sections, rows}, plain, rotated, parts,     \
                    along_rows, each, signs, propagate_nan);                                                           \
    }

AMAX_BLOCKS(amax_blocks_fp32, float)
AMAX_BLOCKS(amax_blocks_bf16, bf16)
AMAX_BLOCKS(amax_blocks_fp16, fp16)
