// quantize_nvfp4: NVFP4 of one read of x: rowwise, columnwise (the transpose, quantized along M), or both.
//
//   x              (M, K), any strides, float32, bfloat16 or float16; any M and K, a short last block counts as padded
//                  with zeros
//   sizes          rows of each of `sections` sections along M, or null: the whole tensor is one section
//   Rowwise, or all null:
//   amax           float32, one a section, or one a row where `each`
//   codes          (M, ceil(K/2)) bytes, element 2j in the low nibble of byte j
//   scales         (M, ceil(K/16)) bytes, E4M3 decode scales; where `swizzled` in the 128x4 layout, whose padding the
//                  caller has set to 0
//   tensor_scale   float32 like amax, the encode factors that were used
//   words          (M, ceil(K/4)) random words where `stochastic`, or null: Philox with seed and offset
//   Columnwise, or all null: the same of each section's transpose (K, m), sections one behind the other; offset_t.
//   Launch: ANY_THREADS threads for every 64x64 tile, of which a strip of 64 rows has ceil(K/64), at least one; ceil(M/64)
//   strips, or with sections one more for each. Of 256 threads, one makes a block of 16 of a row, then one of a column; on
//   a CPU there are 8, a thread has 32 of either, and a barrier costs little.
//   quantize_nvfp4_plain: rowwise alone, contiguous, no variant; two blocks of 16 for every thread, THREADS apart in the
//   order of memory, which is faster by half on a CPU, and a little on a GPU.
//   quantize_nvfp4_tiles: bfloat16, contiguous, M a multiple of 64 and K of 128, both below 2^23, fewer than 2^32 blocks of
//   16, no sections, one amax a half, no 4over6, no rotation of 16x16 blocks; codes aligned to 8 bytes, scales to 4. 256
//   threads for `deep` or `few` tiles of 64x128, at most 8, one below the other: shared_tile.cuh's Deal. `keys` are those
//   of philox_with_offset.
//   While the threads work on a tile in shared memory, the next one comes; a thread makes two blocks of rows, then two of
//   columns. Scales of columns are stored when all tiles are done: those of eight fill a sector of L2, of which each part
//   would cost as much as the whole.
//   Numerics: numerics.md, "NVFP4, 1x16", steps 2 to 8, and "Variants of NVFP4", float32 with one rounding per operation;
//   E4M3 and E2M1 nearest even or stochastic, saturating. `tiles`: blocks of 16x16. `candidates`: 4over6 by absolute (1)
//   or squared (2) errors; those of a tile are measured along its rows, whichever half is made. `rotation`: groups of
//   16 are rotated along K in the rowwise half (bit 0), along M in the columnwise half (bit 1). Everything is exact to
//   the bit.

#include "blocks.cuh"
#include "hadamard.cuh"
#include "layout.cuh"
#include "nvfp4.cuh"
#include "philox.cuh"
#include "sections.cuh"
#include "shared_tile.cuh"
#include "words.cuh"

#ifndef NVFP4_THREADS
#ifdef __CUDA_ARCH__
#define NVFP4_THREADS 256
#else
#define NVFP4_THREADS 8
#endif
#endif

constexpr int THREADS = 256;
constexpr int ANY_THREADS = NVFP4_THREADS;  // of the kernel that takes any matrix
constexpr int TILE = 64;
constexpr int TILE_BLOCKS = TILE / BLOCK;
constexpr int MANY = TILE * TILE_BLOCKS / ANY_THREADS;  // blocks of a thread, of either half
constexpr int PLAIN_BLOCKS = 2;  // of a thread: 0.20 ms for 16384^2 bf16 on an H200, 0.22 with 1, 0.21 with 4
static_assert(TILE == STRIP && MANY * ANY_THREADS == TILE * TILE_BLOCKS, "threads cover the tile");

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

enum Rotation { ROTATE_ROWS = 1, ROTATE_COLUMNS = 2 };

// What the quantization depends on: the same for all threads.
struct Rule {
    float max_product;
    int scale_order, candidates, tiles, each, propagate_nan, rotation, stochastic, swizzled, given_words;
    u32 signs;
    u64 seed;
};

// One orientation of the result; without a tensor_scale it is not wanted (empty codes have no address either).
struct Half {
    const float* amax;
    u8* codes;
    u8* scales;
    float* tensor_scale;
    const u32* words;
    u64 offset;
};

