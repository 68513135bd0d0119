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
//   Numerics: docs/numerics.md#nvfp4, steps 2 to 8, and docs/numerics.md#nvfp4-variants,
//   float32 with one rounding per operation;
//   E4M3 and E2M1 nearest even or stochastic, saturating. `tiles`: blocks of 16x16. `candidates`: 4over6 by absolute (1)
//   or squared (2) errors; those of a tile are measured along its rows, whichever half is made. `rotation`: groups of
//   16 are rotated along K in the rowwise half (bit 0), along M in the columnwise half (bit 1). Everything is exact to
//   the bit.

#include "quantize/quantize_nvfp4_any.cuh"
#include "quantize/quantize_nvfp4_tiles.cuh"

constexpr int PLAIN_BLOCKS = 2;  // of a thread: 0.20 ms for 16384^2 bf16 on an H200, 0.22 with 1, 0.21 with 4

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

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
