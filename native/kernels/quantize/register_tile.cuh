// register_tile.cuh: register tiles of bfloat16. A thread block holds a tile of 128 columns in registers: a thread has a
// piece of eight neighbouring columns and ROWS neighbouring rows. Sixteen threads cover a row: they read 256
// contiguous bytes and write 128 contiguous codes.
#pragma once

#include "common/packed_bf16.cuh"

namespace narrowgauge {

constexpr int TILE_WIDTH = 128;
constexpr int PIECE = 8;                         // columns of a piece
constexpr int ACROSS_TILE = TILE_WIDTH / PIECE;  // pieces across a tile

template <int ROWS>
struct Piece {
    u32 words[ROWS][PIECE / 2];
};

// Vectorized loads and stores of N words, 2 or 4, at aligned addresses.
template <int N>
struct alignas(4 * N) Chunk {
    u32 words[N];
};

template <int N>
__device__ __forceinline__ void load_aligned(const u32* source, u32 (&words)[N]) {
#ifdef __CUDA_ARCH__
    const Chunk<N> chunk = *reinterpret_cast<const Chunk<N>*>(source);
#pragma unroll
    for (int j = 0; j < N; ++j) words[j] = chunk.words[j];
#else
    for (int j = 0; j < N; ++j) words[j] = source[j];
#endif
}

template <int N>
__device__ __forceinline__ void store_aligned(const u32 (&words)[N], u32* target) {
#ifdef __CUDA_ARCH__
    Chunk<N> chunk;
#pragma unroll
    for (int j = 0; j < N; ++j) chunk.words[j] = words[j];
    *reinterpret_cast<Chunk<N>*>(target) = chunk;
#else
    for (int j = 0; j < N; ++j) target[j] = words[j];
#endif
}

template <int ROWS>
__device__ __forceinline__ void load_piece(const bf16* source, i64 stride, Piece<ROWS>& piece) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
#ifdef __CUDA_ARCH__
        load_aligned(reinterpret_cast<const u32*>(source + k * stride), piece.words[k]);
#else
        for (int j = 0; j < PIECE / 2; ++j) {
            const bf16* pair = source + k * stride + 2 * j;
            piece.words[k][j] = pair[0].bits | static_cast<u32>(pair[1].bits) << 16;
        }
#endif
    }
}

// ---- amax ------------------------------------------------------------------------------------------------------------

// The larger magnitudes of two pairs without sign bits. NaN wins if it is propagated; else the result is NaN only if both
// inputs are.
template <bool PROPAGATE_NAN>
__device__ __forceinline__ u32 max_magnitudes(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && !defined(NARROWGAUGE_PORTABLE)
    return PROPAGATE_NAN ? ptx::max_NaN_bf16x2(a, b) : ptx::max_bf16x2(a, b);
#else
    // Halves that are not NaN are at most infinity.
    constexpr u32 INFINITE = FLOAT_INF_BITS >> 16, LIMIT = PROPAGATE_NAN ? 0x7FFFu : INFINITE;
    const u32 a_low = a & 0xFFFFu, a_high = a >> 16, b_low = b & 0xFFFFu, b_high = b >> 16;
    const u32 low = a_low > LIMIT ? b_low : b_low > LIMIT || a_low > b_low ? a_low : b_low;
    const u32 high = a_high > LIMIT ? b_high : b_high > LIMIT || a_high > b_high ? a_high : b_high;
    return low | high << 16;
#endif
}

// Amaxes of each thread's part of the lines of a tile of HEIGHT rows: of each row over eight columns, of each column over ROWS
// rows, as bfloat16, two lines in a word. `rows` is padded: sixteen threads of a row write without bank conflicts.
template <int ROWS, int HEIGHT>
struct Maxima {
    static constexpr int DOWN = HEIGHT / ROWS;
    alignas(16) u32 rows[ACROSS_TILE][(HEIGHT + ROWS) / 2];
    alignas(16) u32 columns[DOWN][TILE_WIDTH / 2];
};

