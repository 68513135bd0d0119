// gemm_wgmma_fp8.cuh: the pipeline of FP8 codes. The contract of its kernels: gemm_wgmma_fp8.cu.
//
// A stage has 128 columns of K. A consumer warpgroup multiplies its 64 rows by 128 rows of b at a time, into an accumulator
// that starts at 0, and adds the accumulator to its sums. Meanwhile the tensor cores work for the other warpgroup: two
// accumulators for each warpgroup do not fit into the registers beside the sums.
#pragma once

#include "gemm/sm90/pipeline.cuh"

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

struct WgmmaFp8Parameters {
    OperandParameters a, b;  // scales and element formats; codes are read through the maps
    EpilogueParameters epilogue;
    i64 m, n, k;
    int slices;       // of K; on a GPU the macro SLICES
    int a_box_rows;   // rows of a box of the tensor map of a: a divisor of TILE_ROWS from 8 on
    i64 slice_steps;  // steps of each slice
};

// Boxes of codes, zeros beyond the last row and column. Zeros take as long as codes: 64 rows by N = K = 8192 take 21.5 us on an
// H200, 26.0 with boxes of 128 rows.
struct MappedCodes : CopyingSource {
    const TensorMap& a;
    const TensorMap& b;
    int a_box_rows;

    __device__ __forceinline__ u32 bytes(const OutputTile&) const { return sizeof(Stage) - (TILE_ROWS - a_box_rows) * ROW_BYTES; }

    __device__ __forceinline__ void load(Stage& stage, ptx::Mbarrier& full, const OutputTile& tile, i64 step) const {
        const int x = static_cast<int>(step * ROW_BYTES), y = static_cast<int>(tile.column);
        ptx::cp_async_bulk_tensor_2d(stage.a, a.words, x, static_cast<int>(tile.row), full);
#pragma unroll
        for (int i = 0; i < B_TILES; ++i) {
            ptx::cp_async_bulk_tensor_2d<(CLUSTER > 1)>(stage.b[i], b.words, x, y + i * TILE_ROWS, full);
        }
    }
};

// The same for a batch, whose matrices are consecutive in memory. Outputs of rows of the next product are not stored.
struct MappedBatch : CopyingSource {
    using Order = TiledProduct;

    const TensorMap& a;
    const TensorMap& b;
    int a_box_rows;
    i64 n;

    __device__ __forceinline__ u32 bytes(const OutputTile&) const { return sizeof(Stage) - (TILE_ROWS - a_box_rows) * ROW_BYTES; }

    __device__ __forceinline__ void load(Stage& stage, ptx::Mbarrier& full, const OutputTile& tile, i64 step) const {
        OutputTile below = tile;
        below.row += tile.section_start;
        below.column += tile.section * n;
        MappedCodes{{}, a, b, a_box_rows}.load(stage, full, below, step);
    }
};

// Alpha of the product of a batch to which a tile belongs.
__device__ __forceinline__ Alpha of_product(Alpha alpha, const OutputTile& tile, i64 n) {
    alpha.a += alpha.a_per_row != 0 ? tile.section_start : tile.section;
    alpha.b += alpha.b_per_row != 0 ? tile.section * n : tile.section;
    return alpha;
}

// The same for the sections of a, with a map of each matrix, and the boxes of a that have rows of the section. Other rows of a
// stage are of the next section or of another tile; their outputs are not stored.
struct MappedSections : CopyingSource {
    const TensorMap& a;
    const TensorMap* b;
    int a_box_rows;

    __device__ __forceinline__ int a_rows(const OutputTile& tile) const {
        const i64 left = tile.section_rows - tile.row;
        return left >= TILE_ROWS ? TILE_ROWS : (static_cast<int>(left) + a_box_rows - 1) / a_box_rows * a_box_rows;
    }

    __device__ __forceinline__ u32 bytes(const OutputTile& tile) const {
        return sizeof(Stage) - (TILE_ROWS - a_rows(tile)) * ROW_BYTES;
    }

    __device__ __forceinline__ void wait_for(const OutputTile& tile) const {
        ptx::fence_proxy_tensormap_acquire(b[tile.section].words);
    }

    __device__ __forceinline__ void load(Stage& stage, ptx::Mbarrier& full, const OutputTile& tile, i64 step) const {
        const int x = static_cast<int>(step * ROW_BYTES), y = static_cast<int>(tile.column);
        const int first = static_cast<int>(tile.section_start + tile.row), rows = a_rows(tile);
        for (int row = 0; row < rows; row += a_box_rows) {
            ptx::cp_async_bulk_tensor_2d(stage.a + row * ROW_BYTES, a.words, x, first + row, full);
        }
        const u64(&map)[16] = b[tile.section].words;
#pragma unroll
        for (int i = 0; i < B_TILES; ++i) {
            if (tile.section_rows <= TILE_ROWS) {  // no other block reads these codes
                ptx::cp_async_bulk_tensor_2d<true>(stage.b[i], map, x, y + i * TILE_ROWS, full);
            } else {
                ptx::cp_async_bulk_tensor_2d(stage.b[i], map, x, y + i * TILE_ROWS, full);
            }
        }
    }
};

