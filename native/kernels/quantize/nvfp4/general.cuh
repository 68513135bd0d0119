// nvfp4/general.cuh: NVFP4 of any matrix, in tiles of 64x64, and the parts shared with the kernel for whole tiles of
// bfloat16. The contract is in quantize_nvfp4.cu.
#pragma once

#include "common/blocks.cuh"
#include "common/hadamard.cuh"
#include "layout/layout.cuh"
#include "common/nvfp4.cuh"
#include "common/philox.cuh"
#include "common/sections.cuh"

namespace narrowgauge {

#ifndef NVFP4_THREADS
#ifdef __CUDA_ARCH__
#define NVFP4_THREADS 256
#else
#define NVFP4_THREADS 8
#endif
#endif

constexpr int THREADS = 256;
constexpr int GENERAL_THREADS = NVFP4_THREADS;  // threads of the kernel for any matrix
constexpr int TILE = 64;
constexpr int TILE_BLOCKS = TILE / BLOCK;
constexpr int BLOCKS_PER_THREAD = TILE * TILE_BLOCKS / GENERAL_THREADS;  // of each output
static_assert(TILE == STRIP && BLOCKS_PER_THREAD * GENERAL_THREADS == TILE * TILE_BLOCKS, "threads cover the tile");

// Scales of a block that are tried: 6 alone, or 4 and 6 (4over6), of which the one with the smaller sum of absolute or squared
// errors is chosen.
enum ScaleCandidates : int { SIX = 0, FOUR_OR_SIX_BY_ABSOLUTE_ERROR = 1, FOUR_OR_SIX_BY_SQUARED_ERROR = 2 };

// Groups of 16 with a rotation before quantization: along K in the rowwise output, or along M in the columnwise output.
enum Rotation : int { NO_ROTATION = 0, ROTATE_ROWS = 1, ROTATE_COLUMNS = 2 };

// The choices of a recipe. On a GPU the macro VARIANT gives their values, and a variant is compiled separately. On a CPU
// they are parameters of the kernel.
struct QuantizeNvfp4Variant {
    ScaleCandidates candidates;
    bool square_blocks;  // blocks are 16x16. The choice of 4over6 is made by errors along rows, for both outputs
    bool amax_per_row;   // every row, or column of the columnwise output, has an amax
    bool propagate_nan;
    Rotation rotation;
    u32 signs;           // of the rotation, bit i for element i of a group
    bool stochastic;     // elements are rounded stochastically, else nearest even
    bool random_given;   // random words are given, else Philox generates them
    bool swizzled;       // scales are in the 128x4 layout
    BlockScaleOrder scale_order;
};

struct QuantizeNvfp4Parameters {
    const void* x;  // (M, K), any strides, float32, bfloat16 or float16; a short last block counts as padded with zeros
    i64 row_stride;
    i64 column_stride;
    i64 rows;          // M
    i64 columns;       // K
    const i64* sizes;  // rows m of each section along M, or null: the whole tensor is a section
    int sections;
    float max_product;  // 2688 = 448 * 6, or 1536 = 256 * 6
    QuantizeNvfp4Variant variant;
    u64 seed;  // of Philox
};

__device__ __forceinline__ QuantizeNvfp4Variant variant_of(const QuantizeNvfp4Parameters& p) {
#ifdef VARIANT
    return VARIANT;
#else
    return p.variant;
#endif
}

// An orientation of the result. The kernel skips it if `tensor_scale` is null (empty codes have no address either).
struct Output {
    const float* amax;    // of each section, or of each row if amax_per_row
    u8* codes;            // (M, ceil(K/2)) bytes, element 2j in the low nibble of byte j
    u8* scales;           // (M, ceil(K/16)) bytes, decode scales in E4M3; if swizzled, the caller has set the padding to 0
    float* tensor_scale;  // encode factors, per amax
    const u32* random;    // (M, ceil(K/4)) random words; or null
    u64 offset;           // of Philox
};

// Settings of the quantization, the same for all threads.
struct Settings : QuantizeNvfp4Variant {
    float max_product;
    u64 seed;
};

// Shared memory: elements, amaxes of the blocks of both outputs, errors of the blocks of rows.
struct Shared {
    float values[TILE * (TILE + 1) + TILE_BLOCKS * 8];
    u32 amaxes[TILE][TILE_BLOCKS], amaxes_t[TILE][TILE_BLOCKS];
    float errors[2][TILE][TILE_BLOCKS];
};

// Index of an element in `values`, padded: a warp reads blocks of rows and of columns without bank conflicts.
__device__ __forceinline__ int value_index(int row, int column) { return row * (TILE + 1) + row / BLOCK * 8 + column; }

// A block of 16 in a matrix with lines of `length` elements. `count` of its elements lie inside the matrix.
struct BlockPosition {
    i64 line, start, length;
    i64 first_code, first_scale;  // of the section
    int count;
};

__device__ __forceinline__ u32 amax_of_square_block(const u32 (&amaxes)[TILE][TILE_BLOCKS], int line, int block) {
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const u32 amax = amaxes[line / BLOCK * BLOCK + i][block];
        largest = amax > largest ? amax : largest;
    }
    return largest;
}

