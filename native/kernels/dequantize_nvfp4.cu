// dequantize_nvfp4: codes and scales of NVFP4 back to values.
//
//   codes   (M, ceil(K/2)) bytes, scales (M, ceil(K/16)) E4M3 bytes, amax float32 (1,), or (M,) where `each`
//   out     (M, K) float32, bfloat16 or float16
//   Launch: 256 threads a block, one thread for every 16 elements.
//   Numerics: f = fl(fl(s * amax) * r), r = fl(1/2688) or fl(1/1536); out = cast(fl(code * f)), nearest even. Exact to
//   the bit.

#include "nvfp4.cuh"

constexpr int THREADS = 256;

template <class T>
__device__ void dequantize(const u8* codes, const u8* scales, const float* amax, T* out, i64 rows, i64 columns, int each,
                           float reciprocal) {
    const i64 blocks = (columns + BLOCK - 1) / BLOCK;
    const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= rows * blocks) return;
    const i64 row = index / blocks;
    const i64 column = (index - row * blocks) * BLOCK;
    const i64 left = columns - column;
    const int count = left < BLOCK ? static_cast<int>(left) : BLOCK;
    const u8* source = codes + row * ((columns + 1) / 2) + column / 2;
    T* target = out + row * columns + column;

    const float factor = e4m3_to_float(scales[index]) * amax[each ? row : 0] * reciprocal;
    for (int i = 0; i < count; ++i) {
        from_float(e2m1_to_float(source[i / 2] >> (i % 2 * 4) & 0xFu) * factor, target[i]);
    }
}

#define DEQUANTIZE(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const u8* codes, const u8* scales, const float* amax, T* out, i64 rows, i64 columns, int each,            \
             float reciprocal) {                                                                                       \
        dequantize(codes, scales, amax, out, rows, columns, each, reciprocal);                                         \
    }

DEQUANTIZE(dequantize_nvfp4_fp32, float)
DEQUANTIZE(dequantize_nvfp4_bf16, bf16)
DEQUANTIZE(dequantize_nvfp4_fp16, fp16)
