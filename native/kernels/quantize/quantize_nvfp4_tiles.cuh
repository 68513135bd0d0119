// quantize_nvfp4_tiles.cuh: NVFP4 of bfloat16, blocks of 16 as eight words, and whole tiles of 64x128. Their contract:
// quantize_nvfp4.cu.
#pragma once

#include "quantize/quantize_nvfp4_any.cuh"
#include "quantize/shared_tile.cuh"
#include "common/words.cuh"

struct Made {
    u8 scale;
    Codes codes;
};

// A block of 16 bfloat16 numbers, whose largest magnitude is `bound`, by an amax that is not above it; where that is NaN,
// which need not count, the block's own is looked for. `factor` is that of elements under a scale.
template <class Factor>
__device__ __forceinline__ Made make_block(const Words& x, u32 bound, u32 amax, float encode, const Factor& factor,
                                           const u32 (*random)[4], const Rule& rule) {
    u8 scale = candidate_scales(amax, encode, rule).six;
    if (random == nullptr && below_7(bound, factor(scale))) {
        return {scale, e2m1x16_of_products_below_7(x, factor(scale))};
    }
    const u32 highest = highest_counted(rule.propagate_nan);
    if (amax > highest) scale = candidate_scales(largest_of_words(x, bound, highest), encode, rule).six;
    return {scale, e2m1x16_of_products(x, factor(scale), random)};
}

// Of a multiprocessor, so that a thread has 64 registers. With 3 and 80 registers both halves of nvfp4-rht-sr take an H200
// as long: 16384^2 0.294 ms for 0.293, 8192^2 79.2 us for 79.7.
constexpr int TILE_BLOCKS_OF_SM = 4;
constexpr int WARPS = THREADS / 32;
constexpr int WARP_ROWS = TILE_ROWS / WARPS;            // of the warp's blocks of rows
constexpr int EACH = TILE_ROWS * ROW_BLOCKS / THREADS;  // blocks of a thread, of either half
constexpr int SCALES = 128;                             // codes of E4M3 without a sign
static_assert(WARP_ROWS % EACH == 0 && BLOCK % WARP_ROWS == 0, "a warp has whole rows of one tile of 16x16");
static_assert(2 * SCALES == THREADS, "a thread finds one factor");
static_assert(EACH == 2, "a row and the next one, a chunk and the next one");

// What a scale is to blocks of finite numbers: the factor of their words, and the magnitude from which on `write_any` has
// to make them.
struct Factor {
    float value, bound;
};

struct SharedTiles {
    Tiles tiles;
    Factor factors[2][SCALES];     // of either half
    float any_factors[2][SCALES];  // of blocks of any numbers
    u32 largest[2][WARPS][ROW_BLOCKS];
    // Scales of columns, a word of each tile; and, RIGHT behind a thread's two, 0 where its blocks of rows, or of columns,
    // are not right yet.
    alignas(16) u8 scales_t[2][TILE_COLUMNS][DEEPEST][COLUMN_BLOCKS];
};
constexpr int RIGHT = TILE_COLUMNS * DEEPEST * COLUMN_BLOCKS;
constexpr int NEXT_KEPT = 8 * DEEPEST * COLUMN_BLOCKS;  // from a thread's first column to the second one
static_assert(RIGHT == THREADS * 16, "a thread sets and looks at 16 of them");

// The largest magnitude that counts and that of all, both of bfloat16 as bits of float32, in one word, which
// `larger_magnitudes` compares; and of block `block` of the rows of a stripe of 16, which two warps have.
__device__ __forceinline__ u32 amax_and_bound(u32 amax, u32 bound) { return amax | bound >> 16; }
__device__ __forceinline__ u32 amax_of(u32 both) { return both & 0x7FFF0000u; }
__device__ __forceinline__ u32 bound_of(u32 both) { return (both & 0x7FFFu) << 16; }

