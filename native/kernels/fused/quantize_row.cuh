// quantize_row.cuh: the end of a kernel that makes a matrix row by row and quantizes it. The elements stay in registers.
//
// A row has the threads of row_part.cuh; it belongs to several thread blocks if no sum and no scale extends over the row.
// A scale belongs to the chunks of up to 32 neighbouring lanes, to a row, or to the tensor.
// Numerics of scales and codes: docs/numerics.md, those of quantize_nvfp4.cu, quantize_mx.cu and quantize_fp8.cu.
#pragma once

#include "common/fp8.cuh"
#include "common/mx.cuh"
#include "common/nvfp4.cuh"
#include "fused/row_part.cuh"
#include "layout/layout.cuh"

#ifndef ELEMENT
#define ELEMENT E4M3
#endif

namespace narrowgauge {

using Element = ELEMENT;
constexpr int PER_BYTE = Element::BITS == 4 ? 2 : 1;
constexpr PackOrder RESULT_ORDER = PER_BYTE == 2 ? EVEN_FIRST : ADJACENT;  // of the elements that quantize_row takes

constexpr int E4M3_MAGNITUDES = 128;  // codes without a sign

// Whether codes of products below 7 in magnitude take fewer instructions.
template <class T>
#if defined(HAS_E2M1_BY_ADDITION) && defined(HAS_MAX_MAGNITUDE)
constexpr bool HAS_CODES_BELOW_7 = PER_BYTE == 2 && is_packed<T>;
#else
constexpr bool HAS_CODES_BELOW_7 = false;
#endif

enum ScaleFamily : int { NVFP4 = 0, MX = 1, FP8 = 2 };
// Elements that share a scale: GROUP is `lanes` chunks.
enum ScaleScope : int { GROUP = 0, ROW = 1, TENSOR = 2 };

// The choices of a recipe. On a GPU the macro VARIANT gives their values.
struct QuantizeRowVariant {
    ScaleFamily family;
    ScaleScope scope;
    int lanes;           // a power of two up to 32
    int scale_order;     // of NVFP4, BlockScaleOrder, or of MX, MxScaleOrder
    u32 up_from;         // of MX: mantissa from which on the exponent of a scale is rounded up
    bool power_of_two;   // of FP8: scales are rounded down to powers of two
    bool propagate_nan;  // NaN counts as the largest magnitude
    bool nan_is_largest; // of FP8: an element NaN gets the code of the largest number
    bool given_decodes;  // the given scale is that of codes; its reciprocal is the factor of elements
    bool swizzled;       // scales are in the 128x4 layout
    bool whole_chunks;   // K is a multiple of 16, elements of a row are neighbours, and all rows are aligned to 16 bytes
};

struct QuantizeRowParameters {
    i64 rows;                // M
    int columns;             // K of the result
    int segments;            // thread blocks of a row
    QuantizeRowVariant variant;
    bool amax_alone;         // the amax of the tensor is all that is wanted
    u8* codes;               // (M, ceil(K / PER_BYTE))
    void* scales;            // GROUP: (M, ceil(K / 16 / lanes)) bytes, or float32 with FP8; ROW: (M,); TENSOR: (1,)
    const float* amax;       // of the tensor: NVFP4, and TENSOR without a given scale
    const float* given;      // with TENSOR: the factor of elements, or with given_decodes the scale of codes; or null
    float* encode;           // factor of the tensor: NVFP4 and TENSOR
    u32* amax_out;           // receives the amax of the tensor as bits of float32, 0 before the launch; or null
    float largest_element;
    float smallest_amax;
    float largest_amax;      // upper bound of the amax of a group or a row
    float largest_scale;
    float max_product;       // of NVFP4: 2688, or 1536
};

__device__ __forceinline__ QuantizeRowVariant variant_of(const QuantizeRowParameters& p) {
#ifdef VARIANT
    return VARIANT;
#else
    return p.variant;
#endif
}

__device__ __forceinline__ Fp8ScaleParameters fp8_parameters(const QuantizeRowParameters& p, const QuantizeRowVariant& variant) {
    return {p.largest_element, p.smallest_amax, p.largest_scale, variant.power_of_two};
}

// Largest of magnitudes as bits of float32.
__device__ __forceinline__ float larger_bits(float a, float b) { return __float_as_uint(a) < __float_as_uint(b) ? b : a; }

__device__ __forceinline__ u32 amax_of_lanes(u32 amax, int lanes) {
#pragma unroll
    for (int apart = 1; apart < lanes; apart *= 2) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, amax, apart);
        amax = other > amax ? other : amax;
    }
    return amax;
}

