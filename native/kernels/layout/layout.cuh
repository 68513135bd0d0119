// layout.cuh: where a block scale lies. docs/numerics.md#scale-layout.
#pragma once

#include "common/formats.cuh"

__device__ __forceinline__ i64 padded_to(i64 extent, i64 multiple) { return (extent + multiple - 1) / multiple * multiple; }

// Scale (i, j) of a matrix of `columns` scales a row, in tiles of 128x4 that hold 512 bytes.
__device__ __forceinline__ i64 swizzled_index(i64 i, i64 j, i64 columns) {
    const i64 tile = i / 128 * (padded_to(columns, 4) / 4) + j / 4;
    return tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
}
