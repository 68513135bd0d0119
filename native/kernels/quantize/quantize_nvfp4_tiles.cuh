// quantize_nvfp4_tiles.cuh: NVFP4 of packed blocks of bfloat16 and of whole tiles of 64x128. The contract is in
// quantize_nvfp4.cu.
#pragma once

#include "quantize/quantize_nvfp4_general.cuh"
#include "quantize/shared_tile.cuh"
#include "common/packed_bf16.cuh"

namespace narrowgauge {

struct QuantizedBlock {
    u8 scale;
    PackedE2m1 codes;
};

// Quantizes a block of 16 bfloat16 numbers. `bound` is its largest magnitude, NaN included. `amax`, which is not above `bound`,
// is the source of the scale; if it is NaN and NaN is left out, the function computes the block's amax without NaN. `factor`
// gives the factor of elements for a scale.
template <class Factor>
__device__ __forceinline__ QuantizedBlock quantize_block(const PackedBf16& x, u32 bound, u32 amax, float encode,
                                                         const Factor& factor, const u32 (*random)[4],
                                                         const Settings& settings) {
    u8 scale = candidate_scales(amax, encode, settings).six;
    if (random == nullptr && below_7(bound, factor(scale))) {
        return {scale, e2m1x16_of_products_below_7(x, factor(scale))};
    }
    const u32 limit = amax_limit(settings.propagate_nan);
    if (amax > limit) scale = candidate_scales(amax_of_packed(x, bound, limit), encode, settings).six;
    return {scale, e2m1x16_of_products(x, factor(scale), random)};
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

// For a scale and blocks of finite numbers: the factor of packed elements, and the magnitude from which on the fast path
// (write_finite) is wrong and write_general has to quantize the block.
struct Factor {
    float value, bound;
};

struct SharedTiles {
    Tiles tiles;
    Factor factors[2][SCALES];         // of each output
    float general_factors[2][SCALES];  // for blocks of any numbers
    u32 amaxes[2][WARPS][ROW_BLOCKS];
    // Scales of columns, a word per tile. The second array has flags, VALID bytes behind the scales of a thread's two
    // columns: 0 if its blocks of rows (first column), or of columns (second), still have to be quantized by write_general.
    alignas(16) u8 scales_t[2][TILE_COLUMNS][MAX_TILES][COLUMN_BLOCKS];
};
constexpr int VALID = TILE_COLUMNS * MAX_TILES * COLUMN_BLOCKS;
constexpr int NEXT_COLUMN = 8 * MAX_TILES * COLUMN_BLOCKS;  // from the scale of a thread's first column to the second one
static_assert(VALID == THREADS * 16, "a thread sets and tests 16 flags");

// One word with two magnitudes, bfloat16 as bits of float32: the amax, which leaves NaN out, and the bound, which does not.
// max_magnitudes compares both. A stripe is 16 rows of a tile, which two warps share.
__device__ __forceinline__ u32 amax_and_bound(u32 amax, u32 bound) { return amax | bound >> 16; }
__device__ __forceinline__ u32 amax_of(u32 both) { return both & 0x7FFF0000u; }
__device__ __forceinline__ u32 bound_of(u32 both) { return (both & 0x7FFFu) << 16; }

__device__ __forceinline__ u32 maximum_of_stripe(const u32 (&amaxes)[WARPS][ROW_BLOCKS], int stripe, int block) {
    static_assert(BLOCK / WARP_ROWS == 2, "two warps");
    return max_magnitudes(amaxes[2 * stripe][block], amaxes[2 * stripe + 1][block]);
}

// The loop over tiles assumes that all numbers are finite and all products small. A second pass over the tiles quantizes the
// blocks again for which this is false. So the main loop has no branches and registers for the rare case, and both outputs of
// nvfp4-rht-sr, 16384^2, take an H200 0.290 ms in place of 0.309 (with sums FOURFOLD and fewer instructions of a copy); 8192^2
// takes 80 us in place of 84, or 120 in place of 96 if one number in 10^4 is NaN.
#ifdef HAS_E2M1_BY_ADDITION
constexpr bool AS_FINITE = true;
#else
constexpr bool AS_FINITE = false;
#endif

// Data shared by all blocks of an output. On the fast path, packed elements of a rotated output are FOURFOLD, four times the
// rotated numbers.
constexpr float FOURFOLD = 4.0f;
struct OutputContext {
    float encode, finite_encode;  // encode factor of numbers, and of packed elements on the fast path
    u32 blocks;                   // of a line
    const Factor (&factors)[SCALES];
    const float (&general_factors)[SCALES];
    const Output& output;
    const Settings& settings;
    const PhiloxKeys& keys;
    bool rotated;
};

#ifdef HAS_E2M1_BY_ADDITION
// Magnitudes below the bound have products below 7, or below 8 with stochastic rounding. Rotated numbers below 2^-126 are not
// FOURFOLD exactly. With a factor below 2^116 their products are at most 2^-10, and their code is 0 for every random byte; with
// a larger factor they matter, and the bound admits zeros only. If powers of two times the factor may not be exact, or the
// factor is NaN, the bound admits zeros only or no number.
__device__ __forceinline__ Factor finite_factor(u8 scale, const OutputContext& context) {
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

// Quantizes and stores the codes of block `index`, with any numbers. Returns its scale.
__device__ __forceinline__ u8 write_general(const InputBlock& block, u32 index, const OutputContext& context) {
    u32 words[4];
    if (context.settings.stochastic) load_or_generate_random(context, index, words);
    const auto factor_of = [&](u8 code) { return context.general_factors[code]; };
    const QuantizedBlock quantized = quantize_block(block.x, block.bound, block.amax, context.encode, factor_of,
                                                    context.settings.stochastic ? &words : nullptr, context.settings);
    store_block(quantized.codes, context, index);
    return quantized.scale;
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

// The fast path. The codes are wrong, and `valid` becomes false, if the largest magnitude is not below the bound, which is
// rare.
template <PackOrder ORDER>
__device__ __forceinline__ u8 write_finite(const InputBlock& block, u32 index, const OutputContext& context, bool& valid) {
    const float amax = __uint_as_float(block.amax);
    const u32 scale = scale_code(nvfp4_unrounded_scale(amax, context.finite_encode, context.settings.scale_order));
    const Factor factor = context.factors[scale];
    PackedE2m1 codes;
    if (context.settings.stochastic) {
        u32 words[4];
        load_or_generate_random(context, index, words);
        codes = e2m1x16_of_products_below_8<ORDER>(block.x, factor.value, words);
    } else {
        codes = e2m1x16_of_products_below_7<ORDER>(block.x, factor.value);
    }
    store_block(codes, context, index);
    valid = valid && __uint_as_float(block.bound) < factor.bound;
    return static_cast<u8>(scale);
}
#endif

// Both outputs of nvfp4-rht-sr, 16384^2, take an H200 1 % longer with ADJACENT.
template <bool FINITE>
__device__ __forceinline__ constexpr PackOrder column_order() {
    return FINITE ? EVEN_FIRST : ADJACENT;
}

// A packed block, rotated if its output is.
template <bool FINITE, PackOrder ORDER>
__device__ __forceinline__ PackedBf16 rotated_block(PackedBf16 x, const OutputContext& context) {
    if (!context.rotated) return x;
#ifdef HAS_E2M1_BY_ADDITION
    if constexpr (FINITE) {
        rotate_finite_packed_times4<ORDER>(x, context.settings.signs);
        return x;
    }
#endif
    rotate_packed(x, context.settings.signs);
    return x;
}

template <bool FINITE>
__device__ __forceinline__ u32 block_bound(const PackedBf16& x) {
    return FINITE ? finite_magnitude_bound(x) : magnitude_bound(x);
}

template <bool FINITE, PackOrder ORDER>
__device__ __forceinline__ u8 write_block_of(const InputBlock& block, u32 index, const OutputContext& context, bool& valid) {
#ifdef HAS_E2M1_BY_ADDITION
    if constexpr (FINITE) return write_finite<ORDER>(block, index, context, valid);
#endif
    return write_general(block, index, context);
}

// A thread's first block of rows and first block of columns in a tile: index in shared memory, index in the output, and, for
// columns, the place of the scale in shared memory.
struct BlockIndices {
    u32 first, first_t, index, index_t;
    u8* scale;
};

__device__ __forceinline__ BlockIndices advance_tile(const BlockIndices& at, const OutputContext& context) {
    return {at.first ^ TILE_WORDS, at.first_t ^ TILE_WORDS, at.index + TILE_ROWS * context.blocks, at.index_t + COLUMN_BLOCKS,
            at.scale + COLUMN_BLOCKS};
}

// Quantizes a thread's blocks of rows and of columns (`wanted`, `wanted_t`) of tile `number` of its thread block. With FINITE,
// on the fast path, which clears the flags of wrong blocks.
template <bool FINITE>
__device__ __forceinline__ void quantize_tile(SharedTiles& shared, const TileIterator& tile, u32 number, const BlockIndices& at,
                                              bool wanted, bool wanted_t, const OutputContext& context,
                                              const OutputContext& column_context) {
    constexpr PackOrder ORDER = column_order<FINITE>();
    const Settings& settings = context.settings;
    const bool rowwise = context.output.tensor_scale != nullptr, columnwise = column_context.output.tensor_scale != nullptr;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    // ---- blocks of rows: a quarter-warp has a row ----
    if (rowwise || settings.square_blocks) {
        const u32 row = warp * WARP_ROWS + lane / ROW_BLOCKS * TILE_BLOCKS_PER_THREAD, block = lane % ROW_BLOCKS;
        InputBlock blocks[TILE_BLOCKS_PER_THREAD];
#pragma unroll
        for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
            const PackedBf16 x = rotated_block<FINITE, ADJACENT>(block_of_row(shared.tiles, at.first, b), context);
            const u32 bound = settings.square_blocks ? magnitude_bound(x) : block_bound<FINITE>(x);
            blocks[b] = {x, bound, bound};
        }
        if (settings.square_blocks) {
            const u32 limit = amax_limit(settings.propagate_nan);
            u32 maximum = 0;
#pragma unroll
            for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
                const u32 amax = amax_of_packed(blocks[b].x, blocks[b].bound, limit);
                maximum = max_magnitudes(maximum, amax_and_bound(amax, blocks[b].bound));
            }
            for (int distance = ROW_BLOCKS; distance < 32; distance *= 2) {
                maximum = max_magnitudes(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, distance));
            }
            if (lane < ROW_BLOCKS) shared.amaxes[number % 2][warp][lane] = maximum;
            __syncthreads();
        }
        if (rowwise && wanted) {
            bool valid = true;
#pragma unroll
            for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
                if (settings.square_blocks)
                    blocks[b].amax = amax_of(maximum_of_stripe(shared.amaxes[number % 2], row / BLOCK, block));
                const u32 index = at.index + b * context.blocks;
                const u8 scale = write_block_of<FINITE, ADJACENT>(blocks[b], index, context, valid);
                const u32 line = (tile.first_strip + number) * TILE_ROWS + row + b,
                          start = tile.tile_column * ROW_BLOCKS + block;
                context.output.scales[settings.swizzled ? swizzled_index(line, start, context.blocks) : index] = scale;
            }
            if (!valid) at.scale[VALID] = 0;
        }
    }

