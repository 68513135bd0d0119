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
//   dequantize_lines: codes of rows, blocks of one row and a power of two columns that divides K, or one of the whole
//   tensor, one amax; everything aligned to 16 bytes; UNITS units for every thread. dequantize_rows: the same of E4M3_AMAX
//   with an amax for every row; a kernel of its own, since more registers than 32 would cost the others threads.
//   Numerics: f = fl(fl(s * amax) * r), r = fl(1/2688) or fl(1/1536), or s alone; out = cast(fl(code * f)), nearest even.
//   Exact to the bit.

#include "common/blocks.cuh"

#ifndef ELEMENT
#define ELEMENT E2M1
#endif
using Element = ELEMENT;

constexpr int THREADS = 256;
constexpr int EACH = 16;
constexpr int PER_BYTE = Element::BITS == 4 ? 2 : 1;  // codes

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

template <int KIND>
struct StoredScale {
    using Type = u8;
};
template <>
struct StoredScale<FP32> {
    using Type = float;
};
template <int KIND>
using Stored = typename StoredScale<KIND>::Type;

// What codes of a stored scale are multiplied by.
template <int KIND>
__device__ __forceinline__ float factor_of(Stored<KIND> scale, float amax, float reciprocal) {
    if constexpr (KIND == FP32) {
        return scale;
    } else if constexpr (KIND == E8M0) {
        return e8m0_to_float(scale);
    } else {
        return e4m3_to_float(scale) * amax * reciprocal;
    }
}

// What the codes of row `row` are multiplied by from column `column` on.
__device__ __forceinline__ float factor_at(const Scales& scales, i64 row, i64 column, i64 rows, i64 columns) {
    const i64 i = quotient(row, scales.block_rows), j = quotient(column, scales.block_columns);
    const i64 index = scales.transposed ? j * blocks_of(rows, scales.block_rows) + i
                                        : i * blocks_of(columns, scales.block_columns) + j;
    if (scales.kind == FP32) return static_cast<const float*>(scales.stored)[index];
    const u8 code = static_cast<const u8*>(scales.stored)[index];
    if (scales.kind == E8M0) return factor_of<E8M0>(code, 0.0f, 0.0f);
    return factor_of<E4M3_AMAX>(code, scales.amax[scales.each ? row : 0], scales.reciprocal);
}

__device__ __forceinline__ float element_to_float(u32 code) {
    if constexpr (Element::BITS == 4) {
        return e2m1_to_float(code);
    } else {
        return narrow_to_float<Element>(code);
    }
}

// The numbers of neighbouring codes.
template <int N>
__device__ __forceinline__ void decode(const u8* bytes, float (&v)[N]) {
#ifdef HAS_LANES
    for (int i = 0; i < N; i += LANES) {
        store_lanes(narrow_lanes<Element>(load_code_lanes<Element>(bytes + i / PER_BYTE)), v + i);
    }
#else
    if constexpr (Element::BITS == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = element_to_float(bytes[i / 2] >> i % 2 * 4);
    } else {
        narrows_to_floats<Element>(bytes, v);
    }
#endif
}

template <class T>
__device__ void dequantize(const u8* codes, int codes_transposed, Scales scales, T* out, i64 rows, i64 columns) {
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
    if (count == EACH) {  // a constant count, which compilers unroll
        u8 bytes[EACH / PER_BYTE];
        if (step == 1) {
            load_bytes(source, bytes);
        } else {
            for (int j = 0; j < EACH / PER_BYTE; ++j) bytes[j] = source[j * step];
        }
        float v[EACH];
        decode(bytes, v);
        for (int i = 0; i < EACH; ++i) v[i] *= factor;
        store_elements(v, target);
    } else {
        for (int i = 0; i < count; ++i) {
            from_float(element_to_float(source[i / PER_BYTE * step] >> i % PER_BYTE * 4) * factor, target[i]);
        }
    }
}

// ---- whole blocks, one behind the other ----

constexpr int UNITS = 2;  // of a thread: nvfp4 of 16384^2 to bf16 on an H200 0.171 ms, 0.187 with 1, 0.174 with 4

// What a thread decodes at once: what a GPU stores with one instruction.
template <class T>
struct Unit {
#ifdef __CUDA_ARCH__
    static constexpr int ELEMENTS = 16 / sizeof(T);
#else
    static constexpr int ELEMENTS = EACH;
#endif
    static constexpr int BYTES = ELEMENTS / PER_BYTE;
    struct alignas(BYTES) Codes {
        u8 each[BYTES];
    };
};

// `row_units`: of a row, where every row has an amax; else 0.
template <class T, int KIND>
__device__ __forceinline__ void dequantize_lines(const u8* codes, const Stored<KIND>* scales, int block_log2,
                                                 const float* amaxes, i64 row_units, float reciprocal, T* out, i64 units) {
    using Codes = typename Unit<T>::Codes;
    constexpr int ELEMENTS = Unit<T>::ELEMENTS;
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS * UNITS + threadIdx.x;
    float amax[UNITS];
    Codes loaded[UNITS];
    Stored<KIND> stored[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const i64 index = first + u * THREADS;
        if (index >= units) break;
        loaded[u] = reinterpret_cast<const Codes*>(codes)[index];
        stored[u] = scales[index * ELEMENTS >> block_log2];
        amax[u] = KIND == E4M3_AMAX ? amaxes[row_units != 0 ? quotient(index, row_units) : 0] : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const i64 index = first + u * THREADS;
        if (index >= units) break;
        const float factor = factor_of<KIND>(stored[u], amax[u], reciprocal);
        float v[ELEMENTS];
        decode(loaded[u].each, v);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) v[i] *= factor;
        store_elements(v, out + index * ELEMENTS);
    }
}

#define DEQUANTIZE_LINES(NAME, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const u8* codes, const void* scales, int kind, int block_log2, const float* amax, float reciprocal,       \
             T* out, i64 total) {                                                                                      \
        const i64 units = total / Unit<T>::ELEMENTS;                                                                   \
        const u8* bytes = static_cast<const u8*>(scales);                                                              \
        if (kind == FP32) {                                                                                            \
            dequantize_lines<T, FP32>(codes, static_cast<const float*>(scales), block_log2, amax, 0, reciprocal, out,  \
                                      units);                                                                          \
        } else if (kind == E8M0) {                                                                                     \
            dequantize_lines<T, E8M0>(codes, bytes, block_log2, amax, 0, reciprocal, out, units);                      \
        } else {                                                                                                       \
            dequantize_lines<T, E4M3_AMAX>(codes, bytes, block_log2, amax, 0, reciprocal, out, units);                 \
        }                                                                                                              \
    }

#define DEQUANTIZE_ROWS(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const u8* codes, const u8* scales, int block_log2, const float* amaxes, i64 columns, float reciprocal,    \
             T* out, i64 total) {                                                                                      \
        constexpr int EACH_UNIT = Unit<T>::ELEMENTS;                                                                   \
        dequantize_lines<T, E4M3_AMAX>(codes, scales, block_log2, amaxes, columns / EACH_UNIT, reciprocal, out,        \
                                       total / EACH_UNIT);                                                             \
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
DEQUANTIZE_LINES(dequantize_lines_fp32, float)
DEQUANTIZE_LINES(dequantize_lines_bf16, bf16)
DEQUANTIZE_LINES(dequantize_lines_fp16, fp16)
DEQUANTIZE_ROWS(dequantize_rows_fp32, float)
DEQUANTIZE_ROWS(dequantize_rows_bf16, bf16)
DEQUANTIZE_ROWS(dequantize_rows_fp16, fp16)
