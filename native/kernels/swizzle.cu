// swizzle, unswizzle: block scales between their linear form and the 128x4 layout of block-scaled tensor cores.
//
//   linear    (R, C) bytes
//   swizzled  (ceil(R/128)*128, ceil(C/4)*4) bytes; the padding is written as 0 and never read
//   Launch: 256 threads a block, one thread for every four scales of a padded row.
//   Exact: bytes are moved.

#include "layout.cuh"

constexpr int THREADS = 256;

struct Quad {
    i64 row, column;
};

// The four scales of a thread, which are next to each other in both forms.
__device__ __forceinline__ Quad quad_of_thread(i64 columns) {
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const i64 quads = padded_to(columns, 4) / 4;
    return {index / quads, index % quads * 4};
}

extern "C" __global__ void __launch_bounds__(THREADS) swizzle(const u8* linear, u8* swizzled, i64 rows, i64 columns) {
    if (columns == 0) return;
    const Quad quad = quad_of_thread(columns);
    if (quad.row >= padded_to(rows, 128)) return;
    u8* target = swizzled + swizzled_index(quad.row, quad.column, columns);
    for (int j = 0; j < 4; ++j) {
        const bool inside = quad.row < rows && quad.column + j < columns;
        target[j] = inside ? linear[quad.row * columns + quad.column + j] : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) unswizzle(const u8* swizzled, u8* linear, i64 rows, i64 columns) {
    if (columns == 0) return;
    const Quad quad = quad_of_thread(columns);
    if (quad.row >= rows) return;
    const u8* source = swizzled + swizzled_index(quad.row, quad.column, columns);
    for (int j = 0; j < 4; ++j) {
        if (quad.column + j < columns) linear[quad.row * columns + quad.column + j] = source[j];
    }
}
