// gemm_skinny_nvfp4.cuh: loads and decoding of NVFP4 operands for GEMMs with few rows of a. Their contracts:
// gemm_skinny_nvfp4.cu and gemm_skinny_nvfp4_wide.cu.
#pragma once

#include "gemm/portable/gemm_nvfp4.cuh"
#include "gemm/skinny/gemm_skinny.cuh"

namespace narrowgauge {

// A chunk: 128 columns of K. A thread has 32 of them of a row, four units of eight.
constexpr int COLUMNS = 128, UNITS = 4;
constexpr int CODE_BYTES = 64, SCALE_BYTES = 8;  // of a row of a chunk

using ptx::Vector4;

// Two block scales times 2^6, for elements that even_as_e4m3 and odd_as_e4m3 have made 2^-6 of their value.
__device__ __forceinline__ u32 restore_elements(u32 scales) { return ptx::mul_rn_f16x2(scales, 0x54005400u); }

// Two block scales of a thread's columns, one code in each of the two low bytes, as float16, times 2^6.
__device__ __forceinline__ u32 decode_scales(u32 codes) { return restore_elements(ptx::cvt_rn_f16x2_e4m3x2(codes)); }

// Eight codes of E2M1 as codes of E4M3 with 2^-6 of the value: even columns, odd columns.
__device__ __forceinline__ u32 even_as_e4m3(u32 codes) { return (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu); }
__device__ __forceinline__ u32 odd_as_e4m3(u32 codes) { return (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu); }

// Decodes a unit, times its block scale: even columns, then odd columns. The products are exact float16 numbers: at most 6
// bits, from 2^-10 to 2688.
__device__ __forceinline__ void decode(const Vector4& codes, int unit, u32 scales, u32 (&pairs)[4]) {
    ptx::cvt_rn_f16x2_e4m3x2(even_as_e4m3(codes.words[unit]), pairs[0], pairs[1]);
    ptx::cvt_rn_f16x2_e4m3x2(odd_as_e4m3(codes.words[unit]), pairs[2], pairs[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = unit < 2 ? ptx::mul_rn_f16x2_low(pairs[i], scales) : ptx::mul_rn_f16x2_high(pairs[i], scales);
    }
}

// Clamps a row to the last row of an operand. Outputs of clamped rows are not stored.
__device__ __forceinline__ i64 clamp_row(i64 row, i64 rows) { return row < rows ? row : rows - 1; }

}  // namespace narrowgauge
