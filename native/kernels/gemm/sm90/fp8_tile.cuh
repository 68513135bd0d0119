// fp8_tile.cuh: the product of tiles of FP8 codes by a warpgroup.
#pragma once

#include "gemm/parameters.cuh"
#include "gemm/sm90/tile.cuh"

namespace narrowgauge {

// A warpgroup accumulates 64 rows by 128 columns, 64 sums in each thread. Sum 4j + 2i + e of thread t is that of row
// t/32*16 + t%32/4 + 8i and column 8j + 2(t%4) + e.
constexpr int FP8_WGMMA_N = 128, FP8_WGMMA_K = 32, FP8_SUMS = WGMMA_M * FP8_WGMMA_N / WARPGROUP;

#ifdef HAS_WGMMA
template <Element A, Element B>
__device__ __forceinline__ void multiply_codes_of(float (&d)[FP8_SUMS], const u8* a, const u8* b) {
    const u64 left = matrix_descriptor(a), right = matrix_descriptor(b);
#pragma unroll
    for (int step = 0; step < ROW_BYTES / FP8_WGMMA_K; ++step) {
        ptx::wgmma_m64n128k32_f32<A == Element::E5M2, B == Element::E5M2>(d, left + step * (FP8_WGMMA_K >> 4),
                                                                          right + step * (FP8_WGMMA_K >> 4), step > 0);
    }
    ptx::wgmma_commit_group();
}
#endif

// d = a * b^T: 64 rows of a tile and 128 rows of a tile, over all 128 columns in order of K. Asynchronous on a GPU: one wgmma
// group.
__device__ __forceinline__ void multiply_codes(float (&d)[FP8_SUMS], Element a_element, Element b_element, const u8* a,
                                               const u8* b) {
#ifdef HAS_WGMMA
    constexpr Element E4 = Element::E4M3, E5 = Element::E5M2;
    if (a_element == E4 && b_element == E4) return multiply_codes_of<E4, E4>(d, a, b);
    if (a_element == E4) return multiply_codes_of<E4, E5>(d, a, b);
    multiply_codes_of<E5, E4>(d, a, b);
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    static_assert(FP8_WGMMA_K == FP8_TERMS_PER_STEP, "a wgmma is a step of the model");
    const int thread = static_cast<int>(threadIdx.x) % WARPGROUP, lane = thread % WARP;
    struct Row {
        Fp8Factor values[ROW_BYTES];

        Row(const u8* tile, int row, Element element) {
            for (int column = 0; column < ROW_BYTES; ++column) {
                const u8 code = tile[swizzled_offset(row, column / 16) + column % 16];
                values[column] = Fp8Factor(code, element == Element::E5M2);
            }
        }
    };
    const int top = thread / WARP * 16 + lane / 4;
    const Row left[2] = {{a, top, a_element}, {a, top + 8, a_element}};
    for (int j = 0; j < FP8_WGMMA_N / 8; ++j) {
        for (int e = 0; e < 2; ++e) {
            const Row right(b, 8 * j + lane % 4 * 2 + e, b_element);
            for (int i = 0; i < 2; ++i) {
                float sum = 0.0f;
                for (int k = 0; k < ROW_BYTES; k += FP8_WGMMA_K) sum = sum_fp8(sum, left[i].values + k, right.values + k);
                d[4 * j + 2 * i + e] = sum;
            }
        }
    }
#endif
}

}  // namespace narrowgauge
