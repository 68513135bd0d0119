// philox.cuh: Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words for a 64-bit key and a 128-bit counter.
#pragma once

#include "common/formats.cuh"

__device__ __forceinline__ u64 wide_product(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u64 product;  // from a product of 64 bits by a constant the compiler leaves an addition of 0
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return static_cast<u64>(a) * b;
#endif
}

// Of each round. As a parameter of a kernel they cost a GPU nothing, which otherwise adds to the key every round.
struct PhiloxKeys {
    u32 each[10][2];
};

template <int FIRST>
__device__ __forceinline__ void philox_rounds(const PhiloxKeys& keys, u32 (&words)[4]) {
#pragma unroll
    for (int round = FIRST; round < 10; ++round) {
        const u64 first = wide_product(words[0], 0xD2511F53u);
        const u64 second = wide_product(words[2], 0xCD9E8D57u);
        const u32 word0 = static_cast<u32>(second >> 32) ^ words[1] ^ keys.each[round][0];
        const u32 word2 = static_cast<u32>(first >> 32) ^ words[3] ^ keys.each[round][1];
        words[0] = word0;
        words[1] = static_cast<u32>(second);
        words[2] = word2;
        words[3] = static_cast<u32>(first);
    }
}

// Counter words 0 and 1 are the offset, 2 and 3 the subsequence.
__device__ __forceinline__ void philox(const PhiloxKeys& keys, u64 offset, u64 subsequence, u32 (&words)[4]) {
    words[0] = static_cast<u32>(offset);
    words[1] = static_cast<u32>(offset >> 32);
    words[2] = static_cast<u32>(subsequence);
    words[3] = static_cast<u32>(subsequence >> 32);
    philox_rounds<0>(keys, words);
}

// The same of a subsequence below 2^32, by keys that have in them what the first two rounds make of the offset alone, which
// leaves one product of each.
__device__ __forceinline__ void philox_with_offset(const PhiloxKeys& keys, u32 subsequence, u32 (&words)[4]) {
    const u64 first = wide_product(subsequence, 0xCD9E8D57u);
    const u64 second = wide_product(static_cast<u32>(first >> 32) ^ keys.each[0][0], 0xD2511F53u);
    words[0] = static_cast<u32>(first) ^ keys.each[1][0];
    words[1] = 0u;
    words[2] = static_cast<u32>(second >> 32) ^ keys.each[1][1];
    words[3] = static_cast<u32>(second);
    philox_rounds<2>(keys, words);
}

// The first key is the seed, low word first.
__device__ __forceinline__ void philox(u64 seed, u64 offset, u64 subsequence, u32 (&words)[4]) {
    PhiloxKeys keys;
#pragma unroll
    for (u32 round = 0; round < 10; ++round) {
        keys.each[round][0] = static_cast<u32>(seed) + round * 0x9E3779B9u;
        keys.each[round][1] = static_cast<u32>(seed >> 32) + round * 0xBB67AE85u;
    }
    philox(keys, offset, subsequence, words);
}
