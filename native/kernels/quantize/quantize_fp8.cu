// quantize_fp8: FP8 with float32 scales of one read of x: rowwise, columnwise (the transpose), or both.
//
//   x              (M, K), any strides, float32, bfloat16 or float16; any M and K, short blocks at the ends
//   sizes          rows of each of `sections` sections along M, or null: the whole tensor is one section
//   variant        the rule in bits. 0, 1: what shares a scale: 128 elements of a line (0), a tile of 128x128 (1), or a section
//                  (2). 2: elements are E5M2, else E4M3. 3: scales are rounded down to powers of two. 4: NaN counts
//                  as the largest
//   given          float32, one a section: the scales of kind 2 (delayed scaling); or null
//   found          float32, one a section, which the caller has set to 0: kind 2 leaves the largest magnitude there; or null
//   Rowwise, or all null:
//   amax           float32, one a section, of which kind 2 makes its scales; or null
//   codes          (M, K) bytes
//   scales         float32, the inverse of what elements were multiplied by: kind 0 (M, ceil(K/128)), kind 1
//                  (ceil(m/128), ceil(K/128)) of each section, one below the other, kind 2 one a section
//   encode         float32, one a section: the scales that kind 2 used; or null
//   Columnwise, or all null: the same of each section's transpose (K, m), sections one behind the other: kind 0
//   (K, ceil(m/128)), kind 1 (ceil(K/128), ceil(m/128)).
//   Launch: THREADS threads for every tile of 128x128, of which a strip of 128 rows has ceil(K/128), at least one;
//   ceil(M/128) strips, or with sections floor(M/128) and one more for each. THREADS is 256, on a CPU 8: a thread then
//   runs along 16 rows, and a barrier costs little.
//   quantize_fp8_tiles: bfloat16, contiguous, aligned to 16 bytes, M and K multiples of 128, no sections; TILE_THREADS
//   threads for every tile of 128x128.
//   Numerics: docs/numerics.md#fp8-with-float32-scales: float32 with one rounding per operation, the scale max/amax, FP8
//   of x times it, nearest even, saturating. Everything is exact to the bit.

#include "common/fp8.cuh"
#include "common/reduce.cuh"
#include "common/sections.cuh"
#include "quantize/register_tile.cuh"

#ifndef FP8_THREADS
#ifdef __CUDA_ARCH__
#define FP8_THREADS 256
#else
#define FP8_THREADS 8
#endif
#endif

constexpr int THREADS = FP8_THREADS;
constexpr int TILE = 128;
// A thread takes patches of four neighbouring rows of 16 columns: 32 or 64 bytes of a row, a word of codes of a column.
// Those of one thread lie side by side, then below.
constexpr int CHUNK = 16, ROWS = 4;
constexpr int ACROSS = TILE / CHUNK;
constexpr int PATCHES = ACROSS * (TILE / ROWS) / THREADS;    // of a thread,
constexpr int CHUNKS = PATCHES < ACROSS ? PATCHES : ACROSS;  // in so many different columns
constexpr int DOWN = THREADS * CHUNKS / ACROSS;              // threads that see a column
constexpr int WORDS = TILE / ROWS;                           // words of codes of a column
static_assert(PATCHES * THREADS == ACROSS * (TILE / ROWS), "threads cover the tile");

enum Kind { LINES = 0, TILES = 1, WHOLE = 2 };

// What the quantization depends on: the same for all threads.
struct Rule {
    int kind, e5m2;
    u32 highest;  // magnitude that counts
    const float* given;
    u32* found;
    ScaleRule scale;
};

// One orientation of the result; without scales there is none to write.
struct Half {
    const float* amax;
    u8* codes;
    float* scales;
    float* encode;
};

// What the threads of a block read of each other. Strides are odd where lanes would meet in one bank.
struct Shared {
    u32 row_amaxes[TILE][ACROSS + 1];  // of the chunks of a row
    u32 line_amaxes[TILE];             // of the rows of a tile
    float scales[2][TILE];             // of rows, of columns
    union {
        u32 column_amaxes[CHUNK][DOWN * ACROSS + 1];  // of what a thread sees of column i of a chunk
        u32 codes[TILE][WORDS];                 // of the transpose
    };
};