// Element formats. On a GPU the macros A_ELEMENT and B_ELEMENT name them, and every pair is compiled separately.
struct Fp8Elements {
    Element a, b;

    __device__ __forceinline__ explicit Fp8Elements([[maybe_unused]] const WgmmaFp8Parameters& p)
#ifdef A_ELEMENT
        : a(Element::A_ELEMENT), b(Element::B_ELEMENT) {
    }
#else
        : a(p.a.element), b(p.b.element) {
    }
#endif
};

// Promotion of an accumulator with tensor scales: it is added as it is.
struct Unscaled {
    static constexpr bool CAST_BEFORE_C = false, ROWS = false;
    using Count = i64;  // of steps. With 32 bits 8192^3 takes 791 us on an H200, 782 with 64

    struct Scales {};

    __device__ __forceinline__ void locate(const OutputTile&, Count, u32) {}
    __device__ __forceinline__ Scales load(Count) const { return {}; }

    static __device__ __forceinline__ void add(float* sums, const float (&accumulator)[FP8_SUMS], const Scales&, int) {
#pragma unroll
        for (int i = 0; i < FP8_SUMS; ++i) sums[i] += accumulator[i];
    }
};

// The same with scales of rows, which the epilogue applies.
struct UnscaledRows : Unscaled {
    static constexpr bool ROWS = true;
};

// Promotion of the sum of a block with block scales: of a for 128 columns of a row, of b for tiles of 128x128.
struct BlockScaled {
    static constexpr bool CAST_BEFORE_C = true, ROWS = false;
    // With 64 bits registers of the grouped kernel are spilled, and each step waits for the loads of its scales: 32 rows of 64
    // sections by N = 4096, K = 7168 take 685 us on an H200, 486 with 32.
    using Count = u32;

    // Of the two rows of a thread, and of the tiles of b.
    struct Scales {
        float a[2], b[B_TILES];
    };

    const float* a_scales;
    const float* b_scales;
    u32 a_stride, b_stride;          // from a block of K to the next
    u32 a_row_stride, b_row_stride;  // from a row of scales to the next
    u32 a_last, b_last;              // last rows of scales
    u32 a_first[2], b_first[B_TILES];  // scales of the first block of the slice, set by `locate`

    __device__ __forceinline__ BlockScaled(const WgmmaFp8Parameters& p) {
        const u32 blocks = static_cast<u32>((p.k + ROW_BYTES - 1) / ROW_BYTES);
        place({p.a, p.m}, blocks, a_scales, a_stride, a_row_stride, a_last);
        place({p.b, p.n}, blocks, b_scales, b_stride, b_row_stride, b_last);
    }

    static __device__ __forceinline__ void place(const Operand& from, u32 blocks, const float*& scales, u32& stride,
                                                 u32& row_stride, u32& last) {
        const u32 rows_per_scale = from.rows_per_scale();
        const u32 rows = (static_cast<u32>(from.rows) + rows_per_scale - 1) / rows_per_scale;
        const bool transposed = (from.layout & SCALES_TRANSPOSED) != 0;
        scales = static_cast<const float*>(from.scales);
        stride = transposed ? rows : 1;
        row_stride = transposed ? 1 : blocks;
        last = rows - 1;
    }

