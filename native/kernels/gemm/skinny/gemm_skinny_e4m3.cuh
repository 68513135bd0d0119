// gemm_skinny_e4m3.cuh: out = a @ b.T (+ c) (+ bias), E4M3 elements, with few rows of a. The contracts: gemm_skinny_mx.cu and
// gemm_skinny_fp8.cu.
//
// A block of 256 threads has 16 rows of a and several strips of 16 rows of b, one after the other. Elements become float16
// numbers, exactly. Tensor cores add 16 products at a time to a float32 accumulator, truncated as in tensor_core_model.cuh
// (sum_fp16). Columns are taken 32 at a time: a thread has eight consecutive columns of a row, the first four for an mma and the
// last four for the next. Of 1024 columns, warp w of eight adds columns 128w to 128w + 127, in order
// of K. The sums of the warps are added in their order, one float32 rounding each.
//
// The kernel is bound by reading b. Each warp has its own pipeline of asynchronous copies (cp.async) into shared memory, four
// stages ahead, and waits for no other warp before the sums are complete. A stage is 16 rows of 128 columns. Stage 0 holds a:
// it is decoded and stays in registers while stages 1 to 4, strips of b, are multiplied by it. Then the next columns follow.
//
// On an H200, 16 rows by N = K = 8192 took 18.8 us (MXFP8, in a CUDA graph), a bare read of b 16.6 us. Variants of this kernel
// took 18.0 us without products; 20.7 us with 16 warps, of half the registers each; 18.9 us with five stages ahead (and 4 %
// less than this kernel at N = 4096), 20.0 us with nine; 19.2 us with consecutive columns for each warp; 1 us more without
// the evict-first cache policy; copies of a for the first columns alone took 0.2 us less. Scales are free: FP8 with one scale,
// or one for 128 columns, takes as long as MXFP8: 18.5 us between events, 19.5 us without an `early` launch.
#pragma once

#include "gemm/skinny/gemm_skinny.cuh"

namespace narrowgauge {

constexpr int WARPS = 8, SKINNY_THREADS = WARPS * WARP;
constexpr int BLOCK = 32, BLOCKS = 4, CHUNK = BLOCKS * BLOCK;  // columns: of a scale block of MX; of a stage
constexpr int STRIPS = 4, ROWS = STRIPS * STRIP_ROWS;          // rows of b that are multiplied by the same columns of a
constexpr int STAGES = 1 + STRIPS;                             // of a, and of each strip, all of the same columns
constexpr int PAIRS = CHUNK / 8;                               // float16 pairs of a thread in a row of a stage
constexpr u32 BYTES_OF_ONE = 0x01010101u;                      // times a byte: four copies of it

// Schedule of a launch: a block of threads has `strips` strips of 16 rows of b. 2^shift rows share a float32 scale of FP8.
struct SkinnyParameters {
    int strips;
    int a_shift, b_shift;
};

// Scales of a row for the columns of a stage have four bytes: four E8M0 scales of MX, or one float32 scale of FP8.
template <class Scaling>
constexpr bool E8M0_SCALES = Scaling::WIDTH == BLOCK;
template <class Scaling>
constexpr bool FLOAT_SCALES = Scaling::WIDTH == CHUNK;
template <class Scaling>
constexpr bool BLOCK_SCALES = E8M0_SCALES<Scaling> || FLOAT_SCALES<Scaling>;

struct alignas(8) Vector2 {
    u32 words[2];
};
struct alignas(16) Float4 {
    float each[4];
};
using Stage = u8[STRIP_ROWS][CHUNK];  // swizzled against bank conflicts: block j of row r lies at j ^ r % 4

struct alignas(128) WarpShared {
    Stage stages[STAGES];
    u32 scales[2][TOKENS + ROWS];  // of the rows of all stages, for these columns and for the next
    Float4 factors[ROWS];          // MX: factors of the block sums of b, for these columns
    float sums[TOKENS][ROWS];
};
struct BlockShared {
    WarpShared warps[WARPS];
};
static_assert(sizeof(BlockShared) == 128000, "native/gemm/skinny.py asks for this size");

// Work of a block of threads: rows of a from `token` on, strips of b from `first` to `last` - 1.
struct BlockWork {
    const u8 *a_codes, *a_scales, *b_codes, *b_scales;
    int tokens, rows, columns;  // M, N and K
    int token, first, last;
    int a_shift, b_shift;  // of SkinnyParameters

