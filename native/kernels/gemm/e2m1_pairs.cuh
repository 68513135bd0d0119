// e2m1_pairs.cuh: codes of E2M1 as pairs of bfloat16 or float16 numbers of a power of two less, for tensor cores.
#pragma once

#include "gemm/ptx.cuh"

namespace narrowgauge {

template <class T>
__device__ __forceinline__ u32 times(u32 pair, u32 factors) {
    return ptx::is_bf16<T> ? ptx::mul_rn_bf16x2(pair, factors) : ptx::mul_rn_f16x2(pair, factors);
}

// A code of E2M1 has its exponent and mantissa where T has the last two bits of the exponent and the first of the mantissa: it is
// RESTORE times too small. A block scale of E4M3 takes RESTORE / REST, as much as T can hold, and the sum takes REST.
template <class T>
struct E2m1In {
    static constexpr int SHIFT = ptx::is_bf16<T> ? 6 : 9;
    static constexpr float RESTORE = ptx::is_bf16<T> ? 0x1p126f : 0x1p14f, REST = 0x1p7f;
};

__device__ constexpr u32 shifted(u32 x, int left) { return left >= 0 ? x << left : x >> -left; }

// Nibbles j of both halves of a word: columns j and j + 4 of eight codes.
template <class T>
__device__ __forceinline__ u32 small_e2m1(u32 word, int j) {
    constexpr int SHIFT = E2m1In<T>::SHIFT;
    if constexpr (ptx::is_bf16<T>) {  // one product makes both shifts, and their bits do not overlap
        const u32 nibbles = (j < 2 ? word : word >> 8) & 0x000F000Fu << j % 2 * 4;
        return nibbles * ((1u << 12 | 1u << SHIFT) >> j % 2 * 4) & (0x80008000u | 0x00070007u << SHIFT);
    }
    return (shifted(word, 12 - 4 * j) & 0x80008000u) | (shifted(word, SHIFT - 4 * j) & 0x00070007u << SHIFT);
}

}  // namespace narrowgauge
