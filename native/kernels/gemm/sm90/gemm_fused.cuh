// gemm_fused.cuh: the GEMM that decodes b in registers. Contracts: gemm_fused_nvfp4.cu and gemm_fused_mx.cu.
//
// With few rows of a, to dequantize b to memory would take longer than to multiply it. Here the operands of wgmma change
// places: 64 rows of b are its first operand, which may lie in registers, and rows of a are its columns. A block has 128 rows
// of b and TOKENS rows of a. Four consumer warpgroups have 64 rows of b of a slice of K each. While a warpgroup decodes, the
// tensor cores multiply for the other warpgroups. The producer warpgroup copies codes of b, and tiles of a, which
// `pack_interleaved` has dequantized. A block has two slices of K and adds their sums; on a GPU a cluster of blocks has all
// slices of an output tile. Neighbouring sums are added first.
//
// The kernel of sections is persistent. A block has 256 rows of b, 64 for each warpgroup, and all of K; the producers copy the
// next output tile while the warpgroups store one. On an H200 64 sections of 32 rows by N = 4096, K = 7168 take 679 us of MXFP8
// and 494 us of NVFP4; with products of 64 rows of a 735 and 570; a block for each output tile, with two slices of K, took 875
// and 790. NVFP4 takes 377 us without decoding, 406 with a quarter of the products, 356 with neither, and a bare read of b 241.
// Slower: to decode a step while the tensor cores multiply the step before, by 1 to 5 %, or two steps at a time; to decode by
// shifts in place of conversions from E4M3, by 8 %.
//
// A thread holds four of 16 consecutive columns of a row, and its codes are neighbours in memory: columns 4t to 4t + 3. The
// tiles of a have the same order of columns. A wgmma adds 16 columns in any order to the same sum.
//
// On an H200, 64 rows by N = K = 8192 take, between events, 26.9 us of NVFP4 and 27.6 of MXFP8, 128 rows 34.6 and 35.8. An
// earlier version took 28.6 us for 64 rows of NVFP4, 22.7 without decoding, 20.2 with a quarter of the products as well; MXFP8
// 30.0, 28.2 and 27.4 us; 128 rows 38.0, 35.6 and 26.7 us, and 40.7, 36.5 and 34.0 us. To add neighbouring slices first took
// 0.6 to 2 us off, to check scales before the first step 0.2 to 0.4. Slower, of 64 rows of MXFP8: half as many stages of a and
// four of b by 1.7 us, three of b by 1.2, warpgroups that multiply by turns by 0.4, prefetches of codes to L2 by 2 to 8.
#pragma once

#include "gemm/skinny/gemm_skinny_nvfp4.cuh"
#include "gemm/sm90/dequantize_tiles.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace narrowgauge {

constexpr int BLOCK_SLICES = 2;                            // slices of K of a block
constexpr int FUSED_CONSUMERS = 2 * BLOCK_SLICES, FUSED_THREADS = (FUSED_CONSUMERS + 1) * WARPGROUP;
constexpr int CONSUMER_THREADS = FUSED_CONSUMERS * WARPGROUP;
constexpr int SLICE_WARPS = 2 * WARPGROUP / WARP;          // consumers of a slice
constexpr int CODE_STAGES = 2, TOKEN_BYTES = 64 * 1024;    // of a slice: pipeline of b, shared memory of the pipeline of a
constexpr int SECTION_ROWS = FUSED_CONSUMERS * WGMMA_M, SECTION_CODE_STAGES = 4;  // of a block of the persistent kernel
constexpr int FEW_TOKENS = 32;                             // of a section: half as many products
constexpr int STORED_TOKENS = 16, STORED_STRIDE = 20;      // of the sums that a warp stores at a time: without bank conflicts
constexpr int FUSED_STRIDE = TILE_ROWS + 4;                // of sums: without bank conflicts of the eight rows of a write
// Of 96 registers of each of 640 threads.
constexpr int FUSED_PRODUCER_REGISTERS = 24, FUSED_CONSUMER_REGISTERS = 112;
// Blocks of a cluster, at most. A CPU has their sums in the shared memory of one block.
#ifdef __CUDA_ARCH__
constexpr int MOST_BLOCKS = CLUSTER, BLOCKS_OF_SUMS = 1;
#else
constexpr int MOST_BLOCKS = 8, BLOCKS_OF_SUMS = MOST_BLOCKS;
#endif

struct FusedParameters {
    const u8* a;  // tiles of pack_interleaved
    const u8 *b_codes, *b_scales;
    u32* refused;
    EpilogueParameters epilogue;
    i64 m, n, k;
    int slices;       // of K
    i64 slice_steps;  // steps of each but the last, which may have fewer
};