    // Rows of b before the end of this block's strips.
    __device__ __forceinline__ int end() const { return last * STRIP_ROWS < rows ? last * STRIP_ROWS : rows; }
};

__device__ __forceinline__ BlockWork block_work(const GemmParameters& p, const SkinnyParameters& skinny) {
    BlockWork work = {p.a.codes, static_cast<const u8*>(p.a.scales), p.b.codes, static_cast<const u8*>(p.b.scales),
                      static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k)};
    work.a_shift = skinny.a_shift;
    work.b_shift = skinny.b_shift;
    return work;
}

// ---- asynchronous copies ---------------------------------------------------------------------------------------------

// The next rows of an operand to be copied.
struct Source {
    const u8* codes;
    int left;  // rows

    // A thread copies 16 bytes of every fourth row.
    __device__ __forceinline__ void copy(Stage& stage, u32 columns) {
        const int lane = threadIdx.x % WARP, first = lane / 8, block = lane % 8 / 2;
        u8* const target = &stage[first][(block ^ first) * BLOCK + lane % 2 * 16];
#pragma unroll
        for (int row = 0; row < STRIP_ROWS; row += 4) {
            if (row + first < left) {
                ptx::cp_async_cg_shared_global_16(target + row * CHUNK, codes, ptx::createpolicy_fractional_L2_evict_first());
            }
            codes += 4 * columns;
        }
        left -= STRIP_ROWS;
    }
};

// Copies of a warp, stage after stage: of all strips for some columns, then for the warp's next columns, then the next
// strips. Nothing is copied beyond the last row of an operand, or after the last strip.
template <class Scaling>
struct CopyPipeline {
    WarpShared& own;
    const BlockWork& work;
    int strip, column, iteration = 0;
    Source b = {};

    __device__ __forceinline__ CopyPipeline(WarpShared& own, const BlockWork& work, int start)
        : own(own), work(work), strip(start < work.columns ? work.first : work.last), column(start) {}

    __device__ __forceinline__ void copy(int stage) {
        Stage& target = own.stages[stage];
        const u32 columns = work.columns;
        if (stage == 0) {
            const int lane = threadIdx.x % WARP, row = strip * STRIP_ROWS;
            const u32 start = column + lane % 8 * 16;
            b = {work.b_codes + (static_cast<u64>(row + lane / 8) * columns + start), work.end() - row};
            if (strip < work.last) {
                const u64 first = static_cast<u64>(work.token + lane / 8) * columns;
                Source a = {work.a_codes + (first + start), work.tokens - work.token};
                a.copy(target, columns);
                if constexpr (BLOCK_SCALES<Scaling>) copy_scales();
            }
        } else {
            b.copy(target, columns);
        }
        ptx::cp_async_commit_group();
        if (stage == STAGES - 1) next();
    }

    // Beyond the last row, the scales of the last row, so that padding does not affect the fast path.
    __device__ __forceinline__ void copy_scales() {
        u32* const target = own.scales[iteration % 2];
        const u32 width = work.columns / BLOCK, block = column / BLOCK;  // in bytes
        const auto copy = [&](const u8* scales, int place, int row, int rows, [[maybe_unused]] int shift) {
            u32 scale_row = row < rows ? row : rows - 1;
            if constexpr (FLOAT_SCALES<Scaling>) scale_row >>= shift;
            ptx::cp_async_ca_shared_global_4(target + place, scales + (static_cast<u64>(scale_row) * width + block));
        };
        const int lane = threadIdx.x % WARP, first = strip * STRIP_ROWS;
        if (lane < TOKENS) copy(work.a_scales, lane, work.token + lane, work.tokens, work.a_shift);
#pragma unroll
        for (int row = lane; row < ROWS; row += WARP) {
            copy(work.b_scales, TOKENS + row, first + row, work.rows, work.b_shift);
        }
    }

