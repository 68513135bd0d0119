// quantize_fp8: FP8 with float32 scales, from one read of x: rowwise, columnwise (the transpose), or both.
//
//   Parameters: struct QuantizeFp8Parameters; the choices of a recipe: struct QuantizeFp8Variant.
//   quantize_fp8: any matrix; blocks at the ends of rows and sections may be short. Launch: THREADS threads for every tile of
//   128x128. A strip of 128 rows has ceil(K/128) tiles, at least 1; ceil(M/128) strips, or with sections floor(M/128) and one
//   more per section. THREADS is 256, on a CPU 8: there a thread processes 16 rows, and a barrier is cheap.
//   quantize_fp8_tiles: contiguous bfloat16, aligned to 16 bytes, M and K multiples of 128, no sections. Launch: TILE_THREADS
//   threads for every tile of 128x128. Amaxes of 1x128 may go to `amaxes_by_tile`; store_scales then stores the scales.
//   store_scales: the scales of both outputs from `amaxes_by_tile`. Launch: `early`, (ceil(blocks of a line / 32), rows of
//   tiles, 2) thread blocks of STORE_THREADS, for the larger of the two outputs.
//   Numerics: docs/numerics.md#fp8-with-float32-scales: float32 with one rounding per operation, the scale max/amax, FP8
//   of x times the scale, nearest even, saturating. Everything is exact to the bit.

#include "common/fp8.cuh"
#include "common/reduce.cuh"
#include "common/sections.cuh"
#include "quantize/register_tile.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

#ifndef FP8_THREADS
#ifdef __CUDA_ARCH__
#define FP8_THREADS 256
#else
#define FP8_THREADS 8
#endif
#endif

constexpr int THREADS = FP8_THREADS;
constexpr int TILE = 128;
// A patch has four neighbouring rows of 16 columns: 32 or 64 bytes of a row, a word of codes of a column. The patches of a
// thread are neighbours in a row, then below each other.
constexpr int CHUNK = 16, ROWS = 4;
constexpr int ACROSS = TILE / CHUNK;
constexpr int PATCHES = ACROSS * (TILE / ROWS) / THREADS;    // patches of a thread
constexpr int CHUNKS = PATCHES < ACROSS ? PATCHES : ACROSS;  // chunks of columns that they cover
constexpr int DOWN = THREADS * CHUNKS / ACROSS;              // threads with a part of a column
constexpr int WORDS = TILE / ROWS;                           // words of codes of a column
static_assert(PATCHES * THREADS == ACROSS * (TILE / ROWS), "threads cover the tile");

// Elements that share a scale: 128 of a row or column, a tile of 128x128, or the whole section.
enum ScaleBlock : int { LINES = 0, TILES = 1, WHOLE = 2 };

// The choices of a recipe. On a GPU the macro VARIANT gives their values, and a variant is compiled separately. On a CPU
// they are parameters of the kernel.
struct QuantizeFp8Variant {
    ScaleBlock scale_block;
    bool e5m2;           // elements are E5M2, else E4M3
    bool power_of_two;   // scales are rounded down to powers of two
    bool propagate_nan;  // NaN counts as the largest magnitude
};

// An orientation of the result. The kernel skips it if `scales` is null.
struct Output {
    const float* amax;  // with WHOLE, float32, per section: the source of scales that are not given; or null
    u8* codes;          // (M, K) bytes
    float* scales;  // inverse of the factors of elements. LINES: (M, ceil(K/128)). TILES: (ceil(m/128), ceil(K/128)) of each
                    // section, vertically adjacent. WHOLE: a value per section
    float* encode;      // with WHOLE, the factors of elements, per section; or null
    u16* amaxes_by_tile;  // with LINES, receives the amaxes of a tile's lines side by side, as bfloat16 (lines / 128, blocks
                          // of a line, 128), and `scales` nothing; or null
};

struct QuantizeFp8Parameters {
    const void* x;  // (M, K), any strides, float32, bfloat16 or float16
    i64 row_stride;
    i64 column_stride;
    i64 rows;             // M
    i64 columns;          // K
    const i64* sizes;     // rows m of each section along M, or null: the whole tensor is a section
    int sections;
    QuantizeFp8Variant variant;
    const float* given_scales;  // with WHOLE, factors of elements, per section (delayed scaling); or null
    u32* amax_out;              // with WHOLE, receives the amax of each section, float32 as bits, 0 before the launch; or null
    Output row;
    Output column;  // of the transpose (K, m) of the sections, which are contiguous: LINES (K, ceil(m/128)), TILES
                    // (ceil(K/128), ceil(m/128))
    float largest_element;
    float smallest_amax;
    float largest_scale;
};