// Sum of the errors of the 16 rows of a square block, in a tree: rows 8 apart, then 4, 2 and 1 apart.
__device__ __forceinline__ float error_of_square_block(const float (&errors)[TILE][TILE_BLOCKS], int line, int block) {
    float sums[BLOCK];
    for (int i = 0; i < BLOCK; ++i) sums[i] = errors[line / BLOCK * BLOCK + i][block];
    for (int apart = BLOCK / 2; apart > 0; apart /= 2) {
        for (int i = 0; i < apart; ++i) sums[i] += sums[i + apart];
    }
    return sums[0];
}

// Error of a block with a scale, summed in the order of its elements.
__device__ float error_of_block(const float (&v)[BLOCK], u8 scale, float encode, float amax, Settings settings) {
    const float factor = nvfp4_element_factor(scale, encode);
    const float decoded = e4m3_to_float(scale);
    float total = 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        const float q = e2m1_to_float(e2m1_from_float(v[i] * factor));
        const float error = q * decoded * amax / settings.max_product - v[i];
        const float magnitude = __uint_as_float(__float_as_uint(error) & 0x7FFFFFFFu);
        total += settings.candidates == FOUR_OR_SIX_BY_ABSOLUTE_ERROR ? magnitude : error * error;
    }
    return total;
}

// Stores the scale of a block. Returns the index of the block in linear layout, which is the subsequence of Philox.
__device__ __forceinline__ i64 write_scale(u8 scale, const Output& output, const BlockPosition& position,
                                           const Settings& settings) {
    const i64 blocks = (position.length + BLOCK - 1) / BLOCK;
    const i64 block = position.start / BLOCK;
    const i64 index = position.first_scale + position.line * blocks + block;
    output.scales[settings.swizzled ? swizzled_index(position.line, block, blocks) : index] = scale;
    return index;
}

__device__ __forceinline__ u8* code_address(const Output& output, const BlockPosition& position) {
    return output.codes + position.first_code + position.line * ((position.length + 1) / 2) + position.start / 2;
}

// Loads the four random words of a block from index `first` on. The line has `left` more words; further words are 0.
__device__ __forceinline__ void load_random_words(const Output& output, i64 first, i64 left, u32 (&words)[4]) {
    for (int j = 0; j < 4; ++j) words[j] = j < left ? output.random[first + j] : 0u;
}