template <bool PROPAGATE_NAN, int ROWS, int HEIGHT>
__device__ __forceinline__ void store_maxima(const Piece<ROWS>& piece, int down, int across, bool needs_rows,
                                             bool needs_columns, Maxima<ROWS, HEIGHT>& maxima) {
    constexpr u32 MAGNITUDES = 0x7FFF7FFFu;
    if (needs_rows) {
        u32 amaxes[ROWS / 2];
#pragma unroll
        for (int k = 0; k < ROWS; k += 2) {
            u32 row_amaxes[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                row_amaxes[i] = piece.words[k + i][0] & MAGNITUDES;
#pragma unroll
                for (int j = 1; j < PIECE / 2; ++j) {
                    row_amaxes[i] = max_magnitudes<PROPAGATE_NAN>(row_amaxes[i], piece.words[k + i][j] & MAGNITUDES);
                }
            }
            amaxes[k / 2] = max_magnitudes<PROPAGATE_NAN>(pack_halves(row_amaxes[0], row_amaxes[1], false),
                                                          pack_halves(row_amaxes[0], row_amaxes[1], true));
        }
        constexpr int N = ROWS / 2 < 4 ? ROWS / 2 : 4;
#pragma unroll
        for (int part = 0; part < ROWS / 2; part += N) {
            u32 chunk[N];
#pragma unroll
            for (int j = 0; j < N; ++j) chunk[j] = amaxes[part + j];
            store_aligned(chunk, &maxima.rows[across][down * (ROWS / 2) + part]);
        }
    }
    if (needs_columns) {
        u32 amaxes[PIECE / 2];
#pragma unroll
        for (int j = 0; j < PIECE / 2; ++j) {
            amaxes[j] = piece.words[0][j] & MAGNITUDES;
#pragma unroll
            for (int k = 1; k < ROWS; ++k) {
                amaxes[j] = max_magnitudes<PROPAGATE_NAN>(amaxes[j], piece.words[k][j] & MAGNITUDES);
            }
        }
        store_aligned(amaxes, &maxima.columns[down][across * (PIECE / 2)]);
    }
}

// Amax of line `line`, from the parts of COUNT threads, the first of which is `first`, as bits of float32. 0 if all elements
// are NaN and NaN is left out.
template <bool PROPAGATE_NAN, int COUNT, int THREADS, int WORDS>
__device__ __forceinline__ u32 amax_of_line(const u32 (&maxima)[THREADS][WORDS], int first, int line) {
    constexpr u32 LIMIT = PROPAGATE_NAN ? 0x7FFFu : FLOAT_INF_BITS >> 16;
    u32 largest = 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        const u32 part = maxima[first + n][line / 2] >> line % 2 * 16 & 0xFFFFu;
        const u32 counted = part <= LIMIT ? part : 0u;
        largest = counted > largest ? counted : largest;
    }
    return largest << 16;
}

// Amax of a piece, as bits of float32.
template <bool PROPAGATE_NAN, int ROWS>
__device__ __forceinline__ u32 amax_of_piece(const Piece<ROWS>& piece) {
    u32 amax = 0;
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
#pragma unroll
        for (int j = 0; j < PIECE / 2; ++j) {
            amax = max_magnitudes<PROPAGATE_NAN>(amax, piece.words[k][j] & 0x7FFF7FFFu);
        }
    }
    const u32 low = amax << 16, high = amax & 0xFFFF0000u;
    return low > high ? low : high;
}

// ---- codes -----------------------------------------------------------------------------------------------------------

// Codes of four numbers in a word, the first one in the low byte.
template <class F>
__device__ __forceinline__ u32 four_codes(float a, float b, float c, float d) {
    return pair_from_float<F>(a, b) | static_cast<u32>(pair_from_float<F>(c, d)) << 16;
}

// Stores words of codes, the first code in the low byte, at an aligned address.
template <int N>
__device__ __forceinline__ void store_code_words(const u32 (&words)[N], u8* target) {
#ifdef __CUDA_ARCH__
    store_aligned(words, reinterpret_cast<u32*>(target));
#else
    for (int j = 0; j < 4 * N; ++j) target[j] = static_cast<u8>(words[j / 4] >> j % 4 * 8);
#endif
}

}  // namespace narrowgauge
