// dequantize_tiles.cuh: operands dequantized to bfloat16 tiles for wgmma: elements times their block scales.
//
// The product of an element and its scale is a bfloat16 number for every operand: E2M1 times E4M3 has at most 6 significant
// bits, and any element times a power of two has the bits of the element. Tensor scales are left to the epilogue. Only an
// MX operand can exceed the range of the sums. Then the kernel sets the `refused` flag, and the portable kernel computes the
// GEMM.
#pragma once

#include "gemm/parameters.cuh"
#include "gemm/sm90/tile.cuh"

namespace narrowgauge {

// Block scales of an operand: E4M3 for 16 elements of K, E8M0 for 32, or none.
enum class BlockScales : int { E4M3 = 0, E8M0 = 1, NONE = 2 };

struct DequantizeParameters {
    OperandParameters operand;  // of matrices: addresses of codes and of scales for each
    const i64* layouts;         // (matrices,), or null for a single operand
    i64 rows, k;
    BlockScales block_scales;
    const i64* sizes;   // (sections,) rows, or null
    const i64* starts;  // (sections,) first rows, or null: sections lie one behind another
    int sections;
    u8* tiles;
    u32* refused;
};

struct PlainParameters {
    const u8* matrix;  // (rows, K) bfloat16
    i64 rows, k;
    u8* tiles;
};

// Range of nonzero magnitudes that tiles may hold, as float32 bits: 2^-62 to below 2^48. A product of two numbers is at least
// 2^-124, so that a term truncated 25 bits below it is a multiple of 2^-149; and the sum of 2^31 products is below 2^127.
constexpr u32 SMALLEST_IN_TILE = (127u - 62u) << 23, LARGEST_IN_TILE_END = (127u + 48u) << 23;

constexpr int CHUNK = 8, DEQUANTIZE_THREADS = 256;  // columns that a thread dequantizes at a time
// Limits a thread to 32 registers. 8 matrices of 8192^2 of NVFP4 take 385 us on an H200, 468 with 6 and 543 without; of MXFP8
// 450, 508 and 588.
constexpr int DEQUANTIZE_BLOCKS_PER_SM = 8;
constexpr int PASSES = TILE_ROWS * TILE_COLUMNS / CHUNK / DEQUANTIZE_THREADS;

struct ChunkCodes {
    u32 words[2];  // a byte for each element, or four bits in the first word
};

// Up to four bytes in a word, the first byte lowest, padded with zeros.
__device__ __forceinline__ u32 load_word(const u8* source, int count) {
#ifdef __CUDA_ARCH__
    if (count >= 4 && reinterpret_cast<u64>(source) % 4 == 0) return *reinterpret_cast<const u32*>(source);
#endif
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= j < count ? static_cast<u32>(source[j]) << 8 * j : 0u;
    return word;
}

// Codes of a chunk, 0 beyond the last column.
template <class F>
__device__ __forceinline__ ChunkCodes load_chunk(const Operand& from, i64 row, i64 start, i64 k) {
    const int count = k - start < CHUNK ? static_cast<int>(k - start) : CHUNK;
    if constexpr (F::BITS == 4) {
        return {{load_word(from.codes + row * ((k + 1) / 2) + start / 2, (count + 1) / 2), 0}};
    } else if ((from.layout & CODES_TRANSPOSED) != 0) {
        ChunkCodes codes = {};
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            codes.words[j / 4] |= j < count ? static_cast<u32>(from.codes[(start + j) * from.rows + row]) << j % 4 * 8 : 0u;
        }
        return codes;
    } else {
        const u8* source = from.codes + row * k + start;
        return {{load_word(source, count), load_word(source + 4, count - 4)}};
    }
}

template <BlockScales SCALES>
__device__ __forceinline__ float load_scale(const Operand& from, i64 row, i64 start, i64 k) {
    if constexpr (SCALES == BlockScales::NONE) {
        return 1.0f;
    } else {
        constexpr int WIDTH = SCALES == BlockScales::E4M3 ? 16 : 32;
        const i64 blocks = (k + WIDTH - 1) / WIDTH, block = start / WIDTH;
        const bool transposed = (from.layout & SCALES_TRANSPOSED) != 0;
        const u8 code = static_cast<const u8*>(from.scales)[transposed ? block * from.rows + row : row * blocks + block];
        return SCALES == BlockScales::E4M3 ? e4m3_to_float(code) : e8m0_to_float(code);
    }
}

