// gemm_skinny_mx: out = a @ b.T (+ c) (+ bias), MXFP8 of elements E4M3, where a has few rows. On a Hopper GPU.
//
//   a_codes  (M, K), a_scales (M, K/32); b likewise with N rows. All begin at a multiple of 16 bytes
//   K        a multiple of 512; any M; N and K to 2^20
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 640 threads, sizeof(Shared) of dynamic shared memory, grid (ceil(M/16), blocks), as many as run at a time
//   or fewer: of the strips of 16 rows of b each block takes as many as any other, but for the last ones.
//   Numerics: elements become float16, exactly. Tensor cores add 16 products at a time to a float32 number, cut off as
//   they do it (aligned_halves). The sum P of a block of 32 begins at 0; thread t of the four with a row has eight
//   columns of it that follow each other, and gives the first four to one mma and the last four to the next. P then
//   becomes fl(P * 2^(ea+eb)) and is added to that of the blocks before it. Of each 2048 columns, warp w of sixteen
//   adds the blocks of columns 128w to 128w + 127, in order of K; the sums of the warps are added in their order. Then
//   + c, + bias; each of these sums rounds to float32, and one cast ends it.
//
// What takes the time is reading b. Copies that run by themselves bring 16 rows of an operand, 2048 columns of each, to
// a stage of shared memory, some stages ahead. Each warp has 128 bytes of a row: it decodes those of a, which come
// first, and keeps them in registers, while some strips of b come and are multiplied by them; then come the next
// columns. What a warp has summed of each strip waits in shared memory meanwhile, and is added to that of the others
// last.
#include "gemm_mx.cuh"
#include "gemm_skinny.cuh"

// Warps that multiply, and those that copy: a group of four, which gives its registers to the others.
constexpr int WARPS = 16, COPIERS = GROUP / WARP, SKINNY_THREADS = (WARPS + COPIERS) * WARP;
constexpr int COPYING_REGISTERS = 32, MULTIPLYING_REGISTERS = 112;  // of 96 for all
constexpr int BLOCK = 32, BLOCKS = 4, SHARE = BLOCKS * BLOCK;  // columns: of a scale; what a warp has of a stage
constexpr int STAGE_COLUMNS = WARPS * SHARE, STAGE_SCALES = STAGE_COLUMNS / BLOCK;
// So that what threads read at once lies in different banks.
constexpr int CODES_STRIDE = STAGE_COLUMNS + 32, SCALES_STRIDE = STAGE_SCALES + 16;
// Strips that are multiplied by the same columns of a, and stages. On an H200, 16 rows by N = K = 8192, trials of this
// kernel took 23.4 us with 3 or 4 stages; 24.1 us with 12 warps that multiply, 24.3 us with 8 that have twice as much;
// 25.2 us where what is read once does not leave the cache first; 20.5 us without products, 15.6 us without copies. A
// bare read of b took 16.7 us.
constexpr int STRIPS = 4, STAGES = 4;
constexpr int PAIRS = SHARE / 8;  // of float16, that a thread has of a share

struct alignas(16) Four {
    float each[4];
};
struct alignas(8) Eight {
    u32 words[2];
};

struct alignas(128) Shared {
    u8 codes[STAGES][STRIP_ROWS][CODES_STRIDE];
    u8 scales[STAGES][STRIP_ROWS][SCALES_STRIDE];
    Four sums[STRIPS][WARPS][GROUPS][WARP];  // each is one thread's until all have met
    Barrier full[STAGES], empty[STAGES], met;
};
static_assert(sizeof(Shared) == 203904, "what native/gemm_skinny.py asks for");

// A stage, and how often it has been filled before, modulo 2.
struct Turn {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void next() {
        if (++stage < STAGES) return;
        stage = 0;
        phase ^= 1u;
    }
};

// What a block has to do: rows of a from `token` on, strips of b from `first` to before `last`.
struct Work {
    const u8 *a_codes, *a_scales, *b_codes, *b_scales;
    int tokens, rows, columns;  // of a, of b, of both
    int token, first, last;

    // Behind the strips that are multiplied by the same columns of a.
    __device__ __forceinline__ int last_of(int strip) const { return last - strip < STRIPS ? last : strip + STRIPS; }
};

// ---- copying --------------------------------------------------------------------------------------------------------

