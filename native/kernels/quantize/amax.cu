// amax: the largest magnitude of a tensor.
//
//   x     n elements, contiguous, float32, bfloat16 or float16
//   amax  one float32 as bits; the caller sets it to 0 before the launch
//   Launch: any grid of 256 threads; the grid strides over x.
//   Exact. Magnitudes are compared as integers, whose order is theirs. NaN is left out, or wins where propagate_nan
//   (its bits are above infinity's).

#include "common/blocks.cuh"
#include "common/reduce.cuh"

constexpr int THREADS = 256;
constexpr int PER_THREAD = 16;

template <class T>
__device__ void amax(const T* x, u32* out, i64 n, int propagate_nan) {
    __shared__ u32 warps[THREADS / 32];
    const i64 step = static_cast<i64>(gridDim.x) * THREADS * PER_THREAD;
    const u32 highest = highest_counted(propagate_nan);
#ifdef HAS_LANES
    Bits most = {};  // of each lane
#endif
    u32 largest = 0;
    for (i64 start = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * PER_THREAD; start < n; start += step) {
#ifdef __CUDA_ARCH__
        if (n - start >= PER_THREAD) {
            float v[PER_THREAD];
            load_elements(x + start, v);
            const u32 found = largest_magnitude(v, highest);
            largest = found > largest ? found : largest;
            continue;
        }
#elif defined(HAS_LANES)
        if (n - start >= PER_THREAD) {
            for (int i = 0; i < PER_THREAD; i += LANES) take_magnitudes(to_float_lanes(x + start + i), highest, most);
            continue;
        }
#endif
        if (n - start >= PER_THREAD) {  // a constant count, which compilers unroll
            for (int i = 0; i < PER_THREAD; ++i) take_magnitude(to_float(x[start + i]), highest, largest);
        } else {
            for (int i = 0; i < n - start; ++i) take_magnitude(to_float(x[start + i]), highest, largest);
        }
    }
#ifdef HAS_LANES
    largest = largest_lane(larger(most, Bits{} + largest));
#endif
    largest_of_block(warps, largest, out);
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