// Up to TILE rows of one section.
struct TileRows {
    int section;
    i64 section_start;  // the section's first row in the tensor
    i64 section_rows;   // 0 where there is no such strip
    i64 start;          // the strip's first row in the section
    i64 blocks_before;  // rows of blocks of the sections before
};

__device__ __forceinline__ TileRows find_tile_rows(const Sections& sections, i64 strip) {
    if (sections.sizes == nullptr) return {0, 0, strip * TILE < sections.rows ? sections.rows : 0, strip * TILE, 0};
    i64 start = 0, blocks = 0;
    for (int s = 0; s < sections.count; ++s) {
        const Section section = section_after(sections, s, start);
        const i64 strips = (section.count + TILE - 1) / TILE;
        if (strip < strips) return {s, start, section.count, strip * TILE, blocks};
        strip -= strips;
        start += section.count;
        blocks += strips;
    }
    return {0, 0, 0, 0, 0};
}

// Where a patch begins in the tile, and how many columns of its own exist.
struct Patch {
    int row, column, count;
};

__device__ __forceinline__ Patch patch_of(int thread, int patch, int width) {
    const int number = thread * PATCHES + patch;
    const int column = number % ACROSS * CHUNK, left = width - column;
    return {number / ACROSS * ROWS, column, left < 0 ? 0 : left < CHUNK ? left : CHUNK};
}

template <class Get>
__device__ __forceinline__ u32 largest(int count, Get get) {
    u32 most = 0;
    for (int n = 0; n < count; ++n) {
        const u32 other = get(n);
        most = other > most ? other : most;
    }
    return most;
}

__device__ __forceinline__ int at_most_tile(i64 count) { return count < TILE ? static_cast<int>(count) : TILE; }

__device__ __forceinline__ float scale_of_section(const float* amax, i64 section, const Rule& rule) {
    return rule.given != nullptr ? rule.given[section] : fp8_scale(amax[section], rule.scale);
}

__device__ __forceinline__ void write_scale_of_section(const Half& half, i64 section, const Rule& rule) {
    if (half.scales == nullptr) return;
    const float scale = scale_of_section(half.amax, section, rule);
    half.encode[section] = scale;
    half.scales[section] = 1.0f / scale;
}

// Where the words of column `column` begin with the rows from 16 * `part` on: turned by the chunk, so that lanes that
// write a word of eight chunks each, or read four words of eight parts each, meet in no bank.
__device__ __forceinline__ int turned(int column, int part) { return (part ^ column / CHUNK % (WORDS / 4)) * 4; }

template <class F>
__device__ __forceinline__ void write_rows(const float (&v)[ROWS][CHUNK], const float* scales, int rows, int columns,
                                           u8* target, i64 stride) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        if (k >= rows) return;
        u8 codes[CHUNK];
        encode_row<F>(v[k], scales[k], codes);
        store_some(codes, columns, target + k * stride);
    }
}

