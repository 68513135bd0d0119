// quantize_nvfp4_any.cuh: NVFP4 of any matrix, in tiles of 64x64, and what is the same for whole tiles of bfloat16. Their
// contract: quantize_nvfp4.cu.
#pragma once

#include "common/blocks.cuh"
#include "common/hadamard.cuh"
#include "layout/layout.cuh"
#include "common/nvfp4.cuh"
#include "common/philox.cuh"
#include "common/sections.cuh"

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
static_assert(TILE == STRIP && MANY * ANY_THREADS == TILE * TILE_BLOCKS, "threads cover the tile");

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
