// kv_write: quantizes rows of keys and of values, and stores them in the slots of a paged cache.
//
//   rows     (tokens, heads, columns) of float32, bfloat16 or float16, any strides; slots (tokens,) int64, negative: not stored
//   target   formats of cache.cuh in any of its layouts:
//   CACHE_FP8        E4M3 of x / s or of x * fl(1/s), nearest even, saturating; s is the decode scale of the tensor, or of each
//                    head. With an encode scale: of x * scale
//   CACHE_FP8_TOKEN  s = max(amax, smallest_amax) * fl(1/448) of a token and head, stored; E4M3 of x * fl(1/s)
//   CACHE_INT8_TOKEN s = max(amax, smallest_amax) / 127 of a token and head, stored; whole numbers of x / s or x * fl(1/s), nearest even
//   CACHE_NVFP4      block scales max(amax / s / 6, 2^-6) in E4M3, s given; E2M1 of x * fl(fl(1/scale) * fl(1/s)); of x / s * fl(1/scale)
//                    for s below 2^-60 or above 2^60
//   Launch: kv_write_TYPE with a thread for 16 elements of a row of keys and of values, 256 threads, ceil(tokens * heads * chunks / 256)
//           blocks
//   kv_store: the bytes of rows that are quantized already. A thread for 16 bytes of a row, grid (as above, 2): keys and values
#include "attention/cache.cuh"
#include "common/packed_bf16.cuh"
#include "gemm/ptx.cuh"

// On a GPU macros have the values of these parameters.
#ifndef USE
#define USE p.use
#endif
#ifndef FORMAT
#define FORMAT p.keys.target.format
#endif
#ifndef HEADS
#define HEADS static_cast<u32>(p.heads)
#endif
#ifndef CHUNKS
#define CHUNKS static_cast<u32>(p.chunks)
#endif
#ifndef PAGE_SIZE
#define PAGE_SIZE p.keys.target.page_size
#endif
// Whether both rows have `chunks` whole chunks, whose bytes are neighbours at multiples of 16 in rows and in the cache (NVFP4: 8).
#ifndef ALIGNED
#define ALIGNED 0
#endif

namespace narrowgauge {

enum ScaleUse : int { DIVIDE = 0, TIMES_RECIPROCAL = 1, TIMES = 2 };

struct KvRows {
    const void* rows;
    i64 token, head, column;  // strides of rows, elements
    const float* scale;       // (1,) or (heads,)
    CachePart target;
};

struct KvWriteParameters {
    KvRows keys, values;
    const i64* slots;
    int tokens, heads;
    int chunks;               // of the longer rows; of the formats with scales of tokens a power of two, at most 32
    float smallest_amax;      // of these formats
    bool scale_of_heads;
    ScaleUse use;
};

constexpr int CHUNK = 16;

// A thread's elements of a row, and where they go. `count`: 0 if they are not stored.
struct Chunk {
    int token, head, column, count;
    i64 slot;
};

// Elements of a chunk that begins at a column. At most 0: none.
__device__ __forceinline__ int count_of(int column, int columns) { return columns - column < CHUNK ? columns - column : CHUNK; }

__device__ __forceinline__ Chunk chunk_of(const KvWriteParameters& p, int columns) {
    const u32 place = blockIdx.x * blockDim.x + threadIdx.x, row = place / CHUNKS, heads = HEADS;
    const int column = static_cast<int>(place % CHUNKS) * CHUNK;
    Chunk chunk{static_cast<int>(row / heads), static_cast<int>(row % heads), column, 0, -1};
    if (chunk.token < p.tokens) chunk.slot = p.slots[chunk.token];
    if (chunk.slot >= 0) chunk.count = count_of(column, columns);
    return chunk;
}

template <int BYTES>
struct alignas(BYTES) Bytes {
    u32 words[BYTES / 4];
};

// Stores `count` of 16 bytes, the first in the low byte of the first word.
__device__ __forceinline__ void store_chunk(const KvWriteParameters& p, const CachePart& target, const Chunk& chunk,
                                            const u32 (&words)[CHUNK / 4]) {
    const Cell cell = cell_of(chunk.slot, PAGE_SIZE, chunk.head);
    const bool swizzled = target.swizzled && target.scales == nullptr;  // the bytes are scales
    if (ALIGNED) {
        u8* const place = target.codes + row_index(target, cell) + chunk.column;
        if (FORMAT == CACHE_NVFP4) {
            *reinterpret_cast<Bytes<8>*>(place) = {{words[0], words[1]}};
        } else {
            *reinterpret_cast<Bytes<16>*>(place) = {{words[0], words[1], words[2], words[3]}};
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i >= chunk.count) break;
        const int column = chunk.column + i;
        const i64 place = !swizzled ? code_index(target, cell, column)
                                           : cell.page * target.page + cell.head * target.head +
                                                 swizzled_place(target.dim, cell.offset, column);
        target.codes[place] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
    }
}

__device__ __forceinline__ void encode_e4m3(const float (&v)[CHUNK], float factor, u32 (&words)[CHUNK / 4]) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int w = 0; w < CHUNK / 4; ++w) {
        words[w] = pair_from_float<E4M3>(v[4 * w] * factor, v[4 * w + 1] * factor) |
                   static_cast<u32>(pair_from_float<E4M3>(v[4 * w + 2] * factor, v[4 * w + 3] * factor)) << 16;
    }
