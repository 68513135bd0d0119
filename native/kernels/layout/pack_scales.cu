// pack_scales, unpack_scales: block scales between the linear layout and a layout of digits (spec/scale_layouts.py).
//
//   linear  rows of `columns` scales: bytes, or float32 powers of two, whose exponents are packed
//   packed  bytes, one part behind another: a part is a batch, a section, or the whole matrix
//   starts  (P + 1,) first byte of each part in packed, then the number of bytes
//   rows    (P + 1,) first row of each part in linear, then the number of rows
//   digits  order in memory, the slowest first; the size of the slowest digit is not read
//   Padding cells are written as 0 if the flags say so, else left as they are; unpack_scales does not read them.
//   Launch: any grid of 256 threads; a grid-stride loop covers the bytes of packed.
//   Exact: bytes are copied.

#include "common/blocks.cuh"

namespace narrowgauge {

constexpr int THREADS = 256;

struct Digits {
    i64 sizes[8];
    i64 row_steps[8];     // rows between two values of the digit
    i64 column_steps[8];  // columns between two values of the digit
    int count;
};

struct PackParameters {
    const void* linear;
    void* packed;
    const i64* starts;
    const i64* rows;
    i64 columns;
    int parts;
    bool is_float;        // linear holds float32 numbers
    bool zero_rows;       // cells of padded rows are written as 0
    bool zero_columns;    // cells of padded columns in other rows are written as 0
    Digits digits;
};

// Part of byte `place`: the last part that begins at or before the byte, which skips empty parts.
__device__ __forceinline__ int part_of(const i64* starts, int parts, i64 place) {
    int low = 0, high = parts - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts[middle] <= place) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Calls `move(place, index, inside, padding)` for the bytes of a thread: `index` of the scale in linear if it is
// `inside`, else `padding` says whether the byte is written as 0.
template <class Move>
__device__ __forceinline__ void for_each_cell(const PackParameters& p, Move move) {
    const i64 total = p.starts[p.parts], step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 place = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; place < total; place += step) {
        const int part = part_of(p.starts, p.parts, place);
        i64 rest = place - p.starts[part], row = 0, column = 0;
        for (int d = p.digits.count - 1; d >= 0; --d) {
            const i64 above = d == 0 ? 0 : quotient(rest, p.digits.sizes[d]);
            const i64 digit = rest - above * p.digits.sizes[d];
            row += digit * p.digits.row_steps[d];
            column += digit * p.digits.column_steps[d];
            rest = above;
        }
        const bool below = row >= p.rows[part + 1] - p.rows[part], beside = column >= p.columns;
        move(place, (p.rows[part] + row) * p.columns + column, !below && !beside, below ? p.zero_rows : p.zero_columns);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_scales(PackParameters p) {
    u8* packed = static_cast<u8*>(p.packed);
    for_each_cell(p, [&](i64 place, i64 index, bool inside, bool padding) {
        if (inside) {
            packed[place] = p.is_float ? static_cast<u8>(__float_as_uint(static_cast<const float*>(p.linear)[index]) >> 23)
                                       : static_cast<const u8*>(p.linear)[index];
        } else if (padding) {
            packed[place] = 0;
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) unpack_scales(PackParameters p) {
    u8* linear = static_cast<u8*>(const_cast<void*>(p.linear));
    for_each_cell(p, [&](i64 place, i64 index, bool inside, bool) {
        if (inside) linear[index] = static_cast<const u8*>(p.packed)[place];
    });
}

}  // namespace narrowgauge
