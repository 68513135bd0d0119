// cache.cuh: pages of keys, or of values, and their numbers.
//
// Element d of head h at offset o of page g lies at g * page + o * offset + h * head + d / chunk * chunk_stride + d % chunk * element
// bytes of the codes, d / 2 in place of d if a byte has two elements. A layout of serving is a choice of these strides.
//   FP8          E4M3; scales are given for the tensor or for each head
//   FP8_TOKEN    E4M3 with a float32 scale for each token and head; INT8_TOKEN the same with integers of two's complement
//   NVFP4        E2M1, E4M3 scales of 16; the scale of the tensor is given. `swizzled`: 4 tokens of a column of scales are neighbours
//   MXFP8        E4M3, E8M0 scales of 32
#pragma once

#include "common/fp8.cuh"
#include "common/mx.cuh"
#include "common/nvfp4.cuh"

namespace narrowgauge {

enum CacheFormat : int { CACHE_FP8 = 0, CACHE_FP8_TOKEN = 1, CACHE_INT8_TOKEN = 2, CACHE_NVFP4 = 3, CACHE_MXFP8 = 4 };

struct CachePart {
    u8* codes;
    void* scales;
    CacheFormat format;
    int dim;                                                     // of a head
    int page_size;
    int chunk;                                                   // bytes
    i64 page, offset, head, chunk_stride, element;               // bytes
    i64 scale_page, scale_offset, scale_head, scale_block;       // scales
    bool swizzled;
};

__device__ constexpr bool has_nibbles(CacheFormat format) { return format == CACHE_NVFP4; }
// Elements of a scale; 0 if it is that of a token and head; -1 if it is given.
__device__ constexpr int scale_width(CacheFormat format) {
    return format == CACHE_NVFP4 ? 16 : format == CACHE_MXFP8 ? 32 : format == CACHE_FP8 ? -1 : 0;
}

// A place of the cache: a head of a token.
struct Cell {
    i64 page;
    int offset, head;
};

__device__ __forceinline__ Cell cell_of(i64 slot, int page_size, int head) {
    const u32 size = static_cast<u32>(page_size);
    if (slot >> 32 != 0) return {slot / page_size, static_cast<int>(slot % page_size), head};
    return {static_cast<u32>(slot) / size, static_cast<int>(static_cast<u32>(slot) % size), head};
}

__device__ __forceinline__ i64 row_index(const CachePart& part, const Cell& cell) {
    return cell.page * part.page + cell.offset * part.offset + cell.head * part.head;
}

__device__ __forceinline__ i64 code_index(const CachePart& part, const Cell& cell, int byte) {
    const i64 row = row_index(part, cell);
    if (byte < part.chunk) return row + byte * part.element;
    return row + byte / part.chunk * part.chunk_stride + byte % part.chunk * part.element;
}

// Place of a block scale of a head in a page of `across` scales a key, in the digits T, s, r, t of serving.
__device__ __forceinline__ int swizzled_place(int across, int offset, int block) {
    const int quarter = across / 4;
    return ((offset / 4 * 4 + block / quarter) * quarter + block % quarter) * 4 + offset % 4;
}

__device__ __forceinline__ i64 scale_index(const CachePart& part, const Cell& cell, int block) {
    const i64 first = cell.page * part.scale_page + cell.head * part.scale_head;
    if (part.swizzled) return first + swizzled_place(part.dim / scale_width(CACHE_NVFP4), cell.offset, block);
    return first + cell.offset * part.scale_offset + block * part.scale_block;
}

// Number of an element without the given scale.
__device__ __forceinline__ float number_of(const CachePart& part, const Cell& cell, int d) {
    const bool nibbles = has_nibbles(part.format);
    const u8 code = part.codes[code_index(part, cell, nibbles ? d / 2 : d)];
    const int width = scale_width(part.format);
    const i64 scale = width < 0 ? 0 : scale_index(part, cell, width == 0 ? 0 : d / width);
    switch (part.format) {
        case CACHE_FP8: return e4m3_to_float(code);
        case CACHE_FP8_TOKEN: return e4m3_to_float(code) * static_cast<const float*>(part.scales)[scale];
        case CACHE_INT8_TOKEN: return static_cast<float>(static_cast<signed char>(code)) * static_cast<const float*>(part.scales)[scale];
        case CACHE_NVFP4:
            return e2m1_to_float(code >> d % 2 * 4 & 0xFu) * e4m3_to_float(static_cast<const u8*>(part.scales)[scale]);
        default: return e4m3_to_float(code) * e8m0_to_float(static_cast<const u8*>(part.scales)[scale]);
    }
}

}  // namespace narrowgauge