#else
    u8 codes[CHUNK];
    encode_row<E4M3>(v, factor, codes);  // vectorized
    __builtin_memcpy(words, codes, CHUNK);
#endif
}

// Codes of v / s. The quotient is rounded once to float32 if its code depends on this rounding.
//
// For T of 16 bits: 1 / s is `above` + `rest`, exact up to 2^-46 of it, and `above` is at most 1 / s, so that -0 stays -0. A quotient
// of 11 bits by 24 bits is at least 2^-45 of itself away from every number at which the rounding to float32 changes the code of E4M3,
// unless all bits of the mantissa of s are 1. Infinity may become NaN; these chunks, other s and float32 take the division.
template <class T>
__device__ __forceinline__ void encode_quotients(float (&v)[CHUNK], float s, u32 (&words)[CHUNK / 4]) {
    if (sizeof(T) == 2 && s >= 0x1p-20f && s <= 0x1p40f && (__float_as_uint(s) & 0x7FFFFFu) != 0x7FFFFFu) {
        const float nearest = 1.0f / s;
        const float above = __uint_as_float(__float_as_uint(nearest) - (__fmaf_rn(-s, nearest, 1.0f) < 0.0f ? 1u : 0u));
        const float rest = __fmaf_rn(-s, above, 1.0f) * above;
        float quotients[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) quotients[i] = __fmaf_rn(v[i], above, v[i] * rest);
        encode_e4m3(quotients, 1.0f, words);
        u32 nan = 0;  // bit 7 of a byte: a code of NaN
#pragma unroll
        for (int w = 0; w < CHUNK / 4; ++w) nan |= (words[w] & 0x7F7F7F7Fu) + 0x01010101u;
        if ((nan & 0x80808080u) == 0) return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] /= s;
    encode_e4m3(v, 1.0f, words);
}

// Codes of INT8: NaN and all elements of a scale of 0 are 0. 1.5 * 2^23 + y has the whole number nearest to y in its low bits.
__device__ __forceinline__ void encode_int8(const KvWriteParameters& p, const float (&v)[CHUNK], float scale, u32 (&words)[CHUNK / 4]) {
    const float reciprocal = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const float scaled = USE == DIVIDE ? v[i] / scale : v[i] * reciprocal;
        const float raised = scaled < -128.0f ? -128.0f : scaled, limited = raised > 127.0f ? 127.0f : raised;
        const u32 code = scaled != scaled || scale == 0.0f ? 0u : __float_as_uint(limited + 0x1.8p23f) & 0xFFu;
        words[i / 4] |= code << i % 4 * 8;
    }
}