__device__ __forceinline__ QuantizeFp8Variant variant_of(const QuantizeFp8Parameters& p) {
#ifdef VARIANT
    return VARIANT;
#else
    return p.variant;
#endif
}

// Settings of the quantization, the same for all threads.
struct Settings {
    int scale_block, e5m2;
    u32 limit;  // of magnitudes in an amax
    const float* given_scales;
    u32* amax_out;
    Fp8ScaleParameters scale;
};

__device__ __forceinline__ Settings settings_of(const QuantizeFp8Parameters& p) {
    const QuantizeFp8Variant variant = variant_of(p);
    return {variant.scale_block, variant.e5m2, amax_limit(variant.propagate_nan), p.given_scales, p.amax_out,
            Fp8ScaleParameters{p.largest_element, p.smallest_amax, p.largest_scale, variant.power_of_two}};
}

// Shared memory. Odd strides avoid bank conflicts.
struct Shared {
    u32 row_amaxes[TILE][ACROSS + 1];  // amax of each chunk of a row
    u32 line_amaxes[TILE];             // amax of each row of a tile
    float scales[2][TILE];             // of rows, of columns
    union {
        u32 column_amaxes[CHUNK][DOWN * ACROSS + 1];  // amax of each thread's part of column i of a chunk
        u32 codes[TILE][WORDS];                       // of the transpose
    };
};

// Up to TILE rows of a section.
struct TileRows {
    int section;
    i64 section_start;  // the section's first row in the tensor
    i64 section_rows;   // 0 if the tensor has no such strip
    i64 start;          // the strip's first row in the section
    i64 blocks_before;  // rows of blocks in the sections before
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

// First row and column of a patch in the tile, and the number of its columns inside the matrix.
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
    u32 maximum = 0;
    for (int n = 0; n < count; ++n) {
        const u32 value = get(n);
        maximum = value > maximum ? value : maximum;
    }
    return maximum;
}

__device__ __forceinline__ int at_most_tile(i64 count) { return count < TILE ? static_cast<int>(count) : TILE; }

__device__ __forceinline__ float scale_of_section(const float* amax, i64 section, const Settings& settings) {
    return settings.given_scales != nullptr ? settings.given_scales[section] : fp8_scale(amax[section], settings.scale);
}

__device__ __forceinline__ void write_scale_of_section(const Output& output, i64 section, const Settings& settings) {
    if (output.scales == nullptr) return;
    const float scale = scale_of_section(output.amax, section, settings);
    output.encode[section] = scale;
    output.scales[section] = 1.0f / scale;
}

// Index of the first of four words with the codes of rows 16 * `part` on of a column. It is permuted by the chunk: lanes
// write a word of eight chunks, and read four words of eight parts, without bank conflicts.
__device__ __forceinline__ int permuted_index(int column, int part) { return (part ^ column / CHUNK % (WORDS / 4)) * 4; }

template <class F>
__device__ __forceinline__ void write_rows(const float (&v)[ROWS][CHUNK], const float* scales, int rows, int columns,
                                           u8* target, i64 stride) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        if (k >= rows) return;
        u8 codes[CHUNK];
        encode_row<F>(v[k], scales[k], codes);
        store_partial(codes, columns, target + k * stride);
    }
}

