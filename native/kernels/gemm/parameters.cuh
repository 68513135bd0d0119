// parameters.cuh: parameter structs that the GEMM kernels share. Python reads these declarations
// (native/runtime/structs.py) and packs each field by its name.
//
// A kernel takes several structs of at most 128 bytes. For larger structs NVRTC loads fields late and does not unswitch loops
// (gemm_mx: 1856 instructions instead of 2272).
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

// Element format.
enum class Element : int { E2M1 = 0, E2M3 = 1, E3M2 = 2, E4M3 = 3, E5M2 = 4, INT8 = 5 };

// Type of c, of bias or of the output.
enum class DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Flags of an operand (rows, K) in memory: codes stored as (K, rows); scales stored as (blocks of K, rows); 128 rows of the
// operand share a row of scales; a row has one scale for all of K; E8M0 scales of 32 columns multiply the elements, and are no
// scales of the product.
enum Layout : int { CODES_TRANSPOSED = 1, SCALES_TRANSPOSED = 2, SCALES_OF_128_ROWS = 4, SCALE_OF_ROW = 8, SCALES_IN_ELEMENTS = 16 };

struct OperandParameters {
    const u8* codes;  // two elements in a byte of E2M1, which is never transposed
    const void* scales;
    Element element;
    int layout;  // flags of Layout
};

// An operand with its number of rows.
struct Operand : OperandParameters {
    i64 rows;

    __device__ __forceinline__ int rows_per_scale() const { return (layout & SCALES_OF_128_ROWS) != 0 ? 128 : 1; }
    __device__ __forceinline__ bool scaled_elements() const { return (layout & SCALES_IN_ELEMENTS) != 0; }
};

// A matrix (N, K) per section. All matrices have the same shape and element format.
struct MatricesParameters {
    const u8* const* codes;
    const void* const* scales;
    Element element;
    const i64* layouts;
};

struct EpilogueParameters {
    const void* c;     // (M, N), or null
    const void* bias;  // (N,), (sections, N) of a grouped GEMM, or null
    void* out;         // (M, N)
    DType c_type, bias_type, out_type;
};

// alpha = (a * b) / divisor, or (a * b) * reciprocal.
enum class AlphaOrder : int { DIVIDE = 0, MULTIPLY = 1 };

// Factor of a sum over all of K, from the tensor amaxes or tensor scales of both operands.
struct Alpha {
    const float* a;  // (1,), (M,), or null if alpha is 1
    int a_per_row;
    const float* b;  // (1,), (N,), or null
    int b_per_row;
    AlphaOrder order;
    float divisor, reciprocal;

    __device__ __forceinline__ float value(i64 y, i64 x) const {
        const float product = a[a_per_row ? y : 0] * b[b_per_row ? x : 0];
        return order == AlphaOrder::DIVIDE ? product / divisor : product * reciprocal;
    }
};

struct GroupedAlpha {
    const float* a;         // (sections,), or null if alpha is 1
    const float* const* b;  // per matrix the address of a float32 number
    AlphaOrder order;
    float divisor, reciprocal;

    __device__ __forceinline__ Alpha section(i64 number) const {
        return {a + number, 0, b[number], 0, order, divisor, reciprocal};
    }
};

struct GemmParameters {
    OperandParameters a, b;
    EpilogueParameters epilogue;
    i64 m, n, k;
};

struct GroupedGemmParameters {
    const i64* sizes;  // (sections,) rows of a
    OperandParameters a;
    MatricesParameters b;
    EpilogueParameters epilogue;
    i64 m, n, k;
};

}  // namespace narrowgauge
