// philox.cuh: Philox4x32-10 (Salmon et al., SC 2011): four random 32-bit words from a 64-bit key and a 128-bit counter.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

__device__ __forceinline__ u64 wide_product(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    return ptx::mul_wide_u32(a, b);  // from a 64-bit product with a constant the compiler leaves an addition of 0
#else
    return static_cast<u64>(a) * b;
#endif
}

// The keys of the ten rounds, two words each. As parameters of a kernel they save two additions per round.
struct PhiloxKeys {
    u32 words[20];
};

template <int FIRST>
__device__ __forceinline__ void philox_rounds(const PhiloxKeys& keys, u32 (&words)[4]) {
#pragma unroll
    for (int round = FIRST; round < 10; ++round) {
        const u64 first = wide_product(words[0], 0xD2511F53u);
        const u64 second = wide_product(words[2], 0xCD9E8D57u);
        const u32 word0 = static_cast<u32>(second >> 32) ^ words[1] ^ keys.words[2 * round];
        const u32 word2 = static_cast<u32>(first >> 32) ^ words[3] ^ keys.words[2 * round + 1];
        words[0] = word0;
        words[1] = static_cast<u32>(second);
        words[2] = word2;
        words[3] = static_cast<u32>(first);
    }
}

// Counter words 0 and 1 are the offset, words 2 and 3 the subsequence.
__device__ __forceinline__ void philox(const PhiloxKeys& keys, u64 offset, u64 subsequence, u32 (&words)[4]) {
    words[0] = static_cast<u32>(offset);
    words[1] = static_cast<u32>(offset >> 32);
    words[2] = static_cast<u32>(subsequence);
    words[3] = static_cast<u32>(subsequence >> 32);
    philox_rounds<0>(keys, words);
}

// The same for a subsequence below 2^32. The host has already combined the keys with the part of rounds 0 and 1 that
// depends on the offset alone (philox_keys of native/quantize/nvfp4.py), and one product per round remains.
__device__ __forceinline__ void philox_with_offset(const PhiloxKeys& keys, u32 subsequence, u32 (&words)[4]) {
    const u64 first = wide_product(subsequence, 0xCD9E8D57u);
    const u64 second = wide_product(static_cast<u32>(first >> 32) ^ keys.words[0], 0xD2511F53u);
    words[0] = static_cast<u32>(first) ^ keys.words[2];
    words[1] = 0u;
    words[2] = static_cast<u32>(second >> 32) ^ keys.words[3];
    words[3] = static_cast<u32>(second);
    philox_rounds<2>(keys, words);
}

// The first key is the seed, low word first.
__device__ __forceinline__ void philox(u64 seed, u64 offset, u64 subsequence, u32 (&words)[4]) {
    PhiloxKeys keys;
#pragma unroll
    for (u32 round = 0; round < 10; ++round) {
        keys.words[2 * round] = static_cast<u32>(seed) + round * 0x9E3779B9u;
        keys.words[2 * round + 1] = static_cast<u32>(seed >> 32) + round * 0xBB67AE85u;
    }
    philox(keys, offset, subsequence, words);
}

}  // namespace narrowgauge