// What the threads of a block read of each other: elements, amaxes of blocks of either half, errors of blocks of rows.
struct Shared {
    float values[TILE * (TILE + 1) + TILE_BLOCKS * 8];
    u32 amaxes[TILE][TILE_BLOCKS], amaxes_t[TILE][TILE_BLOCKS];
    float errors[2][TILE][TILE_BLOCKS];
};

// Where in `values` an element is, so that the threads of a warp find blocks of rows and of columns in different banks.
__device__ __forceinline__ int value_index(int row, int column) { return row * (TILE + 1) + row / BLOCK * 8 + column; }

// A block of 16: where it lies in a matrix whose lines have `length` elements, and how many of its own exist.
struct Place {
    i64 line, start, length;
    i64 first_code, first_scale;
    int count;
};

__device__ __forceinline__ u32 largest_of_tile(const u32 (&amaxes)[TILE][TILE_BLOCKS], int line, int block) {
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const u32 other = amaxes[line / BLOCK * BLOCK + i][block];
        largest = other > largest ? other : largest;
    }
    return largest;
}

// The 16 rows of a tile in a tree: 8 to 8, then 4, 2 and 1.
__device__ __forceinline__ float error_of_tile(const float (&errors)[TILE][TILE_BLOCKS], int line, int block) {
    float sums[BLOCK];
    for (int i = 0; i < BLOCK; ++i) sums[i] = errors[line / BLOCK * BLOCK + i][block];
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
}

// Error of a block under a scale, summed in the order of its elements.
__device__ float error_of_block(const float (&v)[BLOCK], u8 scale, float encode, float amax, Rule rule) {
    const float factor = nvfp4_element_factor(scale, encode);
    const float decoded = e4m3_to_float(scale);
    float total = 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        const float q = e2m1_to_float(e2m1_from_float(v[i] * factor));
        const float error = q * decoded * amax / rule.max_product - v[i];
        const float size = __uint_as_float(__float_as_uint(error) & 0x7FFFFFFFu);
        total += rule.candidates == 1 ? size : error * error;
    }
    return total;
}

// Where a half keeps the scale of a block; its number, where scales are linear, is what Philox counts.
__device__ __forceinline__ i64 write_scale(u8 scale, const Half& half, const Place& place, const Rule& rule) {
    const i64 blocks = (place.length + BLOCK - 1) / BLOCK;
    const i64 block = place.start / BLOCK;
    const i64 index = place.first_scale + place.line * blocks + block;
    half.scales[rule.swizzled ? swizzled_index(place.line, block, blocks) : index] = scale;
    return index;
}

__device__ __forceinline__ u8* code_address(const Half& half, const Place& place) {
    return half.codes + place.first_code + place.line * ((place.length + 1) / 2) + place.start / 2;
}

// The four random words of a block that are given from `first` on, of which `left` are its line's.
__device__ __forceinline__ void load_random(const Half& half, i64 first, i64 left, u32 (&words)[4]) {
    for (int j = 0; j < 4; ++j) words[j] = j < left ? half.words[first + j] : 0u;
}

__device__ __forceinline__ void write_block(const float (&v)[BLOCK], u8 scale, float encode, const Half& half,
                                            const Place& place, const Rule& rule) {
    const float factor = nvfp4_element_factor(scale, encode);
    const i64 index = write_scale(scale, half, place, rule);

    float scaled[BLOCK];
    for (int i = 0; i < BLOCK; ++i) scaled[i] = v[i] * factor;
    u8 packed[BLOCK / 2];
    if (rule.stochastic) {
        u32 words[4];
        if (rule.given_words) {
            const i64 row_words = (place.length + 3) / 4, word = place.start / 4;
            load_random(half, place.line * row_words + word, row_words - word, words);
        } else {
            philox(rule.seed, half.offset, static_cast<u64>(index), words);
        }
        e2m1x16_stochastic(scaled, words, packed);
    } else {
        e2m1x16_from_float(scaled, packed);
    }
    u8* target = code_address(half, place);
    if (place.count == BLOCK) {
        store_bytes(packed, target);
    } else {
        for (int j = 0; j < BLOCK / 2; ++j) {  // a constant count: no byte needs an address
            if (2 * j < place.count) target[j] = packed[j];
        }
        if (place.count % 2 != 0) target[place.count / 2] &= 0xFu;  // padding is code 0 under a NaN factor, too
    }
}

