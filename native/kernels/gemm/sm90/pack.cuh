// pack.cuh: operands as tiles of bfloat16 for tensor cores: elements times the scales of their blocks.
//
// Of every operand both factors fit: E2M1 times E4M3 has at most 6 significant bits, any element times a power of two has
// those of the element; tensor scales are left to the epilogue. A product of MX can leave the numbers that may be packed;
// then it says so, and the portable kernel has to make the product in place of tensor cores.
#pragma once

#include "gemm/portable/gemm.cuh"
#include "gemm/sm90/hopper.cuh"

enum ScaleKind { SCALES_E4M3 = 0, SCALES_E8M0 = 1, NO_SCALES = 2 };  // of 16, of 32 elements of K; one of the tensor

// Numbers that may be packed, as bits of float32: 0 and 2^-62 to below 2^48. A product of two is 2^-124 or more, so that
// what is aligned to it and cut off behind 25 bits is a multiple of 2^-149; and 2^31 products are below 2^127.
constexpr u32 SMALLEST_PACKED = (127u - 62u) << 23, END_OF_PACKED = (127u + 48u) << 23;

// Sections as rows of tiles, of which each begins one: the one that it is at, from the first on.
struct TiledSection {
    Sections all;
    int number;
    Section section;
    i64 before;  // rows of tiles of those before it

    __device__ __forceinline__ TiledSection(const Sections& every)
        : all(every), number(0), section{0, every.rows}, before(0) {
        if (all.sizes != nullptr) section = section_after(all, 0, 0);
    }

    __device__ __forceinline__ i64 tiles() const { return (section.count + TILE_ROWS - 1) / TILE_ROWS; }

    // False where this is the last one.
    __device__ __forceinline__ bool next() {
        before += tiles();
        if (++number >= all.count) return false;
        section = section_after(all, number, section.start + section.count);
        return true;
    }
};

constexpr int CHUNK = 8, PACKING_THREADS = 256;  // columns that a thread packs at a time
constexpr int PASSES = TILE_ROWS * TILE_COLUMNS / CHUNK / PACKING_THREADS;

struct Codes {
    u32 words[2];  // of a chunk: a byte each, or four bits in the first word
};

// Up to four bytes as a word, the first one low, and zeros.
__device__ __forceinline__ u32 load_word(const u8* source, int count) {
#ifdef __CUDA_ARCH__
    if (count >= 4 && reinterpret_cast<u64>(source) % 4 == 0) return *reinterpret_cast<const u32*>(source);
#endif
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= j < count ? static_cast<u32>(source[j]) << 8 * j : 0u;
    return word;
}

// The codes of a chunk, 0 behind the last column.
template <class F>
__device__ __forceinline__ Codes load_chunk(const Operand& from, i64 row, i64 start, i64 k) {
    const int count = k - start < CHUNK ? static_cast<int>(k - start) : CHUNK;
    if constexpr (F::BITS == 4) {
        return {{load_word(from.codes + row * ((k + 1) / 2) + start / 2, (count + 1) / 2), 0}};
    } else if ((from.layout & CODES_TRANSPOSED) != 0) {
        Codes codes = {};
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

template <int KIND>
__device__ __forceinline__ float load_scale(const Operand& from, i64 row, i64 start, i64 k) {
    if constexpr (KIND == NO_SCALES) {
        return 1.0f;
    } else {
        constexpr int WIDTH = KIND == SCALES_E4M3 ? 16 : 32;
        const i64 blocks = (k + WIDTH - 1) / WIDTH, block = start / WIDTH;
        const bool transposed = (from.layout & SCALES_TRANSPOSED) != 0;
        const u8 code = static_cast<const u8*>(from.scales)[transposed ? block * from.rows + row : row * blocks + block];
        return KIND == SCALES_E4M3 ? e4m3_to_float(code) : e8m0_to_float(code);
    }
}

// The high halves of two float32 numbers that are bfloat16 ones, the first one low.
__device__ __forceinline__ u32 pair_of(float low, float high) {
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
}

template <class F>
__device__ __forceinline__ float value_at(const Codes& codes, int j) {
    if constexpr (F::BITS == 4) {
        return e2m1_to_float(codes.words[0] >> 4 * j & 0xFu);
    } else {
        return narrow_to_float<F>(codes.words[j / 4] >> j % 4 * 8 & 0xFFu);
    }
}

// What the codes of a chunk stand for, two numbers a word.
template <class F>
__device__ __forceinline__ void decode_chunk(const Codes& codes, u32 (&pairs)[CHUNK / 2]) {
#ifdef HAS_WGMMA
    if constexpr (F::BITS == 4) {
        // A table of eight magnitudes, their low bytes and their high ones, which a permutation looks four up in.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 which = codes.words[0] >> 16 * half & 0x7777u;
            const u32 low = __byte_perm(0xC0800000u, 0xC0804000u, which);
            const u32 signs = __byte_perm(codes.words[0] << 4, codes.words[0], half == 0 ? 0xD9C8u : 0xFBEAu);
            const u32 high = __byte_perm(0x3F3F3F00u, 0x40404040u, which) | (signs & 0x80808080u);
            pairs[2 * half] = __byte_perm(low, high, 0x5140);
            pairs[2 * half + 1] = __byte_perm(low, high, 0x7362);
        }
        return;
    } else if constexpr (F::BITS == 8) {
#pragma unroll
        for (int j = 0; j < CHUNK / 2; ++j) {
            const u32 word = codes.words[j / 2] >> j % 2 * 16;
            u32 halves;  // two of float16, which have all numbers of FP8
            if constexpr (F::MANTISSA == 3) {
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(word)));
            } else {
                halves = __byte_perm(word, 0u, 0x1404);
            }
            float low, high;
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(low), "=f"(high)
                : "r"(halves));
            pairs[j] = pair_of(low, high);
        }
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < CHUNK / 2; ++j) pairs[j] = pair_of(value_at<F>(codes, 2 * j), value_at<F>(codes, 2 * j + 1));
}

