// philox.cuh: Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words for a 64-bit key and a 128-bit counter.
#pragma once

#include "formats.cuh"

__device__ __forceinline__ u64 wide_product(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u64 product;  // from a product of 64 bits by a constant the compiler leaves an addition of 0
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return static_cast<u64>(a) * b;
#endif
}

// The key is the seed, low word first; counter words 0 and 1 are the offset, 2 and 3 the subsequence.
__device__ __forceinline__ void philox(u64 seed, u64 offset, u64 subsequence, u32 (&words)[4]) {
    u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
    words[0] = static_cast<u32>(offset);
    words[1] = static_cast<u32>(offset >> 32);
    words[2] = static_cast<u32>(subsequence);
    words[3] = static_cast<u32>(subsequence >> 32);
    for (int round = 0; round < 10; ++round) {
        const u64 first = wide_product(words[0], 0xD2511F53u);
        const u64 second = wide_product(words[2], 0xCD9E8D57u);
        const u32 word0 = static_cast<u32>(second >> 32) ^ words[1] ^ key0;
        const u32 word2 = static_cast<u32>(first >> 32) ^ words[3] ^ key1;
        words[0] = word0;
        words[1] = static_cast<u32>(second);
        words[2] = word2;
        words[3] = static_cast<u32>(first);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}
