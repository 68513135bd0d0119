// quantize_mx: MX formats of one read of x: rowwise, columnwise (the transpose, quantized along M), or both.
//
//   ELEMENT        E2M1, E2M3, E3M2, E4M3 or E5M2, a macro: each is a compilation of its own
//   x              (M, K), any strides, float32, bfloat16 or float16; any M and K, a short last block counts as padded
//                  with zeros
//   sizes          rows of each of `sections` sections along M, or null: the whole tensor is one section
//   Rowwise, where wanted:
//   codes          (M, K) bytes, one an element; of E2M1 (M, ceil(K/2)), element 2j in the low nibble of byte j
//   scales         (M, ceil(K/32)) bytes, E8M0; where `swizzled` in the 128x4 layout, whose padding the caller has set to 0
//   words          (M, ceil(K/4)) random words where `stochastic`, or null: Philox with seed and offset, subsequences 2n
//                  and 2n + 1 for block n, counted along the lines of the half, sections one after the other
//   Columnwise, where wanted: the same of each section's transpose (K, m), sections one behind the other. Where `in_place`,
//   which E2M1 is never, codes are stored as (m, K) and linear scales as (ceil(m/32), K).
//   Launch: ANY_THREADS threads for every 64x64 tile, of which a strip of 64 rows has ceil(K/64), at least one; ceil(M/64)
//   strips, or with sections one more for each. Of 128 threads, one makes a block of 32 of a row, then one of a column; on
//   a CPU there are 8, a thread has 16 of either, and a barrier costs little.
//   quantize_mx_plain: rowwise alone, contiguous, no variant; one thread for every 32 elements, in the order of memory.
//   quantize_mx_tiles: bfloat16, contiguous, aligned to 16 bytes, M a multiple of 32 and K of 128, no sections, nearest
//   even, columnwise in place; TILE_THREADS threads for every tile of 32x128.
//   Numerics: docs/numerics.md#mx, float32 with one rounding per operation; elements nearest even or stochastic,
//   saturating. `scale_order` and `up_from`: mx.cuh. `tiles`: blocks of 32x32. Everything is exact to the bit.

#include "common/blocks.cuh"
#include "layout/layout.cuh"
#include "common/mx.cuh"
#include "common/philox.cuh"
#include "common/sections.cuh"
#include "quantize/register_tile.cuh"

#ifndef ELEMENT
#define ELEMENT E4M3
#endif
using Element = ELEMENT;

#ifndef MX_THREADS
#ifdef __CUDA_ARCH__
#define MX_THREADS 128
#else
#define MX_THREADS 8
#endif
#endif

constexpr int THREADS = 128;
constexpr int ANY_THREADS = MX_THREADS;  // of the kernel that takes any matrix
constexpr int TILE = 64;
constexpr int TILE_BLOCKS = TILE / BLOCK;
constexpr int MANY = TILE * TILE_BLOCKS / ANY_THREADS;  // blocks of a thread, of either half
static_assert(TILE == STRIP && MANY * ANY_THREADS == TILE * TILE_BLOCKS, "threads cover the tile");

constexpr int PER_BYTE = Element::BITS == 4 ? 2 : 1;
constexpr int BYTES = BLOCK / PER_BYTE;

// What the quantization depends on: the same for all threads.
struct Rule {
    int scale_order;
    u32 up_from;
    int tiles, propagate_nan, in_place, stochastic, swizzled;
    u64 seed;
};

// One orientation of the result.
struct Half {
    int wanted;
    u8* codes;
    u8* scales;
    const u32* words;
    u64 offset;
};

// What the threads of a block read of each other.
struct Shared {
    float values[TILE][TILE + 1];
    u32 amaxes[TILE][TILE_BLOCKS];
};

// A block of 32: where it lies in a matrix whose lines have `length` elements, and how many of its own exist.
struct Place {
    i64 line, start, length;
    i64 first_code, first_scale;  // of the section
    i64 transposed;               // lines, where they are stored as columns; else 0
    int count;
};

__device__ __forceinline__ u32 largest_of_tile(const u32 (&amaxes)[TILE][TILE_BLOCKS], int first_line, int block) {
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const u32 other = amaxes[first_line + i][block];
        largest = other > largest ? other : largest;
    }
    return largest;
}