    // `row`: the first of the thread's two rows in the output tile; the second is 8 rows below. Rows beyond the end have any
    // scale, since their outputs are not stored.
    __device__ __forceinline__ void locate(const OutputTile& tile, Count first_step, u32 row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 a_row = static_cast<u32>(tile.section_start + tile.row) + row + 8 * i;
            const u32 b_row = static_cast<u32>(tile.column / TILE_ROWS) + i;
            a_first[i] = (a_row < a_last ? a_row : a_last) * a_row_stride + first_step * a_stride;
            if (i >= B_TILES) continue;
            b_first[i] = (b_row < b_last ? b_row : b_last) * b_row_stride + first_step * b_stride;
        }
    }

    __device__ __forceinline__ Scales load(Count block) const {
        Scales scales;
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // by turns: with all loads of a first, 8192^3 takes 1.01 ms on an H200 and not 0.93
            scales.a[i] = a_scales[a_first[i] + block * a_stride];
            if (i < B_TILES) scales.b[i] = b_scales[b_first[i] + block * b_stride];
        }
        return scales;
    }

    // Scales that are powers of two from 2^-60 to 2^60 multiply without rounding, so their product may come first. It saves
    // half of the instructions.
    static __device__ __forceinline__ bool exact(float scale) {
        const u32 bits = __float_as_uint(scale);
        return (bits & 0x007FFFFFu) == 0u && bits - (67u << 23) <= 120u << 23;
    }

    // `tile`: of the tiles of b.
    static __device__ __forceinline__ void add(float* sums, const float (&accumulator)[FP8_SUMS], const Scales& scales,
                                               int tile) {
        const float b = scales.b[tile];
        if (exact(scales.a[0]) && exact(scales.a[1]) && exact(b)) {
            const float factors[2] = {scales.a[0] * b, scales.a[1] * b};
#pragma unroll
            for (int i = 0; i < FP8_SUMS; ++i) sums[i] = __fmaf_rn(accumulator[i], factors[i / 2 % 2], sums[i]);
        } else {
#pragma unroll
            for (int i = 0; i < FP8_SUMS; ++i) sums[i] = __fmaf_rn(accumulator[i] * scales.a[i / 2 % 2], b, sums[i]);
        }
    }
};

// The same for sections.
struct SectionBlockScaled : BlockScaled {
    const float* const* matrices;  // scales of each

    __device__ __forceinline__ SectionBlockScaled(const WgmmaFp8Parameters& p, const float* const* matrices)
        : BlockScaled(p), matrices(matrices) {}

    __device__ __forceinline__ void locate(const OutputTile& tile, Count first_step, u32 row) {
        b_scales = matrices[tile.section];
#ifdef __CUDA_ARCH__
        __builtin_assume(__isGlobal(b_scales));  // else generic loads
#endif
        BlockScaled::locate(tile, first_step, row);
    }
};

// Sums of accumulators of 128 columns each, a step of K.
template <class Promotion>
struct PromotedSums {
    static constexpr bool CAST_BEFORE_C = Promotion::CAST_BEFORE_C;
    static constexpr bool ROWS = Promotion::ROWS;

    Promotion promotion;
    Fp8Elements elements;
    typename Promotion::Count steps;  // of a slice

    __device__ __forceinline__ void accumulate(float (&d)[TILE_SUMS], WgmmaShared& shared, u32& iteration, const OutputTile& tile,
                                               int warpgroup, int lane) const {
        Promotion at = promotion;
        at.locate(tile, tile.slice * steps, warpgroup * WGMMA_M + static_cast<int>(threadIdx.x) % WARPGROUP / WARP * 16 + lane / 4);
        auto scales = at.load(0);
        for (typename Promotion::Count step = 0; step < steps; ++step, ++iteration) {
            const u32 stage = iteration % STAGES, phase = iteration / STAGES % 2;
            const Stage& from = shared.stages[stage];
            const auto next = at.load(step + 1 < steps ? step + 1 : step);  // arrives while the tensor cores work
            ptx::mbarrier_try_wait_parity(shared.full[stage], phase);
#pragma unroll
            for (int i = 0; i < B_TILES; ++i) {
                float accumulator[FP8_SUMS];
                ptx::wgmma_fence();
                multiply_codes(accumulator, elements.a, elements.b, from.a + warpgroup * WGMMA_M * ROW_BYTES, from.b[i]);
                wait_for_sums(accumulator);
                if (i == B_TILES - 1) release(shared.empty[stage], lane);
                Promotion::add(d + i * FP8_SUMS, accumulator, scales, i);
            }
            scales = next;
        }
    }
};

// `promotion`: Unscaled or BlockScaled; for sections SectionBlockScaled. `alpha_of(tile)`: of an output tile.
template <class Codes, class Promotion, class AlphaOf>
__device__ __forceinline__ void multiply_mapped_codes(const Codes& codes, const WgmmaFp8Parameters& p, const Promotion& promotion,
                                                      const Sections& sections, const AlphaOf& alpha_of) {
    const PromotedSums<Promotion> sums = {promotion, Fp8Elements(p), static_cast<typename Promotion::Count>(p.slice_steps)};
#ifdef __CUDA_ARCH__
    constexpr int slices = 1;  // of a block
#else
    const int slices = p.slices;
#endif
    multiply_tiles_persistent(
        codes, sums, {slices, p.slice_steps}, sections, p.n, alpha_of,
        [&](const OutputTile& tile) { return Epilogue{p.epilogue, tile.section_start * p.n, tile.section * p.n}; });
}

}  // namespace narrowgauge
