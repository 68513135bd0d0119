// gemm_mx.cuh: how the GEMM of MX formats adds blocks. Its contract: gemm_mx.cu.
#pragma once

#include "gemm/portable/gemm.cuh"

// 2^(ea+eb) may be no float32 number where P * 2^(ea+eb) is one, so P is multiplied by two powers of two of nearly the
// same exponent, 2^-127 to 2^127: 2^(floor(ea/2) + ceil(eb/2)) and 2^(ceil(ea/2) + floor(eb/2)), at most one apart. P is
// 0 or from 2^-32 (two of E5M2's smallest) to 2^37, so the first product leaves the normal numbers only where the
// exponent is below -94 or above 90; the second one, as large, then ends at zero or infinity, where it belongs.
struct Mx {
    using Scale = u8;
    static constexpr int WIDTH = 32, PARTS = 2;
    static constexpr bool CAST_FIRST = false;

    // 2^floor(e/2) and 2^ceil(e/2), of the other operand in the other order.
    static __device__ __forceinline__ void decode(int side, u8 code, float (&parts)[PARTS]) {
        const u32 sum = code + 127u;  // e + 2 * 127
        const float lower = __uint_as_float(code == 0xFFu ? 0x7FC00000u : sum / 2u << 23);
        const float upper = __uint_as_float(code == 0xFFu ? 0x7FC00000u : (sum + 1u) / 2u << 23);
        parts[0] = side == 0 ? lower : upper;
        parts[1] = side == 0 ? upper : lower;
    }

    static __device__ __forceinline__ float add(float acc, float inner, const float (&a)[PARTS], const float (&b)[PARTS]) {
        return acc + inner * (a[0] * b[0]) * (a[1] * b[1]);
    }

    __device__ __forceinline__ float scaled(float sum, i64, i64) const { return sum; }
};