    __device__ __forceinline__ void next() {
        ++iteration;
        column += WARPS * CHUNK;
        if (column < work.columns) return;
        column %= WARPS * CHUNK;
        strip += STRIPS;
    }
};

// ---- multiplication --------------------------------------------------------------------------------------------------

// Thread 4g + t has, of a stage, eight columns of each block of rows g and g + 8; of the sums of a strip, those of its rows g
// and g + 8 with tokens 2t and 2t + 1 of each group.

// MX, the fast path. Scales of a within 2^-5 to 2^7 times a common power of two, the base, are multiplied into the elements
// of a, which stay normal float16 numbers: 2^-14 to 57344. The block sum P, truncated at the same bit, is larger by this
// factor: a multiple of 2^-23 and below 2^30. The base times the scale of b is 2^-126 to 2^97 if both are moderate. P times
// that is exact in float32, so the fused multiply-add rounds as a product and a sum do.
constexpr u32 BASE_SHIFT = 5, SPAN = 12, BASE_OFFSET = 6;  // BASE_OFFSET: from the base to the first scale of the stage
__device__ __forceinline__ bool moderate_base(u32 base) { return base + BASE_SHIFT - 64u <= 96u; }
// Four E8M0 scales from 2^-63 to 2^64: the two highest bits of each differ.
__device__ __forceinline__ bool moderate_scales(u32 scales) {
    return ((scales ^ scales << 1) & 0x80808080u) == 0x80808080u;
}
// Whether one of four scales, relative to the base, is not in 0 to SPAN. The lowest byte below 0 wraps to above 100.
__device__ __forceinline__ bool exceeds_span(u32 above) {
    return ((above | (above + (15u - SPAN) * BYTES_OF_ONE)) & 0xF0F0F0F0u) != 0u;
}

__device__ __forceinline__ u32 byte_of(u32 word, int byte) { return word >> 8 * byte & 0xFFu; }

// Whether `predicate` is true in all threads of a warp.
__device__ __forceinline__ bool all_of_warp(bool predicate) {
#ifdef __CUDA_ARCH__
    return __all_sync(0xFFFFFFFFu, predicate) != 0;
#else
    u32 all = predicate ? 1u : 0u;
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) all &= __shfl_xor_sync(0xFFFFFFFFu, all, lanes);
    return all != 0u;
#endif
}

// Decodes the thread's columns of a block of row `half` * 8 + g.
__device__ __forceinline__ void decode(const Stage& stage, int half, int block, u32* pairs) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const Vector2 codes = *reinterpret_cast<const Vector2*>(&stage[half * GROUP_ROWS + g][(block ^ g % 4) * BLOCK + 8 * t]);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::cvt_rn_f16x2_e4m3x2(codes.words[i], pairs[2 * i], pairs[2 * i + 1]);
}

// Adds the sum of a block of MX, or of all columns of a stage, for tokens 2t and 2t + 1 of a group and rows `row` and
// `row` + 8 of b.
template <class Scaling, bool MODERATE>
__device__ __forceinline__ void add_block(const u32 (&scales)[TOKENS + ROWS], const Float4 (&factors)[2], int group,
                                          int row, int block, const float (&block_sum)[4], float (&sums)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a_scale = scales[group * GROUP_ROWS + 2 * t + i % 2], b_scale = scales[TOKENS + row + i / 2 * 8];
        if constexpr (MODERATE) {
            sums[i] = __fmaf_rn(block_sum[i], factors[i / 2].each[block], sums[i]);
        } else if constexpr (E8M0_SCALES<Scaling>) {
            float a_factors[2], b_factors[2];
            Scaling::decode_scale(0, byte_of(a_scale, block), a_factors);
            Scaling::decode_scale(1, byte_of(b_scale, block), b_factors);
            sums[i] = Scaling::add_block(sums[i], block_sum[i], a_factors, b_factors);
        } else if constexpr (FLOAT_SCALES<Scaling>) {
            sums[i] = Scaling::add_block(sums[i], block_sum[i], {__uint_as_float(a_scale)}, {__uint_as_float(b_scale)});
        } else {
            sums[i] += block_sum[i];
        }
    }
}

