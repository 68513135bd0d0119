// dequantize: codes and block scales to values.
//
//   The macro ELEMENT names the format of the codes: E2M1, E2M3, E3M2, E4M3 or E5M2; a compilation per format.
//   codes         (M, K) bytes, a byte for each; E2M1: (M, ceil(K/2)), element 2j in the low nibble of byte j. If
//                 codes_transposed is set, (K, M); not with E2M1
//   scales        one for every block of block_rows x block_columns, linear; (columns, rows) if scales_transposed is set.
//                 The kind is E4M3_AMAX (bytes), E8M0 (bytes) or FP32 (float32)
//   amax          float32, with E4M3_AMAX: (1,), or (M,) if amax_per_row is set
//   reciprocal    fl(1/2688) or fl(1/1536), with E4M3_AMAX
//   out           (M, K) float32, bfloat16 or float16
//   dequantize: any matrix. Launch: 256 threads in a block, a thread for every 16 elements of a row. Scale blocks have a
//   multiple of 16 columns.
//   dequantize_lines: codes along K, scale blocks of one row whose columns are a power of two and divide K, or one block of
//   the whole tensor, and one amax; all pointers aligned to 16 bytes. Launch: 256 threads in a block, a thread for UNITS
//   units of the output.
//   dequantize_rows: the same for E4M3 scales with an amax per row. It is a separate kernel because more than 32
//   registers, its need, would lower the occupancy of the kernels above.
//   Numerics: f = fl(fl(s * amax) * r) with r = fl(1/2688) or fl(1/1536), or f = s; out = cast(fl(code * f)), nearest even.
//   Exact to the bit.

#include "common/blocks.cuh"

namespace narrowgauge {

#ifndef ELEMENT
#define ELEMENT E2M1
#endif
using Element = ELEMENT;

constexpr int THREADS = 256;
constexpr int PER_THREAD = 16;                        // elements
constexpr int PER_BYTE = Element::BITS == 4 ? 2 : 1;  // codes

// Format of the stored scales. With E4M3_AMAX an element is also multiplied by its amax and by `reciprocal`.
enum ScaleKind : int { E4M3_AMAX = 0, E8M0 = 1, FP32 = 2 };

struct Scales {
    const void* stored;
    int kind;
    i64 block_rows, block_columns;
    int transposed;
    const float* amax;
    int amax_per_row;
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

// Factor of the codes of a scale block.
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

// Factor of the code of element (row, column).
__device__ __forceinline__ float factor_at(const Scales& scales, i64 row, i64 column, i64 rows, i64 columns) {
    const i64 i = quotient(row, scales.block_rows), j = quotient(column, scales.block_columns);
    const i64 index = scales.transposed ? j * blocks_of(rows, scales.block_rows) + i
                                        : i * blocks_of(columns, scales.block_columns) + j;
    if (scales.kind == FP32) return static_cast<const float*>(scales.stored)[index];
    const u8 code = static_cast<const u8*>(scales.stored)[index];
    if (scales.kind == E8M0) return factor_of<E8M0>(code, 0.0f, 0.0f);
    return factor_of<E4M3_AMAX>(code, scales.amax[scales.amax_per_row ? row : 0], scales.reciprocal);
}

__device__ __forceinline__ float element_to_float(u32 code) {
    if constexpr (Element::BITS == 4) {
        return e2m1_to_float(code);
    } else {
        return narrow_to_float<Element>(code);
    }
}

// Values of N neighbouring codes.
template <int N>
__device__ __forceinline__ void decode(const u8* bytes, float (&v)[N]) {
#ifdef HAS_SIMD
    for (int i = 0; i < N; i += SIMD_LANES) {
        store_vector(narrow_to_float_vector<Element>(load_code_vector<Element>(bytes + i / PER_BYTE)), v + i);
    }
#else
    if constexpr (Element::BITS == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = element_to_float(bytes[i / 2] >> i % 2 * 4);
    } else {
        narrow_to_floats<Element>(bytes, v);
    }
#endif
}

template <class T>
__device__ void dequantize(const u8* codes, int codes_transposed, Scales scales, T* out, i64 rows, i64 columns) {
    const i64 chunks = (columns + PER_THREAD - 1) / PER_THREAD;
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= rows * chunks) return;
    // Consecutive threads read consecutive codes.
    const i64 line_length = codes_transposed ? rows : chunks;
    const i64 line = quotient(index, line_length), offset = index - line * line_length;
    const i64 row = codes_transposed ? offset : line;
    const i64 column = (codes_transposed ? line : offset) * PER_THREAD;
    const int count = columns - column < PER_THREAD ? static_cast<int>(columns - column) : PER_THREAD;
    const u8* source = codes_transposed ? codes + column * rows + row
                                        : codes + row * ((columns + PER_BYTE - 1) / PER_BYTE) + column / PER_BYTE;
    const i64 step = codes_transposed ? rows : 1;
    T* target = out + row * columns + column;

    const float factor = factor_at(scales, row, column, rows, columns);
    if (count == PER_THREAD) {  // a constant count; the compiler unrolls the loop
        u8 bytes[PER_THREAD / PER_BYTE];
        if (step == 1) {
            load_bytes(source, bytes);
        } else {
            for (int j = 0; j < PER_THREAD / PER_BYTE; ++j) bytes[j] = source[j * step];
        }
        float v[PER_THREAD];
        decode(bytes, v);
        for (int i = 0; i < PER_THREAD; ++i) v[i] *= factor;
        store_elements(v, target);
    } else {
        for (int i = 0; i < count; ++i) {
            from_float(element_to_float(source[i / PER_BYTE * step] >> i % PER_BYTE * 4) * factor, target[i]);
        }
    }
}

// ---- contiguous scale blocks -----------------------------------------------------------------------------------------

// Units of a thread. NVFP4 of 16384^2 to bf16 on an H200: 0.171 ms with 2, 0.187 with 1, 0.174 with 4.
constexpr int UNITS = 2;

// Output of one vectorized store on a GPU: 16 bytes.
template <class T>
struct Unit {
#ifdef __CUDA_ARCH__
    static constexpr int ELEMENTS = 16 / sizeof(T);
#else
    static constexpr int ELEMENTS = PER_THREAD;
#endif
    static constexpr int BYTES = ELEMENTS / PER_BYTE;
    struct alignas(BYTES) Codes {
        u8 bytes[BYTES];
    };
};

// `row_units`: units of a row if every row has an amax, else 0.
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
        decode(loaded[u].bytes, v);
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
        constexpr int ELEMENTS = Unit<T>::ELEMENTS;                                                                    \
        dequantize_lines<T, E4M3_AMAX>(codes, scales, block_log2, amaxes, columns / ELEMENTS, reciprocal, out,         \
                                       total / ELEMENTS);                                                              \
    }

#define DEQUANTIZE(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const u8* codes, int codes_transposed, const void* scales, int kind, i64 block_rows, i64 block_columns,   \
             int scales_transposed, const float* amax, int amax_per_row, float reciprocal, T* out, i64 rows, i64 columns) {\
        const Scales all = {scales, kind, block_rows, block_columns, scales_transposed, amax, amax_per_row, reciprocal};\
        dequantize(codes, codes_transposed, all, out, rows, columns);                                                  \
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

}  // namespace narrowgauge