// A matrix (N, K) per section, all of one shape.
struct FusedMatrices {
    const TensorMap* maps;
    const u8* const* codes;
    const u8* const* scales;
    const i64* sizes;   // (sections,) rows of a
    const i64* starts;  // (sections,) first rows, or null: sections lie one behind another
    int sections;
};

// Stages of a pipeline of COUNT stages for SPAN steps from step `done` on, a multiple of SPAN: with constant distances.
template <u32 COUNT, u32 SPAN>
struct Stages {
    static_assert(COUNT % SPAN == 0 || SPAN % COUNT == 0, "SPAN steps begin at the first stage, or do not wrap around");
    u32 first, round;

    __device__ __forceinline__ explicit Stages(u32 done) : first(COUNT > SPAN ? done % COUNT : 0u), round(done / COUNT) {}
    __device__ __forceinline__ u32 stage(u32 step) const { return first + step % COUNT; }
    __device__ __forceinline__ u32 phase(u32 step) const { return (round + step / COUNT) % 2; }
};

// Pipelines of codes of ROWS rows of b, in STAGES stages, and of tiles of a, and their barriers.
template <int TOKENS_OF_A, int ROWS_OF_B, int STAGES_OF_B>
struct FusedPipelines {
    static constexpr int TOKENS = TOKENS_OF_A, ROWS = ROWS_OF_B, CODE_STAGES = STAGES_OF_B, CODE_BYTES = ROWS * ROW_BYTES;
    static constexpr int TOKEN_STAGES = TOKEN_BYTES / (TOKENS * ROW_BYTES);

    struct Barriers {
        ptx::Mbarrier codes_full[CODE_STAGES], codes_empty[CODE_STAGES], tokens_full[TOKEN_STAGES], tokens_empty[TOKEN_STAGES];

        __device__ __forceinline__ void init() {
            constexpr int CONSUMER_WARPS = ROWS * SLICE_WARPS / TILE_ROWS;
            for (int stage = 0; stage < CODE_STAGES; ++stage) {
                ptx::mbarrier_init(codes_full[stage], 1);
                ptx::mbarrier_init(codes_empty[stage], CONSUMER_WARPS);
            }
            for (int stage = 0; stage < TOKEN_STAGES; ++stage) {
                ptx::mbarrier_init(tokens_full[stage], 1);
                ptx::mbarrier_init(tokens_empty[stage], CONSUMER_WARPS);
            }
        }
    };

    u8 codes[CODE_STAGES][CODE_BYTES];
    u8 tokens[TOKEN_STAGES][TOKENS * ROW_BYTES];
};

template <int TOKENS>
struct alignas(1024) FusedShared {
    using Pipelines = FusedPipelines<TOKENS, TILE_ROWS, CODE_STAGES>;

#ifdef __CUDA_ARCH__
    union {  // the sums replace the pipelines after the last step
#else
    struct {
#endif
        Pipelines pipelines[BLOCK_SLICES];
        float sums[BLOCKS_OF_SUMS][TOKENS][FUSED_STRIDE];
    };
    typename Pipelines::Barriers barriers[BLOCK_SLICES];
};

template <int TOKENS>
struct alignas(1024) SectionsShared {
    using Pipelines = FusedPipelines<TOKENS, SECTION_ROWS, SECTION_CODE_STAGES>;

    Pipelines pipelines;
    float sums[CONSUMER_THREADS / WARP][STORED_TOKENS][STORED_STRIDE];
    typename Pipelines::Barriers barriers;
};
#ifdef __CUDA_ARCH__
static_assert(sizeof(FusedShared<64>) == 193 * 1024 && sizeof(FusedShared<128>) == 193 * 1024 &&
                  sizeof(SectionsShared<64>) == 213 * 1024 && sizeof(SectionsShared<128>) == 213 * 1024,
              "native/gemm/fused.py asks for these sizes");
#endif

// Shared memory of a block, of type T.
#ifdef __CUDA_ARCH__
#define FUSED_SHARED(T, shared)                                                                       \
    extern __shared__ u8 dynamic_shared[];                                                            \
    const u32 skipped = -static_cast<u32>(__cvta_generic_to_shared(dynamic_shared)) & 1023u;          \
    T& shared = *reinterpret_cast<T*>(dynamic_shared + skipped)
#else
#define FUSED_SHARED(T, shared) __shared__ T shared
#endif

// 16 bytes of scales of rows g and g + 8 of a warp.
using RowScales = ptx::Vector4[2];

// E2M1 with scales of E4M3 for 16 columns.
struct Nvfp4Codes {
    using Element = E2M1;
    using Number = fp16;
    static constexpr BlockScales SCALES = BlockScales::E4M3;
    // Steps of a stage of codes, and of RowScales.
    static constexpr int STAGE_STEPS = ROW_BYTES * 2 / TILE_COLUMNS, SCALE_STEPS = 16 * 16 / TILE_COLUMNS;
    static constexpr int RUN = SCALE_STEPS * TILE_COLUMNS;  // columns of RowScales
    static constexpr int BYTES = 2;                         // of a lane's codes in a 16-byte chunk, or in half of one

