// quantize_mx: MX formats from one read of x: rowwise, columnwise (the transpose, quantized along M), or both.
//
//   Parameters: struct QuantizeMxParameters; the choices of a recipe: struct QuantizeMxVariant. The macro ELEMENT names the
//   format: E2M1, E2M3, E3M2, E4M3 or E5M2; a compilation per format.
//   quantize_mx: any matrix. Launch: GENERAL_THREADS threads for every tile of 64x64. A strip of 64 rows has ceil(K/64) tiles,
//   at least 1; ceil(M/64) strips, or with sections 1 more per section. With 128 threads, a thread quantizes a block
//   of 32 of a row, then one of a column. On a CPU there are 8 threads with 16 blocks, and a barrier is cheap.
//   quantize_mx_plain: contiguous, rowwise only, a recipe without further choices (square blocks, stochastic rounding and the
//   like); a thread for every 32 elements, in memory order.
//   quantize_mx_tiles: contiguous bfloat16, aligned to 16 bytes, M a multiple of 32 and K of 128, no sections, nearest even,
//   columnwise in position. Launch: TILE_THREADS threads for every tile of 32x128.
//   Numerics: docs/numerics.md#mx, float32 with one rounding per operation; elements nearest even or stochastic, saturating.
//   Philox: block n, counted along the lines of an output, sections in sequence, has the subsequences 2n and 2n + 1.
//   Everything is exact to the bit.

#include "common/blocks.cuh"
#include "layout/layout.cuh"
#include "common/mx.cuh"
#include "common/philox.cuh"
#include "common/sections.cuh"
#include "quantize/register_tile.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

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

constexpr int BLOCK = MX_BLOCK;
constexpr int THREADS = 128;
constexpr int GENERAL_THREADS = MX_THREADS;  // threads of the kernel for any matrix
constexpr int TILE = 64;
constexpr int TILE_BLOCKS = TILE / BLOCK;
constexpr int BLOCKS_PER_THREAD = TILE * TILE_BLOCKS / GENERAL_THREADS;  // of each output
static_assert(TILE == STRIP && BLOCKS_PER_THREAD * GENERAL_THREADS == TILE * TILE_BLOCKS, "threads cover the tile");

constexpr int PER_BYTE = Element::BITS == 4 ? 2 : 1;
constexpr int BYTES = BLOCK / PER_BYTE;

// The choices of a recipe beside the format of its elements.
struct QuantizeMxVariant {
    MxScaleOrder scale_order;
    u32 up_from;         // mantissa from which on the exponent of a scale is rounded up (e8m0_from_float)
    bool square_blocks;  // blocks are 32x32
    bool propagate_nan;
    bool in_place;    // columnwise codes are (m, K) and linear columnwise scales (ceil(m/32), K); not with E2M1
    bool stochastic;  // elements are rounded stochastically, else nearest even
    bool swizzled;    // scales are in the 128x4 layout
};

// One orientation of the result.
struct Output {
    int wanted;         // if 0, it is not written (empty codes have no address either)
    u8* codes;          // (M, K) bytes, a byte for each; E2M1: (M, ceil(K/2)), element 2j in the low nibble of byte j
    u8* scales;         // (M, ceil(K/32)) bytes, E8M0; if swizzled, the caller has set the padding to 0
    const u32* random;  // (M, ceil(K/4)) random words, or null: Philox generates them
    u64 offset;         // of Philox
};

struct QuantizeMxParameters {
    const void* x;  // (M, K), any strides, float32, bfloat16 or float16; a short last block counts as padded with zeros
    i64 row_stride;
    i64 column_stride;
    i64 rows;          // M
    i64 columns;       // K
    const i64* sizes;  // rows m of each section along M, or null: the whole tensor is a section
    int sections;
    Output row;
    Output column;  // of the transpose (K, m) of the sections, which are contiguous
    QuantizeMxVariant variant;
    u64 seed;  // of Philox
};

// Settings of the quantization, the same for all threads.
struct Settings : QuantizeMxVariant {
    u64 seed;
};

// Shared memory: elements, and amaxes of blocks of rows.
struct Shared {
    float values[TILE][TILE + 1];
    u32 amaxes[TILE][TILE_BLOCKS];
};

// A block of 32 in a matrix with lines of `length` elements. `count` of its elements lie inside the matrix.
struct BlockPosition {
    i64 line, start, length;
    i64 first_code, first_scale;  // of the section
    i64 transposed;               // number of lines if they are stored as columns, else 0
    int count;
};