__device__ __forceinline__ void write_block(const float (&v)[BLOCK], u8 scale, float encode, const Output& output,
                                            const BlockPosition& position, const Settings& settings) {
    const float factor = nvfp4_element_factor(scale, encode);
    const i64 index = write_scale(scale, output, position, settings);

    float scaled[BLOCK];
    for (int i = 0; i < BLOCK; ++i) scaled[i] = v[i] * factor;
    u8 packed[BLOCK / 2];
    if (settings.stochastic) {
        u32 words[4];
        if (settings.random_given) {
            const i64 row_words = (position.length + 3) / 4, word = position.start / 4;
            load_random_words(output, position.line * row_words + word, row_words - word, words);
        } else {
            philox(settings.seed, output.offset, static_cast<u64>(index), words);
        }
        e2m1x16_stochastic(scaled, words, packed);
    } else {
        e2m1x16_from_float(scaled, packed);
    }
    u8* target = code_address(output, position);
    if (position.count == BLOCK) {
        store_bytes(packed, target);
    } else {
        for (int j = 0; j < BLOCK / 2; ++j) {  // a constant trip count keeps `packed` in registers
            if (2 * j < position.count) target[j] = packed[j];
        }
        if (position.count % 2 != 0) target[position.count / 2] &= 0xFu;  // padding is code 0 also if the factor is NaN
    }
}

// The two candidates of 4over6; equal without 4over6.
struct Scales {
    u8 six, four;
};

__device__ __forceinline__ Scales candidate_scales(u32 amax, float encode, const Settings& settings) {
    const float scale = nvfp4_unrounded_scale(__uint_as_float(amax), encode, settings.scale_order);
    const u8 six = e4m3_from_float(scale);
    return {six, settings.candidates != SIX ? e4m3_from_float(scale * 1.5f) : six};
}

__device__ __forceinline__ u8 chosen_scale(const float (&v)[BLOCK], Scales scales, float encode, float amax,
                                           const Settings& settings) {
    if (settings.candidates == SIX) return scales.six;
    const float six = error_of_block(v, scales.six, encode, amax, settings);
    return error_of_block(v, scales.four, encode, amax, settings) < six ? scales.four : scales.six;
}

template <int THREADS>
__device__ __forceinline__ void write_tensor_scales(const Output& output, i64 count, float max_product) {
    if (output.tensor_scale == nullptr) return;
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        output.tensor_scale[i] = nvfp4_tensor_scale(output.amax[i], max_product);
    }
}

// Block `n` of a thread in the tile: its line, and its index in the line.
struct TileBlock {
    int line, block;
};

__device__ __forceinline__ TileBlock tile_block(int n) {
    const int number = static_cast<int>(threadIdx.x) * BLOCKS_PER_THREAD + n;
    return {number / TILE_BLOCKS, number % TILE_BLOCKS};
}

// `x`: a Matrix, or another source of rows.
template <class Source>
__device__ void quantize(const Source& x, i64 columns, Sections sections, Output row_output, Output column_output,
                         Settings settings) {
    __shared__ Shared shared;
    const bool rowwise = row_output.tensor_scale != nullptr, columnwise = column_output.tensor_scale != nullptr;
    write_tensor_scales<GENERAL_THREADS>(row_output, settings.amax_per_row ? sections.rows : sections.count,
                                         settings.max_product);
    write_tensor_scales<GENERAL_THREADS>(column_output, settings.amax_per_row ? columns : sections.count, settings.max_product);
    const u32 across = columns > 0 ? static_cast<u32>((columns + TILE - 1) / TILE) : 1u;
    const Strip strip = find_strip<BLOCK, 2>(sections, blockIdx.x / across, columns);
    if (strip.section_rows == 0) return;
    const i64 first_column = static_cast<i64>(blockIdx.x % across) * TILE;
    const u32 limit = amax_limit(settings.propagate_nan);
    const bool square_choice = settings.square_blocks && settings.candidates != SIX;
    const Output& measured = rowwise ? row_output : column_output;  // its amax decides the choice of a square block
    float v[BLOCKS_PER_THREAD][BLOCK];
    u32 amaxes[BLOCKS_PER_THREAD];
    int counts[BLOCKS_PER_THREAD];

    // ---- blocks of rows ----
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const auto [line, block] = tile_block(n);
        const i64 row = strip.section_start + strip.start + line;
        const i64 column = first_column + block * BLOCK;
        const i64 left = strip.start + line < strip.section_rows ? columns - column : 0;
        counts[n] = valid_count<BLOCK>(left);
        x.load(row, column, counts[n], v[n]);
        if (columnwise) {
            float* values = &shared.values[value_index(line, block * BLOCK)];
            for (int i = 0; i < BLOCK; ++i) values[i] = v[n][i];
        }
        if ((settings.rotation & ROTATE_ROWS) != 0) rotate16(v[n], settings.signs);
        amaxes[n] = amax_of_block(v[n], limit);
        if (settings.square_blocks) shared.amaxes[line][block] = amaxes[n];
    }
    if (settings.square_blocks || columnwise) __syncthreads();
    if (rowwise || square_choice) {
        float gamaxes[BLOCKS_PER_THREAD], encodes[BLOCKS_PER_THREAD];
        Scales scales[BLOCKS_PER_THREAD];
#pragma unroll
        for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
            const auto [line, block] = tile_block(n);
            if (settings.square_blocks) amaxes[n] = amax_of_square_block(shared.amaxes, line, block);
            const i64 row = strip.section_start + strip.start + line;
            const float gamax = counts[n] == 0 ? 0.0f : measured.amax[settings.amax_per_row ? row : strip.section];
            const float encode = nvfp4_tensor_scale(gamax, settings.max_product);
            scales[n] = candidate_scales(amaxes[n], encode, settings);
            if (square_choice) {
                shared.errors[0][line][block] = error_of_block(v[n], scales[n].six, encode, gamax, settings);
                shared.errors[1][line][block] = error_of_block(v[n], scales[n].four, encode, gamax, settings);
            }
            gamaxes[n] = gamax;
            encodes[n] = encode;
        }
        if (square_choice) __syncthreads();