    // Step `step` of the scales. `first`: the byte of `codes` at which the thread's codes of chunk 0 of the stage begin.
    static __device__ __forceinline__ void decode(Fragments& fragments, const u8* codes, u32 first, const RowScales& scales,
                                                  int step) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            u32 pairs[2];  // of scales
            ptx::cvt_rn_f16x2_e4m3x2(scales[row].words[step], pairs[0], pairs[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // two wgmmas, whose codes are in a word
                const u8* place = codes + (first ^ (2 * step + half) << 4) + 8 * row * ROW_BYTES;
                const u32 low = *reinterpret_cast<const u16*>(place), high = *reinterpret_cast<const u16*>(place + 8);
                const u32 word = low | high << 16;
                const u32 factors = restore_elements(pairs[half]);
                u32 even[2], odd[2];
                ptx::cvt_rn_f16x2_e4m3x2(even_as_e4m3(word), even[0], even[1]);
                ptx::cvt_rn_f16x2_e4m3x2(odd_as_e4m3(word), odd[0], odd[1]);
                fragments[2 * half][row] = ptx::mul_rn_f16x2_low(even[0], factors);
                fragments[2 * half][2 + row] = ptx::mul_rn_f16x2_low(odd[0], factors);
                fragments[2 * half + 1][row] = ptx::mul_rn_f16x2_high(even[1], factors);
                fragments[2 * half + 1][2 + row] = ptx::mul_rn_f16x2_high(odd[1], factors);
            }
        }
    }

    // Before the first step: brings scales of two rows to the L2 cache, of `runs` runs from run `first` on. Four threads have the
    // same rows.
    static __device__ __forceinline__ void prepare(const FusedParameters& p, const i64 (&rows)[2], i64 first, u32 runs) {
        for (u32 run = threadIdx.x % 4 * 2; run < runs; run += 8) {  // a sector of 32 bytes has two runs
            for (const i64 row : rows) ptx::prefetch_global_L2(p.b_scales + (row * p.k + (first + run) * RUN) / 16);
        }
    }
};

// E4M3 with scales of E8M0 for 32 columns.
struct MxCodes {
    using Element = E4M3;
    using Number = bf16;
    static constexpr BlockScales SCALES = BlockScales::E8M0;
    static constexpr int STAGE_STEPS = ROW_BYTES / TILE_COLUMNS, SCALE_STEPS = 16 * 32 / TILE_COLUMNS;
    static constexpr int RUN = SCALE_STEPS * TILE_COLUMNS;
    static constexpr int BYTES = 4;