// Adds the products of `count` strips of b for the columns of the stages. `above`: MX scales of rows g and g + 8 of a,
// relative to the base. `take(stage)` waits for a stage.
template <class Scaling, bool MODERATE, class Take>
__device__ __forceinline__ void multiply_stages(const WarpShared& own, int iteration, const u32 (&above)[GROUPS], int count,
                                                const Take& take, float (&sums)[STRIPS][GROUPS][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    u32 a[GROUPS][PAIRS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const u32 exponents = (above[group] + (15u - BASE_SHIFT) * BYTES_OF_ONE) << 2;  // exponents in the high bytes of float16
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            u32* const pairs = a[group] + 4 * block;
            decode(own.stages[0], group, block, pairs);
            if constexpr (MODERATE) {
                const u32 powers = byte_of(exponents, block) * 0x01000100u;
#pragma unroll
                for (int i = 0; i < 4; ++i) pairs[i] = ptx::mul_rn_f16x2(pairs[i], powers);
            }
        }
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        take(1 + strip);
        if (strip >= count) continue;
        const int row = strip * STRIP_ROWS + g;
        Float4 factors[2];
        if constexpr (MODERATE) factors[0] = own.factors[row], factors[1] = own.factors[row + 8];
        float block_sum[GROUPS][4] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            u32 left[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) decode(own.stages[1 + strip], half, block, left[half]);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                multiply_32_columns(block_sum[group], left[0], left[1], a[group] + 4 * block);
            }
            if (!E8M0_SCALES<Scaling> && block + 1 < BLOCKS) continue;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                add_block<Scaling, MODERATE>(own.scales[iteration % 2], factors, group, row, block, block_sum[group],
                                          sums[strip][group]);
#pragma unroll
                for (int i = 0; i < 4; ++i) block_sum[group][i] = 0.0f;
            }
        }
    }
}

// Place of a sum in WarpShared::sums, swizzled against bank conflicts.
__device__ __forceinline__ int sum_place(int token, int row) { return token * ROWS + (row ^ token / 2 % 4 * 8); }

// Adds the sums of all warps, of strips from `strip` on, and stores the outputs.
template <class Scaling>
__device__ __forceinline__ void store_strips(const Scaling& scaling, const BlockShared& shared, const BlockWork& work,
                                             const Epilogue& epilogue, int strip) {
    constexpr int ROWS_PER_THREAD = 4;  // consecutive
    static_assert(TOKENS * ROWS == SKINNY_THREADS * ROWS_PER_THREAD, "a thread stores four outputs");
    const int token = threadIdx.x / (ROWS / ROWS_PER_THREAD), row = threadIdx.x % (ROWS / ROWS_PER_THREAD) * ROWS_PER_THREAD;
    Float4 sum;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float* const sums = &shared.warps[warp].sums[0][0] + sum_place(token, row);
        const Float4 part = *reinterpret_cast<const Float4*>(sums);
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) sum.each[i] = warp == 0 ? part.each[i] : sum.each[i] + part.each[i];
    }
    const int x = strip * STRIP_ROWS + row, y = work.token + token, count = y < work.tokens ? work.end() - x : 0;
    const i64 n = work.rows;
    if (!BLOCK_SCALES<Scaling> || epilogue.c != nullptr || epilogue.bias != nullptr) {  // otherwise its instructions are not fetched
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) {
            if (i < count) sum.each[i] = output(scaling, epilogue, sum.each[i], y, x + i, n);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i) {
        if (i < count) store_as(epilogue.out, epilogue.out_type, y * n + x + i, sum.each[i]);
    }
}