template <class T>
__device__ void quantize(const T* x, i64 row_stride, i64 column_stride, i64 columns, Sections sections, Output row_output,
                         Output column_output, Settings settings) {
    __shared__ Shared shared;
    if (settings.scale_block == WHOLE) {  // scales of all sections, also of empty sections
        const i64 step = static_cast<i64>(gridDim.x) * THREADS;
        for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < sections.count; i += step) {
            write_scale_of_section(row_output, i, settings);
            write_scale_of_section(column_output, i, settings);
        }
    }
    const i64 blocks = (columns + TILE - 1) / TILE;  // of a row
    const i64 across = blocks > 0 ? blocks : 1;
    const TileRows strip = find_tile_rows(sections, blockIdx.x / across);
    if (strip.section_rows == 0 || columns == 0) return;
    const bool rowwise = row_output.scales != nullptr, columnwise = column_output.scales != nullptr;
    const i64 block = blockIdx.x % across;
    const i64 first_row = strip.section_start + strip.start, first_column = block * TILE;
    const int height = at_most_tile(strip.section_rows - strip.start), width = at_most_tile(columns - first_column);

    const int thread = threadIdx.x;

    // ---- elements, and the amax of each line ----
    float v[PATCHES][ROWS][CHUNK];
    u32 column_amaxes[CHUNKS][CHUNK] = {};
    for (int patch = 0; patch < PATCHES; ++patch) {
        const Patch patch_position = patch_of(thread, patch, width);
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int count = patch_position.row + k < height ? patch_position.count : 0;
            const T* source =
                x + (first_row + patch_position.row + k) * row_stride + (first_column + patch_position.column) * column_stride;
            if (count == CHUNK && column_stride == 1) {
                load_elements(source, v[patch][k]);
            } else {
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) v[patch][k][i] = i < count ? to_float(source[i * column_stride]) : 0.0f;
            }
        }
        if (settings.scale_block == WHOLE && settings.amax_out == nullptr) continue;
        u32 (&below)[CHUNK] = column_amaxes[patch % CHUNKS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            shared.row_amaxes[patch_position.row + k][patch_position.column / CHUNK] =
                amax_of_block(v[patch][k], settings.limit);
            if (settings.scale_block != LINES) continue;
            for (int i = 0; i < CHUNK; ++i) update_amax(v[patch][k][i], settings.limit, below[i]);
        }
    }

    // ---- scales ----
    const i64 section_blocks = (strip.section_rows + TILE - 1) / TILE, block_row = strip.start / TILE;
    if (settings.scale_block == LINES && columnwise) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            for (int c = 0; c < CHUNKS; ++c) shared.column_amaxes[i][thread * CHUNKS + c] = column_amaxes[c][i];
        }
    }
    const bool of_tile = settings.scale_block == TILES || settings.amax_out != nullptr;
    if (settings.scale_block == LINES || of_tile) {
        __syncthreads();
    }
    float scale = 0.0f;  // of the whole tile
    if (of_tile) {
        for (int line = thread; line < TILE; line += THREADS) {
            shared.line_amaxes[line] = largest(ACROSS, [&](int n) { return shared.row_amaxes[line][n]; });
        }
        __syncthreads();
        const u32 amax = largest(TILE, [&](int n) { return shared.line_amaxes[n]; });
        scale = fp8_scale(__uint_as_float(amax), settings.scale);
        if (thread == 0 && settings.scale_block == WHOLE) atomicMax(settings.amax_out + strip.section, amax);
        if (thread == 0 && settings.scale_block == TILES) {
            if (rowwise) row_output.scales[(strip.blocks_before + block_row) * blocks + block] = 1.0f / scale;
            if (columnwise) {
                column_output.scales[blocks * strip.blocks_before + block * section_blocks + block_row] = 1.0f / scale;
            }
        }
    }
    for (int n = thread; n < 2 * TILE; n += THREADS) {  // rows, then columns
        const bool is_row = n < TILE;
        const int line = n % TILE;
        if (!(is_row ? rowwise : columnwise)) continue;
        if (settings.scale_block == WHOLE) {
            scale = scale_of_section(is_row ? row_output.amax : column_output.amax, strip.section, settings);
        } else if (settings.scale_block == LINES) {
            const int chunk = line / CHUNK, i = line % CHUNK;
            const u32 amax = is_row ? largest(ACROSS, [&](int c) { return shared.row_amaxes[line][c]; })
                                    : largest(DOWN, [&](int d) { return shared.column_amaxes[i][d * ACROSS + chunk]; });
            scale = fp8_scale(__uint_as_float(amax), settings.scale);
            if (is_row && line < height) row_output.scales[(first_row + line) * blocks + block] = 1.0f / scale;
            if (!is_row && line < width) {
                const i64 first = columns * strip.blocks_before + (first_column + line) * section_blocks;
                column_output.scales[first + block_row] = 1.0f / scale;
            }
        }
        shared.scales[is_row ? 0 : 1][line] = scale;
    }
    __syncthreads();

    // ---- codes ----
    for (int patch = 0; patch < PATCHES; ++patch) {
        const Patch patch_position = patch_of(thread, patch, width);
        if (rowwise) {
            u8* target = row_output.codes + (first_row + patch_position.row) * columns + first_column + patch_position.column;
            if (settings.e5m2) {
                write_rows<E5M2>(v[patch], shared.scales[0] + patch_position.row, height - patch_position.row,
                                 patch_position.count, target, columns);
            } else {
                write_rows<E4M3>(v[patch], shared.scales[0] + patch_position.row, height - patch_position.row,
                                 patch_position.count, target, columns);
            }
        }
        if (columnwise) {
            float scales[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) scales[i] = shared.scales[1][patch_position.column + i];
            u32 words[CHUNK];
            if (settings.e5m2) {
                encode_columns<E5M2>(v[patch], scales, words);
            } else {
                encode_columns<E4M3>(v[patch], scales, words);
            }
            const int word =
                permuted_index(patch_position.column, patch_position.row / (4 * ROWS)) + patch_position.row / ROWS % 4;
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) shared.codes[patch_position.column + i][word] = words[i];
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
            codes[j] = static_cast<u8>(shared.codes[at][permuted_index(at, part) + j / 4] >> j % 4 * 8);
        }
        u8* target = column_output.codes + columns * strip.section_start + (first_column + at) * strip.section_rows +
                     strip.start + part * 16;
        store_partial(codes, left < 16 ? left : 16, target);
    }
}

