// gemm_skinny_nvfp4_wide: out = alpha * (a @ b.T) (+ c) (+ bias), NVFP4, where a has few rows.
//
//   a_codes  (M, K/2), a_scales (M, K/16); b likewise with N rows. All begin at a multiple of 16 bytes
//   K        a multiple of 512; any M; N and K to 2^20
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 512 threads and sizeof(Shared) of dynamic shared memory for 16 rows of a and 64 of b, grid (ceil(M/16),
//   ceil(N/64)). A multiprocessor has one block at a time: best where all of them run at once.
//   Numerics: those of gemm_skinny_nvfp4.cu, the 16 columns of an mma too. But runs of 512 columns are taken by four
//   teams of warps in turn, in order of K; the sums of the teams are added in their order, one float32 rounding each.
//
// What takes the time is reading b, and decoding it. A warp of a team has 16 rows of b, whose codes come to registers
// and are decoded there to float16; they are the operand of 16 rows of mma.m16n8k16, 8 rows of a are the other one. A
// team decodes those once for all of its warps, into shared memory, half a run while the half before is multiplied.
// Scales of b go through shared memory, too, those of a run at a time.
#include "gemm/skinny/gemm_skinny_nvfp4.cuh"

// On an H200, 16 rows by N = K = 8192, trials of this kernel took 16.4 us with codes of b that come two chunks ahead,
// 17.6 us with four, 19.1 us with one; of those with four, one whose threads load the scales that they need of each
// chunk took 19.8 us: a load that takes 2 bytes of each of many rows costs as much as one that takes 16. Teams that meet
// by barriers in memory took 17.6 us, copies of b that run by themselves 22.6 us. Alone, loads took 12.9 us and products
// 11.8 us. The kernel of gemm_skinny_nvfp4.cu took 17.2 us.
constexpr int TEAMS = 4, TEAM_WARPS = 4, TEAM = TEAM_WARPS * WARP, WIDE_THREADS = TEAMS * TEAM;
constexpr int WIDE_ROWS = TEAM_WARPS * STRIP_ROWS;            // of b that a block makes
constexpr int RUN = 4, HALF = RUN / 2, ROUND = TEAMS * RUN;  // chunks: of a run, of half of one; between runs of a team
// So that what a warp reads or writes at once lies in different banks.
constexpr int SCALES_STRIDE = RUN * SCALES + 16, PARTS_STRIDE = WIDE_ROWS + 4;

struct alignas(128) Shared {
    Sixteen tokens[TEAMS][2][HALF][GROUPS][UNITS][WARP];  // two halves, by turns
    u8 scales[TEAMS][WIDE_ROWS][SCALES_STRIDE];           // of b
    float parts[TEAMS][TOKENS][PARTS_STRIDE];             // sums of the teams
};
static_assert(sizeof(Shared) == 95232, "what native/gemm/skinny.py asks for");

// What a thread has of a chunk of a.
struct Token {
    Sixteen codes;
    u32 scales;
};

// The threads of a team wait for each other, and see what each has written to shared memory.
__device__ __forceinline__ void meet_in_team(int team) {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");  // 0 is that of __syncthreads
#else
    __shared__ Barrier met[TEAMS];
    if (met[team].state == 0u) met[team].begin(TEAM);
    const u32 phase = met[team].state & 1u;
    met[team].arrive();
    met[team].wait_for(phase);
#endif
}

// The sums of the runs of a team, of the 16 rows of b that the warp has.
__device__ __forceinline__ void multiply_runs(Shared& shared, const u8* a_codes, const u8* a_scales, const u8* b_codes,
                                              const u8* b_scales, i64 m, i64 n, i64 k, float (&sums)[GROUPS][4]) {
    const int thread = threadIdx.x, lane = thread % WARP, g = lane / 4, t = lane % 4;
    const int team = thread / TEAM, strip = thread % TEAM / WARP * STRIP_ROWS;
    const i64 stride = k / 2, start = team * RUN * SPAN;  // bytes of codes in a row, and where the first run begins
    // Of b a thread has rows g and g + 8, and loads half a run's scales of a row.
    const i64 first = static_cast<i64>(blockIdx.y) * WIDE_ROWS + strip, b_row = within(first + g, n);
    const u32 second = static_cast<u32>((within(first + g + 8, n) - b_row) * stride);
    const u8* b_code = b_codes + b_row * stride + start + t * 16;
    const u8* b_scale = b_scales + (within(first + lane / 2, n) * stride + start) / 8 + lane % 2 * 16;
    u8* const scales_to = shared.scales[team][strip + lane / 2] + lane % 2 * 16;
    const u8* const scales_from = shared.scales[team][strip + g] + t * 2;
    // Of a it decodes one chunk of a half, of a row.
    const int own = thread % TEAM / (TEAM / HALF), token = thread / 4 % TOKENS;
    const i64 a_start = within(static_cast<i64>(blockIdx.x) * TOKENS + token, m) * stride + start + own * SPAN;
    const u8* a_code = a_codes + a_start + t * 16;
    const u8* a_scale = a_scales + a_start / 8 + t * 2;

    const auto load_a = [&](int half) {  // from this run on
        const int chunk = half / 2 * ROUND + half % 2 * HALF;
        return Token{load_often(a_code + chunk * SPAN), load_two(a_scale + chunk * SCALES)};
    };
    const auto decode_a = [&](const Token& a, int turn) {
        const u32 scales = two_scales(a.scales);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            decode(a.codes, unit, scales,
                   shared.tokens[team][turn][own][token / GROUP_ROWS][unit][token % GROUP_ROWS * 4 + t].words);
        }
    };
    const auto load_b = [&](int chunk, Sixteen(&rows)[2]) {
        const u8* code = b_code + (chunk / RUN * ROUND + chunk % RUN) * SPAN;
        rows[0] = load_once(code);
        rows[1] = load_once(code + second);
    };
    const auto load_scales = [&](int run) { return load_often(b_scale + run * ROUND * SCALES); };

    int left = static_cast<int>(k / COLUMNS) - team * RUN;  // chunks from the run on
    if (left <= 0) return;
    Token a[2];
    Sixteen b[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) a[half] = load_a(half);
    Sixteen scales = load_scales(0);
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) load_b(chunk, b[chunk]);
    decode_a(a[0], 0);
    if (left > ROUND) a[0] = load_a(2);