template <class T>
__device__ void quantize(const T* x, i64 row_stride, i64 column_stride, i64 columns, Sections sections, Half row_half,
                         Half column_half, Rule rule) {
    __shared__ Shared shared;
    if (rule.kind == WHOLE) {  // of every section, also those without rows
        const i64 step = static_cast<i64>(gridDim.x) * THREADS;
        for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < sections.count; i += step) {
            write_scale_of_section(row_half, i, rule);
            write_scale_of_section(column_half, i, rule);
        }
    }
    const i64 blocks = (columns + TILE - 1) / TILE;  // of a row
    const i64 across = blocks > 0 ? blocks : 1;
    const TileRows strip = find_tile_rows(sections, blockIdx.x / across);
    if (strip.section_rows == 0 || columns == 0) return;
    const bool rowwise = row_half.scales != nullptr, columnwise = column_half.scales != nullptr;
    const i64 block = blockIdx.x % across;
    const i64 first_row = strip.section_start + strip.start, first_column = block * TILE;
    const int height = at_most_tile(strip.section_rows - strip.start), width = at_most_tile(columns - first_column);

    const int thread = threadIdx.x;

    // ---- elements, and the largest of each line ----
    float v[PATCHES][ROWS][CHUNK];
    u32 column_most[CHUNKS][CHUNK] = {};
    for (int patch = 0; patch < PATCHES; ++patch) {
        const Patch at = patch_of(thread, patch, width);
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int here = at.row + k < height ? at.count : 0;
            const T* source = x + (first_row + at.row + k) * row_stride + (first_column + at.column) * column_stride;
            if (here == CHUNK && column_stride == 1) {
                load_elements(source, v[patch][k]);
            } else {
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) v[patch][k][i] = i < here ? to_float(source[i * column_stride]) : 0.0f;
            }
        }
        if (rule.kind == WHOLE && rule.found == nullptr) continue;
        u32 (&below)[CHUNK] = column_most[patch % CHUNKS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            shared.row_amaxes[at.row + k][at.column / CHUNK] = largest_magnitude(v[patch][k], rule.highest);
            if (rule.kind != LINES) continue;
            for (int i = 0; i < CHUNK; ++i) take_magnitude(v[patch][k][i], rule.highest, below[i]);
        }
    }

    // ---- scales, and what is stored of them ----
    const i64 section_blocks = (strip.section_rows + TILE - 1) / TILE, block_row = strip.start / TILE;
    if (rule.kind == LINES && columnwise) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            for (int c = 0; c < CHUNKS; ++c) shared.column_amaxes[i][thread * CHUNKS + c] = column_most[c][i];
        }
    }
    const bool of_tile = rule.kind == TILES || rule.found != nullptr;
    if (rule.kind == LINES || of_tile) {
        __syncthreads();
    }
    float scale = 0.0f;  // of the whole tile
    if (of_tile) {
        for (int line = thread; line < TILE; line += THREADS) {
            shared.line_amaxes[line] = largest(ACROSS, [&](int n) { return shared.row_amaxes[line][n]; });
        }
        __syncthreads();
        const u32 amax = largest(TILE, [&](int n) { return shared.line_amaxes[n]; });
        scale = fp8_scale(__uint_as_float(amax), rule.scale);
        if (thread == 0 && rule.kind == WHOLE) atomicMax(rule.found + strip.section, amax);
        if (thread == 0 && rule.kind == TILES) {
            if (rowwise) row_half.scales[(strip.blocks_before + block_row) * blocks + block] = 1.0f / scale;
            if (columnwise) {
                column_half.scales[blocks * strip.blocks_before + block * section_blocks + block_row] = 1.0f / scale;
            }
        }
    }
    for (int n = thread; n < 2 * TILE; n += THREADS) {  // rows, then columns
        const bool is_row = n < TILE;
        const int line = n % TILE;
        if (!(is_row ? rowwise : columnwise)) continue;
        if (rule.kind == WHOLE) {
            scale = scale_of_section(is_row ? row_half.amax : column_half.amax, strip.section, rule);
        } else if (rule.kind == LINES) {
            const int chunk = line / CHUNK, i = line % CHUNK;
            const u32 amax = is_row ? largest(ACROSS, [&](int c) { return shared.row_amaxes[line][c]; })
                                    : largest(DOWN, [&](int d) { return shared.column_amaxes[i][d * ACROSS + chunk]; });
            scale = fp8_scale(__uint_as_float(amax), rule.scale);
            if (is_row && line < height) row_half.scales[(first_row + line) * blocks + block] = 1.0f / scale;
            if (!is_row && line < width) {
                const i64 first = columns * strip.blocks_before + (first_column + line) * section_blocks;
                column_half.scales[first + block_row] = 1.0f / scale;
            }
        }
        shared.scales[is_row ? 0 : 1][line] = scale;
    }
    __syncthreads();

    // ---- codes ----
    for (int patch = 0; patch < PATCHES; ++patch) {
        const Patch at = patch_of(thread, patch, width);
        if (rowwise) {
            u8* target = row_half.codes + (first_row + at.row) * columns + first_column + at.column;
            if (rule.e5m2) {
                write_rows<E5M2>(v[patch], shared.scales[0] + at.row, height - at.row, at.count, target, columns);
            } else {
                write_rows<E4M3>(v[patch], shared.scales[0] + at.row, height - at.row, at.count, target, columns);
            }
        }
        if (columnwise) {
            float scales[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) scales[i] = shared.scales[1][at.column + i];
            u32 words[CHUNK];
            if (rule.e5m2) {
                encode_columns<E5M2>(v[patch], scales, words);
            } else {
                encode_columns<E4M3>(v[patch], scales, words);
            }
            const int word = turned(at.column, at.row / (4 * ROWS)) + at.row / ROWS % 4;
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) shared.codes[at.column + i][word] = words[i];
        }
    }
    if (!columnwise) return;
    __syncthreads();
    for (int index = thread; index < width * (WORDS / 4); index += THREADS) {
        const int at = index / (WORDS / 4), part = index % (WORDS / 4);
        const int left = height - part * 16;
        u8 codes[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            codes[j] = static_cast<u8>(shared.codes[at][turned(at, part) + j / 4] >> j % 4 * 8);
        }
        u8* target = column_half.codes + columns * strip.section_start + (first_column + at) * strip.section_rows +
                     strip.start + part * 16;
        store_some(codes, left < 16 ? left : 16, target);
    }
}

