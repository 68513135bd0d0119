// pack.cuh: operands as tiles of bfloat16 for tensor cores: elements times the scales of their blocks.
//
// Of every operand both factors fit: E2M1 times E4M3 has at most 6 significant bits, any element times a power of two has
// those of the element; tensor scales are left to the epilogue. A product of MX can leave the numbers that may be packed;
// then it says so, and the portable kernel has to make the product in place of tensor cores.
#pragma once

#include "gemm.cuh"
#include "hopper.cuh"

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
        : all(every), number(0), section(every.sizes == nullptr ? Section{0, every.rows} : section_after(every, 0, 0)), before(0) {}

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

template <class F>
__device__ __forceinline__ float value_of(u32 code) {
    if constexpr (F::BITS == 4) {
        return e2m1_to_float(code);
    } else {
        return narrow_to_float<F>(code);
    }
}

// The codes of a chunk, 0 behind the last column.
template <class F>
__device__ __forceinline__ void load_chunk(const Operand& from, i64 row, i64 start, i64 k, u8 (&codes)[CHUNK]) {
    const int count = k - start < CHUNK ? static_cast<int>(k - start) : CHUNK;
    if constexpr (F::BITS == 4) {
        const u8* source = from.codes + row * ((k + 1) / 2) + start / 2;
        u8 pairs[CHUNK / 2];
        load_bytes4(source, (count + 1) / 2, pairs);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) codes[j] = pairs[j / 2] >> j % 2 * 4 & 0xF;
    } else if ((from.layout & CODES_TRANSPOSED) != 0) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) codes[j] = j < count ? from.codes[(start + j) * from.rows + row] : 0;
    } else if (count == CHUNK) {
        load_bytes(from.codes + row * k + start, codes);
    } else {
        for (int j = 0; j < CHUNK; ++j) codes[j] = j < count ? from.codes[row * k + start + j] : 0;
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

// The part of a tile that a thread packs: rows `first` on of `from`, those behind its last one as zeros, columns `start`
// on. A warp has the eight chunks of four rows, which lie together where K is contiguous, or a chunk of 32 rows.
template <class F, int KIND>
__device__ __forceinline__ void pack_tile(const Operand& from, i64 first, i64 start, i64 k, u8* tile, u32* refused) {
    const int thread = threadIdx.x;
    const bool across = (from.layout & CODES_TRANSPOSED) != 0;
    const int chunk = across ? thread / 32 : thread % 8, top = across ? thread % 32 : thread / 8;
    const i64 column = start + chunk * CHUNK;
    u8 codes[PASSES][CHUNK] = {};
    float scales[PASSES] = {};
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const i64 row = first + top + 32 * pass;
        if (row >= from.rows || column >= k) continue;
        load_chunk<F>(from, row, column, k, codes[pass]);
        scales[pass] = load_scale<KIND>(from, row, column, k);
    }
    bool outside = false;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        u32 words[CHUNK / 2];
#pragma unroll
        for (int j = 0; j < CHUNK / 2; ++j) {
            u32 bits[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bits[half] = __float_as_uint(value_of<F>(codes[pass][2 * j + half]) * scales[pass]);
                if constexpr (KIND == SCALES_E8M0) {
                    const u32 magnitude = bits[half] & 0x7FFFFFFFu;
                    outside |= magnitude - SMALLEST_PACKED >= END_OF_PACKED - SMALLEST_PACKED && magnitude != 0u;
                }
            }
            words[j] = bits[0] >> 16 | (bits[1] & 0xFFFF0000u);
        }
        u32* target = reinterpret_cast<u32*>(tile + chunk_at(top + 32 * pass, chunk));
#ifdef __CUDA_ARCH__
        *reinterpret_cast<uint4*>(target) = {words[0], words[1], words[2], words[3]};
#else
        for (int j = 0; j < CHUNK / 2; ++j) target[j] = words[j];
#endif
    }
    if (outside) *refused = 1;
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