    static __device__ __forceinline__ void decode(Fragments& fragments, const u8* codes, u32 first, const RowScales& scales,
                                                  int step) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int i = 0; i < WGMMAS; ++i) {
                const u8* place = codes + (first ^ (step % 2 * WGMMAS + i) << 4) + 8 * row * ROW_BYTES;
                u32 low, high;
                ptx::cvt_rn_f16x2_e4m3x2(*reinterpret_cast<const u32*>(place), low, high);
                float numbers[4];
                ptx::cvt_f32_f16(low, numbers[0], numbers[1]);
                ptx::cvt_f32_f16(high, numbers[2], numbers[3]);
                const u32 scale = bf16_scales(scales[row].words[step / 2], step % 2 * 2 + i / 2);
                fragments[i][row] = ptx::mul_rn_bf16x2(ptx::bf16_pair(numbers[0], numbers[2]), scale);
                fragments[i][2 + row] = ptx::mul_rn_bf16x2(ptx::bf16_pair(numbers[1], numbers[3]), scale);
            }
        }
    }

    // Byte `number` of codes of E8M0, as a bfloat16 pair.
    static __device__ __forceinline__ u32 bf16_scales(u32 codes, int number) {
#ifdef __CUDA_ARCH__
        return ptx::prmt_b32(codes, 0u, 0x4040u + static_cast<u32>(number) * 0x0101u) << 7;
#else
        const u32 code = codes >> 8 * number & 0xFFu;
        return code << 7 | code << 23;
#endif
    }

    // Before the first step: sets the `refused` flag if a number of two rows of b is outside the range of tiles, in `runs` runs
    // from run `first` on. Four threads have the same rows. The products wait for copies meanwhile.
    static __device__ __forceinline__ void prepare(const FusedParameters& p, const i64 (&rows)[2], i64 first, u32 runs) {
#pragma unroll 1
        for (u32 run = threadIdx.x % 4; run < runs; run += 4) {
            const i64 column = (first + run) * RUN;
            ptx::Vector4 scales[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[i] = ptx::ld_global_nc_v4_u32(p.b_scales + (rows[i] * p.k + column) / 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!in_range(scales[i])) check_codes(p, rows[i] * p.k + column);
            }
        }
    }

    // Whether every number from 2^-9 to 448 is inside the range under scales of E8M0: under 2^-31 to 2^32, codes 96 to 159.
    static __device__ __forceinline__ bool in_range(const ptx::Vector4& scales) {
        u32 others = 0;  // a code plus 32 has the highest bits 10; a sum above 255 has the bits 00
#pragma unroll
        for (int i = 0; i < 4; ++i) others |= scales.words[i] + 0x20202020u ^ 0x80808080u;
        return (others & 0xC0C0C0C0u) == 0;
    }

    // Sets the flag if a number of the run from code `first` on is outside the range.
    static __device__ __forceinline__ void check_codes(const FusedParameters& p, i64 first) {
#pragma unroll 1
        for (i64 code = first; code < first + RUN; code += CHUNK) {
            const ChunkCodes chunk = {{load_word(p.b_codes + code, 4), load_word(p.b_codes + code + 4, 4)}};
            if (out_of_range<E4M3>(chunk, e8m0_to_float(p.b_scales[code / 32]))) *p.refused = 1;
        }
    }
};

// A slice of K of a block: rows of b from `row` on, rows of a from `token` on, `steps` steps from `first` on. Its pipelines have
// had `before` steps of other slices.
template <class Codes, class Pipelines>
struct FusedSlice {
    static constexpr int TOKENS = Pipelines::TOKENS, CODE_STAGES = Pipelines::CODE_STAGES;

    const FusedParameters& p;
    Pipelines& pipelines;
    typename Pipelines::Barriers& barriers;
    i64 row, token, first;
    u32 steps, before;
    u32 token_bytes;  // of the rows of a of a step

    __device__ __forceinline__ void copy_tokens() const {
        constexpr int STAGES = Pipelines::TOKEN_STAGES;
        const i64 tile = token / TILE_ROWS * (p.k / TILE_COLUMNS) + first;
        const u8* source = p.a + tile * TILE_BYTES + token % TILE_ROWS * ROW_BYTES;
        for (u32 step = 0; step < steps; ++step) {
            const u32 stage = (before + step) % STAGES;
            ptx::mbarrier_try_wait_parity(barriers.tokens_empty[stage], (before + step) / STAGES % 2 ^ 1u);
            ptx::mbarrier_arrive_expect_tx(barriers.tokens_full[stage], token_bytes);
            ptx::cp_async_bulk_shared_global(pipelines.tokens[stage], source + i64{step} * TILE_BYTES, token_bytes,
                                             barriers.tokens_full[stage]);
        }
    }

    // `once`: no other block reads the codes at another time.
    __device__ __forceinline__ void copy_codes(const u64 (&map)[16], bool once = CLUSTER > 1) const {
        const int x = static_cast<int>(first / Codes::STAGE_STEPS) * ROW_BYTES;
        for (u32 number = 0; number < steps / Codes::STAGE_STEPS; ++number) {
            const u32 place = before / Codes::STAGE_STEPS + number, stage = place % CODE_STAGES;
            ptx::mbarrier_try_wait_parity(barriers.codes_empty[stage], place / CODE_STAGES % 2 ^ 1u);
            ptx::mbarrier_arrive_expect_tx(barriers.codes_full[stage], Pipelines::CODE_BYTES);
#pragma unroll
            for (int box = 0; box < Pipelines::ROWS; box += TILE_ROWS) {
                u8* const target = pipelines.codes[stage] + box * ROW_BYTES;
                const int column = x + static_cast<int>(number) * ROW_BYTES, y = static_cast<int>(row) + box;
                if (once) {  // on an H200 128 rows of MXFP8 take 35.6 us, 38.0 without
                    ptx::cp_async_bulk_tensor_2d<true>(target, map, column, y, barriers.codes_full[stage]);
                } else {
                    ptx::cp_async_bulk_tensor_2d(target, map, column, y, barriers.codes_full[stage]);
                }
            }
        }
    }