// What a recipe asks for, in one number: where that is known when the kernel is compiled, the rest costs nothing.
#ifdef VARIANT
#define CHOSEN VARIANT
#else
#define CHOSEN variant
#endif
__device__ __forceinline__ Rule rule_of(int variant, const float* given, u32* found, float largest_element,
                                        float smallest_amax, float largest_scale) {
    return {variant & 3, variant >> 2 & 1, highest_counted(variant >> 4 & 1), given, found,
            ScaleRule{largest_element, smallest_amax, largest_scale, variant >> 3 & 1}};
}

#define QUANTIZE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const T* x, i64 row_stride, i64 column_stride, i64 rows, i64 columns, const i64* sizes, int sections,     \
             int variant, const float* given, u32* found, const float* amax, u8* codes, float* scales, float* encode,  \
             const float* amax_t, u8* codes_t, float* scales_t, float* encode_t, float largest_element,                \
             float smallest_amax, float largest_scale) {                                                               \
        quantize(x, row_stride, column_stride, columns, Sections{sizes, sections, rows},                               \
                 Half{amax, codes, scales, encode}, Half{amax_t, codes_t, scales_t, encode_t},                         \
                 rule_of(CHOSEN, given, found, largest_element, smallest_amax, largest_scale));                        \
    }

// ---- bfloat16 in whole tiles ----

// Of both halves of 1x128 on an H200, a tenth of the time is the stores of scales, of which every four bytes take a sector of
// L2 as 32 bytes of codes do. Blocks that take 2, 4 or 8 tiles side by side, and store the scales of their rows at once,
// are slower, tiles in bands too.
constexpr int PIECE_ROWS = 8;  // 1x128, both halves of 16384^2 on an H200: 0.324 ms, 0.333 with 4 and twice the threads
constexpr int TILE_BLOCKS_OF_SM = 4;  // so that a thread has 64 registers: 0.334 ms, 0.336 with 3
constexpr int PIECES_DOWN = TILE / PIECE_ROWS;
constexpr int TILE_THREADS = PIECES_DOWN * ACROSS_TILE;
static_assert(TILE == TILE_WIDTH, "a row of a tile is a block");
static_assert(TILE_THREADS == 2 * TILE, "a thread finds the scale of a row, or of a column");