template <class F>
__device__ __forceinline__ float element_of(const ChunkCodes& codes, int j) {
    if constexpr (F::BITS == 4) {
        return e2m1_to_float(codes.words[0] >> 4 * j & 0xFu);
    } else {
        return narrow_to_float<F>(codes.words[j / 4] >> j % 4 * 8 & 0xFFu);
    }
}

// Decodes a chunk to bfloat16 pairs.
template <class F>
__device__ __forceinline__ void decode_chunk(const ChunkCodes& codes, u32 (&pairs)[CHUNK / 2]) {
#ifdef HAS_WGMMA
    if constexpr (F::BITS == 4) {
        // Byte permutations look up four codes at once in a table of eight magnitudes: their low bytes, their high bytes.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 selectors = codes.words[0] >> 16 * half & 0x7777u;
            const u32 low = __byte_perm(0xC0800000u, 0xC0804000u, selectors);
            const u32 signs = __byte_perm(codes.words[0] << 4, codes.words[0], half == 0 ? 0xD9C8u : 0xFBEAu);
            const u32 high = __byte_perm(0x3F3F3F00u, 0x40404040u, selectors) | (signs & 0x80808080u);
            pairs[2 * half] = __byte_perm(low, high, 0x5140);
            pairs[2 * half + 1] = __byte_perm(low, high, 0x7362);
        }
        return;
    } else if constexpr (F::BITS == 8) {
#pragma unroll
        for (int j = 0; j < CHUNK / 2; ++j) {
            const u32 word = codes.words[j / 2] >> j % 2 * 16;
            u32 halves;  // float16, which has all numbers of FP8
            if constexpr (F::MANTISSA == 3) {
                halves = ptx::cvt_rn_f16x2_e4m3x2(word);
            } else {
                halves = __byte_perm(word, 0u, 0x1404);
            }
            float low, high;
            ptx::cvt_f32_f16(halves, low, high);
            pairs[j] = ptx::bf16_pair(low, high);
        }
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < CHUNK / 2; ++j) pairs[j] = ptx::bf16_pair(element_of<F>(codes, 2 * j), element_of<F>(codes, 2 * j + 1));
}

// A bfloat16 pair times a scale. The result of a refused chunk is not used.
__device__ __forceinline__ u32 scale_pair(u32 pair, float scale) {
#ifdef HAS_WGMMA
    return ptx::mul_rn_bf16x2(pair, __byte_perm(__float_as_uint(scale), 0u, 0x3232));
#else
    return ptx::bf16_pair(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xFFFF0000u) * scale);
#endif
}

// Whether a chunk has a nonzero number outside the range of tiles. Under most scales only infinity and NaN can be outside.
// Then the chunk is accepted, and infinity and NaN propagate as in every kernel.
template <class F>
__device__ __forceinline__ bool out_of_range(const ChunkCodes& codes, float scale) {
    const float smallest = __uint_as_float(F::STEP_BITS) * scale, largest = __uint_as_float(F::MAX_BITS) * scale;
    if (smallest >= __uint_as_float(SMALLEST_IN_TILE) && largest < __uint_as_float(LARGEST_IN_TILE_END)) return false;
    bool outside = false;
    for (int j = 0; j < CHUNK; ++j) {
        const u32 magnitude = __float_as_uint(element_of<F>(codes, j) * scale) & 0x7FFFFFFFu;
        outside |= magnitude - SMALLEST_IN_TILE >= LARGEST_IN_TILE_END - SMALLEST_IN_TILE && magnitude != 0u;
    }
    return outside;
}

// A bfloat16 pair of numbers that are float16 numbers, too.
__device__ __forceinline__ u32 as_float16(u32 pair) {
    return ptx::half_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

// Stores a chunk of a row of a tile. Interleaved: the 16 columns of two chunks are in the order 0, 2, 4, ..., 14, 1, 3, ..., 15.
template <bool INTERLEAVED>
__device__ __forceinline__ void store_chunk(const u32 (&pairs)[CHUNK / 2], u8* tile, int row, int chunk) {
    if constexpr (INTERLEAVED) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            u32* target = reinterpret_cast<u32*>(tile + swizzled_offset(row, (chunk & ~1) + odd)) + chunk % 2 * 2;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 first = pairs[2 * j], second = pairs[2 * j + 1];
                target[j] = odd == 0 ? (first & 0xFFFFu) | second << 16 : first >> 16 | (second & 0xFFFF0000u);
            }
        }
    } else {
        u32* target = reinterpret_cast<u32*>(tile + swizzled_offset(row, chunk));
#ifdef __CUDA_ARCH__
        *reinterpret_cast<uint4*>(target) = {pairs[0], pairs[1], pairs[2], pairs[3]};
#else
        for (int j = 0; j < CHUNK / 2; ++j) target[j] = pairs[j];
#endif
    }
}