// Two bfloat16 numbers times one; products that are none are not looked at.
__device__ __forceinline__ u32 times(u32 pair, float scale) {
#ifdef HAS_WGMMA
    u32 product;
    const u32 both = __byte_perm(__float_as_uint(scale), 0u, 0x3232);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(both));
    return product;
#else
    return pair_of(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xFFFF0000u) * scale);
#endif
}

// Whether a chunk has a number that may not be packed. Under most scales no code is one but infinity and NaN, which are
// packed then, and spread as they do everywhere.
template <class F>
__device__ __forceinline__ bool outside(const Codes& codes, float scale) {
    const float smallest = __uint_as_float(F::STEP_BITS) * scale, largest = __uint_as_float(F::MAX_BITS) * scale;
    if (smallest >= __uint_as_float(SMALLEST_PACKED) && largest < __uint_as_float(END_OF_PACKED)) return false;
    bool found = false;
    for (int j = 0; j < CHUNK; ++j) {
        const u32 magnitude = __float_as_uint(value_at<F>(codes, j) * scale) & 0x7FFFFFFFu;
        found |= magnitude - SMALLEST_PACKED >= END_OF_PACKED - SMALLEST_PACKED && magnitude != 0u;
    }
    return found;
}

// The part of a tile that a thread packs: rows `first` on of `from`, those behind its last one as zeros, columns `start`
// on. A warp has the eight chunks of four rows, which lie together where K is contiguous, or a chunk of 32 rows.
template <class F, int KIND>
__device__ __forceinline__ void pack_tile(const Operand& from, i64 first, i64 start, i64 k, u8* tile, u32* refused) {
    const int thread = threadIdx.x;
    const bool across = (from.layout & CODES_TRANSPOSED) != 0;
    const int chunk = across ? thread / 32 : thread % 8, top = across ? thread % 32 : thread / 8;
    const i64 column = start + chunk * CHUNK;
    Codes codes[PASSES] = {};
    float scales[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const i64 row = first + top + 32 * pass;
        scales[pass] = 1.0f;
        if (row >= from.rows || column >= k) continue;
        codes[pass] = load_chunk<F>(from, row, column, k);
        scales[pass] = load_scale<KIND>(from, row, column, k);
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        u32 pairs[CHUNK / 2];
        decode_chunk<F>(codes[pass], pairs);
        if constexpr (KIND != NO_SCALES) {
#pragma unroll
            for (int j = 0; j < CHUNK / 2; ++j) pairs[j] = times(pairs[j], scales[pass]);
        }
        if constexpr (KIND == SCALES_E8M0) {
            if (outside<F>(codes[pass], scales[pass])) *refused = 1;
        }
        u32* target = reinterpret_cast<u32*>(tile + chunk_at(top + 32 * pass, chunk));
#ifdef __CUDA_ARCH__
        *reinterpret_cast<uint4*>(target) = {pairs[0], pairs[1], pairs[2], pairs[3]};
#else
        for (int j = 0; j < CHUNK / 2; ++j) target[j] = pairs[j];
#endif
    }
}

__device__ __forceinline__ void pack_as(int kind, const Operand& from, i64 first, i64 start, i64 k, u8* tile, u32* refused) {
    const Element element = static_cast<Element>(from.element);
    if (kind == SCALES_E4M3) return pack_tile<E2M1, SCALES_E4M3>(from, first, start, k, tile, refused);
    if (kind == NO_SCALES) {
        if (element == Element::E4M3) return pack_tile<E4M3, NO_SCALES>(from, first, start, k, tile, refused);
        return pack_tile<E5M2, NO_SCALES>(from, first, start, k, tile, refused);
    }
    switch (element) {
        case Element::E2M1: return pack_tile<E2M1, SCALES_E8M0>(from, first, start, k, tile, refused);
        case Element::E2M3: return pack_tile<E2M3, SCALES_E8M0>(from, first, start, k, tile, refused);
        case Element::E3M2: return pack_tile<E3M2, SCALES_E8M0>(from, first, start, k, tile, refused);
        case Element::E4M3: return pack_tile<E4M3, SCALES_E8M0>(from, first, start, k, tile, refused);
        default: return pack_tile<E5M2, SCALES_E8M0>(from, first, start, k, tile, refused);
    }
}