__device__ __forceinline__ u32 largest_of_stripe(const u32 (&largest)[WARPS][ROW_BLOCKS], int stripe, int block) {
    static_assert(BLOCK / WARP_ROWS == 2, "two warps");
    return larger_magnitudes(largest[2 * stripe][block], largest[2 * stripe + 1][block]);
}

// A tile is made as if all its numbers were finite and all products small; what is wrong then is made again when the block
// of threads has made all its tiles. So the loop over tiles has no branches and registers for what is rare, and both halves
// of nvfp4-rht-sr, 16384^2, take an H200 0.290 ms in place of 0.309 (with sums FOURFOLD and fewer instructions of a copy);
// 8192^2 takes 80 us in place of 84, 120 for 96 where one number in 10^4 is NaN.
#ifdef HAS_E2M1_BY_SUMS
constexpr bool AS_FINITE = true;
#else
constexpr bool AS_FINITE = false;
#endif

// What all blocks of a half are made with. Finite words of a half that is rotated are FOURFOLD.
constexpr float FOURFOLD = 4.0f;
struct Making {
    float encode, finite_encode;  // of numbers, and of finite words
    u32 blocks;                   // of a line
    const Factor (&factors)[SCALES];
    const float (&any_factors)[SCALES];
    const Half& half;
    const Rule& rule;
    const PhiloxKeys& keys;
    bool rotated;
};

#ifdef HAS_E2M1_BY_SUMS
// Products are below 7 where magnitudes are below the bound, below 8 by random bytes. Where numbers below 2^-126 may count,
// of which rotated words are not FOURFOLD, zeros alone are below it: by factors below 2^116 such numbers are at most 2^-10,
// and their code is 0 by any random byte. Where powers of two times the factor may not be exact, or it is NaN, nothing is.
__device__ __forceinline__ Factor finite_factor(u8 scale, const Making& by) {
    const float factor = by.any_factors[scale], words = by.rotated ? 1.0f / FOURFOLD : 1.0f;
    const float below = by.rule.stochastic ? 7.99f : 6.99f;
    const float bound = e4m3_to_float(scale) * (1.0f / by.encode) * (by.rotated ? below * FOURFOLD : below);
    const float of_others = factor >= 0x1p116f ? 0x1p-149f : 0.0f;
    return {factor * words * (by.rule.stochastic ? RANDOM_FACTOR : 1.0f),
            factor >= 0x1p-100f && factor < 0x1p116f ? bound : of_others};
}
#endif

// A block, its largest magnitude, and the amax that its scale is made of.
struct Line {
    Words x;
    u32 bound, amax;
};

__device__ __forceinline__ void draw(const Making& by, u32 index, u32 (&words)[4]) {
    if (by.rule.given_words) {
        load_random(by.half, static_cast<i64>(index) * 4, 4, words);
    } else {
        philox_with_offset(by.keys, index, words);
    }
}

__device__ __forceinline__ void store_block(const Codes& codes, const Making& by, u32 index) {
    store_codes(codes, by.half.codes + static_cast<i64>(index) * (BLOCK / 2));
}

// The codes of the block with this number, of any numbers; what is returned is its scale.
__device__ __forceinline__ u8 write_any(const Line& line, u32 index, const Making& by) {
    u32 words[4];
    if (by.rule.stochastic) draw(by, index, words);
    const auto factor_of = [&](u8 code) { return by.any_factors[code]; };
    const Made made =
        make_block(line.x, line.bound, line.amax, by.encode, factor_of, by.rule.stochastic ? &words : nullptr, by.rule);
    store_block(made.codes, by, index);
    return made.scale;
}

#ifdef HAS_E2M1_BY_SUMS
// The code of a scale that is not negative, alone in its word.
__device__ __forceinline__ u32 scale_word(float scale) {
#ifdef HAS_CVT_FP8
    u32 word;
    asm("{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\nmov.b32 %0, {pair, 0};\n}"
        : "=r"(word)
        : "f"(0.0f), "f"(scale));
    return word;
#else
    return e4m3_from_float(scale);
#endif
}