// Sets the first row of tile row `tile` of an operand, moves `at` to its section and ends `from` with the section. False if no
// section has this row of tiles.
__device__ __forceinline__ bool find_rows(const DequantizeParameters& p, i64 tile, TiledSection& at, Operand& from, i64& first) {
    first = tile * TILE_ROWS;
    if (p.sizes == nullptr) return true;
    while (tile - at.before >= at.tiles()) {
        if (!at.next()) return false;
    }
    from.rows = at.section.start + at.section.count;
    first = at.section.start + (tile - at.before) * TILE_ROWS;
    return true;
}

// Dequantizes a chunk of a row of a tile. Interleaved tiles of E2M1 are float16.
template <class F, BlockScales SCALES, bool INTERLEAVED>
__device__ __forceinline__ void dequantize_chunk(const ChunkCodes& codes, float scale, u8* tile, int row, int chunk, u32* refused) {
    u32 pairs[CHUNK / 2];
    decode_chunk<F>(codes, pairs);
    if constexpr (SCALES != BlockScales::NONE) {
#pragma unroll
        for (int j = 0; j < CHUNK / 2; ++j) pairs[j] = scale_pair(pairs[j], scale);
    }
    if constexpr (SCALES == BlockScales::E8M0) {
        if (out_of_range<F>(codes, scale)) *refused = 1;
    }
    if constexpr (INTERLEAVED && F::BITS == 4) {
#pragma unroll
        for (int j = 0; j < CHUNK / 2; ++j) pairs[j] = as_float16(pairs[j]);
    }
    store_chunk<INTERLEAVED>(pairs, tile, row, chunk);
}

// A thread's part of a tile: rows from `first` on, zeros beyond the last row, columns from `start` on. A warp dequantizes the
// eight chunks of four rows, which are contiguous if K is; or a chunk of 32 rows of transposed codes.
// Unless `whole`, groups of 32 rows beyond the last row are not written.
template <class F, BlockScales SCALES, bool INTERLEAVED = false>
__device__ __forceinline__ void dequantize_tile(const Operand& from, i64 first, i64 start, i64 k, u8* tile, u32* refused,
                                                bool whole = true) {
    const int thread = threadIdx.x;
    const bool transposed = (from.layout & CODES_TRANSPOSED) != 0;
    const int chunk = transposed ? thread / 32 : thread % 8, top = transposed ? thread % 32 : thread / 8;
    const i64 column = start + chunk * CHUNK;
    ChunkCodes codes[PASSES] = {};
    float scales[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const i64 row = first + top + 32 * pass;
        scales[pass] = 1.0f;
        if (row >= from.rows || column >= k) continue;
        codes[pass] = load_chunk<F>(from, row, column, k);
        scales[pass] = load_scale<SCALES>(from, row, column, k);
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        if (!whole && first + 32 * pass >= from.rows) return;
        dequantize_chunk<F, SCALES, INTERLEAVED>(codes[pass], scales[pass], tile, top + 32 * pass, chunk, refused);
    }
}

// 16 bytes of codes of a row, and the codes of their block scales.
template <class F, BlockScales SCALES>
struct alignas(16) CodesOfRow {
    static constexpr int PER_BYTE = F::BITS == 4 ? 2 : 1, COLUMNS = 16 * PER_BYTE, CHUNKS = COLUMNS / CHUNK;
    u32 words[4];
    u32 scales;

    // Codes and scales are contiguous along K, and aligned to their bytes.
    __device__ __forceinline__ void load(const Operand& from, i64 row, i64 column, i64 k) {
        const u8* source = from.codes + (row * k + column) / PER_BYTE;
#ifdef __CUDA_ARCH__
        const uint4 loaded = *reinterpret_cast<const uint4*>(source);
        words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
#else
        for (int n = 0; n < 4; ++n) words[n] = load_word(source + 4 * n, 4);
#endif
        const u8* all = static_cast<const u8*>(from.scales);
        scales = 0;
        if constexpr (SCALES == BlockScales::E4M3) scales = *reinterpret_cast<const u16*>(all + (row * k + column) / 16);
        if constexpr (SCALES == BlockScales::E8M0) scales = all[(row * k + column) / 32];
    }

