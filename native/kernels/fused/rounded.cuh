// rounded.cuh: 16 neighbouring elements that are rounded to the dtype of a matrix. On a GPU bfloat16 stays in packed form.
#pragma once

#include "quantize/register_tile.cuh"

namespace narrowgauge {

constexpr int CHUNK = 16;  // elements of a thread that are neighbours

enum ElementType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <class T>
constexpr ElementType type_of = FLOAT32;
template <>
constexpr ElementType type_of<bf16> = BFLOAT16;
template <>
constexpr ElementType type_of<fp16> = FLOAT16;

// The place of a chunk in its row.
struct RowChunk {
    int column;  // the first
    int count;   // elements inside the row
    bool whole;  // 0 or 16 elements, neighbours in memory, aligned to 16 bytes (codes of 4 bits to 8)
};

// Distance of the elements of a chunk, and that of the chunk from the start of its row. Those of whole chunks need no product.
__device__ __forceinline__ i64 stride_of(const RowChunk& chunk, i64 stride) { return chunk.whole ? 1 : stride; }
__device__ __forceinline__ i64 offset_of(const RowChunk& chunk, i64 stride) {
    return chunk.whole ? chunk.column : chunk.column * stride;
}

// x rounded to the dtype T, as a float32.
template <class T>
__device__ __forceinline__ float rounded(float x) {
    T narrow;
    from_float(x, narrow);
    return to_float(narrow);
}

template <class T>
struct Rounded {
    float v[CHUNK];
};

template <class T>
constexpr bool is_packed = false;

// Sets elements 2j and 2j + 1.
template <class T>
__device__ __forceinline__ void set_pair(Rounded<T>& y, int j, float low, float high) {
    y.v[2 * j] = rounded<T>(low);
    y.v[2 * j + 1] = rounded<T>(high);
}

// ORDER: of the words, if elements are packed.
template <PackOrder ORDER = ADJACENT, class T>
__device__ __forceinline__ void round_chunk(const float (&v)[CHUNK], Rounded<T>& y) {
    constexpr PackOrder OF_WORDS = is_packed<T> ? ORDER : ADJACENT;
#pragma unroll
    for (int j = 0; j < CHUNK / 2; ++j) set_pair(y, j, v[low_index<OF_WORDS>(j)], v[high_index<OF_WORDS>(j)]);
}

// Elements that are `stride` apart, and zeros.
template <class T>
__device__ __forceinline__ void load_rounded(const T* source, i64 stride, const RowChunk& chunk, Rounded<T>& y) {
    load_block(source, stride, chunk.count, y.v);
}

template <class T>
__device__ __forceinline__ void store_rounded(const Rounded<T>& y, const RowChunk& chunk, T* target) {
    if (chunk.count == CHUNK) {
        store_elements(y.v, target);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {  // a constant trip count keeps the elements in registers
        if (i < chunk.count) from_float(y.v[i], target[i]);
    }
}

template <class T>
__device__ __forceinline__ void unpack_floats(const Rounded<T>& y, float (&v)[CHUNK]) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] = y.v[i];
}

template <class T>
__device__ __forceinline__ u32 amax_of(const Rounded<T>& y, u32 limit) {
    return amax_of_block(y.v, limit);
}

// Elements from `count` on become 0: a factor of NaN or infinity leaves no zeros behind the row.
template <PackOrder ORDER = ADJACENT, class T>
__device__ __forceinline__ void keep_first(Rounded<T>& y, int count) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y.v[i] = i < count ? y.v[i] : 0.0f;
}

#ifdef HAS_CVT_HALF
template <>
struct Rounded<bf16> {
    PackedBf16 packed;
};

template <>
constexpr bool is_packed<bf16> = true;

__device__ __forceinline__ void set_pair(Rounded<bf16>& y, int j, float low, float high) {
    y.packed.words[j] = ptx::cvt_rn_bf16x2_f32(low, high);
}

__device__ __forceinline__ void load_rounded(const bf16* source, i64 stride, const RowChunk& chunk, Rounded<bf16>& y) {
    if (chunk.whole) {
        y.packed = chunk.count > 0 ? load_packed(reinterpret_cast<const u32*>(source)) : PackedBf16{};
        return;
    }
#pragma unroll
    for (int j = 0; j < CHUNK / 2; ++j) {
        const u32 low = 2 * j < chunk.count ? source[2 * j * stride].bits : 0u;
        const u32 high = 2 * j + 1 < chunk.count ? source[(2 * j + 1) * stride].bits : 0u;
        y.packed.words[j] = low | high << 16;
    }
}

__device__ __forceinline__ void store_rounded(const Rounded<bf16>& y, const RowChunk& chunk, bf16* target) {
    if (chunk.whole) {
        if (chunk.count == 0) return;
        uint4* chunks = reinterpret_cast<uint4*>(target);
        const u32(&words)[8] = y.packed.words;
        chunks[0] = make_uint4(words[0], words[1], words[2], words[3]);
        chunks[1] = make_uint4(words[4], words[5], words[6], words[7]);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i < chunk.count) target[i].bits = static_cast<u16>(y.packed.words[i / 2] >> i % 2 * 16);
    }
}

__device__ __forceinline__ void unpack_floats(const Rounded<bf16>& y, float (&v)[CHUNK]) { unpack_floats(y.packed, v); }

__device__ __forceinline__ u32 amax_of(const Rounded<bf16>& y, u32 limit) {
    return amax_of_packed(y.packed, magnitude_bound(y.packed), limit);
}

template <PackOrder ORDER>
__device__ __forceinline__ void keep_first(Rounded<bf16>& y, int count) {
#pragma unroll
    for (int j = 0; j < CHUNK / 2; ++j) {
        y.packed.words[j] &= (low_index<ORDER>(j) < count ? 0xFFFFu : 0u) | (high_index<ORDER>(j) < count ? 0xFFFF0000u : 0u);
    }
}
#endif

// Elements of another operand, in one of three types, of a row that begins at element `row`. T is the most frequent type.
template <class T>
__device__ __forceinline__ void load_as_floats(const void* source, ElementType type, i64 row, i64 stride, const RowChunk& chunk,
                                               float (&v)[CHUNK]) {
    const i64 start = row + offset_of(chunk, stride);
    stride = stride_of(chunk, stride);
    if (type == type_of<T>) {
        Rounded<T> own;
        load_rounded(static_cast<const T*>(source) + start, stride, chunk, own);
        unpack_floats(own, v);
    } else if (type == BFLOAT16) {
        load_block(static_cast<const bf16*>(source) + start, stride, chunk.count, v);
    } else if (type == FLOAT16) {
        load_block(static_cast<const fp16*>(source) + start, stride, chunk.count, v);
    } else {
        load_block(static_cast<const float*>(source) + start, stride, chunk.count, v);
    }
}

__device__ __forceinline__ float load_element(const void* source, ElementType type, i64 index) {
    if (type == BFLOAT16) return to_float(static_cast<const bf16*>(source)[index]);
    if (type == FLOAT16) return to_float(static_cast<const fp16*>(source)[index]);
    return static_cast<const float*>(source)[index];
}

}  // namespace narrowgauge