__device__ __forceinline__ void pack(const u8 (&codes)[BLOCK], u8 (&packed)[BYTES]) {
    if constexpr (PER_BYTE == 2) {
        for (int j = 0; j < BYTES; ++j) packed[j] = static_cast<u8>(codes[2 * j] | codes[2 * j + 1] << 4);
    } else {
        for (int j = 0; j < BYTES; ++j) packed[j] = codes[j];
    }
}

__device__ __forceinline__ void round_to_nearest(const float (&scaled)[BLOCK], u8 (&packed)[BYTES]) {
    if constexpr (PER_BYTE == 2) {
        for (int j = 0; j < BYTES; ++j) packed[j] = e2m1x2_from_float(scaled[2 * j], scaled[2 * j + 1]);
    } else if constexpr (Element::HAS_CVT) {
        for (int j = 0; j < BYTES / 2; ++j) {
            const u16 pair = pair_from_float<Element>(scaled[2 * j], scaled[2 * j + 1]);
            packed[2 * j] = static_cast<u8>(pair);
            packed[2 * j + 1] = static_cast<u8>(pair >> 8);
        }
    } else {
        for (int j = 0; j < BYTES; ++j) packed[j] = static_cast<u8>(nearest_even<Element>(scaled[j]));
    }
}

__device__ __forceinline__ void round_by_words(const float (&scaled)[BLOCK], const Half& half, const Place& place,
                                               const Rule& rule, u8 (&packed)[BYTES]) {
    u32 words[BLOCK / 4];
    if (half.words == nullptr) {
        const i64 blocks = (place.length + BLOCK - 1) / BLOCK;
        const u64 number = static_cast<u64>(place.first_scale + place.line * blocks + place.start / BLOCK);
        for (int j = 0; j < 2; ++j) {
            u32 four[4];
            philox(rule.seed, half.offset, 2u * number + static_cast<u64>(j), four);
            for (int k = 0; k < 4; ++k) words[4 * j + k] = four[k];
        }
    } else {
        const i64 line_words = (place.length + 3) / 4;
        for (int j = 0; j < BLOCK / 4; ++j) {
            const i64 word = place.start / 4 + j;
            words[j] = word < line_words ? half.words[place.line * line_words + word] : 0u;
        }
    }
    u8 bytes[BLOCK], codes[BLOCK];  // one a lane, so that a CPU takes several at once
    for (int i = 0; i < BLOCK; ++i) bytes[i] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
    for (int i = 0; i < BLOCK; ++i) codes[i] = static_cast<u8>(stochastic<Element>(scaled[i], bytes[i]));
    pack(codes, packed);
}

__device__ __forceinline__ void write_block(const float (&v)[BLOCK], u32 amax, const Half& half, const Place& place,
                                            const Rule& rule) {
    const u8 scale = mx_scale<Element>(__uint_as_float(amax), rule.scale_order, rule.up_from);
    const float factor = mx_element_factor(scale);
    const i64 blocks = (place.length + BLOCK - 1) / BLOCK;
    const i64 block = place.start / BLOCK;
    const i64 linear = place.transposed != 0 ? block * place.transposed + place.line : place.line * blocks + block;
    half.scales[rule.swizzled ? swizzled_index(place.line, block, blocks) : place.first_scale + linear] = scale;

    float scaled[BLOCK];
    for (int i = 0; i < BLOCK; ++i) scaled[i] = v[i] * factor;
    u8 packed[BYTES];
    if (rule.stochastic) {
        round_by_words(scaled, half, place, rule, packed);
    } else {
        round_to_nearest(scaled, packed);
    }
    if (place.transposed != 0) {
        u8* target = half.codes + place.first_code + place.start * place.transposed + place.line;
        for (int i = 0; i < place.count; ++i) target[i * place.transposed] = packed[i];
        return;
    }
    const i64 line_bytes = (place.length + PER_BYTE - 1) / PER_BYTE;
    u8* target = half.codes + place.first_code + place.line * line_bytes + place.start / PER_BYTE;
    if (place.count == BLOCK) {
        store_bytes(packed, target);
    } else {
        for (int j = 0; j < (place.count + PER_BYTE - 1) / PER_BYTE; ++j) target[j] = packed[j];
        // Padding is code 0 under a NaN factor, too.
        if (place.count % PER_BYTE != 0) target[place.count / PER_BYTE] &= 0xFu;
    }
}