#define QUANTIZE(TYPE, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        quantize_fp8_##TYPE(const __grid_constant__ QuantizeFp8Parameters p) {                                         \
        quantize(static_cast<const T*>(p.x), p.row_stride, p.column_stride, p.columns,                                 \
                 Sections{p.sizes, p.sections, p.rows}, p.row, p.column, settings_of(p));                              \
    }

// ---- whole tiles of bfloat16 -----------------------------------------------------------------------------------------

// With both outputs of 1x128 on an H200, stores of scales took a tenth of the time: four bytes occupy a sector of L2, as 32
// bytes of codes do. So a large matrix has its amaxes stored by tile first: 320 us, 323 without the policy evict_last. Thread
// blocks with 2, 4 or 8 neighbouring tiles that store the scales of their rows together are slower, and so are tiles in bands,
// and loads of x or stores of codes with evict_first.
constexpr int PIECE_ROWS = 8;  // 1x128, both outputs of 16384^2 on an H200: 0.324 ms, 0.333 with 4 and twice the threads
constexpr int TILE_BLOCKS_PER_SM = 4;  // limits a thread to 64 registers: 0.334 ms, 0.336 with 3
constexpr int PIECES_DOWN = TILE / PIECE_ROWS;
constexpr int TILE_THREADS = PIECES_DOWN * ACROSS_TILE;
static_assert(TILE == TILE_WIDTH, "a row of a tile is a block");
static_assert(TILE_THREADS == 2 * TILE, "a thread finds the scale of a row, or of a column");

struct SharedTile {
    union {
        Maxima<PIECE_ROWS, TILE> maxima;
        struct {
            u32 pieces[PIECES_DOWN][ACROSS_TILE];  // of each piece
            u32 columns[ACROSS_TILE];              // of each column of pieces
        } amaxes;
    };
    alignas(16) float factors[2][TILE];  // of rows, of columns
    alignas(16) u32 codes[TILE][WORDS];  // of the transpose
    u32 warp_maxima[TILE_THREADS / 32];
};

// Index of the word with the codes of rows 4 * word to 4 * word + 3 of a column of piece `across`. It is permuted: a warp,
// with sixteen pieces in two rows of pieces, has no bank conflicts. Four words of a column stay together.
__device__ __forceinline__ u32 permuted_word(u32 across, u32 word) {
    return word ^ (across / 2 % (WORDS / 4) * 4 + across % 2);
}

// Stores the amax of a block of line `line` of a strip of 128 lines with `blocks` blocks each, or the inverse of its factor.
__device__ __forceinline__ void store_scale(const Output& output, u32 amax, float factor, u32 strip, u32 line, u32 block,
                                            u32 blocks) {
    if (output.amaxes_by_tile != nullptr) {
        u16* target = output.amaxes_by_tile + ((strip * blocks + block) * TILE + line);
        ptx::st_global_L2_evict_last_u16(target, static_cast<u16>(amax >> 16));
    } else {
        output.scales[(strip * TILE + line) * blocks + block] = 1.0f / factor;
    }
}

