// gemm_skinny_nvfp4.cuh: how products of a few rows in NVFP4 read codes and decode them. Their contracts:
// gemm_skinny_nvfp4.cu and gemm_skinny_nvfp4_wide.cu.
#pragma once

#include "gemm/portable/gemm_nvfp4.cuh"
#include "gemm/skinny/gemm_skinny.cuh"

// A chunk: 128 columns of K, of which a thread has 32 of a row, four units of eight.
constexpr int COLUMNS = 128, UNITS = 4;
constexpr int SPAN = 64, SCALES = 8;  // bytes of their codes in a row, and of their scales

struct alignas(16) Sixteen {
    u32 words[4];
};

__device__ __forceinline__ Sixteen load_once(const u8* source) {
#ifdef __CUDA_ARCH__
    Sixteen found;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3])
                 : "l"(source));
    return found;
#else
    return *reinterpret_cast<const Sixteen*>(source);
#endif
}

__device__ __forceinline__ Sixteen load_often(const u8* source) {
#ifdef __CUDA_ARCH__
    Sixteen found;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3])
                 : "l"(source));
    return found;
#else
    return *reinterpret_cast<const Sixteen*>(source);
#endif
}

__device__ __forceinline__ u32 load_two(const u8* source) {
#ifdef __CUDA_ARCH__
    u16 found;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(found) : "l"(source));
    return found;
#else
    return *reinterpret_cast<const u16*>(source);
#endif
}

// The scales of what a thread has, a block in each of two bytes, times 2^6 for the 2^-6 of elements.
__device__ __forceinline__ u32 two_scales(u32 codes) { return multiply_pairs(e4m3_pair(codes), 0x54005400u); }

// A unit: its even columns, then its odd ones, times the scale of their block. Products of the two are exact float16
// numbers: at most 6 bits, from 2^-10 to 2688.
__device__ __forceinline__ void decode(const Sixteen& codes, int unit, u32 scales, u32 (&pairs)[4]) {
    e4m3_pairs(even_as_e4m3(codes.words[unit]), pairs[0], pairs[1]);
    e4m3_pairs(odd_as_e4m3(codes.words[unit]), pairs[2], pairs[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = unit < 2 ? multiply_by_low(pairs[i], scales) : multiply_by_high(pairs[i], scales);
    }
}

// What stands behind the last row of an operand is read as the last one, and made of no use.
__device__ __forceinline__ i64 within(i64 row, i64 rows) { return row < rows ? row : rows - 1; }
