// nvfp4/tiles.cuh: NVFP4 of packed blocks of bfloat16 and of whole tiles of 64x128. The contract is in quantize_nvfp4.cu.
#pragma once

#include "quantize/nvfp4/four_over_six.cuh"
#include "quantize/nvfp4/general.cuh"
#include "quantize/shared_tile.cuh"
#include "common/packed_bf16.cuh"

namespace narrowgauge {

struct QuantizedBlock {
    u8 scale;
    PackedE2m1 codes;
};

// Quantizes a block of 16 bfloat16 numbers, which may be infinite or NaN, to nearest even.
__device__ __forceinline__ QuantizedBlock quantize_block(const PackedBf16& x, float encode, const Settings& settings) {
    const u32 amax = amax_of_packed(x, magnitude_bound(x), amax_limit(settings.propagate_nan));
    const u8 scale = candidate_scales(amax, encode, settings).six;
    return {scale, e2m1x16_of_products(x, nvfp4_element_factor(scale, encode), nullptr)};
}

// Thread blocks of a multiprocessor, for an occupancy that leaves a thread 64 registers. With 3 thread blocks and 80 registers
// both outputs of nvfp4-rht-sr take an H200 as long: 16384^2 0.294 ms in place of 0.293, 8192^2 79.2 us in place of 79.7.
constexpr int TILE_BLOCKS_PER_SM = 4;
constexpr int WARPS = THREADS / 32;
constexpr int WARP_ROWS = TILE_ROWS / WARPS;                              // rows of a warp, for blocks of rows
constexpr int TILE_BLOCKS_PER_THREAD = TILE_ROWS * ROW_BLOCKS / THREADS;  // of each output
constexpr int SCALES = 128;                                               // codes of E4M3 without a sign
static_assert(WARP_ROWS % TILE_BLOCKS_PER_THREAD == 0 && BLOCK % WARP_ROWS == 0, "a warp has whole rows of a square block");
static_assert(2 * SCALES == THREADS, "a thread computes one factor");
static_assert(TILE_BLOCKS_PER_THREAD == 2, "a row and the next row, a chunk and the next chunk");

// For a scale: the factor of packed elements on the fast path, and the magnitude from which on the fast path is wrong.
struct Factor {
    float value, bound;
};

// The encode factor of a row or column, and its reciprocal.
struct LineScale {
    float encode, inverse;
};
constexpr int MOST_ROWS = TILE_ROWS * MAX_TILES;  // rows of a thread block

// Of an amax per output.
struct OutputFactors {
    Factor factors[2][SCALES];
    float general_factors[2][SCALES];  // for blocks of any numbers
};

// Of amax_per_row.
struct LineScales {
    LineScale rows[MOST_ROWS];
    LineScale columns[TILE_COLUMNS];
};

struct SharedTiles {
    Tiles tiles;
    union {
        OutputFactors outputs;
        LineScales lines;
    };
    u32 amaxes[2][WARPS][ROW_BLOCKS];
    alignas(16) u8 scales_t[TILE_COLUMNS][MAX_TILES][COLUMN_BLOCKS];  // scales of columns, a word per tile
};
constexpr int NEXT_COLUMN = 8 * MAX_TILES * COLUMN_BLOCKS;  // from the scale of a thread's first column to the second one

// One word with two magnitudes, bfloat16 as bits of float32: the amax, which leaves NaN out, and the bound, which does not.
// max_magnitudes compares both. A stripe is 16 rows of a tile, which two warps share.
__device__ __forceinline__ u32 amax_and_bound(u32 amax, u32 bound) { return amax | bound >> 16; }
__device__ __forceinline__ u32 amax_of(u32 both) { return both & 0x7FFF0000u; }
__device__ __forceinline__ u32 bound_of(u32 both) { return (both & 0x7FFFu) << 16; }

__device__ __forceinline__ u32 maximum_of_stripe(const u32 (&amaxes)[WARPS][ROW_BLOCKS], int stripe, int block) {
    static_assert(BLOCK / WARP_ROWS == 2, "two warps");
    return max_magnitudes(amaxes[2 * stripe][block], amaxes[2 * stripe + 1][block]);
}

// On the fast path, packed elements of a rotated output are FOURFOLD, four times the rotated numbers.
constexpr float FOURFOLD = 4.0f;

// Data shared by all blocks of an output.
struct OutputContext {
    float amax, encode, finite_encode;  // encode factor of numbers, and of packed elements on the fast path
    u32 blocks;                         // of a line
    const Factor (&factors)[SCALES];
    const float (&general_factors)[SCALES];
    const LineScale* lines;             // with amax_per_row, of the thread block's rows or columns
    const Output& output;
    const Settings& settings;
    const PhiloxKeys& keys;
    bool rotated;
    ErrorUnits units;
};

#ifdef HAS_E2M1_BY_ADDITION
// Magnitudes below the bound have products below 7, or below 8 with stochastic rounding. Rotated numbers below 2^-126 are not
// FOURFOLD exactly. With a factor below 2^116 their products are at most 2^-10, and their code is 0 for every random byte; with
// a larger factor they matter, and the bound admits zeros only. If powers of two times the factor may not be exact, or the
// factor is NaN, the bound admits zeros only or no number.
__device__ __forceinline__ Factor table_factor(u8 scale, const OutputContext& context) {
    const float factor = context.general_factors[scale], words = context.rotated ? 1.0f / FOURFOLD : 1.0f;
    const float below = context.settings.stochastic ? 7.99f : 6.99f;
    const float bound = e4m3_to_float(scale) * (1.0f / context.encode) * (context.rotated ? below * FOURFOLD : below);
    const float extreme_bound = factor >= 0x1p116f ? 0x1p-149f : 0.0f;
    return {factor * words * (context.settings.stochastic ? STOCHASTIC_FACTOR_SCALE : 1.0f),
            factor >= 0x1p-100f && factor < 0x1p116f ? bound : extreme_bound};
}
#endif

// A block, its largest magnitude with NaN, and the amax of its scale.
struct InputBlock {
    PackedBf16 x;
    u32 bound, amax;
};

__device__ __forceinline__ void load_or_generate_random(const OutputContext& context, u32 index, u32 (&words)[4]) {
    if (context.settings.random_given) {
        load_random_words(context.output, static_cast<i64>(index) * 4, 4, words);
    } else {
        philox_with_offset(context.keys, index, words);
    }
}

__device__ __forceinline__ void store_block(const PackedE2m1& codes, const OutputContext& context, u32 index) {
    store_codes(codes, context.output.codes + static_cast<i64>(index) * (BLOCK / 2));
}

// Encode factor of a line of the thread block.
__device__ __forceinline__ float encode_of(const OutputContext& context, u32 line) {
    return context.settings.amax_per_row ? context.lines[line].encode : context.encode;
}

// Factor of the elements of a block of any numbers: nvfp4_element_factor(scale, encode_of(context, line)).
__device__ __forceinline__ float general_factor(const OutputContext& context, u8 scale, u32 line) {
    if (!context.settings.amax_per_row) return context.general_factors[scale];
    return clamp_to_flt_max(1.0f / (e4m3_to_float(scale) * context.lines[line].inverse));
}

// The choice between both scales of 4over6.
__device__ __forceinline__ Choice choice_of(Scales scales, const OutputContext& context) {
    return {scales, context.general_factors, context.encode, context.amax, context.units};
}

#ifdef HAS_E2M1_BY_ADDITION
// Factor of a scale on the fast path.
__device__ __forceinline__ Factor finite_factor(const OutputContext& context, u32 scale, u32 line) {
    if (!context.settings.amax_per_row) return context.factors[scale];
    const float decode = e4m3_to_float(static_cast<u8>(scale)) * context.lines[line].inverse;
    return {clamp_to_flt_max(1.0f / decode), fmaxf(6.99f * decode, 0x1p-149f)};
}
#endif

// Quantizes and stores the codes of block `index` of any numbers. `line`: the number of its line in the thread block. Returns
// its scale.
template <PackOrder ORDER>
__device__ __forceinline__ u8 write_general(const InputBlock& block, u32 index, u32 line, const OutputContext& context) {
    const Scales candidates = candidate_scales(block.amax, encode_of(context, line), context.settings);
    const u8 scale = chosen_packed_scale<ORDER>(block.x, block.bound, choice_of(candidates, context), context.settings);
    const float factor = general_factor(context, scale, line);
    u32 words[4];
    if (context.settings.stochastic) load_or_generate_random(context, index, words);
    store_block(e2m1x16_of_products<ORDER>(block.x, factor, context.settings.stochastic ? &words : nullptr), context, index);
    return scale;
}

#ifdef HAS_E2M1_BY_ADDITION
// Code of a scale that is not negative, zero-extended.
__device__ __forceinline__ u32 scale_code(float scale) {
#ifdef HAS_CVT_FP8
    return ptx::cvt_rn_satfinite_e4m3x2_f32(scale, 0.0f);
#else
    return e4m3_from_float(scale);
#endif
}

// The fast path. The codes are wrong, and `repeat` becomes true, if the largest magnitude is not below the bound of the factor,
// or if 4over6 has no estimate, which is rare.
template <PackOrder ORDER>
__device__ __forceinline__ u8 write_finite(const InputBlock& block, u32 index, u32 line, const OutputContext& context,
                                           bool& repeat) {
    const Settings& settings = context.settings;
    const float encode = settings.amax_per_row ? context.lines[line].encode : context.finite_encode;
    const float unrounded = nvfp4_unrounded_scale(__uint_as_float(block.amax), encode, settings.scale_order);
    u32 scale = scale_code(unrounded);
    if (settings.candidates != SIX) {
        const Choice choice = choice_of({static_cast<u8>(scale), static_cast<u8>(scale_code(unrounded * 1.5f))}, context);
        u8 chosen;
        const Decision decision = estimate_choice<ORDER>(block.x, block.bound, choice, settings, chosen);
        if (decision == CLOSE) chosen = exact_choice<ORDER>(block.x, choice, settings);
        repeat |= decision == NO_ESTIMATE;
        scale = chosen;
    }
    const Factor factor = finite_factor(context, scale, line);
    repeat |= !(__uint_as_float(block.bound) < factor.bound);
    if (settings.stochastic) {
        u32 words[4];
        load_or_generate_random(context, index, words);
        store_block(e2m1x16_of_products_below_8<ORDER>(block.x, factor.value, words), context, index);
    } else {
        store_block(e2m1x16_of_products_below_7<ORDER>(block.x, factor.value), context, index);
    }
    return static_cast<u8>(scale);
}
#endif

// The fast path assumes that all numbers are finite and all products small. If this is false for a block of a warp, the warp
// quantizes its blocks of this tile again with write_general, and those of the thread block's further tiles at once.
// Columns are packed EVEN_FIRST: both outputs of nvfp4-rht-sr, 16384^2, take an H200 1 % longer with ADJACENT.
#ifdef HAS_E2M1_BY_ADDITION
constexpr PackOrder COLUMN_ORDER = EVEN_FIRST;
#else
constexpr PackOrder COLUMN_ORDER = ADJACENT;
#endif

// A thread's first block of rows and first block of columns in a tile: index in shared memory, index in the output, the line in
// the thread block, and, for columns, the place of the scale in shared memory.
struct BlockIndices {
    u32 first, first_t, index, index_t, line, line_t;
    u8* scale;
};

__device__ __forceinline__ BlockIndices advance_tile(const BlockIndices& at, const OutputContext& context) {
    return {at.first ^ TILE_WORDS, at.first_t ^ TILE_WORDS, at.index + TILE_ROWS * context.blocks, at.index_t + COLUMN_BLOCKS,
            at.line + TILE_ROWS, at.line_t, at.scale + COLUMN_BLOCKS};
}

// A block with its amax and bound: of its square block if `square`, amax_and_bound, is given, else its own.
template <bool FINITE>
__device__ __forceinline__ InputBlock input_block(const PackedBf16& x, bool has_square, u32 square, const Settings& settings) {
    if (has_square) return {x, bound_of(square), amax_of(square)};
    const u32 bound = FINITE ? finite_magnitude_bound(x) : magnitude_bound(x);
    return {x, bound, FINITE ? bound : amax_of_packed(x, bound, amax_limit(settings.propagate_nan))};
}

// Rotates a block if its output is rotated, and quantizes it.
template <bool FINITE, PackOrder ORDER>
__device__ __forceinline__ u8 write_block_of(PackedBf16 x, u32 square, u32 index, u32 line, const OutputContext& context,
                                             [[maybe_unused]] bool& repeat) {
    const Settings& settings = context.settings;
#ifdef HAS_E2M1_BY_ADDITION
    if constexpr (FINITE) {
        if (context.rotated) rotate_finite_packed_times4<ORDER>(x, settings.signs);
        const InputBlock block = input_block<true>(x, settings.square_blocks, square, settings);
        return write_finite<ORDER>(block, index, line, context, repeat);
    }
#endif
    if (context.rotated) rotate_packed<ORDER>(x, settings.signs);
    return write_general<ORDER>(input_block<false>(x, settings.square_blocks, square, settings), index, line, context);
}

// Quantizes a thread's blocks of rows and of columns of tile `number` of its thread block, with FINITE on the fast path.
// Returns whether the codes of the fast path are wrong.
template <bool FINITE>
__device__ __forceinline__ bool quantize_tile(SharedTiles& shared, const TileIterator& tile, u32 number,
                                                    const BlockIndices& at, const OutputContext& context,
                                                    const OutputContext& column_context) {
    const Settings& settings = context.settings;
    const bool rowwise = context.output.tensor_scale != nullptr, columnwise = column_context.output.tensor_scale != nullptr;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool repeat = false;

    // ---- blocks of rows: a quarter-warp has a row ----
    if (rowwise) {
        const u32 row = warp * WARP_ROWS + lane / ROW_BLOCKS * TILE_BLOCKS_PER_THREAD, block = lane % ROW_BLOCKS;
        const u32 square = settings.square_blocks ? maximum_of_stripe(shared.amaxes[number % 2], row / BLOCK, block) : 0u;
#pragma unroll
        for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
            const u32 index = at.index + b * context.blocks;
            const u8 scale = write_block_of<FINITE, ADJACENT>(block_of_row(shared.tiles, at.first, b), square, index,
                                                              at.line + b, context, repeat);
            const u32 line = (tile.first_strip + number) * TILE_ROWS + row + b, start = tile.tile_column * ROW_BLOCKS + block;
            context.output.scales[settings.swizzled ? swizzled_index(line, start, context.blocks) : index] = scale;
        }
    }

