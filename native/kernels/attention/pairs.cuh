// pairs.cuh: pairs of bfloat16 or float16 numbers for tensor cores, from codes and from float32 numbers.
#pragma once

#include "gemm/e2m1_pairs.cuh"

namespace narrowgauge {

__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 selectors) {
#ifdef __CUDA_ARCH__
    return ptx::prmt_b32(a, b, selectors);
#else
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 from = selectors >> 4 * i & 7u;
        bytes |= ((from < 4 ? a : b) >> 8 * (from % 4) & 0xFFu) << 8 * i;
    }
    return bytes;
#endif
}

// Two numbers, rounded to T, the first in the low half.
template <class T>
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
#ifdef __CUDA_ARCH__
    if constexpr (ptx::is_bf16<T>) return ptx::cvt_rn_bf16x2_f32(low, high);
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    T numbers[2];
    from_float(low, numbers[0]);
    from_float(high, numbers[1]);
    return numbers[0].bits | static_cast<u32>(numbers[1].bits) << 16;
#endif
}

// Four codes of E4M3. In bfloat16 exponent and mantissa become the lowest bits of those of the result, which is 2^120 too small.
template <class T>
__device__ __forceinline__ void e4m3_pairs(u32 codes, u32& low, u32& high) {
    if constexpr (ptx::is_bf16<T>) {
        const auto number = [](u32 half) {
            return times<T>((half & 0x80008000u) | (half >> 4 & 0x07F007F0u), 0x7B807B80u);  // 2^120
        };
        low = number(bytes_of(codes, 0, 0x1404));
        high = number(bytes_of(codes, 0, 0x3424));
    } else {
        ptx::cvt_rn_f16x2_e4m3x2(codes, low, high);
    }
}

}  // namespace narrowgauge