    __device__ __forceinline__ ChunkCodes chunk(int n) const {
        if constexpr (F::BITS == 4) return {{words[n], 0}};
        else return {{words[2 * n], words[2 * n + 1]}};
    }

    __device__ __forceinline__ float scale(int n) const {
        if constexpr (SCALES == BlockScales::E4M3) return e4m3_to_float(scales >> n * CHUNK / 16 * 8 & 0xFFu);
        else if constexpr (SCALES == BlockScales::E8M0) return e8m0_to_float(scales);
        else return 1.0f;
    }
};

// A whole tile by a warp. A thread loads codes of LOADS rows before it decodes them, since the few warps that do this need many
// bytes in flight: gemm_tensor_dequantizing of FP8 takes 1.62 ms on an H200, 1.77 ms with two loads.
template <class F, BlockScales SCALES>
__device__ __forceinline__ void dequantize_tile_by_warp(const Operand& from, i64 first, i64 start, i64 k, u8* tile, u32* refused) {
    using Codes = CodesOfRow<F, SCALES>;
    constexpr int LOADS = 4, THREADS_OF_ROW = TILE_COLUMNS / Codes::COLUMNS, ROWS = WARP / THREADS_OF_ROW;
    const int lane = threadIdx.x % WARP, chunk = lane % THREADS_OF_ROW * Codes::CHUNKS;
#pragma unroll 1
    for (int top = lane / THREADS_OF_ROW; top < TILE_ROWS; top += LOADS * ROWS) {
        Codes codes[LOADS];
#pragma unroll
        for (int load = 0; load < LOADS; ++load) codes[load].load(from, first + top + load * ROWS, start + chunk * CHUNK, k);
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
#pragma unroll
            for (int n = 0; n < Codes::CHUNKS; ++n) {
                dequantize_chunk<F, SCALES, false>(codes[load].chunk(n), codes[load].scale(n), tile, top + load * ROWS, chunk + n,
                                                   refused);
            }
        }
    }
}

template <class F, BlockScales SCALES, bool BY_WARP>
__device__ __forceinline__ void dequantize_tile_of(const Operand& from, i64 first, i64 start, i64 k, u8* tile, u32* refused) {
    if constexpr (BY_WARP) {
        dequantize_tile_by_warp<F, SCALES>(from, first, start, k, tile, refused);
    } else {
        dequantize_tile<F, SCALES>(from, first, start, k, tile, refused);
    }
}

// Calls dequantize_tile, or dequantize_tile_by_warp, for the element format of the operand.
template <bool BY_WARP = false>
__device__ __forceinline__ void dequantize_tile(BlockScales scales, const Operand& from, i64 first, i64 start, i64 k, u8* tile,
                                                u32* refused) {
    constexpr BlockScales NONE = BlockScales::NONE, E8M0 = BlockScales::E8M0;
    if (scales == BlockScales::E4M3) return dequantize_tile_of<E2M1, BlockScales::E4M3, BY_WARP>(from, first, start, k, tile, refused);
    if (scales == NONE) {
        if (from.element == Element::E4M3) return dequantize_tile_of<E4M3, NONE, BY_WARP>(from, first, start, k, tile, refused);
        return dequantize_tile_of<E5M2, NONE, BY_WARP>(from, first, start, k, tile, refused);
    }
    switch (from.element) {
        case Element::E2M1: return dequantize_tile_of<E2M1, E8M0, BY_WARP>(from, first, start, k, tile, refused);
        case Element::E2M3: return dequantize_tile_of<E2M3, E8M0, BY_WARP>(from, first, start, k, tile, refused);
        case Element::E3M2: return dequantize_tile_of<E3M2, E8M0, BY_WARP>(from, first, start, k, tile, refused);
        case Element::E4M3: return dequantize_tile_of<E4M3, E8M0, BY_WARP>(from, first, start, k, tile, refused);
        default: return dequantize_tile_of<E5M2, E8M0, BY_WARP>(from, first, start, k, tile, refused);
    }
}

}  // namespace narrowgauge