struct SharedTile {
    union {
        Maxima<PIECE_ROWS, TILE> maxima;
        struct {
            u32 pieces[PIECES_DOWN][ACROSS_TILE];  // the largest of each
            u32 columns[ACROSS_TILE];              // of those below each other
        } largest;
    };
    alignas(16) float factors[2][TILE];  // of rows, of columns
    alignas(16) u32 codes[TILE][WORDS];  // of the transpose
    u32 warps[TILE_THREADS / 32];        // the largest of each
};

// Which word of a column of the piece `across` holds the codes of rows 4 * word to 4 * word + 3: turned so that the threads
// of a warp meet in no bank, sixteen of which lie side by side, and two below each other. Four words of a column stay
// together.
__device__ __forceinline__ u32 turned_word(u32 across, u32 word) {
    return word ^ (across / 2 % (WORDS / 4) * 4 + across % 2);
}

template <class F, bool PROPAGATE_NAN>
__device__ __forceinline__ void quantize_tile(const bf16* x, i64 rows, i64 columns, const Half& row_half,
                                              const Half& column_half, const Rule& rule, SharedTile& shared) {
    const bool rowwise = row_half.scales != nullptr, columnwise = column_half.scales != nullptr;
    const u32 tiles_across = static_cast<u32>(columns / TILE), tiles_down = static_cast<u32>(rows / TILE);
    const u32 tile_row = blockIdx.x / tiles_across, tile_column = blockIdx.x % tiles_across;
    const u32 thread = threadIdx.x;
    const u32 down = thread / ACROSS_TILE, across = thread % ACROSS_TILE;
    const i64 first_row = static_cast<i64>(tile_row) * TILE, first_column = static_cast<i64>(tile_column) * TILE;
    const i64 start = (first_row + down * PIECE_ROWS) * columns + first_column + across * PIECE;

    Piece<PIECE_ROWS> piece;
    load_piece(x + start, columns, piece);

    // ---- what rows and columns are multiplied by ----
    if (rule.kind == LINES) {
        note_maxima<PROPAGATE_NAN>(piece, down, across, rowwise, columnwise, shared.maxima);
        __syncthreads();
        const bool is_row = thread < TILE;
        const u32 line = thread % TILE;
        if (is_row ? rowwise : columnwise) {
            const u32 amax = is_row ? largest_of_line<PROPAGATE_NAN, ACROSS_TILE>(shared.maxima.rows, 0, line)
                                    : largest_of_line<PROPAGATE_NAN, PIECES_DOWN>(shared.maxima.columns, 0, line);
            const float scale = fp8_scale(__uint_as_float(amax), rule.scale);
            shared.factors[is_row ? 0 : 1][line] = scale;
            if (is_row) {
                row_half.scales[(first_row + line) * tiles_across + tile_column] = 1.0f / scale;
            } else {
                column_half.scales[(first_column + line) * tiles_down + tile_row] = 1.0f / scale;
            }
        }
        __syncthreads();
    } else if (rule.kind == TILES) {
        shared.largest.pieces[down][across] = largest_of_piece<PROPAGATE_NAN>(piece);
        __syncthreads();
        if (thread < ACROSS_TILE) {
            shared.largest.columns[thread] = largest(PIECES_DOWN, [&](int n) { return shared.largest.pieces[n][thread]; });
        }
        __syncthreads();
    }
    float row_factor = 0.0f, column_factor = 0.0f;
    if (rule.kind == TILES) {
        const u32 amax = largest(ACROSS_TILE, [&](int n) { return shared.largest.columns[n]; });
        row_factor = column_factor = fp8_scale(__uint_as_float(amax), rule.scale);
        if (thread == 0) {
            if (rowwise) row_half.scales[static_cast<i64>(tile_row) * tiles_across + tile_column] = 1.0f / row_factor;
            if (columnwise) column_half.scales[static_cast<i64>(tile_column) * tiles_down + tile_row] = 1.0f / row_factor;
        }
    } else if (rule.kind == WHOLE) {
        if (rowwise) row_factor = scale_of_section(row_half.amax, 0, rule);
        if (columnwise) column_factor = scale_of_section(column_half.amax, 0, rule);
        if (tile_row == 0 && tile_column == 0 && thread == 0) {
            write_scale_of_section(row_half, 0, rule);
            write_scale_of_section(column_half, 0, rule);
        }
    }

    // ---- codes ----
#pragma unroll
    for (int group = 0; group < PIECE_ROWS; group += ROWS) {
        u32 of_rows[ROWS][PIECE / 4];
#pragma unroll
        for (int w = 0; w < PIECE / 4; ++w) {
            float v[ROWS][4];
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                v[k][0] = low_of(piece.words[group + k][2 * w]);
                v[k][1] = high_of(piece.words[group + k][2 * w]);
                v[k][2] = low_of(piece.words[group + k][2 * w + 1]);
                v[k][3] = high_of(piece.words[group + k][2 * w + 1]);
                if (!rowwise) continue;
                const float f = rule.kind == LINES ? shared.factors[0][down * PIECE_ROWS + group + k] : row_factor;
                of_rows[k][w] = four_codes<F>(v[k][0] * f, v[k][1] * f, v[k][2] * f, v[k][3] * f);
            }
            if (!columnwise) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 column = across * PIECE + 4 * w + i;
                const float f = rule.kind == LINES ? shared.factors[1][column] : column_factor;
                shared.codes[column][turned_word(across, (down * PIECE_ROWS + group) / ROWS)] =
                    four_codes<F>(v[0][i] * f, v[1][i] * f, v[2][i] * f, v[3][i] * f);
            }
        }
        if (!rowwise) continue;
