// gemm_skinny_nvfp4_wide: out = alpha * (a @ b.T) (+ c) (+ bias), NVFP4, with few rows of a.
//
//   a.codes  (M, K/2); a.scales (M, K/16); b likewise with N rows. Codes and scales begin at a multiple of 16 bytes
//   K        a multiple of 512; any M; N and K to 2^20
//   alpha    from the tensor amaxes: float32 (1,), or (M,) or (N,) with an amax for each row
//   Launch: `early`, 512 threads and sizeof(WideShared) of dynamic shared memory for 16 rows of a and 64 of b, grid
//   (ceil(M/16), ceil(N/64)). A multiprocessor runs one block at a time: best if all blocks run at once.
//   Numerics: as gemm_skinny_nvfp4.cu, with the same 16 columns of an mma. But four teams of warps take runs of 512 columns
//   in turn, in order of K; the sums of the teams are added in their order, one float32 rounding each.
//
// The kernel is bound by reading b and decoding it. A warp of a team has 16 rows of b. Their codes go to registers and are
// decoded there to float16, as the operand with 16 rows of mma.m16n8k16; 8 rows of a are the other operand. A team decodes a
// once for all its warps into shared memory, half a run ahead of the multiplication. The scales of b go through shared memory,
// too, those of a run at a time.
#include "gemm/skinny/gemm_skinny_nvfp4.cuh"

namespace narrowgauge {

// On an H200, 16 rows by N = K = 8192, variants of this kernel took 16.4 us with codes of b two chunks ahead, 17.6 us with
// four, 19.1 us with one. Of those with four, the variant in which each thread loads its own scales of each chunk took 19.8
// us: a load of 2 bytes of each of many rows costs as much as a load of 16. Teams that synchronize by mbarriers took 17.6 us,
// asynchronous bulk copies of b 22.6 us. Loads alone took 12.9 us and products alone 11.8 us. The kernel of
// gemm_skinny_nvfp4.cu took 17.2 us.
constexpr int TEAMS = 4, TEAM_WARPS = 4, TEAM = TEAM_WARPS * WARP, WIDE_THREADS = TEAMS * TEAM;
constexpr int WIDE_ROWS = TEAM_WARPS * STRIP_ROWS;           // rows of b of a block of threads
constexpr int RUN = 4, HALF = RUN / 2, ROUND = TEAMS * RUN;  // chunks: of a run, of half a run, from a team's run to its next
// Strides without bank conflicts when a warp reads or writes.
constexpr int SCALES_STRIDE = RUN * SCALE_BYTES + 16, SUMS_STRIDE = WIDE_ROWS + 4;

struct alignas(128) WideShared {
    Vector4 tokens[TEAMS][2][HALF][GROUPS][UNITS][WARP];  // decoded halves of a run, double-buffered
    u8 scales[TEAMS][WIDE_ROWS][SCALES_STRIDE];           // of b
    float team_sums[TEAMS][TOKENS][SUMS_STRIDE];
};
static_assert(sizeof(WideShared) == 95232, "native/gemm/skinny.py asks for this size");

// A thread's part of a chunk of a.
struct TokenChunk {
    Vector4 codes;
    u32 scales;
};

// Barrier of a team; barrier 0 is that of __syncthreads.
__device__ __forceinline__ void sync_team(int team) { ptx::bar_sync<TEAM>(team + 1); }

// Sums over the runs of the thread's team, of 16 rows of b for each warp.
__device__ __forceinline__ void multiply_runs(WideShared& shared, const u8* a_codes, const u8* a_scales, const u8* b_codes,
                                              const u8* b_scales, i64 m, i64 n, i64 k, float (&sums)[GROUPS][4]) {
    const int thread = threadIdx.x, lane = thread % WARP, g = lane / 4, t = lane % 4;
    const int team = thread / TEAM, strip = thread % TEAM / WARP * STRIP_ROWS;
    const i64 stride = k / 2, start = team * RUN * CODE_BYTES;  // bytes of codes in a row, and of the first run's offset
    // A thread has rows g and g + 8 of b, and loads the scales of half a run of one row.
    const i64 first = static_cast<i64>(blockIdx.y) * WIDE_ROWS + strip, b_row = clamp_row(first + g, n);
    const u32 second = static_cast<u32>((clamp_row(first + g + 8, n) - b_row) * stride);
    const u8* b_code = b_codes + b_row * stride + start + t * 16;
    const u8* b_scale = b_scales + (clamp_row(first + lane / 2, n) * stride + start) / 8 + lane % 2 * 16;
    u8* const scales_to = shared.scales[team][strip + lane / 2] + lane % 2 * 16;
    const u8* const scales_from = shared.scales[team][strip + g] + t * 2;
    // A thread decodes one chunk of half a run, of one row of a.
    const int own_chunk = thread % TEAM / (TEAM / HALF), token = thread / 4 % TOKENS;
    const i64 a_start = clamp_row(static_cast<i64>(blockIdx.x) * TOKENS + token, m) * stride + start + own_chunk * CODE_BYTES;
    const u8* a_code = a_codes + a_start + t * 16;
    const u8* a_scale = a_scales + a_start / 8 + t * 2;

    const auto load_a = [&](int half) {  // half-runs from the current run on
        const int chunk = half / 2 * ROUND + half % 2 * HALF;
        return TokenChunk{ptx::ld_global_nc_v4_u32(a_code + chunk * CODE_BYTES), ptx::ld_global_nc_u16(a_scale + chunk * SCALE_BYTES)};
    };
    const auto decode_a = [&](const TokenChunk& a, int half) {
        const u32 scales = decode_scales(a.scales);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            decode(a.codes, unit, scales,
                   shared.tokens[team][half][own_chunk][token / GROUP_ROWS][unit][token % GROUP_ROWS * 4 + t].words);
        }
    };
    const auto load_b = [&](int chunk, Vector4(&rows)[2]) {
        const u8* code = b_code + (chunk / RUN * ROUND + chunk % RUN) * CODE_BYTES;
        rows[0] = ptx::ld_global_nc_L1_no_allocate_L2_128B_v4_u32(code);
        rows[1] = ptx::ld_global_nc_L1_no_allocate_L2_128B_v4_u32(code + second);
    };
    const auto load_scales = [&](int run) { return ptx::ld_global_nc_v4_u32(b_scale + run * ROUND * SCALE_BYTES); };