// The same of finite words; the codes are not right where their largest magnitude is not below the bound, which is rare.
template <Order ORDER>
__device__ __forceinline__ u8 write_finite(const Line& line, u32 index, const Making& by, bool& right) {
    const float amax = __uint_as_float(line.amax);
    const u32 scale = scale_word(nvfp4_unrounded_scale(amax, by.finite_encode, by.rule.scale_order));
    const Factor factor = by.factors[scale];
    Codes codes;
    if (by.rule.stochastic) {
        u32 words[4];
        draw(by, index, words);
        codes = e2m1x16_of_products_below_8<ORDER>(line.x, factor.value, words);
    } else {
        codes = e2m1x16_of_products_below_7<ORDER>(line.x, factor.value);
    }
    store_block(codes, by, index);
    right = right && __uint_as_float(line.bound) < factor.bound;
    return static_cast<u8>(scale);
}
#endif

// Both halves of nvfp4-rht-sr, 16384^2, take an H200 1 % longer by NEIGHBOURS.
template <bool FINITE>
__device__ __forceinline__ constexpr Order column_order() {
    return FINITE ? EVEN_FIRST : NEIGHBOURS;
}

// The words of a block, rotated where its half is.
template <bool FINITE, Order ORDER>
__device__ __forceinline__ Words made_words(Words x, const Making& by) {
    if (!by.rotated) return x;
#ifdef HAS_E2M1_BY_SUMS
    if constexpr (FINITE) {
        rotate_finite_words_fourfold<ORDER>(x, by.rule.signs);
        return x;
    }
#endif
    rotate_words(x, by.rule.signs);
    return x;
}

template <bool FINITE>
__device__ __forceinline__ u32 words_bound(const Words& x) {
    return FINITE ? bound_of_finite_words(x) : bound_of_words(x);
}

template <bool FINITE, Order ORDER>
__device__ __forceinline__ u8 write_words(const Line& line, u32 index, const Making& by, bool& right) {
#ifdef HAS_E2M1_BY_SUMS
    if constexpr (FINITE) return write_finite<ORDER>(line, index, by, right);
#endif
    return write_any(line, index, by);
}

// Where a thread's first blocks of a tile are, of rows and of columns: their words, their numbers in their half; and where
// the latter's scale is kept.
struct Spots {
    u32 first, first_t, index, index_t;
    u8* kept;
};

__device__ __forceinline__ Spots next_tile(const Spots& at, const Making& by) {
    return {at.first ^ TILE_WORDS, at.first_t ^ TILE_WORDS, at.index + TILE_ROWS * by.blocks, at.index_t + COLUMN_BLOCKS,
            at.kept + COLUMN_BLOCKS};
}