// The two scales that 4over6 chooses from; both the same where it does not.
struct Scales {
    u8 six, four;
};

__device__ __forceinline__ Scales candidate_scales(u32 amax, float encode, const Rule& rule) {
    const float scale = nvfp4_unrounded_scale(__uint_as_float(amax), encode, rule.scale_order);
    const u8 six = e4m3_from_float(scale);
    return {six, rule.candidates != 0 ? e4m3_from_float(scale * 1.5f) : six};
}

__device__ __forceinline__ u8 chosen_scale(const float (&v)[BLOCK], Scales scales, float encode, float amax, const Rule& rule) {
    if (rule.candidates == 0) return scales.six;
    const float six = error_of_block(v, scales.six, encode, amax, rule);
    return error_of_block(v, scales.four, encode, amax, rule) < six ? scales.four : scales.six;
}

template <int THREADS>
__device__ __forceinline__ void write_tensor_scales(const Half& half, i64 count, float max_product) {
    if (half.tensor_scale == nullptr) return;
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        half.tensor_scale[i] = nvfp4_tensor_scale(half.amax[i], max_product);
    }
}

// Number `n` of a thread's blocks of the tile: the line it lies in, and which of its line's.
struct Spot {
    int line, block;
};

__device__ __forceinline__ Spot spot_of(int n) {
    const int number = static_cast<int>(threadIdx.x) * MANY + n;
    return {number / TILE_BLOCKS, number % TILE_BLOCKS};
}

template <class T>
__device__ void quantize(const T* x, i64 row_stride, i64 column_stride, i64 columns, Sections sections, Half row_half,
                         Half column_half, Rule rule) {
    __shared__ Shared shared;
    const bool rowwise = row_half.tensor_scale != nullptr, columnwise = column_half.tensor_scale != nullptr;
    write_tensor_scales<ANY_THREADS>(row_half, rule.each ? sections.rows : sections.count, rule.max_product);
    write_tensor_scales<ANY_THREADS>(column_half, rule.each ? columns : sections.count, rule.max_product);
    const u32 across = columns > 0 ? static_cast<u32>((columns + TILE - 1) / TILE) : 1u;
    const Strip strip = find_strip<BLOCK, 2>(sections, blockIdx.x / across, columns);
    if (strip.section_rows == 0) return;
    const i64 first_column = static_cast<i64>(blockIdx.x % across) * TILE;
    const u32 highest = highest_counted(rule.propagate_nan);
    const bool tiled_choice = rule.tiles && rule.candidates != 0;
    const Half& measured = rowwise ? row_half : column_half;  // whose amax the choice of a tile is made by
    float v[MANY][BLOCK];
    u32 amaxes[MANY];
    int counts[MANY];

    // ---- blocks of rows ----
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const auto [line, block] = spot_of(n);
        const i64 row = strip.section_start + strip.start + line;
        const i64 column = first_column + block * BLOCK;
        const i64 left = strip.start + line < strip.section_rows ? columns - column : 0;
        counts[n] = count_of<BLOCK>(left);
        load_block(x + row * row_stride + column * column_stride, column_stride, counts[n], v[n]);
        if (columnwise) {
            float* kept = &shared.values[value_index(line, block * BLOCK)];
            for (int i = 0; i < BLOCK; ++i) kept[i] = v[n][i];
        }
        if ((rule.rotation & ROTATE_ROWS) != 0) rotate16(v[n], rule.signs);
        amaxes[n] = largest_magnitude(v[n], highest);
        if (rule.tiles) shared.amaxes[line][block] = amaxes[n];
    }
    if (rule.tiles || columnwise) __syncthreads();
    if (rowwise || tiled_choice) {
        float gamaxes[MANY], encodes[MANY];
        Scales scales[MANY];
#pragma unroll
        for (int n = 0; n < MANY; ++n) {
            const auto [line, block] = spot_of(n);
            if (rule.tiles) amaxes[n] = largest_of_tile(shared.amaxes, line, block);
            const i64 row = strip.section_start + strip.start + line;
            const float gamax = counts[n] == 0 ? 0.0f : measured.amax[rule.each ? row : strip.section];
            const float encode = nvfp4_tensor_scale(gamax, rule.max_product);
            scales[n] = candidate_scales(amaxes[n], encode, rule);
            if (tiled_choice) {
                shared.errors[0][line][block] = error_of_block(v[n], scales[n].six, encode, gamax, rule);
                shared.errors[1][line][block] = error_of_block(v[n], scales[n].four, encode, gamax, rule);
            }
            gamaxes[n] = gamax;
            encodes[n] = encode;
        }
        if (tiled_choice) __syncthreads();
#pragma unroll
        for (int n = 0; n < MANY; ++n) {
            const auto [line, block] = spot_of(n);
            u8 scale;
            if (tiled_choice) {
                const float six = error_of_tile(shared.errors[0], line, block);
                scale = error_of_tile(shared.errors[1], line, block) < six ? scales[n].four : scales[n].six;
            } else {
                scale = chosen_scale(v[n], scales[n], encodes[n], gamaxes[n], rule);
            }
            if (rowwise && counts[n] > 0) {
                const i64 row = strip.section_start + strip.start + line;
                const Place place = {row, first_column + block * BLOCK, columns, 0, 0, counts[n]};
                write_block(v[n], scale, encodes[n], row_half, place, rule);
            }
        }
    }
    if (!columnwise) return;

    // ---- blocks of columns ----
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const auto [line, block] = spot_of(n);
        for (int i = 0; i < BLOCK; ++i) v[n][i] = shared.values[value_index(block * BLOCK + i, line)];
    }
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const auto [line, block] = spot_of(n);
        if ((rule.rotation & ROTATE_COLUMNS) != 0) rotate16(v[n], rule.signs);
        amaxes[n] = largest_magnitude(v[n], highest);
        if (rule.tiles) shared.amaxes_t[line][block] = amaxes[n];
    }
    if (rule.tiles) __syncthreads();
