// register_tile.cuh: whole tiles of bfloat16, of 128 columns, in the registers of a block of threads: a thread holds a
// piece of eight neighbouring columns of ROWS neighbouring rows. Sixteen threads lie side by side, so that a GPU reads
// 256 bytes of a row at once, and writes 128 of its codes.
#pragma once

#include "common/words.cuh"

constexpr int TILE_WIDTH = 128;
constexpr int PIECE = 8;  // columns
constexpr int ACROSS_TILE = TILE_WIDTH / PIECE;

template <int ROWS>
struct Piece {
    u32 words[ROWS][PIECE / 2];
};

// N words, 2 or 4, from and to where they lie aligned.
template <int N>
struct alignas(4 * N) Chunk {
    u32 each[N];
};

template <int N>
__device__ __forceinline__ void load_aligned(const u32* source, u32 (&words)[N]) {
#ifdef __CUDA_ARCH__
    const Chunk<N> chunk = *reinterpret_cast<const Chunk<N>*>(source);
#pragma unroll
    for (int j = 0; j < N; ++j) words[j] = chunk.each[j];
#else
    for (int j = 0; j < N; ++j) words[j] = source[j];
#endif
}

template <int N>
__device__ __forceinline__ void store_aligned(const u32 (&words)[N], u32* target) {
#ifdef __CUDA_ARCH__
    Chunk<N> chunk;
#pragma unroll
    for (int j = 0; j < N; ++j) chunk.each[j] = words[j];
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

// ---- largest magnitudes ----------------------------------------------------------------------------------------------

// The larger ones of two pairs of magnitudes; NaN wins where it is propagated, else it stays only where both are.
template <bool PROPAGATE_NAN>
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && !defined(NARROWGAUGE_PORTABLE)
    u32 most;
    if constexpr (PROPAGATE_NAN) {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    } else {
        asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    }
    return most;
#else
    // Without its NaN, a pair has halves from 0 to infinity.
    constexpr u32 INFINITE = FLOAT_INF_BITS >> 16, HIGHEST = PROPAGATE_NAN ? 0x7FFFu : INFINITE;
    const u32 a_low = a & 0xFFFFu, a_high = a >> 16, b_low = b & 0xFFFFu, b_high = b >> 16;
    const u32 low = a_low > HIGHEST ? b_low : b_low > HIGHEST || a_low > b_low ? a_low : b_low;
    const u32 high = a_high > HIGHEST ? b_high : b_high > HIGHEST || a_high > b_high ? a_high : b_high;
    return low | high << 16;
#endif
}

// What threads see of the lines of a tile of HEIGHT rows: of each row in eight columns, of each column in ROWS rows; two
// lines a word. Rows are padded so that sixteen threads that lie side by side write to different banks.
template <int ROWS, int HEIGHT>
struct Maxima {
    static constexpr int DOWN = HEIGHT / ROWS;
    alignas(16) u32 rows[ACROSS_TILE][(HEIGHT + ROWS) / 2];
    alignas(16) u32 columns[DOWN][TILE_WIDTH / 2];
};

template <bool PROPAGATE_NAN, int ROWS, int HEIGHT>
__device__ __forceinline__ void note_maxima(const Piece<ROWS>& piece, int down, int across, bool of_rows, bool of_columns,
                                            Maxima<ROWS, HEIGHT>& maxima) {
    constexpr u32 MAGNITUDES = 0x7FFF7FFFu;
    if (of_rows) {
        u32 most[ROWS / 2];
#pragma unroll
        for (int k = 0; k < ROWS; k += 2) {
            u32 two[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                two[i] = piece.words[k + i][0] & MAGNITUDES;
#pragma unroll
                for (int j = 1; j < PIECE / 2; ++j) {
                    two[i] = larger_magnitudes<PROPAGATE_NAN>(two[i], piece.words[k + i][j] & MAGNITUDES);
                }
            }
            most[k / 2] = larger_magnitudes<PROPAGATE_NAN>(paired(two[0], two[1], false), paired(two[0], two[1], true));
        }
        constexpr int N = ROWS / 2 < 4 ? ROWS / 2 : 4;
#pragma unroll
        for (int part = 0; part < ROWS / 2; part += N) {
            u32 some[N];
#pragma unroll
            for (int j = 0; j < N; ++j) some[j] = most[part + j];
            store_aligned(some, &maxima.rows[across][down * (ROWS / 2) + part]);
        }
    }
    if (of_columns) {
        u32 most[PIECE / 2];
#pragma unroll
        for (int j = 0; j < PIECE / 2; ++j) {
            most[j] = piece.words[0][j] & MAGNITUDES;
#pragma unroll
            for (int k = 1; k < ROWS; ++k) {
                most[j] = larger_magnitudes<PROPAGATE_NAN>(most[j], piece.words[k][j] & MAGNITUDES);
            }
        }
        store_aligned(most, &maxima.columns[down][across * (PIECE / 2)]);
    }
}

// The largest of what COUNT threads have seen of line `line`, from `first` on, as bits of float32; 0 where all is NaN and
// NaN does not count.
template <bool PROPAGATE_NAN, int COUNT, int THREADS, int WORDS>
__device__ __forceinline__ u32 largest_of_line(const u32 (&maxima)[THREADS][WORDS], int first, int line) {
    constexpr u32 HIGHEST = PROPAGATE_NAN ? 0x7FFFu : FLOAT_INF_BITS >> 16;
    u32 largest = 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        const u32 seen = maxima[first + n][line / 2] >> line % 2 * 16 & 0xFFFFu;
        const u32 counted = seen <= HIGHEST ? seen : 0u;
        largest = counted > largest ? counted : largest;
    }
    return largest << 16;
}

// The largest magnitude of a piece, as above.
template <bool PROPAGATE_NAN, int ROWS>
__device__ __forceinline__ u32 largest_of_piece(const Piece<ROWS>& piece) {
    u32 most = 0;
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
#pragma unroll
        for (int j = 0; j < PIECE / 2; ++j) {
            most = larger_magnitudes<PROPAGATE_NAN>(most, piece.words[k][j] & 0x7FFF7FFFu);
        }
    }
    const u32 low = most << 16, high = most & 0xFFFF0000u;
    return low > high ? low : high;
}

// ---- codes -----------------------------------------------------------------------------------------------------------

// Four numbers to the bytes of a word, the first one low.
template <class F>
__device__ __forceinline__ u32 four_codes(float a, float b, float c, float d) {
    return pair_from_float<F>(a, b) | static_cast<u32>(pair_from_float<F>(c, d)) << 16;
}

// Words of codes, whose first byte is the first code, to where they lie aligned.
template <int N>
__device__ __forceinline__ void store_code_words(const u32 (&words)[N], u8* target) {
#ifdef __CUDA_ARCH__
    store_aligned(words, reinterpret_cast<u32*>(target));
#else
    for (int j = 0; j < 4 * N; ++j) target[j] = static_cast<u8>(words[j / 4] >> j % 4 * 8);
#endif
}