__device__ __forceinline__ u32 amax_of_square_block(const u32 (&amaxes)[TILE][TILE_BLOCKS], int first_line, int block) {
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const u32 amax = amaxes[first_line + i][block];
        largest = amax > largest ? amax : largest;
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

__device__ __forceinline__ void round_stochastically(const float (&scaled)[BLOCK], const Output& output,
                                                     const BlockPosition& position, const Settings& settings,
                                                     u8 (&packed)[BYTES]) {
    u32 words[BLOCK / 4];
    if (output.random == nullptr) {
        const i64 blocks = (position.length + BLOCK - 1) / BLOCK;
        const u64 number = static_cast<u64>(position.first_scale + position.line * blocks + position.start / BLOCK);
        for (int j = 0; j < 2; ++j) {
            u32 four[4];
            philox(settings.seed, output.offset, 2u * number + static_cast<u64>(j), four);
            for (int k = 0; k < 4; ++k) words[4 * j + k] = four[k];
        }
    } else {
        const i64 line_words = (position.length + 3) / 4;
        for (int j = 0; j < BLOCK / 4; ++j) {
            const i64 word = position.start / 4 + j;
            words[j] = word < line_words ? output.random[position.line * line_words + word] : 0u;
        }
    }
    u8 bytes[BLOCK], codes[BLOCK];  // arrays of elements; a CPU vectorizes the loop
    for (int i = 0; i < BLOCK; ++i) bytes[i] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
    for (int i = 0; i < BLOCK; ++i) codes[i] = static_cast<u8>(stochastic<Element>(scaled[i], bytes[i]));
    pack(codes, packed);
}

__device__ __forceinline__ void write_block(const float (&v)[BLOCK], u32 amax, const Output& output,
                                            const BlockPosition& position, const Settings& settings) {
    const u8 scale = mx_scale<Element>(__uint_as_float(amax), settings.scale_order, settings.up_from);
    const float factor = mx_element_factor(scale);
    const i64 blocks = (position.length + BLOCK - 1) / BLOCK;
    const i64 block = position.start / BLOCK;
    const i64 linear = position.transposed != 0 ? block * position.transposed + position.line : position.line * blocks + block;
    output.scales[settings.swizzled ? swizzled_index(position.line, block, blocks) : position.first_scale + linear] = scale;

    float scaled[BLOCK];
    for (int i = 0; i < BLOCK; ++i) scaled[i] = v[i] * factor;
    u8 packed[BYTES];
    if (settings.stochastic) {
        round_stochastically(scaled, output, position, settings, packed);
    } else {
        round_to_nearest(scaled, packed);
    }
    if (position.transposed != 0) {
        u8* target = output.codes + position.first_code + position.start * position.transposed + position.line;
        for (int i = 0; i < position.count; ++i) target[i * position.transposed] = packed[i];
        return;
    }
    const i64 line_bytes = (position.length + PER_BYTE - 1) / PER_BYTE;
    u8* target = output.codes + position.first_code + position.line * line_bytes + position.start / PER_BYTE;
    if (position.count == BLOCK) {
        store_bytes(packed, target);
    } else {
        for (int j = 0; j < (position.count + PER_BYTE - 1) / PER_BYTE; ++j) target[j] = packed[j];
        // Padding is code 0 also if the factor is NaN.
        if (position.count % PER_BYTE != 0) target[position.count / PER_BYTE] &= 0xFu;
    }
}

// `x`: a Matrix, or another source of rows.
template <class Source>
__device__ void quantize(const Source& x, i64 columns, Sections sections, Output row_output, Output column_output,
                         Settings settings) {
    __shared__ Shared shared;
    const u32 across = columns > 0 ? static_cast<u32>((columns + TILE - 1) / TILE) : 1u;
    const Strip strip = find_strip<BLOCK, PER_BYTE>(sections, blockIdx.x / across, columns);
    if (strip.section_rows == 0) return;
    const int first = static_cast<int>(threadIdx.x) * BLOCKS_PER_THREAD;
    const i64 first_column = static_cast<i64>(blockIdx.x % across) * TILE;
    const u32 limit = amax_limit(settings.propagate_nan);
    float v[BLOCKS_PER_THREAD][BLOCK];
    u32 amaxes[BLOCKS_PER_THREAD];
    int counts[BLOCKS_PER_THREAD];

    // ---- blocks of rows ----
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const int line = (first + n) / TILE_BLOCKS, block = (first + n) % TILE_BLOCKS;
        const i64 row = strip.section_start + strip.start + line;
        const i64 column = first_column + block * BLOCK;
        counts[n] = valid_count<BLOCK>(strip.start + line < strip.section_rows ? columns - column : 0);
        x.load(row, column, counts[n], v[n]);
        if (column_output.wanted) {
            for (int i = 0; i < BLOCK; ++i) shared.values[line][block * BLOCK + i] = v[n][i];
        }
        amaxes[n] = amax_of_block(v[n], limit);
        if (settings.square_blocks) shared.amaxes[line][block] = amaxes[n];
    }
    if (settings.square_blocks || column_output.wanted) __syncthreads();
    if (row_output.wanted) {
#pragma unroll
        for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
            const int line = (first + n) / TILE_BLOCKS, block = (first + n) % TILE_BLOCKS;
            if (counts[n] == 0) continue;
            if (settings.square_blocks) amaxes[n] = amax_of_square_block(shared.amaxes, line / BLOCK * BLOCK, block);
            const i64 row = strip.section_start + strip.start + line;
            const BlockPosition position = {row, first_column + block * BLOCK, columns, 0, 0, 0, counts[n]};
            write_block(v[n], amaxes[n], row_output, position, settings);
        }
    }
    if (!column_output.wanted) return;

    // ---- blocks of columns ----
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const int line = (first + n) % TILE, block = (first + n) / TILE;
        const i64 column = first_column + line;
        const i64 start = strip.start + block * BLOCK;
        const int count = valid_count<BLOCK>(column < columns ? strip.section_rows - start : 0);
        if (count == 0) continue;
        for (int i = 0; i < BLOCK; ++i) v[n][i] = shared.values[block * BLOCK + i][line];
        const u32 amax = settings.square_blocks ? amax_of_square_block(shared.amaxes, block * BLOCK, line / BLOCK)
                                                : amax_of_block(v[n], limit);
        const i64 transposed = settings.in_place ? columns : 0;
        const BlockPosition position = {column, start, strip.section_rows, strip.codes_t, strip.scales_t, transposed, count};
        write_block(v[n], amax, column_output, position, settings);
    }
}