#pragma unroll
        for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
            const auto [line, block] = tile_block(n);
            u8 scale;
            if (square_choice) {
                const float six = error_of_square_block(shared.errors[0], line, block);
                scale = error_of_square_block(shared.errors[1], line, block) < six ? scales[n].four : scales[n].six;
            } else {
                scale = chosen_scale(v[n], scales[n], encodes[n], gamaxes[n], settings);
            }
            if (rowwise && counts[n] > 0) {
                const i64 row = strip.section_start + strip.start + line;
                const BlockPosition position = {row, first_column + block * BLOCK, columns, 0, 0, counts[n]};
                write_block(v[n], scale, encodes[n], row_output, position, settings);
            }
        }
    }
    if (!columnwise) return;

    // ---- blocks of columns ----
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const auto [line, block] = tile_block(n);
        for (int i = 0; i < BLOCK; ++i) v[n][i] = shared.values[value_index(block * BLOCK + i, line)];
    }
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const auto [line, block] = tile_block(n);
        if ((settings.rotation & ROTATE_COLUMNS) != 0) rotate16(v[n], settings.signs);
        amaxes[n] = amax_of_block(v[n], limit);
        if (settings.square_blocks) shared.amaxes_t[line][block] = amaxes[n];
    }
    if (settings.square_blocks) __syncthreads();
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const auto [line, block] = tile_block(n);
        const i64 column = first_column + line;
        const i64 start = strip.start + block * BLOCK;
        const int count = valid_count<BLOCK>(column < columns ? strip.section_rows - start : 0);
        if (count == 0) continue;
        if (settings.square_blocks) amaxes[n] = amax_of_square_block(shared.amaxes_t, line, block);
        const float gamax = column_output.amax[settings.amax_per_row ? column : strip.section];
        const float encode = nvfp4_tensor_scale(gamax, settings.max_product);
        const Scales scales = candidate_scales(amaxes[n], encode, settings);
        u8 scale;
        if (square_choice) {
            const float six = error_of_square_block(shared.errors[0], block * BLOCK, line / BLOCK);
            scale = error_of_square_block(shared.errors[1], block * BLOCK, line / BLOCK) < six ? scales.four : scales.six;
        } else {
            scale = chosen_scale(v[n], scales, encode, gamax, settings);
        }
        const BlockPosition position = {column, start, strip.section_rows, strip.codes_t, strip.scales_t, count};
        write_block(v[n], scale, encode, column_output, position, settings);
    }
}

}  // namespace narrowgauge