// Makes a thread's blocks of the tile, the `number`th of its block of threads, of rows and of columns where they are
// wanted. Made as FINITE, it says where they are not right.
template <bool FINITE>
__device__ __forceinline__ void make_tile(SharedTiles& shared, const TileWalk& walk, u32 number, const Spots& at, bool wanted,
                                          bool wanted_t, const Making& by, const Making& by_t) {
    constexpr Order ORDER = column_order<FINITE>();
    const Rule& rule = by.rule;
    const bool rowwise = by.half.tensor_scale != nullptr, columnwise = by_t.half.tensor_scale != nullptr;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    // ---- blocks of rows: a quarter of a warp has a row ----
    if (rowwise || rule.tiles) {
        const u32 row = warp * WARP_ROWS + lane / ROW_BLOCKS * EACH, block = lane % ROW_BLOCKS;
        Line lines[EACH];
#pragma unroll
        for (u32 b = 0; b < EACH; ++b) {
            const Words x = made_words<FINITE, NEIGHBOURS>(block_of_row(shared.tiles, at.first, b), by);
            const u32 bound = rule.tiles ? bound_of_words(x) : words_bound<FINITE>(x);
            lines[b] = {x, bound, bound};
        }
        if (rule.tiles) {
            const u32 highest = highest_counted(rule.propagate_nan);
            u32 most = 0;
#pragma unroll
            for (u32 b = 0; b < EACH; ++b) {
                const u32 amax = largest_of_words(lines[b].x, lines[b].bound, highest);
                most = larger_magnitudes(most, amax_and_bound(amax, lines[b].bound));
            }
            for (int lanes = ROW_BLOCKS; lanes < 32; lanes *= 2) {
                most = larger_magnitudes(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
            }
            if (lane < ROW_BLOCKS) shared.largest[number % 2][warp][lane] = most;
            __syncthreads();
        }
        if (rowwise && wanted) {
            bool right = true;
#pragma unroll
            for (u32 b = 0; b < EACH; ++b) {
                if (rule.tiles) lines[b].amax = amax_of(largest_of_stripe(shared.largest[number % 2], row / BLOCK, block));
                const u32 index = at.index + b * by.blocks;
                const u8 scale = write_words<FINITE, NEIGHBOURS>(lines[b], index, by, right);
                const u32 line = (walk.top + number) * TILE_ROWS + row + b, start = walk.place * ROW_BLOCKS + block;
                by.half.scales[rule.swizzled ? swizzled_index(line, start, by.blocks) : index] = scale;
            }
            if (!right) at.kept[RIGHT] = 0;
        }
    }

    // ---- blocks of columns: four lanes have a column, a warp chunks of eight ----
    if (columnwise) {
        const u32 chunk = warp * EACH, stripe = lane % COLUMN_BLOCKS;
        bool right = true;
#pragma unroll
        for (u32 b = 0; b < EACH; ++b) {
            const Words x = made_words<FINITE, ORDER>(blocks_of_columns(shared.tiles, at.first_t, b), by_t);
            const u32 bound = words_bound<FINITE>(x);
            Line line = {x, bound, bound};
            if (rule.tiles) {
                const u32 both = largest_of_stripe(shared.largest[number % 2], stripe, chunk / 2);
                line = {x, bound_of(both), amax_of(both)};
            }
            if (!wanted_t) continue;
            at.kept[b * NEXT_KEPT] =
                write_words<FINITE, ORDER>(line, at.index_t + b * 8 * by_t.blocks, by_t, right);
        }
        if (!right) at.kept[RIGHT + NEXT_KEPT] = 0;
    }
}

__device__ __forceinline__ void store_word(const u8 (&bytes)[4], u8* target) {  // both aligned
#ifdef __CUDA_ARCH__
    *reinterpret_cast<u32*>(target) = *reinterpret_cast<const u32*>(bytes);
#else
    for (int j = 0; j < 4; ++j) target[j] = bytes[j];
#endif
}

__device__ __forceinline__ void quantize_tiles(const bf16* x, i64 rows, i64 columns, const Deal& deal, const Half& row_half,
                                               const Half& column_half, const Rule& rule, const PhiloxKeys& keys,
                                               const PhiloxKeys& keys_t) {
    __shared__ SharedTiles shared;
    const bool rowwise = row_half.tensor_scale != nullptr, columnwise = column_half.tensor_scale != nullptr;
    // Both at once, and before the tile. A half that is not wanted is as the other one.
    const float amax = *(rowwise ? row_half.amax : column_half.amax);
    const float amax_t = *(columnwise ? column_half.amax : row_half.amax);
    TileWalk walk(x, rows, columns, deal);
    walk.fetch<THREADS>(shared.tiles);
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    const float encode = nvfp4_tensor_scale(amax, rule.max_product);
    const float encode_t = nvfp4_tensor_scale(amax_t, rule.max_product);
    if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) {
        if (rowwise) row_half.tensor_scale[0] = encode;
        if (columnwise) column_half.tensor_scale[0] = encode_t;
    }
    const bool rows_rotated = (rule.rotation & ROTATE_ROWS) != 0, columns_rotated = (rule.rotation & ROTATE_COLUMNS) != 0;
    const u32 blocks = static_cast<u32>(columns / BLOCK), blocks_t = static_cast<u32>(rows / BLOCK);
    const Making by = {encode, rows_rotated ? encode / FOURFOLD : encode, blocks, shared.factors[0], shared.any_factors[0],
                       row_half, rule, keys, rows_rotated};
    const Making by_t = {encode_t, columns_rotated ? encode_t / FOURFOLD : encode_t, blocks_t, shared.factors[1],
                         shared.any_factors[1], column_half, rule, keys_t, columns_rotated};
    const u8 scale = static_cast<u8>(thread % SCALES);
    const u32 half = thread / SCALES;
    shared.any_factors[half][scale] = nvfp4_element_factor(scale, half == 0 ? encode : encode_t);
#ifdef HAS_E2M1_BY_SUMS
    shared.factors[half][scale] = finite_factor(scale, half == 0 ? by : by_t);
    reinterpret_cast<uint4*>(shared.scales_t[1])[thread] = {~0u, ~0u, ~0u, ~0u};
#endif

    // Of a warp: rows, of which a quarter has EACH, a block of each; chunks of eight columns, which four lanes have.
    const u32 row = warp * WARP_ROWS + lane / ROW_BLOCKS * EACH, block = lane % ROW_BLOCKS;
    const u32 chunk = warp * EACH, column = chunk * 8 + lane / COLUMN_BLOCKS, stripe = lane % COLUMN_BLOCKS;
    const auto spots = [&](u32 first_t) {
        return Spots{chunk_index(row, 2 * block), first_t,
                     (walk.top * TILE_ROWS + row) * blocks + walk.place * ROW_BLOCKS + block,
                     (walk.place * TILE_COLUMNS + column) * blocks_t + walk.top * COLUMN_BLOCKS + stripe,
                     &shared.scales_t[0][column][0][stripe]};
    };
    Spots at = spots(column_index<column_order<AS_FINITE>()>(chunk));
    for (u32 number = 0; walk.inside(); ++number) {
        tile_comes();
        walk.step();
        if (walk.inside()) walk.fetch<THREADS>(shared.tiles);
        make_tile<AS_FINITE>(shared, walk, number, at, true, true, by, by_t);
        at = next_tile(at, by);
    }
    __syncthreads();
#ifdef HAS_E2M1_BY_SUMS
    const uint4 right = reinterpret_cast<const uint4*>(shared.scales_t[1])[thread];
    if (__syncthreads_or((right.x & right.y & right.z & right.w) != ~0u) != 0) {
        at = spots(column_index<NEIGHBOURS>(chunk));
        TileWalk again(x, rows, columns, deal);
        for (u32 number = 0;; ++number) {
            const bool inside = again.inside();
            const bool wanted = inside && at.kept[RIGHT] == 0, wanted_t = inside && at.kept[RIGHT + NEXT_KEPT] == 0;
            if (__syncthreads_or(wanted || wanted_t) != 0) {  // and all have done with the tile before
                again.fetch<THREADS>(shared.tiles);
                tile_comes();
                make_tile<false>(shared, walk, number, at, wanted, wanted_t, by, by_t);
            }
            if (!inside) break;
            again.step();
            at = next_tile(at, by);
        }
    }
#endif
    if (!columnwise) return;
    const u32 count = walk.end - walk.top;
#pragma unroll
    for (u32 i = 0; i < TILE_COLUMNS * DEEPEST / THREADS; ++i) {
        const u32 n = i * THREADS + thread;
        // Neighbours store what lies side by side.
        const u32 number = rule.swizzled ? n / TILE_COLUMNS : n % DEEPEST;
        const u32 line = rule.swizzled ? n % TILE_COLUMNS / 4 + n % 4 * 32 : n / DEEPEST;
        if (number >= count) continue;
        const u32 at = walk.place * TILE_COLUMNS + line, start = (walk.top + number) * COLUMN_BLOCKS;
        store_word(shared.scales_t[0][line][number],
                   column_half.scales + (rule.swizzled ? swizzled_index(at, start, blocks_t) : at * blocks_t + start));
    }
}