#pragma unroll 1
    for (; left > 0; left -= ROUND) {
        const bool more = left > ROUND;
        meet_in_warp();
        *reinterpret_cast<Sixteen*>(scales_to) = scales;
        if (more) scales = load_scales(1);
#pragma unroll
        for (int chunk = 0; chunk < RUN; ++chunk) {
            const int half = chunk / HALF, next = 1 - half;
            if (chunk % HALF == 0) {
                meet_in_team(team);
                if (half == 0 || more) decode_a(a[next], next);
                if (half == 0 ? more : left > 2 * ROUND) a[next] = load_a(half + 3);
            }
            u32 factors[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const u8* place = scales_from + 8 * row * SCALES_STRIDE + chunk * SCALES;
                factors[row] = two_scales(*reinterpret_cast<const u16*>(place));
            }
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                u32 pairs[2][4];
#pragma unroll
                for (int row = 0; row < 2; ++row) decode(b[chunk % 2][row], unit, factors[row], pairs[row]);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const Sixteen right = shared.tokens[team][half][chunk % HALF][group][unit][lane];
                    multiply_eight(sums[group], pairs[0], pairs[1], right.words);
                }
            }
            if (chunk + 2 < RUN || more) load_b(chunk + 2, b[chunk % 2]);
        }
        a_code += ROUND * SPAN;
        a_scale += ROUND * SCALES;
        b_code += ROUND * SPAN;
        b_scale += ROUND * SCALES;
    }
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1)
    gemm_skinny_nvfp4_wide(const u8* a_codes, const u8* a_scales, const u8* b_codes, const u8* b_scales, const void* c,
                           const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type,
                           const float* a_amax, int a_each, const float* b_amax, int b_each, int alpha_order,
                           float divisor, float reciprocal) {
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 room[];
    Shared& shared = *reinterpret_cast<Shared*>(room);
#else
    __shared__ Shared shared;
#endif
    const int thread = threadIdx.x, lane = thread % WARP, g = lane / 4, t = lane % 4;
    float sums[GROUPS][4] = {};
    multiply_runs(shared, a_codes, a_scales, b_codes, b_scales, m, n, k, sums);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = group * GROUP_ROWS + 2 * t + i % 2;
            const int row = thread % TEAM / WARP * STRIP_ROWS + g + i / 2 * 8;
            shared.parts[thread / TEAM][token][row] = sums[group][i];
        }
    }
    __syncthreads();
    const Nvfp4 rule{a_amax, b_amax, a_each, b_each, alpha_order, divisor, reciprocal};
    const Epilogue epilogue{c, bias, out, c_type, bias_type, out_type, 0, 0};
#pragma unroll 1  // code that runs once takes longer to fetch
    for (int place = thread; place < TOKENS * WIDE_ROWS; place += WIDE_THREADS) {
        const int token = place / WIDE_ROWS, row = place % WIDE_ROWS;
        const i64 y = static_cast<i64>(blockIdx.x) * TOKENS + token, x = static_cast<i64>(blockIdx.y) * WIDE_ROWS + row;
        if (y >= m || x >= n) continue;
        float sum = shared.parts[0][token][row];
#pragma unroll
        for (int team = 1; team < TEAMS; ++team) sum += shared.parts[team][token][row];
        store_as(epilogue.out, epilogue.out_type, y * n + x, output(rule, epilogue, sum, y, x, n));
    }
}