    // The sums of a thread, of the first COLUMNS rows of a. `own`: its first row in the block; the second is 8 rows below.
    template <int COLUMNS>
    __device__ __forceinline__ void accumulate(float (&d)[COLUMNS / 2], int own, int lane) const {
        constexpr u32 STAGE_STEPS = Codes::STAGE_STEPS, STEPS = Codes::SCALE_STEPS;
        const u32 first_code = own * ROW_BYTES + (lane / 4 << 4) + lane % 4 * Codes::BYTES;  // lane / 4 is own % 8
        i64 y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) y[i] = row + own + 8 * i < p.n ? row + own + 8 * i : p.n - 1;
        const i64 first_run = first / STEPS;
        const u8* row_scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scales[i] = p.b_scales + (y[i] * (p.k / TILE_COLUMNS / STEPS) + first_run) * 16;
        RowScales scales;
        const auto load = [&](u32 run) {
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[i] = *reinterpret_cast<const ptx::Vector4*>(row_scales[i] + i64{run} * 16);
        };
        load(0);
        Codes::prepare(p, y, first_run, steps / STEPS);
        for (u32 run = 0; run < steps / STEPS; ++run) {
            const u32 done = before + run * STEPS;
            const Stages<Pipelines::TOKEN_STAGES, STEPS> tokens(done);
            const Stages<CODE_STAGES, STEPS / STAGE_STEPS> codes(done / STAGE_STEPS);
#pragma unroll
            for (u32 step = 0; step < STEPS; ++step) {
                const u32 stage = tokens.stage(step), code_stage = codes.stage(step / STAGE_STEPS);
                if (step % STAGE_STEPS == 0) {
                    ptx::mbarrier_try_wait_parity(barriers.codes_full[code_stage], codes.phase(step / STAGE_STEPS));
                }
                Fragments fragments;
                Codes::decode(fragments, pipelines.codes[0], code_stage * Pipelines::CODE_BYTES + first_code, scales, step);
                if (step % STAGE_STEPS == STAGE_STEPS - 1) {
                    ptx::fence_proxy_async_shared();  // loads of codes end before the next copy writes
                    release(barriers.codes_empty[code_stage], lane);
                }
                // After the last fence, which waits for loads. The compiler moves loads by ld.global.nc before a fence.
                if (step == STEPS - 1 && run + 1 < steps / STEPS) load(run + 1);
                ptx::mbarrier_try_wait_parity(barriers.tokens_full[stage], tokens.phase(step));
                ptx::wgmma_fence();
                multiply_fragments<typename Codes::Number, COLUMNS>(d, fragments, pipelines.tokens[0], stage * TOKENS * ROW_BYTES);
                wait_for_sums(d);
                keep(fragments);
                release(barriers.tokens_empty[stage], lane);
            }
        }
    }
};

// Adds the sums of the two slices of a block. Each warpgroup adds half of the sums.
template <int TOKENS>
__device__ __forceinline__ void add_slices(const float (&d)[TOKENS / 2], float (&sums)[TOKENS][FUSED_STRIDE], int number, int own,
                                            int lane) {
    constexpr int HALF = TOKENS / 4;
    const auto place = [&](int i) -> float& { return sums[i / 4 * 8 + lane % 4 * 2 + i % 2][own + i / 2 % 2 * 8]; };
    ptx::bar_sync<CONSUMER_THREADS>(1);  // all have read the pipelines
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        if (i / HALF != number) place(i) = d[i];
    }
    ptx::bar_sync<CONSUMER_THREADS>(1);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        if (i / HALF == number) place(i) += d[i];
    }
}