    // ---- blocks of columns: four lanes have a column, a warp has chunks of eight columns ----
    if (columnwise) {
        const u32 chunk = warp * TILE_BLOCKS_PER_THREAD, stripe = lane % COLUMN_BLOCKS;
        const u32 square = settings.square_blocks ? maximum_of_stripe(shared.amaxes[number % 2], stripe, chunk / 2) : 0u;
#pragma unroll
        for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
            at.scale[b * NEXT_COLUMN] = write_block_of<FINITE, COLUMN_ORDER>(
                blocks_of_columns(shared.tiles, at.first_t, b), square, at.index_t + b * 8 * column_context.blocks,
                at.line_t + b * 8, column_context, repeat);
        }
    }
    return repeat;
}

// Amaxes and bounds of the square blocks of a tile, for all warps.
__device__ __forceinline__ void share_square_amaxes(SharedTiles& shared, u32 number, u32 first, const Settings& settings) {
    const u32 lane = threadIdx.x % 32, limit = amax_limit(settings.propagate_nan);
    u32 maximum = 0;
#pragma unroll
    for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
        const PackedBf16 x = block_of_row(shared.tiles, first, b);
        const u32 bound = magnitude_bound(x);
        maximum = max_magnitudes(maximum, amax_and_bound(amax_of_packed(x, bound, limit), bound));
    }
    for (int distance = ROW_BLOCKS; distance < 32; distance *= 2) {
        maximum = max_magnitudes(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, distance));
    }
    if (lane < ROW_BLOCKS) shared.amaxes[number % 2][threadIdx.x / 32][lane] = maximum;
    __syncthreads();
}