template <class F, bool PROPAGATE_NAN>
__device__ __forceinline__ void quantize_tile(const bf16* x, i64 rows, i64 columns, const Output& row_output,
                                              const Output& column_output, const Settings& settings, SharedTile& shared) {
    const bool rowwise = row_output.scales != nullptr, columnwise = column_output.scales != nullptr;
    const u32 tiles_across = static_cast<u32>(columns / TILE), tiles_down = static_cast<u32>(rows / TILE);
    const u32 tile_row = blockIdx.x / tiles_across, tile_column = blockIdx.x % tiles_across;
    const u32 thread = threadIdx.x;
    const u32 down = thread / ACROSS_TILE, across = thread % ACROSS_TILE;
    const i64 first_row = static_cast<i64>(tile_row) * TILE, first_column = static_cast<i64>(tile_column) * TILE;
    const i64 start = (first_row + down * PIECE_ROWS) * columns + first_column + across * PIECE;

    Piece<PIECE_ROWS> piece;
    load_piece(x + start, columns, piece);

    // ---- factors of rows and columns ----
    if (settings.scale_block == LINES) {
        store_maxima<PROPAGATE_NAN>(piece, down, across, rowwise, columnwise, shared.maxima);
        __syncthreads();
        const bool is_row = thread < TILE;
        const u32 line = thread % TILE;
        if (is_row ? rowwise : columnwise) {
            const u32 amax = is_row ? amax_of_line<PROPAGATE_NAN, ACROSS_TILE>(shared.maxima.rows, 0, line)
                                    : amax_of_line<PROPAGATE_NAN, PIECES_DOWN>(shared.maxima.columns, 0, line);
            const float scale = fp8_scale(__uint_as_float(amax), settings.scale);
            shared.factors[is_row ? 0 : 1][line] = scale;
            if (is_row) {
                store_scale(row_output, amax, scale, tile_row, line, tile_column, tiles_across);
            } else {
                store_scale(column_output, amax, scale, tile_column, line, tile_row, tiles_down);
            }
        }
        __syncthreads();
    } else if (settings.scale_block == TILES) {
        shared.amaxes.pieces[down][across] = amax_of_piece<PROPAGATE_NAN>(piece);
        __syncthreads();
        if (thread < ACROSS_TILE) {
            shared.amaxes.columns[thread] = largest(PIECES_DOWN, [&](int n) { return shared.amaxes.pieces[n][thread]; });
        }
        __syncthreads();
    }
    float row_factor = 0.0f, column_factor = 0.0f;
    if (settings.scale_block == TILES) {
        const u32 amax = largest(ACROSS_TILE, [&](int n) { return shared.amaxes.columns[n]; });
        row_factor = column_factor = fp8_scale(__uint_as_float(amax), settings.scale);
        if (thread == 0) {
            if (rowwise) row_output.scales[static_cast<i64>(tile_row) * tiles_across + tile_column] = 1.0f / row_factor;
            if (columnwise) column_output.scales[static_cast<i64>(tile_column) * tiles_down + tile_row] = 1.0f / row_factor;
        }
    } else if (settings.scale_block == WHOLE) {
        if (rowwise) row_factor = scale_of_section(row_output.amax, 0, settings);
        if (columnwise) column_factor = scale_of_section(column_output.amax, 0, settings);
        if (tile_row == 0 && tile_column == 0 && thread == 0) {
            write_scale_of_section(row_output, 0, settings);
            write_scale_of_section(column_output, 0, settings);
        }
    }

    // ---- codes ----
#pragma unroll
    for (int group = 0; group < PIECE_ROWS; group += ROWS) {
        u32 row_codes[ROWS][PIECE / 4];
#pragma unroll
        for (int w = 0; w < PIECE / 4; ++w) {
            float v[ROWS][4];
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                v[k][0] = low_float(piece.words[group + k][2 * w]);
                v[k][1] = high_float(piece.words[group + k][2 * w]);
                v[k][2] = low_float(piece.words[group + k][2 * w + 1]);
                v[k][3] = high_float(piece.words[group + k][2 * w + 1]);
                if (!rowwise) continue;
                const float f = settings.scale_block == LINES ? shared.factors[0][down * PIECE_ROWS + group + k] : row_factor;
                row_codes[k][w] = four_codes<F>(v[k][0] * f, v[k][1] * f, v[k][2] * f, v[k][3] * f);
            }
            if (!columnwise) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 column = across * PIECE + 4 * w + i;
                const float f = settings.scale_block == LINES ? shared.factors[1][column] : column_factor;
                shared.codes[column][permuted_word(across, (down * PIECE_ROWS + group) / ROWS)] =
                    four_codes<F>(v[0][i] * f, v[1][i] * f, v[2][i] * f, v[3][i] * f);
            }
        }
        if (!rowwise) continue;
