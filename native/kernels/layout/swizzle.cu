// swizzle, unswizzle: block scales between the linear layout and the 128x4 layout of block-scaled tensor cores.
//
//   linear    (R, C) bytes
//   swizzled  (ceil(R/128)*128, ceil(C/4)*4) bytes; the padding is written as 0 and never read
//   Launch: 128 threads in a block, ceil(R/128)*32*ceil(C/16) threads. A thread moves 16 scales of each of the rows i, i + 32,
//   i + 64 and i + 96 of a strip of 128 rows. In each of four tiles, four scales of each of these rows are contiguous.
//   Consecutive threads have a few consecutive rows, then the columns: memory transactions of a GPU have 64 bytes or
//   more in both layouts.
//   Exact: bytes are copied.

#include "common/blocks.cuh"
#include "layout/layout.cuh"

namespace narrowgauge {

// Scales of 32768x2048 on an H200: 35.7 us to unswizzle, 36.5 with 256 threads; about 36.5 to swizzle with either.
constexpr int THREADS = 128;
constexpr int TILES = 4;  // tiles of a thread
constexpr int ROWS = 4;   // rows of a thread, 32 apart
// Number of consecutive rows of consecutive threads; a transaction reads 128 bytes. Scales of 32768x2048 on an H200, in
// percent of the rate of a copy: swizzle 91 % with 4, 88 % with 8; unswizzle 90 % with 8, 87 % with 4.
constexpr int ROWS_TOGETHER = 4, ROWS_TOGETHER_BACK = 8;

// The 4x16 scales of a thread: their first row and column.
struct Quad {
    i64 row, column;
};

// The row lies outside the matrix if the thread has no scales.
template <int TOGETHER>
__device__ __forceinline__ Quad quad_of_thread(i64 columns) {
    const i64 chunks = (columns + 4 * TILES - 1) / (4 * TILES);
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const i64 group = quotient(index / TOGETHER, chunks);  // group of rows
    constexpr int GROUPS = 32 / TOGETHER;
    return {group / GROUPS * 128 + group % GROUPS * TOGETHER + index % TOGETHER,
            (index / TOGETHER - group * chunks) * 4 * TILES};
}

// 16 scales, four in a word, the first one in the low byte.
struct alignas(16) Scales {
    u32 words[4];
};

// Loads `count` scales and pads with zeros. On a GPU, vectorized loads of 16 or 4 bytes if the address is aligned.
__device__ __forceinline__ Scales load_scales(const u8* source, int count) {
#ifdef __CUDA_ARCH__
    if (count == 16 && reinterpret_cast<u64>(source) % 16 == 0) return *reinterpret_cast<const Scales*>(source);
#endif
    Scales scales;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u8 bytes[4];
        load_bytes4(source + 4 * j, valid_count<4>(count - 4 * j), bytes);
        scales.words[j] = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<u32>(bytes[3]) << 24;
    }
    return scales;
}

__device__ __forceinline__ void store_scales(const Scales& scales, int count, u8* target) {
#ifdef __CUDA_ARCH__
    if (count == 16 && reinterpret_cast<u64>(target) % 16 == 0) {
        *reinterpret_cast<Scales*>(target) = scales;
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u8 bytes[4];
        for (int i = 0; i < 4; ++i) bytes[i] = static_cast<u8>(scales.words[j] >> 8 * i);
        store_bytes4(bytes, valid_count<4>(count - 4 * j), target + 4 * j);
    }
}

// Number of the 16 scales of a row from `column` on that lie inside the matrix.
__device__ __forceinline__ int count_at(i64 row, i64 column, i64 rows, i64 columns) {
    return row < rows ? valid_count<4 * TILES>(columns - column) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) swizzle(const u8* linear, u8* swizzled, i64 rows, i64 columns) {
    if (rows == 0 || columns == 0) return;
    const Quad quad = quad_of_thread<ROWS_TOGETHER>(columns);
    if (quad.row >= padded_to(rows, 128)) return;
    u8* target = swizzled + swizzled_index(quad.row, quad.column, columns);
    Scales of_rows[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const i64 row = quad.row + 32 * k;
        of_rows[k] = load_scales(linear + row * columns + quad.column, count_at(row, quad.column, rows, columns));
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        if (quad.column + 4 * t >= columns) return;
        const Scales of_tile = {{of_rows[0].words[t], of_rows[1].words[t], of_rows[2].words[t], of_rows[3].words[t]}};
        store_scales(of_tile, 16, target + 512 * t);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) unswizzle(const u8* swizzled, u8* linear, i64 rows, i64 columns) {
    if (rows == 0 || columns == 0) return;
    const Quad quad = quad_of_thread<ROWS_TOGETHER_BACK>(columns);
    if (quad.row >= rows) return;
    const u8* source = swizzled + swizzled_index(quad.row, quad.column, columns);
    Scales of_tiles[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        if (quad.column + 4 * t < columns) of_tiles[t] = load_scales(source + 512 * t, 16);
    }
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const i64 row = quad.row + 32 * k;
        const Scales of_row = {{of_tiles[0].words[k], of_tiles[1].words[k], of_tiles[2].words[k], of_tiles[3].words[k]}};
        store_scales(of_row, count_at(row, quad.column, rows, columns), linear + row * columns + quad.column);
    }
}

}  // namespace narrowgauge