__device__ __forceinline__ void store_word(const u8 (&bytes)[4], u8* target) {  // both aligned
#ifdef __CUDA_ARCH__
    *reinterpret_cast<u32*>(target) = *reinterpret_cast<const u32*>(bytes);
#else
    for (int j = 0; j < 4; ++j) target[j] = bytes[j];
#endif
}

// Encode factors of the lines `first` to `first + count - 1`, and their reciprocals. One thread block `stores` a line's factor.
__device__ __forceinline__ void write_line_scales(const Output& output, u32 first, u32 count, bool stores,
                                                  const Settings& settings, LineScale* lines) {
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        const float encode = nvfp4_tensor_scale(output.amax[first + i], settings.max_product);
        lines[i] = {encode, 1.0f / encode};
        if (stores) output.tensor_scale[first + i] = encode;
    }
}

__device__ __forceinline__ void quantize_tiles(const bf16* x, i64 rows, i64 columns, const TileSchedule& schedule,
                                               const Output& row_output, const Output& column_output, const Settings& settings,
                                               const PhiloxKeys& keys, const PhiloxKeys& column_keys) {
    __shared__ SharedTiles shared;
    const bool rowwise = row_output.tensor_scale != nullptr, columnwise = column_output.tensor_scale != nullptr;
    // Both loads are issued together, before the copy of the tile. An output without buffers uses the amax of the second
    // output.
    const float amax = *(rowwise ? row_output.amax : column_output.amax);
    const float amax_t = *(columnwise ? column_output.amax : row_output.amax);
    TileIterator tile(x, rows, columns, schedule);
    tile.copy_async<THREADS>(shared.tiles);
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    const float encode = nvfp4_tensor_scale(amax, settings.max_product);
    const float encode_t = nvfp4_tensor_scale(amax_t, settings.max_product);
    const bool rows_rotated = (settings.rotation & ROTATE_ROWS) != 0,
               columns_rotated = (settings.rotation & ROTATE_COLUMNS) != 0;
    const u32 blocks = static_cast<u32>(columns / BLOCK), blocks_t = static_cast<u32>(rows / BLOCK);
    const OutputContext context = {amax,
                                   encode,
                                   rows_rotated ? encode / FOURFOLD : encode,
                                   blocks,
                                   shared.outputs.factors[0],
                                   shared.outputs.general_factors[0],
                                   shared.lines.rows,
                                   row_output,
                                   settings,
                                   keys,
                                   rows_rotated,
                                   error_units(amax, encode)};
    const OutputContext column_context = {amax_t,
                                          encode_t,
                                          columns_rotated ? encode_t / FOURFOLD : encode_t,
                                          blocks_t,
                                          shared.outputs.factors[1],
                                          shared.outputs.general_factors[1],
                                          shared.lines.columns,
                                          column_output,
                                          settings,
                                          column_keys,
                                          columns_rotated,
                                          error_units(amax_t, encode_t)};
    if (settings.amax_per_row) {
        if (rowwise) {
            write_line_scales(row_output, tile.first_strip * TILE_ROWS, (tile.end - tile.first_strip) * TILE_ROWS,
                              tile.tile_column == 0, settings, shared.lines.rows);
        }
        if (columnwise) {
            write_line_scales(column_output, tile.tile_column * TILE_COLUMNS, TILE_COLUMNS, tile.first_strip == 0, settings,
                              shared.lines.columns);
        }
    } else {
        if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) {
            if (rowwise) row_output.tensor_scale[0] = encode;
            if (columnwise) column_output.tensor_scale[0] = encode_t;
        }
        const u8 scale = static_cast<u8>(thread % SCALES);
        const u32 output = thread / SCALES;
        shared.outputs.general_factors[output][scale] = nvfp4_element_factor(scale, output == 0 ? encode : encode_t);
#ifdef HAS_E2M1_BY_ADDITION
        shared.outputs.factors[output][scale] = table_factor(scale, output == 0 ? context : column_context);
#endif
    }

    // A quarter-warp has a block in each of two neighbouring rows. Four lanes have a column of a chunk of eight columns.
    const u32 row = warp * WARP_ROWS + lane / ROW_BLOCKS * TILE_BLOCKS_PER_THREAD, block = lane % ROW_BLOCKS;
    const u32 chunk = warp * TILE_BLOCKS_PER_THREAD, column = chunk * 8 + lane / COLUMN_BLOCKS, stripe = lane % COLUMN_BLOCKS;
    BlockIndices at = {chunk_index(row, 2 * block),
                       column_index<COLUMN_ORDER>(chunk),
                       (tile.first_strip * TILE_ROWS + row) * blocks + tile.tile_column * ROW_BLOCKS + block,
                       (tile.tile_column * TILE_COLUMNS + column) * blocks_t + tile.first_strip * COLUMN_BLOCKS + stripe,
                       row,
                       column,
                       &shared.scales_t[column][0][stripe]};