// The scale of a token and head, from all lanes of the row, and the codes. In E4M3 NaN has the code of 448. NaN counts for no amax.
__device__ __forceinline__ void encode_token(const KvWriteParameters& p, const KvRows& rows, const Chunk& chunk,
                                             float (&v)[CHUNK], u32 (&words)[CHUNK / 4]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) update_amax(v[i], FLOAT_INF_BITS, amax);
    for (int apart = 1; apart < static_cast<int>(CHUNKS); apart *= 2) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, amax, apart);
        amax = other > amax ? other : amax;
    }
    const float largest = __uint_as_float(amax), raised = largest < p.smallest_amax ? p.smallest_amax : largest;
    const float scale = FORMAT == CACHE_INT8_TOKEN ? raised / 127.0f : raised * (1.0f / 448.0f);
    if (chunk.count > 0 && chunk.column == 0) {
        const Cell cell = cell_of(chunk.slot, PAGE_SIZE, chunk.head);
        static_cast<float*>(rows.target.scales)[scale_index(rows.target, cell, 0)] = scale;
    }
    if (FORMAT == CACHE_INT8_TOKEN) {
        encode_int8(p, v, scale, words);
        return;
    }
    const float factor = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        v[i] *= factor;  // infinity times 0 is NaN too
        if (v[i] != v[i]) v[i] = __uint_as_float(FLOAT_INF_BITS);
    }
    encode_e4m3(v, 1.0f, words);
}

// The scale of a block of NVFP4, and the codes in the first two words. NaN has the code 12, and its block the scale NaN.
__device__ __forceinline__ void encode_nvfp4(const KvRows& rows, const Chunk& chunk, const Cell& cell, float scale,
                                             float (&v)[CHUNK], u32 (&words)[CHUNK / 4]) {
    // One factor has both reciprocals. Its range keeps the products of finite numbers from NaN.
    const bool joined = scale >= 0x1p-60f && scale <= 0x1p60f;
    if (!joined) {
        for (int i = 0; i < CHUNK; ++i) v[i] /= scale;
    }
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) update_amax(v[i], amax_limit(true), amax);
    const float unrounded = __uint_as_float(amax) / (joined ? scale : 1.0f) / 6.0f;
    const u8 stored = e4m3_from_float(unrounded < 0x1p-6f ? 0x1p-6f : unrounded);
    static_cast<u8*>(rows.target.scales)[scale_index(rows.target, cell, chunk.column / CHUNK)] = stored;
    const float factor = 1.0f / e4m3_to_float(stored) * (joined ? 1.0f / scale : 1.0f);
#ifdef HAS_E2M1_BY_ADDITION
    words[0] = e2m1x8_of_products<ANY_PRODUCTS>(v, factor);
    words[1] = e2m1x8_of_products<ANY_PRODUCTS>(v + CHUNK / 2, factor);
#else
    for (int i = 0; i < CHUNK; ++i) v[i] *= factor;
    u8 codes[CHUNK / 2];
    e2m1x16_from_float(v, codes);
    for (int i = 0; i < CHUNK / 2; ++i) words[i / 4] |= static_cast<u32>(codes[i]) << i % 4 * 8;
#endif
    if (factor != factor) words[0] = words[1] = 0xCCCCCCCCu;
}

template <class T>
using Elements = Bytes<CHUNK * sizeof(T)>;

// All formats have one code for NaN of either sign, so conversions of float16 may lose the sign of NaN.
template <class T>
__device__ __forceinline__ void numbers_of(const Elements<T>& elements, float (&v)[CHUNK]) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) {
        if constexpr (sizeof(T) == 4) {
            v[i] = __uint_as_float(elements.words[i]);
            v[i + 1] = __uint_as_float(elements.words[i + 1]);
        } else if constexpr (ptx::is_bf16<T>) {
            v[i] = ptx::low_of<T>(elements.words[i / 2]);
            v[i + 1] = ptx::high_of<T>(elements.words[i / 2]);
        } else {
            ptx::cvt_f32_f16(elements.words[i / 2], v[i], v[i + 1]);
        }
    }
}