#pragma unroll
    for (int n = 0; n < MANY; ++n) {
        const auto [line, block] = spot_of(n);
        const i64 column = first_column + line;
        const i64 start = strip.start + block * BLOCK;
        const int count = count_of<BLOCK>(column < columns ? strip.section_rows - start : 0);
        if (count == 0) continue;
        if (rule.tiles) amaxes[n] = largest_of_tile(shared.amaxes_t, line, block);
        const float gamax = column_half.amax[rule.each ? column : strip.section];
        const float encode = nvfp4_tensor_scale(gamax, rule.max_product);
        const Scales scales = candidate_scales(amaxes[n], encode, rule);
        u8 scale;
        if (tiled_choice) {
            const float six = error_of_tile(shared.errors[0], block * BLOCK, line / BLOCK);
            scale = error_of_tile(shared.errors[1], block * BLOCK, line / BLOCK) < six ? scales.four : scales.six;
        } else {
            scale = chosen_scale(v[n], scales, encode, gamax, rule);
        }
        const Place place = {column, start, strip.section_rows, strip.codes_t, strip.scales_t, count};
        write_block(v[n], scale, encode, column_half, place, rule);
    }
}

// What a recipe asks for, in one number: where that is known when the kernel is compiled, the rest costs nothing.
#ifdef VARIANT
#define CHOSEN VARIANT
#else
#define CHOSEN variant
#endif
__device__ __forceinline__ Rule rule_of(int variant, float max_product, u64 seed) {
    return {max_product, variant >> 25 & 1, variant & 3, variant >> 2 & 1, variant >> 3 & 1, variant >> 4 & 1,
            variant >> 5 & 3, variant >> 7 & 1, variant >> 8 & 1, variant >> 26 & 1,
            static_cast<u32>(variant >> 9 & 0xFFFF), seed};
}

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

#define QUANTIZE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(ANY_THREADS)                                                          \
        NAME(const T* x, i64 row_stride, i64 column_stride, i64 rows, i64 columns, const i64* sizes, int sections,     \
             const float* amax, u8* codes, u8* scales, float* tensor_scale, const u32* words, u64 offset,              \
             const float* amax_t, u8* codes_t, u8* scales_t, float* tensor_scale_t, const u32* words_t, u64 offset_t,  \
             float max_product, int variant, u64 seed) {                                                               \
        quantize(x, row_stride, column_stride, columns, Sections{sizes, sections, rows},                               \
                 Half{amax, codes, scales, tensor_scale, words, offset},                                               \
                 Half{amax_t, codes_t, scales_t, tensor_scale_t, words_t, offset_t},                                   \
                 rule_of(CHOSEN, max_product, seed));                                                                  \
    }