// Rowwise, contiguous, without further choices of the recipe.
template <class T>
__device__ void quantize_plain(const T* x, i64 rows, i64 columns, Output output, Settings settings) {
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= rows * ((columns + BLOCK - 1) / BLOCK)) return;
    const LinearBlock block = linear_block<BLOCK>(rows, columns, index);
    float v[BLOCK];
    load_block(x + block.line * columns + block.start, 1, block.count, v);
    const u32 amax = amax_of_block(v, amax_limit(settings.propagate_nan));
    write_block(v, amax, output, BlockPosition{block.line, block.start, block.length, 0, 0, 0, block.count}, settings);
}

// With quantize_mx_plain, only the rounding of scales and the handling of NaN depend on the recipe.
__device__ __forceinline__ Settings plain_settings(const QuantizeMxParameters& p) {
    QuantizeMxVariant variant = {};
    variant.scale_order = p.variant.scale_order;
    variant.up_from = p.variant.up_from;
    variant.propagate_nan = p.variant.propagate_nan;
    return {variant, 0u};
}

// ---- whole tiles of bfloat16 -----------------------------------------------------------------------------------------

// Rows of a thread's piece. Both outputs of 16384^2 on an H200: 91 % of the rate of a copy, 88 % with 4 rows and twice the
// threads. On a CPU, where a barrier is expensive, a thread has all rows.
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
constexpr int PIECES_ACROSS = BLOCK / PIECE;  // pieces across a block

struct SharedTile {
    Maxima<PIECE_ROWS, BLOCK> maxima;
    u32 pieces[PIECES_DOWN][ACROSS_TILE];                     // amax of each piece, with square blocks
    alignas(16) float row_factors[BLOCKS_ACROSS][BLOCK + 8];  // padded against bank conflicts
    alignas(16) float column_factors[TILE_WIDTH];
};

// Amax of a block of 32x32.
__device__ __forceinline__ u32 amax_of_square_block(const SharedTile& shared, int block) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < PIECES_DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < PIECES_ACROSS; ++j) {
            const u32 amax = shared.pieces[i][block * PIECES_ACROSS + j];
            largest = amax > largest ? amax : largest;
        }
    }
    return largest;
}

// Stores the scale of a block. Returns the factor of its elements.
__device__ __forceinline__ float write_scale(u32 amax, const Output& output, i64 line, i64 block, i64 blocks, i64 linear,
                                             const Settings& settings) {
    const u8 scale = mx_scale<Element>(__uint_as_float(amax), settings.scale_order, settings.up_from);
    output.scales[settings.swizzled ? swizzled_index(line, block, blocks) : linear] = scale;
    return mx_element_factor(scale);
}

// Stores the codes of eight numbers, each with its factor.
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