// Elements of a chunk, 0 behind the end of a row. Those of a token that is not stored too: its slot may not be loaded yet.
template <class T>
__device__ __forceinline__ Elements<T> load(const KvWriteParameters& p, const KvRows& rows, const Chunk& chunk) {
    const T* const first = static_cast<const T*>(rows.rows);
    const T* const source = first + chunk.token * rows.token + chunk.head * rows.head + chunk.column * rows.column;
    if (ALIGNED) return *reinterpret_cast<const Elements<T>*>(chunk.token < p.tokens ? source : first);
    const int count = chunk.token < p.tokens ? count_of(chunk.column, rows.target.dim) : 0;
    Elements<T> elements = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i >= count) break;
        if constexpr (sizeof(T) == 4) {
            elements.words[i] = __float_as_uint(source[i * rows.column]);
        } else {
            elements.words[i / 2] |= static_cast<u32>(source[i * rows.column].bits) << i % 2 * 16;
        }
    }
    return elements;
}

template <class T>
__device__ __forceinline__ void store(const KvWriteParameters& p, const KvRows& rows, const Chunk& chunk, const Elements<T>& elements) {
    float v[CHUNK];
    numbers_of<T>(elements, v);
    const float scale = rows.scale == nullptr ? 1.0f : rows.scale[p.scale_of_heads ? chunk.head : 0];
    u32 words[CHUNK / 4] = {};
    Chunk stored = chunk;
    if (FORMAT == CACHE_FP8_TOKEN || FORMAT == CACHE_INT8_TOKEN) {
        encode_token(p, rows, chunk, v, words);  // all lanes of a row take part in its amax
    } else if (chunk.count <= 0) {
        return;
    } else if (FORMAT == CACHE_NVFP4) {
        encode_nvfp4(rows, chunk, cell_of(chunk.slot, PAGE_SIZE, chunk.head), scale, v, words);
        stored.column /= 2;
        stored.count = (chunk.count + 1) / 2;
    } else if (USE == DIVIDE) {
        encode_quotients<T>(v, scale, words);
    } else {
        encode_e4m3(v, USE == TIMES_RECIPROCAL ? 1.0f / scale : scale, words);
    }
    if (stored.count > 0) store_chunk(p, rows.target, stored, words);
}

template <class T>
__device__ __forceinline__ void write(const KvWriteParameters& p) {
    const Chunk of_keys = chunk_of(p, p.keys.target.dim), of_values = chunk_of(p, p.values.target.dim);
    const Elements<T> k = load<T>(p, p.keys, of_keys), v = load<T>(p, p.values, of_values);
    store<T>(p, p.keys, of_keys, k);
    store<T>(p, p.values, of_values, v);
}

extern "C" __global__ void __launch_bounds__(256) kv_write_fp32(const __grid_constant__ KvWriteParameters p) { write<float>(p); }

extern "C" __global__ void __launch_bounds__(256) kv_write_bf16(const __grid_constant__ KvWriteParameters p) { write<bf16>(p); }

extern "C" __global__ void __launch_bounds__(256) kv_write_fp16(const __grid_constant__ KvWriteParameters p) { write<fp16>(p); }

// Rows of `rows` are bytes here, codes or scales. `target.dim` counts them.
extern "C" __global__ void __launch_bounds__(256) kv_store(const __grid_constant__ KvWriteParameters p) {
    const KvRows& rows = blockIdx.y == 0 ? p.keys : p.values;
    const Chunk chunk = chunk_of(p, rows.target.dim);
    if (chunk.count <= 0) return;
    const u8* source = static_cast<const u8*>(rows.rows) + chunk.token * rows.token + chunk.head * rows.head + chunk.column * rows.column;
    u32 words[CHUNK / 4] = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i < chunk.count) words[i / 4] |= static_cast<u32>(source[i * rows.column]) << i % 4 * 8;
    }
    store_chunk(p, rows.target, chunk, words);
}

}  // namespace narrowgauge
