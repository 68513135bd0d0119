// layout.cuh: the 128x4 layout of block scales. docs/numerics.md#scale-layout.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

// `extent` rounded up to a multiple.
__device__ __forceinline__ i64 padded_to(i64 extent, i64 multiple) { return (extent + multiple - 1) / multiple * multiple; }

// Index of scale (i, j) of a matrix with `columns` scales in a row. A tile of 128x4 scales has 512 bytes.
__device__ __forceinline__ i64 swizzled_index(i64 i, i64 j, i64 columns) {
    const i64 tile = i / 128 * (padded_to(columns, 4) / 4) + j / 4;
    return tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
}

}  // namespace narrowgauge