// Adds the sums of neighbouring blocks, then the sums of neighbours, and stores the outputs of part `rank` of the rows of a.
// Threads of a row write neighbouring outputs.
template <int TOKENS>
__device__ __forceinline__ void store_fused(const FusedShared<TOKENS>& shared, const FusedParameters& p, const Alpha& alpha,
                                            const Epilogue& epilogue, i64 row, i64 token, int rank) {
    constexpr int OUTPUTS = 8, THREADS_OF_TOKEN = TILE_ROWS / OUTPUTS, PART = TOKENS / CLUSTER;
    const int thread = threadIdx.x, left = thread % THREADS_OF_TOKEN * OUTPUTS;
#ifdef __CUDA_ARCH__
    constexpr int blocks = MOST_BLOCKS;
#else
    const int blocks = p.slices / BLOCK_SLICES;
#endif
#pragma unroll 1
    for (int y = rank * PART + thread / THREADS_OF_TOKEN; y < (rank + 1) * PART;
         y += FUSED_CONSUMERS * WARPGROUP / THREADS_OF_TOKEN) {
        if (token + y >= p.m || row + left >= p.n) continue;
        float v[OUTPUTS];
#pragma unroll
        for (int i = 0; i < OUTPUTS; i += 4) {
            ptx::Vector4 sums[MOST_BLOCKS];  // all are loaded before the first addition
#pragma unroll
            for (int block = 0; block < MOST_BLOCKS; ++block) {
                if (block >= blocks) break;
                const float* place = &shared.sums[block % BLOCKS_OF_SUMS][y][left + i];
                sums[block] = ptx::ld_shared_cluster(reinterpret_cast<const ptx::Vector4*>(place), block / BLOCKS_OF_SUMS);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float tree[MOST_BLOCKS];
#pragma unroll
                for (int block = 0; block < MOST_BLOCKS; ++block) tree[block] = __uint_as_float(sums[block].words[j]);
#pragma unroll
                for (int distance = 1; distance < MOST_BLOCKS; distance *= 2) {
#pragma unroll
                    for (int block = 0; block < MOST_BLOCKS; block += 2 * distance) {
                        if (block + distance < blocks) tree[block] += tree[block + distance];
                    }
                }
                v[i + j] = tree[0];
            }
        }
        store_outputs<false>(alpha, epilogue, v, token + y, row + left, p.n);
    }
}

// Flag of the block. Thread 0 clears the flag; a barrier must follow before any thread sets the flag.
__device__ __forceinline__ u32* flag_of_block(u32* flags) {
    u32* const flag = flags + (blockIdx.y * gridDim.x + blockIdx.x);
    if (threadIdx.x == 0) *flag = 0;
    return flag;
}

// A block's part of a GEMM: rows of a from `token` on.
template <class Codes, int TOKENS>
__device__ __forceinline__ void multiply_fused(const u64 (&map)[16], const FusedParameters& p, const Alpha& alpha,
                                               const Epilogue& epilogue, i64 token) {
    using Pipelines = typename FusedShared<TOKENS>::Pipelines;
    FUSED_SHARED(FusedShared<TOKENS>, shared);
    const int thread = threadIdx.x, lane = thread % WARP, rank = static_cast<int>(blockIdx.x % CLUSTER);
    const i64 row = i64{blockIdx.x / CLUSTER} * TILE_ROWS;
#ifdef __CUDA_ARCH__
    constexpr int blocks = 1;  // blocks of a cluster whose slices this block sums
#else
    const int blocks = p.slices / BLOCK_SLICES;
#endif
    const auto slice_of = [&](int block, int number) {
        const i64 first = ((rank + block) * BLOCK_SLICES + number) * p.slice_steps, left = p.k / TILE_COLUMNS - first;
        const u32 steps = static_cast<u32>(left < p.slice_steps ? left : p.slice_steps);
        return FusedSlice<Codes, Pipelines>{p,     shared.pipelines[number], shared.barriers[number], row, token, first,
                                            steps, static_cast<u32>(block * p.slice_steps), TOKENS * ROW_BYTES};
    };
    if (thread == 0) {
        for (auto& barriers : shared.barriers) barriers.init();
        ptx::fence_mbarrier_init_and_proxy_async();
    }
    __syncthreads();
    if (thread >= CONSUMER_THREADS) {
        ptx::setmaxnreg_dec<FUSED_PRODUCER_REGISTERS>();
        const int warp = (thread - CONSUMER_THREADS) / WARP;
        for (int block = 0; block < blocks; ++block) {
            const FusedSlice<Codes, Pipelines> slice = slice_of(block, warp / 2);
            if (lane == 0 && warp % 2 == 0) {
                ptx::griddepcontrol_wait();  // for the tiles; b was complete before pack_interleaved let this kernel begin
                slice.copy_tokens();
            }
            if (lane == 0 && warp % 2 == 1) slice.copy_codes(map);
        }
        return;
    }
    ptx::setmaxnreg_inc<FUSED_CONSUMER_REGISTERS>();
    const int own = thread / WARP % SLICE_WARPS * 16 + lane / 4;
    int number = thread / (2 * WARPGROUP);
#ifdef __CUDA_ARCH__
    number = __shfl_sync(0xFFFFFFFFu, number, 0);  // so that the compiler keeps addresses of stages in uniform registers
#endif
    for (int block = 0; block < blocks; ++block) {
        float d[TOKENS / 2] = {};
        slice_of(block, number).template accumulate<TOKENS>(d, own, lane);
        add_slices<TOKENS>(d, shared.sums[block], number, own, lane);
    }
    if constexpr (CLUSTER > 1) {
        ptx::barrier_cluster();
    } else {
        ptx::bar_sync<CONSUMER_THREADS>(1);
    }
    ptx::griddepcontrol_launch_dependents();
    store_fused<TOKENS>(shared, p, alpha, epilogue, row, token, rank);
    if constexpr (CLUSTER > 1) ptx::barrier_cluster_relaxed();  // all blocks have read this block's sums
}