    int left = static_cast<int>(k / COLUMNS) - team * RUN;  // chunks from the current run on
    if (left <= 0) return;
    TokenChunk a[2];
    Vector4 b[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) a[half] = load_a(half);
    Vector4 scales = load_scales(0);
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) load_b(chunk, b[chunk]);
    decode_a(a[0], 0);
    if (left > ROUND) a[0] = load_a(2);
#pragma unroll 1
    for (; left > 0; left -= ROUND) {
        const bool more = left > ROUND;
        ptx::bar_warp_sync();
        *reinterpret_cast<Vector4*>(scales_to) = scales;
        if (more) scales = load_scales(1);
#pragma unroll
        for (int chunk = 0; chunk < RUN; ++chunk) {
            const int half = chunk / HALF, next = 1 - half;
            if (chunk % HALF == 0) {
                sync_team(team);
                if (half == 0 || more) decode_a(a[next], next);
                if (half == 0 ? more : left > 2 * ROUND) a[next] = load_a(half + 3);
            }
            u32 factors[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const u8* place = scales_from + 8 * row * SCALES_STRIDE + chunk * SCALE_BYTES;
                factors[row] = decode_scales(*reinterpret_cast<const u16*>(place));
            }
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                u32 pairs[2][4];
#pragma unroll
                for (int row = 0; row < 2; ++row) decode(b[chunk % 2][row], unit, factors[row], pairs[row]);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const Vector4 right = shared.tokens[team][half][chunk % HALF][group][unit][lane];
                    multiply_32_columns(sums[group], pairs[0], pairs[1], right.words);
                }
            }
            if (chunk + 2 < RUN || more) load_b(chunk + 2, b[chunk % 2]);
        }
        a_code += ROUND * CODE_BYTES;
        a_scale += ROUND * SCALE_BYTES;
        b_code += ROUND * CODE_BYTES;
        b_scale += ROUND * SCALE_BYTES;
    }
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) gemm_skinny_nvfp4_wide(GemmParameters p, Alpha alpha) {
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 dynamic_shared[];
    WideShared& shared = *reinterpret_cast<WideShared*>(dynamic_shared);
#else
    __shared__ WideShared shared;
#endif
    const int thread = threadIdx.x, lane = thread % WARP, g = lane / 4, t = lane % 4;
    ptx::griddepcontrol_wait();
    float sums[GROUPS][4] = {};
    multiply_runs(shared, p.a.codes, static_cast<const u8*>(p.a.scales), p.b.codes, static_cast<const u8*>(p.b.scales), p.m, p.n,
                  p.k, sums);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = group * GROUP_ROWS + 2 * t + i % 2;
            const int row = thread % TEAM / WARP * STRIP_ROWS + g + i / 2 * 8;
            shared.team_sums[thread / TEAM][token][row] = sums[group][i];
        }
    }
    __syncthreads();
    const Nvfp4Scaling scaling{alpha};
    const Epilogue epilogue{p.epilogue, 0, 0};
#pragma unroll 1  // unrolled code that runs once takes longer to fetch
    for (int place = thread; place < TOKENS * WIDE_ROWS; place += WIDE_THREADS) {
        const int token = place / WIDE_ROWS, row = place % WIDE_ROWS;
        const i64 y = static_cast<i64>(blockIdx.x) * TOKENS + token, x = static_cast<i64>(blockIdx.y) * WIDE_ROWS + row;
        if (y >= p.m || x >= p.n) continue;
        float sum = shared.team_sums[0][token][row];
#pragma unroll
        for (int team = 1; team < TEAMS; ++team) sum += shared.team_sums[team][token][row];
        store_as(epilogue.out, epilogue.out_type, y * p.n + x, output(scaling, epilogue, sum, y, x, p.n));
    }
}

}  // namespace narrowgauge
