// produced_nvfp4: NVFP4 of a matrix that the kernel makes (producers.cuh): rowwise, columnwise, or both in one pass.
//
//   Parameters: struct QuantizeNvfp4Parameters, of which x and its strides and sections are not used, an Output for each
//   orientation, and struct ProducerParameters. Launch and numerics: quantize_nvfp4 of quantize/quantize_nvfp4.cu.
//   produced_amax: amaxes of the matrix, and of its rotated groups of 16. Parameters: struct ProducedAmaxParameters and struct
//   ProducerParameters. Launch: the same. The caller sets both outputs to 0.

#include "common/reduce.cuh"
#include "fused/producers.cuh"
#include "quantize/nvfp4/general.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

struct ProducedAmaxParameters {
    i64 rows;       // M
    i64 columns;    // K
    u32* plain;     // amax of the matrix, float32 as bits; or null
    u32* rotated;   // amax of the rotated groups, float32 as bits; or null
    bool along_rows;  // groups of 16 extend along K, else along M
    u32 signs;      // of the rotation
    bool propagate_nan;
};

template <class Source>
__device__ __forceinline__ void produced_amax(const Source& x, const ProducedAmaxParameters& p) {
    __shared__ float values[TILE * (TILE + 1) + TILE_BLOCKS * 8];
    __shared__ u32 plain_maxima[WARPS_OF<GENERAL_THREADS>], rotated_maxima[WARPS_OF<GENERAL_THREADS>];
    const u32 across = p.columns > 0 ? static_cast<u32>((p.columns + TILE - 1) / TILE) : 1u;
    const u32 limit = amax_limit(p.propagate_nan);
    const i64 first_row = static_cast<i64>(blockIdx.x / across) * TILE;
    const i64 first_column = static_cast<i64>(blockIdx.x % across) * TILE;
    const bool across_rows = p.rotated != nullptr && !p.along_rows;
    u32 largest = 0, largest_rotated = 0;
    float v[BLOCK];
#pragma unroll
    for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
        const auto [line, block] = tile_block(n);
        const i64 row = first_row + line, column = first_column + block * BLOCK;
        x.load(row, column, valid_count<BLOCK>(row < p.rows ? p.columns - column : 0), v);
        const u32 plain = amax_of_block(v, limit);
        largest = plain > largest ? plain : largest;
        if (across_rows) {
            for (int i = 0; i < BLOCK; ++i) values[value_index(line, block * BLOCK) + i] = v[i];
        } else if (p.rotated != nullptr) {
            rotate16(v, p.signs);
            const u32 rotated = amax_of_block(v, limit);
            largest_rotated = rotated > largest_rotated ? rotated : largest_rotated;
        }
    }
    if (across_rows) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < BLOCKS_PER_THREAD; ++n) {
            const auto [line, block] = tile_block(n);
            for (int i = 0; i < BLOCK; ++i) v[i] = values[value_index(block * BLOCK + i, line)];
            rotate16(v, p.signs);
            const u32 rotated = amax_of_block(v, limit);
            largest_rotated = rotated > largest_rotated ? rotated : largest_rotated;
        }
    }
    if (p.plain != nullptr) atomic_max_of_threads<GENERAL_THREADS>(plain_maxima, largest, p.plain);
    if (p.rotated != nullptr) atomic_max_of_threads<GENERAL_THREADS>(rotated_maxima, largest_rotated, p.rotated);
}

#define PRODUCED_NVFP4(TYPE, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                      \
        produced_nvfp4_##TYPE(const __grid_constant__ QuantizeNvfp4Parameters p, Output row, Output column,            \
                              const __grid_constant__ ProducerParameters producer) {                                   \
        quantize(Produced<T>{producer, variant_of(producer)}, p.columns, Sections{nullptr, 1, p.rows}, row, column,    \
                 Settings{variant_of(p), p.max_product, 0u});                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                      \
        produced_amax_##TYPE(const __grid_constant__ ProducedAmaxParameters p,                                         \
                             const __grid_constant__ ProducerParameters producer) {                                    \
        produced_amax(Produced<T>{producer, variant_of(producer)}, p);                                                 \
    }

#if IN_UNIT(UNIT_FP32)
PRODUCED_NVFP4(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
PRODUCED_NVFP4(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
PRODUCED_NVFP4(fp16, fp16)
#endif

}  // namespace narrowgauge