template <class Codes, int TOKENS>
__device__ __forceinline__ void multiply_fused(const TensorMap& map, const FusedParameters& p, const Alpha& alpha) {
    FusedParameters own = p;
    if constexpr (Codes::SCALES == BlockScales::E8M0) own.refused = flag_of_block(p.refused);
    multiply_fused<Codes, TOKENS>(map.words, own, alpha, {p.epilogue, 0, 0}, i64{blockIdx.y} * TOKENS);
}

// Stores the sums of a warp, of 16 rows of b from `left` on and the rows of a of a section from `token` on.
template <int TOKENS>
__device__ __forceinline__ void store_section(const float (&d)[TOKENS / 2], float (&sums)[STORED_TOKENS][STORED_STRIDE],
                                              const Alpha& alpha, const Epilogue& epilogue, const OutputTile& tile, i64 token,
                                              i64 left, i64 n, int lane) {
    constexpr int PARTS = TOKENS / STORED_TOKENS;
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
        ptx::bar_warp_sync();
#pragma unroll
        for (int which = 0; which < PARTS; ++which) {  // registers have constant indices only
            if (which != part) continue;
#pragma unroll
            for (int i = 0; i < STORED_TOKENS / 2; ++i) {
                sums[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 % 2 * 8] = d[which * (STORED_TOKENS / 2) + i];
            }
        }
        ptx::bar_warp_sync();
        const i64 y = token + part * STORED_TOKENS + lane / 2, x = left + lane % 2 * 8;
        if (y >= tile.section_rows || x >= n) continue;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = sums[lane / 2][lane % 2 * 8 + i];
        store_outputs<false>(alpha, epilogue, v, y, x, n);
    }
}

// Calls `work` for the output tiles of a block, TOKENS rows of a at a time.
template <int TOKENS, class Work>
__device__ __forceinline__ void for_slices(const FusedMatrices& matrices, const FusedParameters& p,
                                           SectionsShared<TOKENS>& shared, const Work& work) {
    static_assert(SECTION_ROWS == OUT_COLUMNS, "the scheduler counts tiles of these rows of b");
    const u32 steps = static_cast<u32>(p.k / TILE_COLUMNS);
    TileScheduler<TiledSection> scheduler({matrices.sizes, matrices.sections, p.m, matrices.starts}, p.n, {1, steps});
    OutputTile tile;
    u32 before = 0;
    while (scheduler.take(tile)) {
        FusedParameters own = p;
        own.a += (tile.a_tile - tile.row / TILE_ROWS) * steps * TILE_BYTES;
        own.b_codes = matrices.codes[tile.section];
        own.b_scales = matrices.scales[tile.section];
        for (int part = 0; part < TILE_ROWS && tile.row + part < tile.section_rows; part += TOKENS, before += steps) {
            const i64 left = tile.section_rows - tile.row - part;
            // pack_interleaved writes groups of 32 rows. Outputs of other rows are not stored.
            const u32 rows = left < TOKENS ? static_cast<u32>(left + 31) / 32 * 32 : TOKENS;
            work({own, shared.pipelines, shared.barriers, tile.column, tile.row + part, 0, steps, before, rows * ROW_BYTES}, tile);
        }
    }
}

// Multiplies and stores the outputs of a warp, of COLUMNS rows of a.
template <int COLUMNS, class Slice>
__device__ __forceinline__ void multiply_section(const Slice& slice, float (&sums)[STORED_TOKENS][STORED_STRIDE],
                                                 const GroupedAlpha& alpha, const OutputTile& tile) {
    const int own = threadIdx.x / WARP * 16, lane = threadIdx.x % WARP;
    const FusedParameters& p = slice.p;
    float d[COLUMNS / 2] = {};
    slice.template accumulate<COLUMNS>(d, own + lane / 4, lane);
    store_section<COLUMNS>(d, sums, alpha.a == nullptr ? Alpha{} : alpha.section(tile.section),
                           {p.epilogue, tile.section_start * p.n, tile.section * p.n}, tile, slice.token, slice.row + own, p.n,
                           lane);
}

