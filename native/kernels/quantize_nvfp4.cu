// quantize_nvfp4: NVFP4 with 1x16 blocks along K.
//
//   x             (M, K) contiguous, float32, bfloat16 or float16; any M and K, a short last block counts as padded
//                 with zeros
//   amax          float32 (1,), largest magnitude of the tensor
//   codes         (M, ceil(K/2)) bytes, element 2j in the low nibble of byte j
//   scales        (M, ceil(K/16)) bytes, E4M3 decode scales
//   tensor_scale  float32 (1,), the encode factor that was used
//   Launch: 256 threads a block, one thread for every 16 elements.
//   Numerics: numerics.md, "NVFP4, 1x16", steps 2 to 8, float32 with one rounding per operation; E4M3 and E2M1 nearest
//   even, saturating. Everything is exact to the bit.

#include "nvfp4.cuh"

constexpr int THREADS = 256;

template <class T>
__device__ void quantize(const T* x, const float* amax, u8* codes, u8* scales, float* tensor_scale, i64 rows, i64 columns,
                         int scale_order, int propagate_nan) {
    const i64 blocks = (columns + BLOCK - 1) / BLOCK;
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    const float encode = nvfp4_tensor_scale(amax[0]);
    if (index == 0) tensor_scale[0] = encode;
    if (index >= rows * blocks) return;

    // Where every block is full, rows follow each other without a gap and no row number is needed.
    const bool full_rows = columns % BLOCK == 0;
    const i64 row = full_rows ? 0 : index / blocks;
    const i64 column = (index - row * blocks) * BLOCK;
    const i64 left = full_rows ? BLOCK : columns - column;
    const int count = left < BLOCK ? static_cast<int>(left) : BLOCK;
    const T* source = x + row * columns + column;
    u8* target = codes + row * ((columns + 1) / 2) + column / 2;

    float values[BLOCK];
    if (count == BLOCK) {
        for (int i = 0; i < BLOCK; ++i) values[i] = to_float(source[i]);
    } else {
        for (int i = 0; i < BLOCK; ++i) values[i] = i < count ? to_float(source[i]) : 0.0f;
    }

    const u32 highest = highest_counted(propagate_nan);
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) take_magnitude(values[i], highest, largest);
    const u8 scale = nvfp4_block_scale(__uint_as_float(largest), encode, scale_order);
    const float factor = nvfp4_element_factor(scale, encode);

    u8 packed[BLOCK / 2];
    for (int j = 0; j < BLOCK / 2; ++j) packed[j] = e2m1x2_from_float(values[2 * j] * factor, values[2 * j + 1] * factor);
    for (int j = 0; j < (count + 1) / 2; ++j) target[j] = packed[j];
    if (count % 2 != 0) target[count / 2] &= 0xFu;  // padding is code 0 under a NaN factor, too
    scales[index] = scale;
}

#define QUANTIZE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const T* x, const float* amax, u8* codes, u8* scales, float* tensor_scale, i64 rows, i64 columns,         \
             int scale_order, int propagate_nan) {                                                                     \
        quantize(x, amax, codes, scales, tensor_scale, rows, columns, scale_order, propagate_nan);                     \
    }

QUANTIZE(quantize_nvfp4_fp32, float)
QUANTIZE(quantize_nvfp4_bf16, bf16)
QUANTIZE(quantize_nvfp4_fp16, fp16)