template <class T>
__device__ void quantize(const T* x, i64 row_stride, i64 column_stride, i64 columns, Sections sections, Half row_half,
                         Half column_half, Rule rule) {
    __shared__ Shared shared;
    const u32 across = columns > 0 ? static_cast<u32>((columns + TILE - 1) / TILE) : 1u;
    const Strip strip = find_strip<BLOCK, PER_BYTE>(sections, blockIdx.x / across, columns);
    if (strip.section_rows == 0) return;
    const int first = static_cast<int>(threadIdx.x) * MANY;
    const i64 first_column = static_cast<i64>(blockIdx.x % across) * TILE;
    const u32 highest = highest_counted(rule.propagate_nan);
    float v[MANY][BLOCK];
    u32 amaxes[MANY];
    int counts[MANY];

    // ---- blocks of rows ----
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const int line = (first + n) / TILE_BLOCKS, block = (first + n) % TILE_BLOCKS;
        const i64 row = strip.section_start + strip.start + line;
        const i64 column = first_column + block * BLOCK;
        counts[n] = count_of<BLOCK>(strip.start + line < strip.section_rows ? columns - column : 0);
        load_block(x + row * row_stride + column * column_stride, column_stride, counts[n], v[n]);
        if (column_half.wanted) {
            for (int i = 0; i < BLOCK; ++i) shared.values[line][block * BLOCK + i] = v[n][i];
        }
        amaxes[n] = largest_magnitude(v[n], highest);
        if (rule.tiles) shared.amaxes[line][block] = amaxes[n];
    }
    if (rule.tiles || column_half.wanted) __syncthreads();
    if (row_half.wanted) {
#pragma unroll
        for (int n = 0; n < MANY; ++n) {
            const int line = (first + n) / TILE_BLOCKS, block = (first + n) % TILE_BLOCKS;
            if (counts[n] == 0) continue;
            if (rule.tiles) amaxes[n] = largest_of_tile(shared.amaxes, line / BLOCK * BLOCK, block);
            const i64 row = strip.section_start + strip.start + line;
            const Place place = {row, first_column + block * BLOCK, columns, 0, 0, 0, counts[n]};
            write_block(v[n], amaxes[n], row_half, place, rule);
        }
    }
    if (!column_half.wanted) return;

    // ---- blocks of columns ----
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const int line = (first + n) % TILE, block = (first + n) / TILE;
        const i64 column = first_column + line;
        const i64 start = strip.start + block * BLOCK;
        const int count = count_of<BLOCK>(column < columns ? strip.section_rows - start : 0);
        if (count == 0) continue;
        for (int i = 0; i < BLOCK; ++i) v[n][i] = shared.values[block * BLOCK + i][line];
        const u32 amax =
            rule.tiles ? largest_of_tile(shared.amaxes, block * BLOCK, line / BLOCK) : largest_magnitude(v[n], highest);
        const i64 transposed = rule.in_place ? columns : 0;
        const Place place = {column, start, strip.section_rows, strip.codes_t, strip.scales_t, transposed, count};
        write_block(v[n], amax, column_half, place, rule);
    }
}

#define QUANTIZE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(ANY_THREADS)                                                          \
        NAME(const T* x, i64 row_stride, i64 column_stride, i64 rows, i64 columns, const i64* sizes, int sections,     \
             int rowwise, u8* codes, u8* scales, const u32* words, u64 offset, int columnwise, u8* codes_t,            \
             u8* scales_t, const u32* words_t, u64 offset_t, int scale_order, int up_from, int tiles,                  \
             int propagate_nan, int in_place, int stochastic, u64 seed, int swizzled) {                                \
        const Rule rule = {scale_order, static_cast<u32>(up_from), tiles, propagate_nan, in_place, stochastic,         \
                           swizzled, seed};                                                                            \
        quantize(x, row_stride, column_stride, columns, Sections{sizes, sections, rows},                               \
                 Half{rowwise, codes, scales, words, offset}, Half{columnwise, codes_t, scales_t, words_t, offset_t},  \
                 rule);                                                                                                \
    }

