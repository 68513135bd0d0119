// gemm_mx.cuh: scaling policy of the GEMM of MX formats. Its contract: gemm_mx.cu.
#pragma once

#include "gemm/portable/gemm.cuh"

namespace narrowgauge {

// 2^(ea+eb) may be outside float32 although P * 2^(ea+eb) is a float32 number. So P is multiplied by two powers of two of
// nearly the same exponent, 2^-127 to 2^127: 2^(floor(ea/2) + ceil(eb/2)) and 2^(ceil(ea/2) + floor(eb/2)). Their exponents
// differ by at most one. P is 0 or from 2^-32 (two of E5M2's smallest) to 2^37, so the first product leaves the normal
// numbers only if the exponent is below -94 or above 90. Then the second factor is of the same size, and the result is the
// correct zero or infinity.
struct MxScaling {
    using Scale = u8;
    static constexpr int WIDTH = 32, FACTORS = 2;
    static constexpr bool CAST_BEFORE_C = false;

    // 2^floor(e/2) and 2^ceil(e/2) of a, the reverse of b.
    static __device__ __forceinline__ void decode_scale(int operand, u8 code, float (&factors)[FACTORS]) {
        const u32 sum = code + 127u;  // e + 2 * 127
        const float lower = __uint_as_float(code == 0xFFu ? 0x7FC00000u : sum / 2u << 23);
        const float upper = __uint_as_float(code == 0xFFu ? 0x7FC00000u : (sum + 1u) / 2u << 23);
        factors[0] = operand == 0 ? lower : upper;
        factors[1] = operand == 0 ? upper : lower;
    }

    static __device__ __forceinline__ float add_block(float acc, float block_sum, const float (&a)[FACTORS],
                                                      const float (&b)[FACTORS]) {
        return acc + block_sum * (a[0] * b[0]) * (a[1] * b[1]);
    }

    __device__ __forceinline__ float scale_output(float sum, i64, i64) const { return sum; }
};

}  // namespace narrowgauge