// A thread copies a row of each stage, once nobody reads what was there before. Behind the last row of an operand that
// stays, and is made of no use.
__device__ __forceinline__ void copy_rows(Shared& shared, const Work& work) {
    constexpr int EACH = STRIP_ROWS / COPIERS;
    const int lane = threadIdx.x % WARP, row = (threadIdx.x / WARP - WARPS) * EACH + lane;
    if (lane >= EACH) return;
    const u64 once = read_once(), often = read_often();
    Turn turn;
    const auto copy = [&](const u8* codes, const u8* scales, int source_row, int rows, int column, u64 policy) {
        const int left = work.columns - column, count = left < STAGE_COLUMNS ? left : STAGE_COLUMNS;
        const i64 start = static_cast<i64>(source_row) * work.columns + column;
        Barrier& full = shared.full[turn.stage];
        shared.empty[turn.stage].wait_for(turn.phase ^ 1u);
        if (source_row < rows) {
            full.arrive_before(count + count / BLOCK);
            copy_bytes(shared.codes[turn.stage][row], codes + start, count, full, policy);
            copy_bytes(shared.scales[turn.stage][row], scales + start / BLOCK, count / BLOCK, full, policy);
        } else {
            full.arrive();
        }
        turn.next();
    };
    for (int first = work.first; first < work.last; first += STRIPS) {
#pragma unroll 1
        for (int column = 0; column < work.columns; column += STAGE_COLUMNS) {
            copy(work.a_codes, work.a_scales, work.token + row, work.tokens, column, often);
#pragma unroll 1
            for (int strip = first; strip < work.last_of(first); ++strip) {
                copy(work.b_codes, work.b_scales, strip * STRIP_ROWS + row, work.rows, column, once);
            }
        }
    }
}

// ---- multiplying ----------------------------------------------------------------------------------------------------

// Thread 4g + t has, of a share, eight columns of each block of rows g and g + 8 of a strip, and of row g of both
// groups of a; of their sums, rows g and g + 8 of the strip by rows 2t and 2t + 1 of each group.
struct Codes {
    Eight blocks[BLOCKS];
};

struct TokenScales {
    u32 codes[GROUPS][2];
    float powers[GROUPS][2][BLOCKS];  // where moderate
    bool moderate;
};

__device__ __forceinline__ u32 scale_of(u32 scales, int block) { return scales >> 8 * block & 0xFFu; }

__device__ __forceinline__ void decode(const Eight& codes, u32* pairs) {
#pragma unroll
    for (int i = 0; i < 2; ++i) e4m3_pairs(codes.words[i], pairs[2 * i], pairs[2 * i + 1]);
}

// Scales of a from 2^-63 to 2^40 and of b from 2^-63 to 2^64 are moderate: P, a multiple of 2^-18 and below 2^23, times
// one of them or both is a number, so that a product and a sum round as often as two products and a sum would.
__device__ __forceinline__ bool moderate_token(u32 scale) { return scale - 64u < 104u; }
// Of four: the two highest bits of each differ.
__device__ __forceinline__ bool moderate_four(u32 scales) {
    return ((scales ^ scales << 1) & 0x80808080u) == 0x80808080u;
}

__device__ __forceinline__ TokenScales token_scales(const u32 (&scales)[GROUPS][2]) {
    TokenScales found;
    found.moderate = true;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            found.codes[group][e] = scales[group][e];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const u32 scale = scale_of(scales[group][e], block);
                found.powers[group][e][block] = __uint_as_float(scale << 23);
                found.moderate = found.moderate && moderate_token(scale);
            }
        }
    }
    return found;
}

template <bool MODERATE>
__device__ __forceinline__ void multiply_share(const Codes (&b)[2], const u32 (&b_scales)[2],
                                               const u32 (&a)[GROUPS][PAIRS], const TokenScales& a_scales,
                                               float (&sums)[GROUPS][4]) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        u32 left[2][4];
#pragma unroll
        for (int row = 0; row < 2; ++row) decode(b[row].blocks[block], left[row]);
        float inner[GROUPS][4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            multiply_eight(inner[group], left[0], left[1], a[group] + 4 * block);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 b_scale = scale_of(b_scales[i / 2], block);
                float& sum = sums[group][i];
                if constexpr (MODERATE) {
                    const float scaled = inner[group][i] * a_scales.powers[group][i % 2][block];
                    sum = __fmaf_rn(scaled, __uint_as_float(b_scale << 23), sum);
                } else {
                    float a_parts[2], b_parts[2];
                    Mx::decode(0, static_cast<u8>(scale_of(a_scales.codes[group][i % 2], block)), a_parts);
                    Mx::decode(1, static_cast<u8>(b_scale), b_parts);
                    sum = Mx::add(sum, inner[group][i], a_parts, b_parts);
                }
            }
        }
    }
}

// Whether all threads of a warp say so.
__device__ __forceinline__ bool all_of_warp(bool mine) {
#ifdef __CUDA_ARCH__
    return __all_sync(0xFFFFFFFFu, mine) != 0;
#else
    u32 all = mine ? 1u : 0u;
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) all &= __shfl_xor_sync(0xFFFFFFFFu, all, lanes);
    return all != 0u;
#endif
}