#pragma unroll
        for (int k = 0; k < ROWS; ++k) store_code_words(of_rows[k], row_half.codes + start + (group + k) * columns);
    }
    if (rule.found != nullptr) largest_of_block(shared.warps, largest_of_piece<PROPAGATE_NAN>(piece), rule.found);
    if (!columnwise) return;
    __syncthreads();
#pragma unroll
    for (u32 n = 0; n < TILE * (WORDS / 4); n += TILE_THREADS) {
        const u32 column = (n + thread) / (WORDS / 4), part = (n + thread) % (WORDS / 4);
        u32 turned_words[4], words[4];
        load_aligned(&shared.codes[column][turned_word(column / PIECE, 4 * part) / 4 * 4], turned_words);
        const bool odd = column / PIECE % 2 != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = odd ? turned_words[j ^ 1] : turned_words[j];
        store_code_words(words, column_half.codes + (first_column + column) * rows + first_row + 16 * part);
    }
}

template <class F>
__device__ __forceinline__ void quantize_tile(const bf16* x, i64 rows, i64 columns, const Half& row_half,
                                              const Half& column_half, const Rule& rule, int propagate_nan,
                                              SharedTile& shared) {
    if (propagate_nan) {
        quantize_tile<F, true>(x, rows, columns, row_half, column_half, rule, shared);
    } else {
        quantize_tile<F, false>(x, rows, columns, row_half, column_half, rule, shared);
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_OF_SM)
    quantize_fp8_tiles_bf16(const bf16* x, i64 rows, i64 columns, int variant, const float* given, u32* found,
                            const float* amax, u8* codes, float* scales, float* encode, const float* amax_t,
                            u8* codes_t, float* scales_t, float* encode_t, float largest_element, float smallest_amax,
                            float largest_scale) {
    __shared__ SharedTile shared;
    const Rule rule = rule_of(CHOSEN, given, found, largest_element, smallest_amax, largest_scale);
    const Half row_half = {amax, codes, scales, encode}, column_half = {amax_t, codes_t, scales_t, encode_t};
    if (rule.e5m2) {
        quantize_tile<E5M2>(x, rows, columns, row_half, column_half, rule, CHOSEN >> 4 & 1, shared);
    } else {
        quantize_tile<E4M3>(x, rows, columns, row_half, column_half, rule, CHOSEN >> 4 & 1, shared);
    }
}

QUANTIZE(quantize_fp8_fp32, float)
QUANTIZE(quantize_fp8_bf16, bf16)
QUANTIZE(quantize_fp8_fp16, fp16)
