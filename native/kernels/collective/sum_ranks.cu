// sum_ranks: the sum of matrices of the ranks of a group, in rank order.
//
//   The macro ELEMENT names the format of the codes, E4M3 or E5M2; a compilation per format.
//   sum_codes_TYPE   codes (ranks, M, K) bytes; scales (ranks, M, ceil(K/block)), float32, or bytes of E8M0 if e8m0 is set
//                    out (M, K): fl(code * scale) of rank 0, plus those of ranks 1, 2, …, each addition rounded to float32, then
//                    one cast to the type of out
//   sum_values_TYPE  values (ranks, M, K) and out (M, K) of one type: the same sum of float32 values
//   Launch: a thread for 16 elements of a row, 256 threads in a block; block is a multiple of 16, or at least K
//   Numerics: exact to the bit.

#include "common/blocks.cuh"

namespace narrowgauge {

#ifndef ELEMENT
#define ELEMENT E4M3
#endif
using Element = ELEMENT;

struct SumRanksParameters {
    const void* source;  // codes or values
    const void* scales;  // null: values
    void* out;
    i64 rows, columns, block;
    int ranks;
    bool e8m0;
};

constexpr int CHUNK = 16;

// The place of a thread: 16 elements of a row, or those up to its end.
struct Place {
    i64 row, column;
    int count;  // 0 behind the last row
};

__device__ __forceinline__ Place place_of(const SumRanksParameters& p) {
    const i64 chunks = (p.columns + CHUNK - 1) / CHUNK;
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 row = quotient(index, chunks), column = (index - row * chunks) * CHUNK, left = p.columns - column;
    return {row, column, row >= p.rows ? 0 : left < CHUNK ? static_cast<int>(left) : CHUNK};
}

__device__ __forceinline__ float scale_at(const SumRanksParameters& p, i64 row, i64 column) {
    const i64 index = row * ((p.columns + p.block - 1) / p.block) + quotient(column, p.block);
    return p.e8m0 ? e8m0_to_float(static_cast<const u8*>(p.scales)[index]) : static_cast<const float*>(p.scales)[index];
}

template <class T>
__device__ __forceinline__ void sum_codes(const SumRanksParameters& p) {
    const Place at = place_of(p);
    if (at.count == 0) return;
    float total[CHUNK];
    for (int rank = 0; rank < p.ranks; ++rank) {
        const i64 row = rank * p.rows + at.row;
        const u8* codes = static_cast<const u8*>(p.source) + row * p.columns + at.column;
        const float scale = scale_at(p, row, at.column);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const float value = i < at.count ? narrow_to_float<Element>(codes[i]) * scale : 0.0f;
            total[i] = rank == 0 ? value : total[i] + value;
        }
    }
    T* target = static_cast<T*>(p.out) + at.row * p.columns + at.column;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i < at.count) from_float(total[i], target[i]);
    }
}

template <class T>
__device__ __forceinline__ void sum_values(const SumRanksParameters& p) {
    const Place at = place_of(p);
    for (int i = 0; i < at.count; ++i) {
        const i64 index = at.row * p.columns + at.column + i, step = p.rows * p.columns;
        float total = to_float(static_cast<const T*>(p.source)[index]);
        for (int rank = 1; rank < p.ranks; ++rank) total += to_float(static_cast<const T*>(p.source)[rank * step + index]);
        from_float(total, static_cast<T*>(p.out)[index]);
    }
}

#define SUM_RANKS(NAME, TYPE)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) sum_codes_##NAME(const __grid_constant__ SumRanksParameters p) {      \
        sum_codes<TYPE>(p);                                                                                                 \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) sum_values_##NAME(const __grid_constant__ SumRanksParameters p) {     \
        sum_values<TYPE>(p);                                                                                                \
    }

SUM_RANKS(fp32, float)
SUM_RANKS(bf16, bf16)
SUM_RANKS(fp16, fp16)

}  // namespace narrowgauge