#pragma unroll
        for (int k = 0; k < ROWS; ++k) store_code_words(row_codes[k], row_output.codes + start + (group + k) * columns);
    }
    if (settings.amax_out != nullptr)
        block_atomic_max(shared.warp_maxima, amax_of_piece<PROPAGATE_NAN>(piece), settings.amax_out);
    if (!columnwise) return;
    __syncthreads();
#pragma unroll
    for (u32 n = 0; n < TILE * (WORDS / 4); n += TILE_THREADS) {
        const u32 column = (n + thread) / (WORDS / 4), part = (n + thread) % (WORDS / 4);
        u32 permuted[4], words[4];
        load_aligned(&shared.codes[column][permuted_word(column / PIECE, 4 * part) / 4 * 4], permuted);
        const bool odd = column / PIECE % 2 != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = odd ? permuted[j ^ 1] : permuted[j];
        store_code_words(words, column_output.codes + (first_column + column) * rows + first_row + 16 * part);
    }
}

template <class F>
__device__ __forceinline__ void quantize_tile(const bf16* x, i64 rows, i64 columns, const Output& row_output,
                                              const Output& column_output, const Settings& settings, int propagate_nan,
                                              SharedTile& shared) {
    if (propagate_nan) {
        quantize_tile<F, true>(x, rows, columns, row_output, column_output, settings, shared);
    } else {
        quantize_tile<F, false>(x, rows, columns, row_output, column_output, settings, shared);
    }
}

#if IN_UNIT(UNIT_TILES)
extern "C" __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_PER_SM)
    quantize_fp8_tiles_bf16(const __grid_constant__ QuantizeFp8Parameters p) {
    __shared__ SharedTile shared;
    const Settings settings = settings_of(p);
    const Output row_output = p.row, column_output = p.column;
    const bf16* x = static_cast<const bf16*>(p.x);
    if (settings.e5m2) {
        quantize_tile<E5M2>(x, p.rows, p.columns, row_output, column_output, settings, variant_of(p).propagate_nan, shared);
    } else {
        quantize_tile<E4M3>(x, p.rows, p.columns, row_output, column_output, settings, variant_of(p).propagate_nan, shared);
    }
}

constexpr int STORED_BLOCKS = 32;  // neighbouring scales of a line that a thread block stores: 128 bytes
constexpr int STORE_THREADS = 256;

extern "C" __global__ void __launch_bounds__(STORE_THREADS)
    store_scales(const __grid_constant__ QuantizeFp8Parameters p) {
    __shared__ float scales[STORED_BLOCKS][TILE + 1];
    ptx::griddepcontrol_wait();
    const Output output = blockIdx.z == 0 ? p.row : p.column;
    const i64 lines = blockIdx.z == 0 ? p.rows : p.columns, blocks = (blockIdx.z == 0 ? p.columns : p.rows) / TILE;
    const i64 strip = blockIdx.y, first = static_cast<i64>(blockIdx.x) * STORED_BLOCKS;
    if (output.amaxes_by_tile == nullptr || strip * TILE >= lines || first >= blocks) return;
    const int count = blocks - first < STORED_BLOCKS ? static_cast<int>(blocks - first) : STORED_BLOCKS;
    const u16* source = output.amaxes_by_tile + (strip * blocks + first) * TILE;
    const Fp8ScaleParameters parameters = settings_of(p).scale;
    constexpr int EACH = STORED_BLOCKS * TILE / STORE_THREADS;
    u16 loaded[EACH];  // all loads are in flight at the same time
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int n = i * STORE_THREADS + thread;
        loaded[i] = n < count * TILE ? source[n] : u16{0};
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int n = i * STORE_THREADS + thread;
        scales[n / TILE][n % TILE] = 1.0f / fp8_scale(to_float(bf16{loaded[i]}), parameters);
    }
    __syncthreads();
    float* target = output.scales + strip * TILE * blocks + first;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int n = i * STORE_THREADS + thread, line = n / STORED_BLOCKS, block = n % STORED_BLOCKS;
        if (block < count) target[line * blocks + block] = scales[block][line];
    }
}
#endif

#if IN_UNIT(UNIT_FP32)
QUANTIZE(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
QUANTIZE(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
QUANTIZE(fp16, fp16)
#endif

}  // namespace narrowgauge