// Rowwise, of a whole contiguous tensor, without any variant.
template <class T>
__device__ void quantize_plain(const T* x, i64 rows, i64 columns, Half half, Rule rule) {
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= rows * ((columns + BLOCK - 1) / BLOCK)) return;
    const Run run = find_run<BLOCK>(rows, columns, index);
    float v[BLOCK];
    load_block(x + run.line * columns + run.start, 1, run.count, v);
    const u32 amax = largest_magnitude(v, highest_counted(rule.propagate_nan));
    write_block(v, amax, half, Place{run.line, run.start, run.length, 0, 0, 0, run.count}, rule);
}

#define QUANTIZE_PLAIN(NAME, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const T* x, i64 rows, i64 columns, u8* codes, u8* scales, int scale_order, int up_from,                   \
             int propagate_nan) {                                                                                      \
        quantize_plain(x, rows, columns, Half{1, codes, scales, nullptr, 0},                                           \
                       Rule{scale_order, static_cast<u32>(up_from), 0, propagate_nan, 0, 0, 0, 0u});                   \
    }

// ---- bfloat16 in whole tiles ----

// Of a thread. On an H200, both halves of 16384^2: 91 % of the rate of a copy, with 4 rows and twice the threads 88 %. On a
// CPU, where a barrier costs, a thread holds all rows.
#ifndef MX_PIECE_ROWS
#ifdef __CUDA_ARCH__
#define MX_PIECE_ROWS 8
#else
#define MX_PIECE_ROWS 32
#endif
#endif
constexpr int PIECE_ROWS = MX_PIECE_ROWS;
constexpr int PIECES_DOWN = BLOCK / PIECE_ROWS;
constexpr int TILE_THREADS = PIECES_DOWN * ACROSS_TILE;
constexpr int BLOCKS_ACROSS = TILE_WIDTH / BLOCK;
constexpr int PIECES_ACROSS = BLOCK / PIECE;  // of a block

struct SharedTile {
    Maxima<PIECE_ROWS, BLOCK> maxima;
    u32 pieces[PIECES_DOWN][ACROSS_TILE];                     // the largest of each, of square blocks
    alignas(16) float row_factors[BLOCKS_ACROSS][BLOCK + 8];  // padded, so that threads meet in fewer banks
    alignas(16) float column_factors[TILE_WIDTH];
};

// The largest magnitude of a block of 32x32.
__device__ __forceinline__ u32 largest_of_square(const SharedTile& shared, int block) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < PIECES_DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < PIECES_ACROSS; ++j) {
            const u32 other = shared.pieces[i][block * PIECES_ACROSS + j];
            largest = other > largest ? other : largest;
        }
    }
    return largest;
}

// A scale to where the half keeps it; returns what elements are multiplied by.
__device__ __forceinline__ float write_scale(u32 amax, const Half& half, i64 line, i64 block, i64 blocks, i64 linear,
                                             const Rule& rule) {
    const u8 scale = mx_scale<Element>(__uint_as_float(amax), rule.scale_order, rule.up_from);
    half.scales[rule.swizzled ? swizzled_index(line, block, blocks) : linear] = scale;
    return mx_element_factor(scale);
}

// Eight numbers, each with its factor, to their codes.
__device__ __forceinline__ void write_piece(const float (&v)[PIECE], const float (&factors)[PIECE], u8* target) {
    float scaled[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) scaled[i] = v[i] * factors[i];
    u32 words[2 / PER_BYTE];
    if constexpr (PER_BYTE == 2) {
        words[0] = 0;
        for (int j = 0; j < 4; ++j) {
            words[0] |= static_cast<u32>(e2m1x2_from_float(scaled[2 * j], scaled[2 * j + 1])) << 8 * j;
        }
    } else {
        for (int w = 0; w < 2; ++w) {
            words[w] = four_codes<Element>(scaled[4 * w], scaled[4 * w + 1], scaled[4 * w + 2], scaled[4 * w + 3]);
        }
    }
    store_code_words(words, target);
}