// The same for all sections: each block has output tiles of SECTION_ROWS rows of b and TILE_ROWS rows of a, TOKENS at a time.
template <class Codes, int TOKENS>
__device__ __forceinline__ void multiply_sections_fused(const FusedMatrices& matrices, const FusedParameters& p,
                                                        const GroupedAlpha& alpha) {
    using Slice = FusedSlice<Codes, typename SectionsShared<TOKENS>::Pipelines>;
    FUSED_SHARED(SectionsShared<TOKENS>, shared);
    const int thread = threadIdx.x, lane = thread % WARP;
    if (thread == 0) {
        shared.barriers.init();
        ptx::fence_mbarrier_init_and_proxy_async();
    }
    __syncthreads();
    if (thread >= CONSUMER_THREADS) {
        ptx::setmaxnreg_dec<FUSED_PRODUCER_REGISTERS>();
        const int warp = (thread - CONSUMER_THREADS) / WARP;
        if (lane == 0 && warp == 0) {
            ptx::griddepcontrol_wait();  // for the tiles; b was complete before pack_interleaved let this kernel begin
            for_slices(matrices, p, shared, [](const Slice& slice, const OutputTile&) { slice.copy_tokens(); });
        }
        if (lane == 0 && warp == 1) {
            for_slices(matrices, p, shared, [&](const Slice& slice, const OutputTile& tile) {
                const u64(&map)[16] = matrices.maps[tile.section].words;
                ptx::fence_proxy_tensormap_acquire(map);
                slice.copy_codes(map, tile.section_rows <= TILE_ROWS);
            });
        }
        return;
    }
    ptx::setmaxnreg_inc<FUSED_CONSUMER_REGISTERS>();
    const int warp = thread / WARP;
    for_slices(matrices, p, shared, [&](const Slice& slice, const OutputTile& tile) {
        if constexpr (TOKENS == 64) {
            if (tile.section_rows - slice.token <= FEW_TOKENS) {
                return multiply_section<FEW_TOKENS>(slice, shared.sums[warp], alpha, tile);
            }
        }
        multiply_section<TOKENS>(slice, shared.sums[warp], alpha, tile);
    });
    ptx::griddepcontrol_launch_dependents();
}

// Of pack_interleaved, at least. On an H200 2 and 3 blocks are slower by 1 %, 6 and 8 by 3 % with 256 rows of NVFP4.
constexpr int PACKING_BLOCKS_PER_SM = 4;

// Tiles that a block of pack_interleaved dequantizes at a time: rows of the operand, tiles of K, and place in memory.
struct PackedRun {
    i64 first, end, step, tile;  // end: -1 beyond the last tile
};

// Dequantizes an operand to tiles with interleaved columns: 256 threads for every tile, grid K/64 * rows of tiles; of sections
// any grid, a block takes neighbouring tiles of K. One thread finds their section: when all threads did so for each tile, 64
// sections of 32 rows by K = 7168 took 52 us on an H200.
template <class Codes>
__device__ __forceinline__ void pack_interleaved_operand(const DequantizeParameters& p) {
    constexpr u32 TILES_OF_RUN = 4;
    static_assert(Codes::RUN % (TILES_OF_RUN * TILE_COLUMNS) == 0, "K is a multiple of the columns of a run");
    __shared__ PackedRun shared;
    const bool sections = p.sizes != nullptr;
    const u32 count = sections ? TILES_OF_RUN : 1, runs = static_cast<u32>(p.k / TILE_COLUMNS) / count;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();  // after the wait: the next kernel reads b without one
    u32* refused = p.refused;
    if (Codes::SCALES == BlockScales::E8M0 && !sections) refused = flag_of_block(p.refused);
    TiledSection at({p.sizes, p.sections, p.rows, p.starts});
    for (i64 run = blockIdx.x;; run += gridDim.x) {
        if (threadIdx.x == 0) {
            Operand from = {p.operand, p.rows};
            i64 first;
            const bool found = find_rows(p, run / runs, at, from, first);
            shared = {first, found ? from.rows : -1, run % runs * count, run * count};
        }
        __syncthreads();
        const PackedRun own = shared;
        if (own.end < 0) return;
        for (u32 i = 0; i < count; ++i) {
            dequantize_tile<typename Codes::Element, Codes::SCALES, true>(
                {p.operand, own.end}, own.first, (own.step + i) * TILE_COLUMNS, p.k, p.tiles + (own.tile + i) * TILE_BYTES,
                refused, !sections);
        }
        if (!sections) return;
        __syncthreads();
    }
}

}  // namespace narrowgauge
