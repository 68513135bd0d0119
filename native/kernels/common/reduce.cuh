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

}  // namespace narrowgauge