// Whole blocks of bfloat16, one behind the other: all are loaded before any is used.
__device__ __forceinline__ void quantize_lines(const bf16* x, i64 total, const Half& half, const Rule& rule) {
    const float encode = nvfp4_tensor_scale(half.amax[0], rule.max_product);
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS * PLAIN_BLOCKS + threadIdx.x;
    Words loaded[PLAIN_BLOCKS];
#pragma unroll
    for (int b = 0; b < PLAIN_BLOCKS; ++b) {
        const i64 index = first + b * THREADS;
        if (index < total) loaded[b] = load_words(reinterpret_cast<const u32*>(x) + index * (BLOCK / 2));
    }
#pragma unroll
    for (int b = 0; b < PLAIN_BLOCKS; ++b) {
        const i64 index = first + b * THREADS;
        if (index >= total) return;
        const u32 bound = bound_of_words(loaded[b]);
        const auto factor = [&](u8 scale) { return nvfp4_element_factor(scale, encode); };
        const Made made = make_block(loaded[b], bound, bound, encode, factor, nullptr, rule);
        half.scales[index] = made.scale;
        store_codes(made.codes, half.codes + index * (BLOCK / 2));
    }
}

// Rowwise, of a whole contiguous tensor, without any variant.
template <class T>
__device__ void quantize_plain(const T* x, i64 rows, i64 columns, Half half, Rule rule) {
    write_tensor_scales<THREADS>(half, 1, rule.max_product);
    const i64 total = rows * ((columns + BLOCK - 1) / BLOCK);
#ifdef __CUDA_ARCH__
    if constexpr (is_bf16<T>) {
        if (columns % BLOCK == 0 && reinterpret_cast<u64>(x) % 16 == 0 && reinterpret_cast<u64>(half.codes) % 8 == 0) {
            quantize_lines(x, total, half, rule);
            return;
        }
    }
#endif
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS * PLAIN_BLOCKS + threadIdx.x;
    for (i64 index = first; index < total && index < first + THREADS * PLAIN_BLOCKS; index += THREADS) {
        const Run run = find_run<BLOCK>(rows, columns, index);
        float v[BLOCK];
        load_block(x + run.line * columns + run.start, 1, run.count, v);
        const float encode = nvfp4_tensor_scale(half.amax[0], rule.max_product);
        const u32 amax = largest_magnitude(v, highest_counted(rule.propagate_nan));
        write_block(v, candidate_scales(amax, encode, rule).six, encode, half,
                    Place{run.line, run.start, run.length, 0, 0, run.count}, rule);
    }
}

// ---- bfloat16 in whole tiles of 64x128 ----

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

extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS_OF_SM)
    quantize_nvfp4_tiles_bf16(const bf16* x, i64 rows, i64 columns, int deep, int whole, int few, const float* amax,
                              u8* codes, u8* scales, float* tensor_scale, const u32* words, u64 offset, const float* amax_t, u8* codes_t,
                              u8* scales_t, float* tensor_scale_t, const u32* words_t, u64 offset_t, float max_product,
                              int variant, u64 seed, PhiloxKeys keys, PhiloxKeys keys_t) {
    quantize_tiles(x, rows, columns, Deal{deep, whole, few}, Half{amax, codes, scales, tensor_scale, words, offset},
                  Half{amax_t, codes_t, scales_t, tensor_scale_t, words_t, offset_t},
                  rule_of(CHOSEN, max_product, seed), keys, keys_t);
}

#define QUANTIZE_PLAIN(NAME, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const T* x, i64 rows, i64 columns, const float* amax, u8* codes, u8* scales, float* tensor_scale,         \
             float max_product, int scale_order, int propagate_nan) {                                                  \
        quantize_plain(x, rows, columns, Half{amax, codes, scales, tensor_scale, nullptr, 0},                          \
                       Rule{max_product, scale_order, 0, 0, 0, propagate_nan, 0, 0, 0, 0, 0u, 0u});                    \
    }

QUANTIZE(quantize_nvfp4_fp32, float)
QUANTIZE(quantize_nvfp4_bf16, bf16)
QUANTIZE(quantize_nvfp4_fp16, fp16)
QUANTIZE_PLAIN(quantize_nvfp4_plain_fp32, float)
QUANTIZE_PLAIN(quantize_nvfp4_plain_bf16, bf16)
QUANTIZE_PLAIN(quantize_nvfp4_plain_fp16, fp16)
