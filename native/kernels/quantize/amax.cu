// amax: largest magnitude of a tensor.
//
//   x    n elements, contiguous, float32, bfloat16 or float16
//   out  a float32, as bits; the caller sets it to 0 before the launch
//   Launch: any grid of 256 threads; a grid-stride loop covers x.
//   Exact. Magnitudes are compared as integers, which have the same order. NaN is left out, or wins if propagate_nan is
//   set (its bits are above those of infinity).

#include "common/blocks.cuh"
#include "common/reduce.cuh"

namespace narrowgauge {

constexpr int THREADS = 256;
constexpr int PER_THREAD = 16;

template <class T>
__device__ void amax(const T* x, u32* out, i64 n, int propagate_nan) {
    __shared__ u32 warp_maxima[THREADS / 32];
    const i64 step = static_cast<i64>(gridDim.x) * THREADS * PER_THREAD;
    const u32 limit = amax_limit(propagate_nan);
#ifdef HAS_SIMD
    UintVector lane_maxima = {};
#endif
    u32 largest = 0;
    for (i64 start = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * PER_THREAD; start < n; start += step) {
#ifdef __CUDA_ARCH__
        if (n - start >= PER_THREAD) {
            float v[PER_THREAD];
            load_elements(x + start, v);
            const u32 amax = amax_of_block(v, limit);
            largest = amax > largest ? amax : largest;
            continue;
        }
#elif defined(HAS_SIMD)
        if (n - start >= PER_THREAD) {
            for (int i = 0; i < PER_THREAD; i += SIMD_LANES) {
                update_amax_vector(to_float_vector(x + start + i), limit, lane_maxima);
            }
            continue;
        }
#endif
        if (n - start >= PER_THREAD) {  // a constant trip count; the compiler unrolls the loop
            for (int i = 0; i < PER_THREAD; ++i) update_amax(to_float(x[start + i]), limit, largest);
        } else {
            for (int i = 0; i < n - start; ++i) update_amax(to_float(x[start + i]), limit, largest);
        }
    }
#ifdef HAS_SIMD
    largest = reduce_max(vector_max(lane_maxima, UintVector{} + largest));
#endif
    block_atomic_max(warp_maxima, largest, out);
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_fp32(const float* x, u32* out, i64 n, int propagate_nan) {
    amax(x, out, n, propagate_nan);
}
extern "C" __global__ void __launch_bounds__(THREADS) amax_bf16(const bf16* x, u32* out, i64 n, int propagate_nan) {
    amax(x, out, n, propagate_nan);
}
extern "C" __global__ void __launch_bounds__(THREADS) amax_fp16(const fp16* x, u32* out, i64 n, int propagate_nan) {
    amax(x, out, n, propagate_nan);
}

}  // namespace narrowgauge