// Specialised by the outputs: the unrolled loop over rows has no branches.
template <bool PROPAGATE_NAN, bool ROWWISE, bool COLUMNWISE>
__device__ __forceinline__ void quantize_tile(const bf16* x, i64 rows, i64 columns, const Output& row_output,
                                              const Output& column_output, const Settings& settings, SharedTile& shared) {
    const u32 tiles_across = static_cast<u32>(columns / TILE_WIDTH);
    const i64 block_row = blockIdx.x / tiles_across, first_row = block_row * BLOCK;
    const i64 first_column = static_cast<i64>(blockIdx.x % tiles_across) * TILE_WIDTH;
    const int thread = threadIdx.x;
    const int down = thread / ACROSS_TILE, across = thread % ACROSS_TILE;
    const i64 start = (first_row + down * PIECE_ROWS) * columns + first_column + across * PIECE;

    Piece<PIECE_ROWS> piece;
    load_piece(x + start, columns, piece);
    if (settings.square_blocks) {
        shared.pieces[down][across] = amax_of_piece<PROPAGATE_NAN>(piece);
    } else {
        store_maxima<PROPAGATE_NAN>(piece, down, across, ROWWISE, COLUMNWISE, shared.maxima);
    }
    __syncthreads();

    // ---- scales: consecutive threads write consecutive bytes, of four blocks of a row, or of the blocks of columns ----
    if constexpr (ROWWISE) {
        const i64 blocks = columns / BLOCK;
#pragma unroll
        for (int n = 0; n < BLOCK * BLOCKS_ACROSS; n += TILE_THREADS) {
            const int row = (n + thread) / BLOCKS_ACROSS, number = (n + thread) % BLOCKS_ACROSS;
            const u32 amax = settings.square_blocks ? amax_of_square_block(shared, number)
                                        : amax_of_line<PROPAGATE_NAN, PIECES_ACROSS>(
                                              shared.maxima.rows, number * PIECES_ACROSS, row);
            const i64 line = first_row + row, block = first_column / BLOCK + number;
            shared.row_factors[number][row] =
                write_scale(amax, row_output, line, block, blocks, line * blocks + block, settings);
        }
    }
    if constexpr (COLUMNWISE) {
#pragma unroll
        for (int n = 0; n < TILE_WIDTH; n += TILE_THREADS) {
            const int column = n + thread;
            const u32 amax = settings.square_blocks ? amax_of_square_block(shared, column / BLOCK)
                                        : amax_of_line<PROPAGATE_NAN, PIECES_DOWN>(shared.maxima.columns, 0, column);
            const i64 line = first_column + column;
            shared.column_factors[column] =
                write_scale(amax, column_output, line, block_row, rows / BLOCK, block_row * columns + line, settings);
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
            v[2 * j] = low_float(piece.words[k][j]);
            v[2 * j + 1] = high_float(piece.words[k][j]);
        }
        for (int i = 0; i < PIECE; ++i) of_row[i] = factor;
        const i64 target = (start + k * columns) / PER_BYTE;
        if constexpr (ROWWISE) write_piece(v, of_row, row_output.codes + target);
        if constexpr (COLUMNWISE) write_piece(v, of_columns, column_output.codes + target);
    }
}

template <bool PROPAGATE_NAN>
__device__ __forceinline__ void quantize_tile(const QuantizeMxParameters& p, SharedTile& shared) {
    const bf16* x = static_cast<const bf16*>(p.x);
    const Output row = p.row, column = p.column;
    const Settings settings = {p.variant, p.seed};
    if (row.wanted && column.wanted) {
        quantize_tile<PROPAGATE_NAN, true, true>(x, p.rows, p.columns, row, column, settings, shared);
    } else if (row.wanted) {
        quantize_tile<PROPAGATE_NAN, true, false>(x, p.rows, p.columns, row, column, settings, shared);
    } else {
        quantize_tile<PROPAGATE_NAN, false, true>(x, p.rows, p.columns, row, column, settings, shared);
    }
}

#if IN_UNIT(UNIT_TILES)
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    quantize_mx_tiles_bf16(const __grid_constant__ QuantizeMxParameters p) {
    __shared__ SharedTile shared;
    if (p.variant.propagate_nan) {
        quantize_tile<true>(p, shared);
    } else {
        quantize_tile<false>(p, shared);
    }
}
#endif

#define QUANTIZE(TYPE, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                      \
        quantize_mx_##TYPE(const __grid_constant__ QuantizeMxParameters p) {                                           \
        quantize(Matrix<T>{static_cast<const T*>(p.x), p.row_stride, p.column_stride}, p.columns,                      \
                 Sections{p.sizes, p.sections, p.rows}, p.row, p.column, Settings{p.variant, p.seed});                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        quantize_mx_plain_##TYPE(const __grid_constant__ QuantizeMxParameters p) {                                     \
        quantize_plain(static_cast<const T*>(p.x), p.rows, p.columns,                                                  \
                       Output{1, p.row.codes, p.row.scales, nullptr, 0}, plain_settings(p));                           \
    }

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