// Factors of the tensor, the same for all rows.
struct TensorFactors {
    float encode;          // with NVFP4
    float factor;          // of elements, if their scale is that of the tensor
    const float* factors;  // with NVFP4 and TABULATED: element factor of each scale code, in shared memory
};

__device__ __forceinline__ TensorFactors tensor_factors(const QuantizeRowParameters& p) {
    const QuantizeRowVariant variant = variant_of(p);
    if (p.amax_alone) return {};  // other thread blocks still change the amax
    if (variant.family == NVFP4) return {nvfp4_tensor_scale(*p.amax, p.max_product), 0.0f, nullptr};
    if (variant.scope != TENSOR) return {};
    if (p.given != nullptr) return {0.0f, variant.given_decodes ? 1.0f / *p.given : *p.given, nullptr};
    return {0.0f, fp8_scale(*p.amax, fp8_parameters(p, variant)), nullptr};
}

// All threads of the block take part.
__device__ __forceinline__ void tabulate(TensorFactors& tensor, float (&factors)[E4M3_MAGNITUDES]) {
    for (int code = static_cast<int>(threadIdx.x); code < E4M3_MAGNITUDES; code += static_cast<int>(blockDim.x)) {
        factors[code] = nvfp4_element_factor(static_cast<u8>(code), tensor.encode);
    }
    __syncthreads();
    tensor.factors = factors;
}

// Stores the scale of a group and returns the factor of its elements.
template <bool TABULATED>
__device__ __forceinline__ float scale_of_group(u32 amax_bits, const TensorFactors& tensor, bool stores, i64 row, i64 group,
                                                i64 groups, const QuantizeRowParameters& p, const QuantizeRowVariant& variant) {
    const float own = __uint_as_float(amax_bits), amax = own > p.largest_amax ? p.largest_amax : own;  // NaN stays NaN
    if (variant.family == FP8) {
        const float scale = fp8_scale(amax, fp8_parameters(p, variant));
        if (stores) static_cast<float*>(p.scales)[row * groups + group] = 1.0f / scale;
        return scale;
    }
    u8 scale;
    float factor;
    if (variant.family == MX) {
        scale = mx_scale<Element>(amax, variant.scale_order, variant.up_from);
        factor = mx_element_factor(scale);
    } else {
        scale = e4m3_from_float(nvfp4_unrounded_scale(amax, tensor.encode, static_cast<BlockScaleOrder>(variant.scale_order)));
        factor = TABULATED ? tensor.factors[scale] : nvfp4_element_factor(scale, tensor.encode);
    }
    if (stores) {
        static_cast<u8*>(p.scales)[variant.swizzled ? swizzled_index(row, group, groups) : row * groups + group] = scale;
    }
    return factor;
}

// Codes of a chunk, of which `count` elements lie inside the row. BELOW_7: the products are below 7 in magnitude.
template <bool BELOW_7, class F, class T>
__device__ __forceinline__ void store_codes(const Rounded<T>& y, float factor, const QuantizeRowVariant& variant,
                                            const RowChunk& chunk, u8* target) {
    constexpr int BYTES = CHUNK * F::BITS > 64 ? CHUNK : CHUNK / 2;
#ifdef HAS_CVT_HALF
    if constexpr (BYTES < CHUNK && is_packed<T>) {
        PackedE2m1 codes;
        if constexpr (!BELOW_7) {
            codes = e2m1x16_of_products<RESULT_ORDER>(y.packed, factor, nullptr);
        } else if (variant.family == MX) {  // the factor is a power of two
            codes = e2m1x16_of_exact_products_below_7(y.packed, factor);
        } else {
            codes = e2m1x16_of_products_below_7<RESULT_ORDER>(y.packed, factor);
        }
        if (chunk.whole) {
            store_codes(codes, target);
            return;
        }
#pragma unroll
        for (int j = 0; j < BYTES; ++j) {
            const u32 byte = codes.words[j / 4] >> j % 4 * 8;
            if (2 * j < chunk.count) target[j] = static_cast<u8>(2 * j + 1 < chunk.count ? byte : byte & 0xFu);
        }
        return;
    }
#endif
    float v[CHUNK];
    unpack_floats(y, v);
    if (variant.nan_is_largest) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            v[i] *= factor;
            v[i] = v[i] != v[i] ? __uint_as_float(F::MAX_BITS) : v[i];
        }
        factor = 1.0f;
    }
    if constexpr (BYTES < CHUNK) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) v[i] *= factor;
        u8 packed[BYTES];
        e2m1x16_from_float(v, packed);
        if (chunk.count == CHUNK) {
            store_bytes(packed, target);
            return;
        }
