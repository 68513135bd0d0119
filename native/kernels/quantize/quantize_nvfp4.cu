// quantize_nvfp4: NVFP4 from one read of x: rowwise, columnwise (the transpose, quantized along M), or both.
//
//   Parameters: struct QuantizeNvfp4Parameters, the choices of a recipe in struct QuantizeNvfp4Variant, and an Output for each
//   orientation: `column` is the transpose (K, m) of the sections, which are contiguous. quantize_nvfp4_tiles takes the keys
//   of philox_with_offset, too. A struct of more than 128 bytes makes NVRTC 13.0 schedule nvfp4-sr worse: 9 %
//   longer on an H200.
//   quantize_nvfp4: any matrix. Launch: GENERAL_THREADS threads for every tile of 64x64. A strip of 64 rows has ceil(K/64)
//   tiles, at least 1; ceil(M/64) strips, or with sections 1 more per section. With 256 threads, a thread quantizes a block of
//   16 of a row, then one of a column. On a CPU there are 8 threads with 32 blocks, and a barrier is cheap.
//   quantize_nvfp4_plain: contiguous, rowwise only, a recipe without further choices (4over6, square blocks, rotation and the
//   like). A thread quantizes two blocks of 16 that are THREADS blocks apart in memory order. It is faster by half on a CPU,
//   and a little on a GPU.
//   quantize_nvfp4_tiles: contiguous bfloat16, M a multiple of 64 and K of 128, both below 2^23, fewer than 2^32 blocks of 16;
//   no sections, no square blocks with 4over6 or rotation, no 4over6 with an amax per row; codes aligned to 8 bytes, scales to
//   4. Launch: the grid of TileSchedule (shared_tile.cuh), 256 threads in a block. While the threads work on a tile in shared
//   memory, the next tile is copied asynchronously. A thread quantizes two blocks of rows, then two of columns. Scales of
//   columns are stored after the last tile: those of eight tiles fill a sector of L2, and a partial write would cost as much
//   as the whole sector.
//   Numerics: docs/numerics.md#nvfp4, steps 2 to 8, and docs/numerics.md#nvfp4-variants: float32 with one rounding per
//   operation; E4M3 and E2M1 nearest even or stochastic, saturating. Philox: the subsequence is the index of the block in
//   linear layout. Everything is exact to the bit.

#include "quantize/nvfp4/general.cuh"
#include "quantize/nvfp4/tiles.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

// Blocks of a thread of quantize_nvfp4_plain. 16384^2 bf16 on an H200: 0.20 ms with 2, 0.22 with 1, 0.21 with 4.
constexpr int PLAIN_BLOCKS = 2;
// Thread blocks of a multiprocessor, an occupancy that limits a thread to 40 registers; ptxas would use 48 for bfloat16.
constexpr int PLAIN_BLOCKS_PER_SM = 6;

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

// Contiguous full blocks of bfloat16. All loads are issued before the first use.
__device__ __forceinline__ void quantize_lines(const bf16* x, i64 total, const Output& output, const Settings& settings) {
    const float encode = nvfp4_tensor_scale(output.amax[0], settings.max_product);
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS * PLAIN_BLOCKS + threadIdx.x;
    PackedBf16 loaded[PLAIN_BLOCKS];
#pragma unroll
    for (int b = 0; b < PLAIN_BLOCKS; ++b) {
        const i64 index = first + b * THREADS;
        if (index < total) loaded[b] = load_packed(reinterpret_cast<const u32*>(x) + index * (BLOCK / 2));
    }
#pragma unroll
    for (int b = 0; b < PLAIN_BLOCKS; ++b) {
        const i64 index = first + b * THREADS;
        if (index >= total) return;
        const QuantizedBlock block = quantize_block(loaded[b], encode, settings);
        output.scales[index] = block.scale;
        store_codes(block.codes, output.codes + index * (BLOCK / 2));
    }
}

// Rowwise, contiguous, without further choices of the recipe.
template <class T>
__device__ void quantize_plain(const T* x, i64 rows, i64 columns, Output output, Settings settings) {
    write_tensor_scales<THREADS>(output, 1, settings.max_product);
    const i64 total = rows * ((columns + BLOCK - 1) / BLOCK);
#ifdef __CUDA_ARCH__
    if constexpr (is_bf16<T>) {
        if (columns % BLOCK == 0 && reinterpret_cast<u64>(x) % 16 == 0 && reinterpret_cast<u64>(output.codes) % 8 == 0) {
            quantize_lines(x, total, output, settings);
            return;
        }
    }
#endif
    const i64 first = static_cast<i64>(blockIdx.x) * THREADS * PLAIN_BLOCKS + threadIdx.x;
    for (i64 index = first; index < total && index < first + THREADS * PLAIN_BLOCKS; index += THREADS) {
        const LinearBlock block = linear_block<BLOCK>(rows, columns, index);
        float v[BLOCK];
        load_block(x + block.line * columns + block.start, 1, block.count, v);
        const float encode = nvfp4_tensor_scale(output.amax[0], settings.max_product);
        const u32 amax = amax_of_block(v, amax_limit(settings.propagate_nan));
        write_block(v, candidate_scales(amax, encode, settings).six, encode, output,
                    BlockPosition{block.line, block.start, block.length, 0, 0, block.count}, settings);
    }
}

// With quantize_nvfp4_plain, only the order of the scale's operations and the handling of NaN depend on the recipe.
__device__ __forceinline__ Settings plain_settings(const QuantizeNvfp4Parameters& p) {
    QuantizeNvfp4Variant variant = {};
    variant.propagate_nan = p.variant.propagate_nan;
    variant.scale_order = p.variant.scale_order;
    return {variant, p.max_product, 0u};
}

#define QUANTIZE(TYPE, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                      \
        quantize_nvfp4_##TYPE(const __grid_constant__ QuantizeNvfp4Parameters p, Output row, Output column) {          \
        quantize(Matrix<T>{static_cast<const T*>(p.x), p.row_stride, p.column_stride}, p.columns,                      \
                 Sections{p.sizes, p.sections, p.rows}, row, column,                                                   \
                 Settings{variant_of(p), p.max_product, p.seed});                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, PLAIN_BLOCKS_PER_SM)                                         \
        quantize_nvfp4_plain_##TYPE(const __grid_constant__ QuantizeNvfp4Parameters p, Output row) {                   \
        quantize_plain(static_cast<const T*>(p.x), p.rows, p.columns, row, plain_settings(p));                         \
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
#if IN_UNIT(UNIT_TILES)
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS_PER_SM)
    quantize_nvfp4_tiles_bf16(const __grid_constant__ QuantizeNvfp4Parameters p, Output row, Output column,
                              TileSchedule schedule, const __grid_constant__ PhiloxKeys row_keys,
                              const __grid_constant__ PhiloxKeys column_keys) {
    quantize_tiles(static_cast<const bf16*>(p.x), p.rows, p.columns, schedule, row, column,
                   Settings{variant_of(p), p.max_product, p.seed}, row_keys, column_keys);
}
#endif

}  // namespace narrowgauge
