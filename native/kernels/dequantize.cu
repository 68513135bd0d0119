// dequantize: codes and scales back to values.
//
//   ELEMENT  E2M1, E2M3, E3M2, E4M3 or E5M2, a macro: each is a compilation of its own
//   codes    (M, K) bytes, one an element; of E2M1 (M, ceil(K/2)), element 2j in the low nibble of byte j. (K, M) where
//            codes_transposed, which E2M1 is never
//   scales   one for every block of block_rows x block_columns, linear; (columns, rows) where scales_transposed
//            E4M3_AMAX  E4M3 bytes; amax float32 (1,), or (M,) where `each`
//            E8M0       bytes
//            FP32       float32
//   out      (M, K) float32, bfloat16 or float16
//   Launch: 256 threads a block, one thread for every 16 elements of a row. A block has a multiple of 16 columns.
//   Numerics: f = fl(fl(s * amax) * r), r = fl(1/2688) or fl(1/1536), or s alone; out = cast(fl(code * f)), nearest even.
//   Exact to the bit.

#include "blocks.cuh"

#ifndef ELEMENT
#define ELEMENT E2M1
#endif
using Element = ELEMENT;

constexpr int THREADS = 256;
constexpr int EACH = 16;

enum ScaleKind { E4M3_AMAX = 0, E8M0 = 1, FP32 = 2 };

struct Scales {
    const void* stored;
    int kind;
    i64 block_rows, block_columns;
    int transposed;
    const float* amax;
    int each;
    float reciprocal;
};

__device__ __forceinline__ i64 blocks_of(i64 extent, i64 block) {
    const i64 whole = quotient(extent, block);
    return whole + (whole * block != extent ? 1 : 0);
}

// What the codes of row `row` are multiplied by from column `column` on.
__device__ __forceinline__ float factor_at(const Scales& scales, i64 row, i64 column, i64 rows, i64 columns) {
    const i64 i = quotient(row, scales.block_rows), j = quotient(column, scales.block_columns);
    const i64 index = scales.transposed ? j * blocks_of(rows, scales.block_rows) + i
                                        : i * blocks_of(columns, scales.block_columns) + j;
    if (scales.kind == FP32) return static_cast<const float*>(scales.stored)[index];
    const u8 code = static_cast<const u8*>(scales.stored)[index];
    if (scales.kind == E8M0) return e8m0_to_float(code);
    return e4m3_to_float(code) * scales.amax[scales.each ? row : 0] * scales.reciprocal;
}

__device__ __forceinline__ float element_to_float(u32 code) {
    if constexpr (Element::BITS == 4) {
        return e2m1_to_float(code);
    } else {
        return narrow_to_float<Element>(code);
    }
}

template <class T>
__device__ void dequantize(const u8* codes, int codes_transposed, Scales scales, T* out, i64 rows, i64 columns) {
    constexpr int PER_BYTE = Element::BITS == 4 ? 2 : 1;
    const i64 chunks = (columns + EACH - 1) / EACH;
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= rows * chunks) return;
    // Neighbours read neighbouring codes.
    const i64 lines = codes_transposed ? rows : chunks;
    const i64 line = quotient(index, lines), place = index - line * lines;
    const i64 row = codes_transposed ? place : line;
    const i64 column = (codes_transposed ? line : place) * EACH;
    const int count = columns - column < EACH ? static_cast<int>(columns - column) : EACH;
    const u8* source = codes_transposed ? codes + column * rows + row
                                        : codes + row * ((columns + PER_BYTE - 1) / PER_BYTE) + column / PER_BYTE;
    const i64 step = codes_transposed ? rows : 1;
    T* target = out + row * columns + column;

    const float factor = factor_at(scales, row, column, rows, columns);
    if (count == EACH && step == 1) {  // a constant count, which compilers unroll
        u8 bytes[EACH / PER_BYTE];
        load_bytes(source, bytes);
        float v[EACH];
        for (int i = 0; i < EACH; ++i) v[i] = element_to_float(bytes[i / PER_BYTE] >> i % PER_BYTE * 4) * factor;
        store_elements(v, target);
    } else {
        for (int i = 0; i < count; ++i) {
            from_float(element_to_float(source[i / PER_BYTE * step] >> i % PER_BYTE * 4) * factor, target[i]);
        }
    }
}

#define DEQUANTIZE(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const u8* codes, int codes_transposed, const void* scales, int kind, i64 block_rows, i64 block_columns,   \
             int scales_transposed, const float* amax, int each, float reciprocal, T* out, i64 rows, i64 columns) {    \
        const Scales every = {scales, kind, block_rows, block_columns, scales_transposed, amax, each, reciprocal};     \
        dequantize(codes, codes_transposed, every, out, rows, columns);                                                \
    }

DEQUANTIZE(dequantize_fp32, float)
DEQUANTIZE(dequantize_bf16, bf16)
DEQUANTIZE(dequantize_fp16, fp16)
