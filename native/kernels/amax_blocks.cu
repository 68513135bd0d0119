// amax_blocks: largest magnitudes before and after a rotation, of sections, rows or columns of a tensor, in one read.
//
//   x         (M, K), any strides, float32, bfloat16 or float16
//   sizes     rows of each of `sections` sections along M, or null: the whole tensor is one section
//   plain     float32 as bits, of what is in x: one a section; where `each`, one a row (along_rows) or one a column; or
//             null
//   rotated   float32 as bits, one a section, of groups of 16 rotated (along_rows: along K, else along M); or null
//   The caller sets both to 0.
//   Launch: 256 threads a block, `parts` blocks for every strip of 64 rows, which share its columns; ceil(M/64) strips, or
//   with sections one more for each.
//   amax_tiles: bfloat16, contiguous, M a multiple of 64 and K of 128, both below 2^24, one section; 256 threads for every
//   `apart`th tile of 64x128 of a strip, in shared_tile.cuh's grid.
//   Exact: magnitudes are compared as integers, NaN left out unless propagate_nan; the rotation is hadamard.cuh's.

#include "hadamard.cuh"
#include "nvfp4.cuh"
#include "reduce.cuh"
#include "sections.cuh"
#include "shared_tile.cuh"

constexpr int THREADS = 256;
constexpr int TILE = 64;  // columns

template <class T>
__device__ void amax_blocks(const T* x, i64 row_stride, i64 column_stride, i64 columns, Sections sections, u32* plain,
                            u32* rotated, int parts, int along_rows, int each, int signs, int propagate_nan) {
    __shared__ u32 plain_warps[THREADS / 32], rotated_warps[THREADS / 32];
    const Strip strip = find_strip<BLOCK, 2>(sections, blockIdx.x / parts, columns);
    if (strip.section_rows == 0) return;
    // Along rows, four threads share a row of the tile; along columns, 64 threads read 64 neighbours.
    const int thread = threadIdx.x;
    const i64 row = strip.start + (along_rows ? thread / 4 : thread / TILE * BLOCK);
    const int offset = along_rows ? thread % 4 * BLOCK : thread % TILE;
    const i64 step = along_rows ? column_stride : row_stride;
    const i64 rows_left = strip.section_rows - row;
    const u32 highest = highest_counted(propagate_nan);

    u32 largest = 0, largest_rotated = 0;
    for (i64 start = static_cast<i64>(blockIdx.x % parts) * TILE; start < columns; start += static_cast<i64>(parts) * TILE) {
        const i64 column = start + offset;
        const i64 along = along_rows ? columns - column : rows_left;
        const bool inside = rows_left > 0 && column < columns;
        const int count = !inside ? 0 : along < BLOCK ? static_cast<int>(along) : BLOCK;
        const T* source = x + (strip.section_start + row) * row_stride + column * column_stride;
        float values[BLOCK];
        u32 most = 0;
        if (count == BLOCK) {
            for (int i = 0; i < BLOCK; ++i) values[i] = to_float(source[i * step]);
        } else {
            for (int i = 0; i < BLOCK; ++i) values[i] = i < count ? to_float(source[i * step]) : 0.0f;
        }
        for (int i = 0; i < BLOCK; ++i) take_magnitude(values[i], highest, most);
        if (each && !along_rows) {
            if (count > 0) atomicMax(plain + column, most);
        } else {
            largest = most > largest ? most : largest;
        }
        if (rotated != nullptr) {
            rotate16(values, static_cast<u32>(signs));
            for (int i = 0; i < BLOCK; ++i) take_magnitude(values[i], highest, largest_rotated);
        }
    }
    if (plain != nullptr && each && along_rows && rows_left > 0) atomicMax(plain + strip.section_start + row, largest);
    if (plain != nullptr && !each) largest_of_block(plain_warps, largest, plain + strip.section);
    if (rotated != nullptr) largest_of_block(rotated_warps, largest_rotated, rotated + strip.section);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    amax_tiles_bf16(const bf16* x, i64 rows, i64 columns, int apart, u32* plain, u32* rotated, int along_rows, int signs,
                    int propagate_nan) {
    __shared__ Tile tiles[2];
    __shared__ u32 plain_warps[THREADS / 32], rotated_warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 highest = highest_counted(propagate_nan);
    u32 largest = 0, largest_rotated = 0;
    TileWalk walk(x, rows, columns, static_cast<u32>(apart));
    walk.fetch<THREADS>(tiles[0]);
    for (int slot = 0; walk.inside(); slot ^= 1) {
        tile_waits();
        __syncthreads();  // this tile has come, and all have done with the other one
        walk.step();
        walk.fetch<THREADS>(tiles[slot ^ 1]);
#pragma unroll
        for (int b = 0; b < TILE_ROWS * ROW_BLOCKS / THREADS; ++b) {
            const int each = warp * (TILE_ROWS * ROW_BLOCKS / THREADS) + b;
            Words line = along_rows ? block_of_row(tiles[slot], each * 4 + lane / ROW_BLOCKS, lane % ROW_BLOCKS)
                                    : block_of_column(tiles[slot], each);
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
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const T* x, i64 row_stride, i64 column_stride, i64 rows, i64 columns, const i64* sizes, int sections,     \
             u32* plain, u32* rotated, int parts, int along_rows, int each, int signs, int propagate_nan) {            \
        amax_blocks(x, row_stride, column_stride, columns, Sections{sizes, sections, rows}, plain, rotated, parts,     \
                    along_rows, each, signs, propagate_nan);                                                           \
    }

AMAX_BLOCKS(amax_blocks_fp32, float)
AMAX_BLOCKS(amax_blocks_bf16, bf16)
AMAX_BLOCKS(amax_blocks_fp16, fp16)
