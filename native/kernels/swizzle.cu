// swizzle, unswizzle: block scales between their linear form and the 128x4 layout of block-scaled tensor cores.
//
//   linear    (R, C) bytes
//   swizzled  (ceil(R/128)*128, ceil(C/4)*4) bytes; the padding is written as 0 and never read
//   Launch: 256 threads for every eight tiles of a strip of 128 rows, whose threads each move 16 bytes: four scales of the
//   rows i, i + 32, i + 64 and i + 96, which follow each other in the swizzled form. Four rows of eight tiles go to
//   neighbours, so that a GPU moves whole sectors of 32 bytes in either form.
//   Exact: bytes are moved.

#include "blocks.cuh"
#include "layout.cuh"

constexpr int THREADS = 256;
constexpr int TILES = 8;
constexpr int ROWS = 4;  // of a thread, 32 apart

struct Quad {
    i64 row, column;  // of the first of its scales
};

__device__ __forceinline__ Quad quad_of_thread(i64 columns) {
    const i64 groups = (columns + 4 * TILES - 1) / (4 * TILES);
    const i64 strip = quotient(blockIdx.x, groups), group = blockIdx.x - strip * groups;
    const int thread = threadIdx.x;
    return {strip * 128 + thread / 32 * 4 + thread % 4, (group * TILES + thread / 4 % TILES) * 4};
}

extern "C" __global__ void __launch_bounds__(THREADS) swizzle(const u8* linear, u8* swizzled, i64 rows, i64 columns) {
    if (rows == 0 || columns == 0) return;
    const Quad quad = quad_of_thread(columns);
    if (quad.column >= columns) return;
    u8* target = swizzled + swizzled_index(quad.row, quad.column, columns);
    u8 bytes[4 * ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const i64 row = quad.row + 32 * k;
        const int count = row < rows ? count_of<4>(columns - quad.column) : 0;
        load_bytes4(linear + row * columns + quad.column, count, &bytes[4 * k]);
    }
    store_bytes(bytes, target);
}

extern "C" __global__ void __launch_bounds__(THREADS) unswizzle(const u8* swizzled, u8* linear, i64 rows, i64 columns) {
    if (rows == 0 || columns == 0) return;
    const Quad quad = quad_of_thread(columns);
    if (quad.column >= columns) return;
    const u8* source = swizzled + swizzled_index(quad.row, quad.column, columns);
    u8 bytes[4 * ROWS];
    load_bytes(source, bytes);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const i64 row = quad.row + 32 * k;
        const int count = row < rows ? count_of<4>(columns - quad.column) : 0;
        store_bytes4(&bytes[4 * k], count, linear + row * columns + quad.column);
    }
}