    // ---- blocks of columns: four lanes have a column, a warp has chunks of eight columns ----
    if (columnwise) {
        const u32 chunk = warp * TILE_BLOCKS_PER_THREAD, stripe = lane % COLUMN_BLOCKS;
        bool valid = true;
#pragma unroll
        for (u32 b = 0; b < TILE_BLOCKS_PER_THREAD; ++b) {
            const PackedBf16 x = rotated_block<FINITE, ORDER>(blocks_of_columns(shared.tiles, at.first_t, b), column_context);
            const u32 bound = block_bound<FINITE>(x);
            InputBlock column = {x, bound, bound};
            if (settings.square_blocks) {
                const u32 both = maximum_of_stripe(shared.amaxes[number % 2], stripe, chunk / 2);
                column = {x, bound_of(both), amax_of(both)};
            }
            if (!wanted_t) continue;
            at.scale[b * NEXT_COLUMN] =
                write_block_of<FINITE, ORDER>(column, at.index_t + b * 8 * column_context.blocks, column_context, valid);
        }
        if (!valid) at.scale[VALID + NEXT_COLUMN] = 0;
    }
}

__device__ __forceinline__ void store_word(const u8 (&bytes)[4], u8* target) {  // both aligned
#ifdef __CUDA_ARCH__
    *reinterpret_cast<u32*>(target) = *reinterpret_cast<const u32*>(bytes);
#else
    for (int j = 0; j < 4; ++j) target[j] = bytes[j];
#endif
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
    if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) {
        if (rowwise) row_output.tensor_scale[0] = encode;
        if (columnwise) column_output.tensor_scale[0] = encode_t;
    }
    const bool rows_rotated = (settings.rotation & ROTATE_ROWS) != 0,
               columns_rotated = (settings.rotation & ROTATE_COLUMNS) != 0;
    const u32 blocks = static_cast<u32>(columns / BLOCK), blocks_t = static_cast<u32>(rows / BLOCK);
    const OutputContext context = {encode,
                                   rows_rotated ? encode / FOURFOLD : encode,
                                   blocks,
                                   shared.factors[0],
                                   shared.general_factors[0],
                                   row_output,
                                   settings,
                                   keys,
                                   rows_rotated};
    const OutputContext column_context = {encode_t,
                                          columns_rotated ? encode_t / FOURFOLD : encode_t,
                                          blocks_t,
                                          shared.factors[1],
                                          shared.general_factors[1],
                                          column_output,
                                          settings,
                                          column_keys,
                                          columns_rotated};
    const u8 scale = static_cast<u8>(thread % SCALES);
    const u32 output = thread / SCALES;
    shared.general_factors[output][scale] = nvfp4_element_factor(scale, output == 0 ? encode : encode_t);