// MX: stores the factors of b, and returns the scales of a relative to the base in `above`. Returns whether all scales that
// this thread reads are moderate.
__device__ __forceinline__ bool prepare_scales(WarpShared& own, int iteration, u32 (&above)[GROUPS]) {
    const int lane = threadIdx.x % WARP, g = lane / 4;
    const u32* const scales = own.scales[iteration % 2];
    const u32 base = byte_of(scales[0], 0) - BASE_OFFSET;
    bool moderate = moderate_base(base);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        above[group] = scales[group * GROUP_ROWS + g] - base * BYTES_OF_ONE;
        moderate &= !exceeds_span(above[group]);
    }
#pragma unroll
    for (int row = lane; row < ROWS; row += WARP) {
        const u32 b_scales = scales[TOKENS + row], product = b_scales + (base + BASE_SHIFT - 127u) * BYTES_OF_ONE;
        moderate &= moderate_scales(b_scales);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            own.factors[row].each[block] = __uint_as_float(byte_of(product, block) << 23);
        }
    }
    return moderate;
}

template <class Scaling>
__device__ __forceinline__ void multiply_rows(const Scaling& scaling, BlockShared& shared, const BlockWork& work,
                                              const Epilogue& epilogue) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    WarpShared& own = shared.warps[warp];
    CopyPipeline<Scaling> pipeline(own, work, warp * CHUNK);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) pipeline.copy(stage);
    // Waits for a stage, and starts a copy into the stage before it, which is free.
    const auto take = [&](int stage) {
        ptx::cp_async_wait_group<STAGES - 2>();
        ptx::bar_warp_sync();
        pipeline.copy((stage + STAGES - 1) % STAGES);
    };
    int iteration = 0;
    for (int strip = work.first; strip < work.last; strip += STRIPS) {
        float sums[STRIPS][GROUPS][4] = {};
#pragma unroll 1
        for (int column = warp * CHUNK; column < work.columns; column += WARPS * CHUNK, ++iteration) {
            take(0);
            u32 above[GROUPS] = {};
            bool moderate = false;
            if constexpr (E8M0_SCALES<Scaling>) moderate = prepare_scales(own, iteration, above);
            const int count = work.last - strip;
            if (E8M0_SCALES<Scaling> && all_of_warp(moderate)) {
                multiply_stages<Scaling, E8M0_SCALES<Scaling>>(own, iteration, above, count, take, sums);
            } else {
                multiply_stages<Scaling, false>(own, iteration, above, count, take, sums);
            }
        }
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = group * GROUP_ROWS + 2 * t + i % 2, row = s * STRIP_ROWS + g + i / 2 * 8;
                    (&own.sums[0][0])[sum_place(token, row)] = sums[s][group][i];
                }
            }
        }
        __syncthreads();
        store_strips(scaling, shared, work, epilogue, strip);
        if (strip + STRIPS < work.last) __syncthreads();
    }
}

template <class Scaling>
__device__ __forceinline__ void multiply_skinny(const Scaling& scaling, const GemmParameters& p,
                                                const SkinnyParameters& skinny) {
#ifdef __CUDA_ARCH__
    alignas(128) extern __shared__ u8 dynamic_shared[];
    BlockShared& shared = *reinterpret_cast<BlockShared*>(dynamic_shared);
#else
    __shared__ BlockShared shared;
#endif
    BlockWork work = block_work(p, skinny);
    const int strips = (work.rows + STRIP_ROWS - 1) / STRIP_ROWS;
    work.token = static_cast<int>(blockIdx.x) * TOKENS;
    work.first = static_cast<int>(blockIdx.y) * skinny.strips;
    work.last = strips - work.first < skinny.strips ? strips : work.first + skinny.strips;
    ptx::griddepcontrol_wait();
    multiply_rows(scaling, shared, work, Epilogue{p.epilogue, 0, 0});
}

}  // namespace narrowgauge