#ifdef HAS_E2M1_BY_ADDITION
    bool careful = false;  // the warp does not try the fast path, which failed in a tile before
#endif
    for (u32 number = 0; tile.valid(); ++number) {
        wait_for_tile();
        tile.advance();
        if (tile.valid()) tile.copy_async<THREADS>(shared.tiles);
        if (settings.square_blocks) share_square_amaxes(shared, number, at.first, settings);
#ifdef HAS_E2M1_BY_ADDITION
        if (number == 0) {  // in the first tile the first block tells
            careful = __any_sync(0xFFFFFFFFu, magnitude_bound(block_of_row(shared.tiles, at.first, 0)) >= FLOAT_INF_BITS);
        }
        if (!careful) {
            careful = __any_sync(0xFFFFFFFFu, quantize_tile<true>(shared, tile, number, at, context, column_context));
        }
        if (careful) quantize_tile<false>(shared, tile, number, at, context, column_context);
#else
        quantize_tile<false>(shared, tile, number, at, context, column_context);
#endif
        at = advance_tile(at, context);
    }
    __syncthreads();
    if (!columnwise) return;
    const u32 count = tile.end - tile.first_strip;
#pragma unroll
    for (u32 i = 0; i < TILE_COLUMNS * MAX_TILES / THREADS; ++i) {
        const u32 n = i * THREADS + thread;
        // Consecutive threads store consecutive words.
        const u32 number = settings.swizzled ? n / TILE_COLUMNS : n % MAX_TILES;
        const u32 line = settings.swizzled ? n % TILE_COLUMNS / 4 + n % 4 * 32 : n / MAX_TILES;
        if (number >= count) continue;
        const u32 at = tile.tile_column * TILE_COLUMNS + line, start = (tile.first_strip + number) * COLUMN_BLOCKS;
        store_word(shared.scales_t[line][number],
                   column_output.scales + (settings.swizzled ? swizzled_index(at, start, blocks_t) : at * blocks_t + start));
    }
}

}  // namespace narrowgauge