#pragma unroll
        for (int j = 0; j < BYTES; ++j) {
            if (2 * j < chunk.count) target[j] = 2 * j + 1 < chunk.count ? packed[j] : packed[j] & 0xFu;
        }
    } else if constexpr (F::HAS_CVT) {
        u32 words[CHUNK / 4];
#pragma unroll
        for (int w = 0; w < CHUNK / 4; ++w) {
            words[w] = four_codes<F>(v[4 * w] * factor, v[4 * w + 1] * factor, v[4 * w + 2] * factor,
                                           v[4 * w + 3] * factor);
        }
        if (chunk.whole) {
            store_code_words(words, target);
            return;
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (i < chunk.count) target[i] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
        }
    } else {
        u8 codes[CHUNK];
        encode_row<F>(v, factor, codes);
        store_partial(codes, chunk.count, target);
    }
}

template <bool BELOW_7, class T>
__device__ __forceinline__ void store_row(const Rounded<T> (&y)[ROW_CHUNKS], const float (&factors)[ROW_CHUNKS], const Part& part,
                                          const QuantizeRowParameters& p, const QuantizeRowVariant& variant) {
    const int row_bytes = (p.columns + PER_BYTE - 1) / PER_BYTE;
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        const RowChunk chunk = chunk_of(part, i);
        u8* target = p.codes + part.row * row_bytes + chunk.column / PER_BYTE;
        if (chunk.count > 0) store_codes<BELOW_7, Element>(y[i], factors[i], variant, chunk, target);
    }
}

// Amax of each chunk as bits of float32, and the largest of them.
template <class T>
__device__ __forceinline__ u32 amaxes_of(const Rounded<T> (&y)[ROW_CHUNKS], const Part& part, u32 limit, u32 (&amaxes)[ROW_CHUNKS]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        amaxes[i] = amax_of(y[i], limit);
        largest = amaxes[i] > largest ? amaxes[i] : largest;
    }
    return largest;
}

// Scales and codes of the part of a row, or the tensor's amax alone. All threads of the block take part. Elements have
// RESULT_ORDER; those behind the row are 0, in whole chunks too.
template <bool TABULATED = false, class T>
__device__ __forceinline__ void quantize_row(const Rounded<T> (&y)[ROW_CHUNKS], const Part& part, Words& words,
                                             const QuantizeRowParameters& p, const TensorFactors& tensor) {
    const QuantizeRowVariant variant = variant_of(p);
    const u32 limit = amax_limit(variant.propagate_nan);
    u32 amaxes[ROW_CHUNKS];
    float amax = 0.0f;
    if (p.amax_out != nullptr || variant.scope != TENSOR) {
        const u32 largest = amaxes_of(y, part, limit, amaxes);
        amax = __uint_as_float(largest);
        if (variant.scope == ROW) {
            amax = PIPELINED && ROW_LANES == 0 ? __uint_as_float(largest_of_block(largest, words[2]))
                                               : over_row(amax, words[2], 0.0f, larger_bits);
            amax = amax > p.largest_amax ? p.largest_amax : amax;
        } else if (p.amax_out != nullptr) {
            amax = over_block(amax, words[2], 0.0f, larger_bits);
            if (threadIdx.x == 0) atomicMax(p.amax_out, __float_as_uint(amax));
        }
    }
    if (p.amax_alone) return;

    const float factor = variant.scope == ROW ? fp8_scale(amax, fp8_parameters(p, variant)) : tensor.factor;
    if (part.thread == 0 && part.first == 0) {
        if (variant.scope == ROW && part.row < p.rows) static_cast<float*>(p.scales)[part.row] = 1.0f / factor;
        if (variant.scope == TENSOR && part.row == 0) {
            static_cast<float*>(p.scales)[0] = 1.0f / factor;
            *p.encode = factor;
        }
        if (variant.family == NVFP4 && part.row == 0) *p.encode = tensor.encode;
    }
    const int width = CHUNK * variant.lanes, groups = (p.columns + width - 1) / width;
    float factors[ROW_CHUNKS];
    bool below_7 = HAS_CODES_BELOW_7<T>;
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        const RowChunk chunk = chunk_of(part, i);
        factors[i] = factor;
        if (variant.scope == GROUP) {
            const u32 of_group = amax_of_lanes(amaxes[i], variant.lanes);
            const bool stores = chunk.count > 0 && threadIdx.x % variant.lanes == 0;
            factors[i] = scale_of_group<TABULATED>(of_group, tensor, stores, part.row, chunk.column / width, groups, p, variant);
        }
        if constexpr (HAS_CODES_BELOW_7<T>) below_7 &= __uint_as_float(magnitude_bound(y[i].packed)) * factors[i] < 7.0f;
    }
    if (below_7) {
        store_row<HAS_CODES_BELOW_7<T>>(y, factors, part, p, variant);
    } else {
        store_row<false>(y, factors, part, p, variant);
    }
}

}  // namespace narrowgauge