// The sums of all warps, of strips from `strip` on, to the output. Sum i of a thread is that of row g + i/2*8 and token
// 2t + i%2 of its group.
__device__ __forceinline__ void store_strips(const Shared& shared, const Work& work, const Epilogue& epilogue,
                                             int strip) {
    constexpr int OUTPUTS = STRIP_ROWS * TOKENS;
    const int count = work.last_of(strip) - strip;
#pragma unroll 1  // code that runs once takes longer to fetch
    for (int place = threadIdx.x; place < count * OUTPUTS; place += WARPS * WARP) {
        const int lane = place / 4 % WARP, group = place / (4 * WARP) % GROUPS;
        const int y = work.token + group * GROUP_ROWS + lane % 4 * 2 + place % 2;
        const int x = (strip + place / OUTPUTS) * STRIP_ROWS + lane / 4 + place % 4 / 2 * 8;
        if (y >= work.tokens || x >= work.rows) continue;
        float sum = shared.sums[place / OUTPUTS][0][group][lane].each[place % 4];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += shared.sums[place / OUTPUTS][warp][group][lane].each[place % 4];
        const i64 n = work.rows;
        store_as(epilogue.out, epilogue.out_type, y * n + x, output(Mx{}, epilogue, sum, y, x, n));
    }
}

__device__ __forceinline__ void multiply_rows(Shared& shared, const Work& work, const Epilogue& epilogue) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    Turn turn;
    u32 meeting = 0;
    const auto codes_of = [&](int row) {
        Codes codes;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const u8* source = shared.codes[turn.stage][row] + warp * SHARE + block * BLOCK + 8 * t;
            codes.blocks[block] = *reinterpret_cast<const Eight*>(source);
        }
        return codes;
    };
    const auto scales_of = [&](int row) {
        return *reinterpret_cast<const u32*>(shared.scales[turn.stage][row] + warp * BLOCKS);
    };
    const auto release = [&] {
        meet_in_warp();
        if (lane == 0) shared.empty[turn.stage].arrive();
        turn.next();
    };
    const auto meet = [&] {
        meet_in_warp();
        if (lane == 0) shared.met.arrive();
        shared.met.wait_for(meeting);
        meeting ^= 1u;
    };
    for (int first = work.first; first < work.last; first += STRIPS) {
        const int count = work.last_of(first) - first;
        for (int column = warp * SHARE; column - warp * SHARE < work.columns; column += STAGE_COLUMNS) {
            const bool mine = column < work.columns;
            u32 a[GROUPS][PAIRS], scales[GROUPS][2];
            shared.full[turn.stage].wait_for(turn.phase);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const Codes codes = codes_of(group * GROUP_ROWS + g);
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) decode(codes.blocks[block], a[group] + 4 * block);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = group * GROUP_ROWS + 2 * t + e;
                    scales[group][e] = work.token + row < work.tokens ? scales_of(row) : 0x7F7F7F7Fu;
                }
            }
            release();
            const TokenScales a_scales = token_scales(scales);
#pragma unroll 1
            for (int strip = 0; strip < count; ++strip) {
                Four(&kept)[GROUPS][WARP] = shared.sums[strip][warp];
                float sums[GROUPS][4] = {};
                if (column >= STAGE_COLUMNS) {
#pragma unroll
                    for (int group = 0; group < GROUPS; ++group) {
                        const Four before = kept[group][lane];
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[group][i] = before.each[i];
                    }
                }
                shared.full[turn.stage].wait_for(turn.phase);
                const Codes b[2] = {codes_of(g), codes_of(g + 8)};
                const u32 b_scales[2] = {scales_of(g), scales_of(g + 8)};
                release();
                const bool moderate = moderate_four(b_scales[0]) && moderate_four(b_scales[1]);
                if (mine && all_of_warp(moderate && a_scales.moderate)) {
                    multiply_share<true>(b, b_scales, a, a_scales, sums);
                } else if (mine) {
                    multiply_share<false>(b, b_scales, a, a_scales, sums);
                }
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    kept[group][lane] = {{sums[group][0], sums[group][1], sums[group][2], sums[group][3]}};
                }
            }
        }
        meet();
        store_strips(shared, work, epilogue, first);
        if (first + STRIPS < work.last) meet();
    }
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
    gemm_skinny_mx(const u8* a_codes, const u8* a_scales, const u8* b_codes, const u8* b_scales, const void* c,
                   const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type) {
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 room[];
    Shared& shared = *reinterpret_cast<Shared*>(room);
#else
    __shared__ Shared shared;
#endif
    const int strips = static_cast<int>((n + STRIP_ROWS - 1) / STRIP_ROWS), each = (strips + gridDim.y - 1) / gridDim.y;
    const int first = static_cast<int>(blockIdx.y) * each, last = strips - first < each ? strips : first + each;
    const Work work = {a_codes, a_scales, b_codes, b_scales, static_cast<int>(m), static_cast<int>(n),
                       static_cast<int>(k), static_cast<int>(blockIdx.x) * TOKENS, first, last};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            shared.full[stage].begin(STRIP_ROWS);
            shared.empty[stage].begin(WARPS);
        }
        shared.met.begin(WARPS);
        fence_barriers();
    }
    __syncthreads();
    if (threadIdx.x < WARPS * WARP) {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply_rows(shared, work, {c, bias, out, c_type, bias_type, out_type, 0, 0});
    } else {
        leave_registers<COPYING_REGISTERS>();
        copy_rows(shared, work);
    }
}