template <bool PROPAGATE_NAN>
__device__ __forceinline__ void quantize_tile(const bf16* x, i64 rows, i64 columns, const Half& row_half,
                                              const Half& column_half, const Rule& rule, SharedTile& shared) {
    const u32 tiles_across = static_cast<u32>(columns / TILE_WIDTH);
    const i64 block_row = blockIdx.x / tiles_across, first_row = block_row * BLOCK;
    const i64 first_column = static_cast<i64>(blockIdx.x % tiles_across) * TILE_WIDTH;
    const int thread = threadIdx.x;
    const int down = thread / ACROSS_TILE, across = thread % ACROSS_TILE;
    const i64 start = (first_row + down * PIECE_ROWS) * columns + first_column + across * PIECE;

    Piece<PIECE_ROWS> piece;
    load_piece(x + start, columns, piece);
    if (rule.tiles) {
        shared.pieces[down][across] = largest_of_piece<PROPAGATE_NAN>(piece);
    } else {
        note_maxima<PROPAGATE_NAN>(piece, down, across, row_half.wanted, column_half.wanted, shared.maxima);
    }
    __syncthreads();

    // ---- scales: neighbours write neighbouring bytes, of four blocks of a row or of a row of columns ----
    if (row_half.wanted) {
        const i64 blocks = columns / BLOCK;
#pragma unroll
        for (int n = 0; n < BLOCK * BLOCKS_ACROSS; n += TILE_THREADS) {
            const int row = (n + thread) / BLOCKS_ACROSS, number = (n + thread) % BLOCKS_ACROSS;
            const u32 amax = rule.tiles ? largest_of_square(shared, number)
                                        : largest_of_line<PROPAGATE_NAN, PIECES_ACROSS>(
                                              shared.maxima.rows, number * PIECES_ACROSS, row);
            const i64 line = first_row + row, block = first_column / BLOCK + number;
            shared.row_factors[number][row] = write_scale(amax, row_half, line, block, blocks, line * blocks + block, rule);
        }
    }
    if (column_half.wanted) {
#pragma unroll
        for (int n = 0; n < TILE_WIDTH; n += TILE_THREADS) {
            const int column = n + thread;
            const u32 amax = rule.tiles ? largest_of_square(shared, column / BLOCK)
                                        : largest_of_line<PROPAGATE_NAN, PIECES_DOWN>(shared.maxima.columns, 0, column);
            const i64 line = first_column + column;
            shared.column_factors[column] =
                write_scale(amax, column_half, line, block_row, rows / BLOCK, block_row * columns + line, rule);
        }
    }
    __syncthreads();

    // ---- codes ----
    float of_columns[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) of_columns[i] = shared.column_factors[across * PIECE + i];
#pragma unroll
    for (int k = 0; k < PIECE_ROWS; ++k) {
        float v[PIECE], of_row[PIECE];
        const float factor = shared.row_factors[across / PIECES_ACROSS][down * PIECE_ROWS + k];
#pragma unroll
        for (int j = 0; j < PIECE / 2; ++j) {
            v[2 * j] = low_of(piece.words[k][j]);
            v[2 * j + 1] = high_of(piece.words[k][j]);
        }
        for (int i = 0; i < PIECE; ++i) of_row[i] = factor;
        const i64 target = (start + k * columns) / PER_BYTE;
        if (row_half.wanted) write_piece(v, of_row, row_half.codes + target);
        if (column_half.wanted) write_piece(v, of_columns, column_half.codes + target);
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    quantize_mx_tiles_bf16(const bf16* x, i64 rows, i64 columns, int rowwise, u8* codes, u8* scales, int columnwise,
                           u8* codes_t, u8* scales_t, int scale_order, int up_from, int tiles, int propagate_nan,
                           int swizzled) {
    const Half row_half = {rowwise, codes, scales, nullptr, 0}, column_half = {columnwise, codes_t, scales_t, nullptr, 0};
    const Rule rule = {scale_order, static_cast<u32>(up_from), tiles, propagate_nan, 1, 0, swizzled, 0u};
    __shared__ SharedTile shared;
    if (propagate_nan) {
        quantize_tile<true>(x, rows, columns, row_half, column_half, rule, shared);
    } else {
        quantize_tile<false>(x, rows, columns, row_half, column_half, rule, shared);
    }
}

QUANTIZE(quantize_mx_fp32, float)
QUANTIZE(quantize_mx_bf16, bf16)
QUANTIZE(quantize_mx_fp16, fp16)
QUANTIZE_PLAIN(quantize_mx_plain_fp32, float)
QUANTIZE_PLAIN(quantize_mx_plain_bf16, bf16)
QUANTIZE_PLAIN(quantize_mx_plain_fp16, fp16)