#ifdef HAS_E2M1_BY_ADDITION
    shared.factors[output][scale] = finite_factor(scale, output == 0 ? context : column_context);
    reinterpret_cast<uint4*>(shared.scales_t[1])[thread] = {~0u, ~0u, ~0u, ~0u};
#endif

    // A quarter-warp has a block in each of two neighbouring rows. Four lanes have a column of a chunk of eight columns.
    const u32 row = warp * WARP_ROWS + lane / ROW_BLOCKS * TILE_BLOCKS_PER_THREAD, block = lane % ROW_BLOCKS;
    const u32 chunk = warp * TILE_BLOCKS_PER_THREAD, column = chunk * 8 + lane / COLUMN_BLOCKS, stripe = lane % COLUMN_BLOCKS;
    const auto block_indices = [&](u32 first_t) {
        return BlockIndices{chunk_index(row, 2 * block), first_t,
                     (tile.first_strip * TILE_ROWS + row) * blocks + tile.tile_column * ROW_BLOCKS + block,
                     (tile.tile_column * TILE_COLUMNS + column) * blocks_t + tile.first_strip * COLUMN_BLOCKS + stripe,
                     &shared.scales_t[0][column][0][stripe]};
    };
    BlockIndices at = block_indices(column_index<column_order<AS_FINITE>()>(chunk));
    for (u32 number = 0; tile.valid(); ++number) {
        wait_for_tile();
        tile.advance();
        if (tile.valid()) tile.copy_async<THREADS>(shared.tiles);
        quantize_tile<AS_FINITE>(shared, tile, number, at, true, true, context, column_context);
        at = advance_tile(at, context);
    }
    __syncthreads();
#ifdef HAS_E2M1_BY_ADDITION
    const uint4 flags = reinterpret_cast<const uint4*>(shared.scales_t[1])[thread];
    if (__syncthreads_or((flags.x & flags.y & flags.z & flags.w) != ~0u) != 0) {
        at = block_indices(column_index<ADJACENT>(chunk));
        TileIterator second_pass(x, rows, columns, schedule);
        for (u32 number = 0;; ++number) {
            const bool inside = second_pass.valid();
            const bool wanted = inside && at.scale[VALID] == 0, wanted_t = inside && at.scale[VALID + NEXT_COLUMN] == 0;
            if (__syncthreads_or(wanted || wanted_t) != 0) {  // also a barrier: all threads have finished the previous tile
                second_pass.copy_async<THREADS>(shared.tiles);
                wait_for_tile();
                quantize_tile<false>(shared, tile, number, at, wanted, wanted_t, context, column_context);
            }
            if (!inside) break;
            second_pass.advance();
            at = advance_tile(at, context);
        }
    }
#endif
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
        store_word(shared.scales_t[0][line][number],
                   column_output.scales + (settings.swizzled ? swizzled_index(at, start, blocks_t) : at * blocks_t + start));
    }
}

}  // namespace narrowgauge
