// reduce.cuh: reductions over a thread block.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

// Atomic maximum of *out and the values `largest` of all threads of the block. `warp_maxima`: shared memory, a word per
// warp.
template <int WARPS>
__device__ __forceinline__ void block_atomic_max(u32 (&warp_maxima)[WARPS], u32 largest, u32* out) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const u32 received = __shfl_xor_sync(0xFFFFFFFFu, largest, distance);
        largest = received > largest ? received : largest;
    }
    if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; ++w) largest = warp_maxima[w] > largest ? warp_maxima[w] : largest;
        atomicMax(out, largest);
    }
}

template <int THREADS>
constexpr int WARPS_OF = THREADS < 32 ? 1 : THREADS / 32;

// The same for a block of THREADS threads, which may be fewer than a warp.
template <int THREADS>
__device__ __forceinline__ void atomic_max_of_threads(u32 (&warp_maxima)[WARPS_OF<THREADS>], u32 largest, u32* out) {
    if constexpr (THREADS < 32) {  // fewer threads than a warp do not shuffle
        atomicMax(out, largest);
    } else {
        block_atomic_max(warp_maxima, largest, out);
    }
}

}  // namespace narrowgauge
