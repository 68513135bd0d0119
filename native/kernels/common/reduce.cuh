// reduce.cuh: one number from all threads of a block.
#pragma once

#include "common/formats.cuh"

// The largest number that a thread of the block holds, into `out` where it is larger. `warps`: shared, one for each warp.
template <int WARPS>
__device__ __forceinline__ void largest_of_block(u32 (&warps)[WARPS], u32 largest, u32* out) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, largest, lanes);
        largest = other > largest ? other : largest;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; ++w) largest = warps[w] > largest ? warps[w] : largest;
        atomicMax(out, largest);
    }
}
