// gemm_skinny_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), NVFP4, where a has few rows.
//
//   a_codes  (M, K/2), a_scales (M, K/16); b likewise with N rows. Codes begin at a multiple of 16 bytes, scales of 2
//   K        a multiple of 128; any M; N and K to 2^20
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 256 threads for 16 rows of a and 32 of b, grid (ceil(M/16), ceil(N/32)): blocks that read the same rows of b
//   run at the same time, so that they come from memory once.
//   Numerics: elements become float16 with the scale of their block, exactly. Tensor cores add 16 products at a time to a
//   float32 number, cut off as they do it (aligned_halves). Which 16 columns: thread t of the four with a row has 32 that
//   follow each other in a chunk of 128, and of each eight gives the four even ones to one mma and the odd ones to the
//   next. Chunks are taken by eight warps in turn, in order of K; the sums of the warps are added in their order, one
//   float32 rounding each. Then alpha * sum, + c, + bias round to float32, and one cast ends it.
//
// What takes the time is reading b, and decoding it: b goes from memory to registers, a chunk ahead, is decoded there to
// float16, and is the operand of 16 rows of mma.m16n8k16; 8 rows of a are the other one. Warps of a block share the same
// rows of b; their sums meet in shared memory.
#include "gemm/skinny/gemm_skinny_nvfp4.cuh"

constexpr int WARPS = 8, SKINNY_THREADS = WARPS * WARP;
constexpr int STRIPS = 2, SKINNY_ROWS = STRIPS * STRIP_ROWS;  // of b that a block makes
constexpr int PART_STRIDE = SKINNY_ROWS + 4;  // so that what a warp writes at once lies in different banks

struct Chunk {
    Sixteen codes;
    u32 scales;  // a block in each of two bytes
};

__device__ __forceinline__ Chunk load_chunk(const u8* codes, const u8* scales) {
    return {load_once(codes), *reinterpret_cast<const u16*>(scales)};
}

// All of it, of four rows of b and one of each group of a that a thread has.
__device__ __forceinline__ void multiply(const Chunk (&b)[2 * STRIPS], const Chunk (&a)[GROUPS], float (&sums)[STRIPS][GROUPS][4]) {
    u32 b_scales[2 * STRIPS], a_scales[GROUPS];
#pragma unroll
    for (int row = 0; row < 2 * STRIPS; ++row) b_scales[row] = two_scales(b[row].scales);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) a_scales[group] = two_scales(a[group].scales);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        u32 left[2 * STRIPS][4];
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) decode(b[row].codes, unit, b_scales[row], left[row]);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            u32 right[4];
            decode(a[group].codes, unit, a_scales[group], right);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) multiply_eight(sums[strip][group], left[2 * strip], left[2 * strip + 1], right);
        }
    }
}

// TOKENS rows of a, those of blockIdx.x.
__device__ __forceinline__ void multiply_skinny(const Nvfp4& rule, const u8* a_codes, const u8* a_scales, const u8* b_codes,
                                                const u8* b_scales, const Epilogue& epilogue, i64 m, i64 n, i64 k) {
    __shared__ float parts[WARPS][GROUP_ROWS][PART_STRIDE];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const i64 first_token = static_cast<i64>(blockIdx.x) * TOKENS, first = static_cast<i64>(blockIdx.y) * SKINNY_ROWS;
    const i64 chunks = k / COLUMNS, codes_row = chunks * SPAN, scales_row = chunks * SCALES;

    // Where what the thread has of the next chunk begins: of its first row, and how many bytes behind it the others.
    const i64 b_row = within(first + g, n), a_row = within(first_token + g, m);
    const i64 codes_start = warp * SPAN + t * 16, scales_start = warp * SCALES + t * 2;
    const u8* b_code = b_codes + b_row * codes_row + codes_start;
    const u8* b_scale = b_scales + b_row * scales_row + scales_start;
    const u8* a_code = a_codes + a_row * codes_row + codes_start;
    const u8* a_scale = a_scales + a_row * scales_row + scales_start;
    u32 b_codes_at[2 * STRIPS], b_scales_at[2 * STRIPS], a_codes_at[GROUPS], a_scales_at[GROUPS];
#pragma unroll
    for (int row = 0; row < 2 * STRIPS; ++row) {
        const i64 behind = within(first + 8 * row + g, n) - b_row;
        b_codes_at[row] = static_cast<u32>(behind * codes_row);
        b_scales_at[row] = static_cast<u32>(behind * scales_row);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const i64 behind = within(first_token + 8 * group + g, m) - a_row;
        a_codes_at[group] = static_cast<u32>(behind * codes_row);
        a_scales_at[group] = static_cast<u32>(behind * scales_row);
    }

    float sums[STRIPS][GROUPS][4] = {};
    Chunk next[2 * STRIPS], next_a[GROUPS];
    const auto load_next = [&] {
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) {
            next[row] = load_chunk(b_code + b_codes_at[row], b_scale + b_scales_at[row]);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            next_a[group] = load_chunk(a_code + a_codes_at[group], a_scale + a_scales_at[group]);
        }
        b_code += WARPS * SPAN;
        b_scale += WARPS * SCALES;
        a_code += WARPS * SPAN;
        a_scale += WARPS * SCALES;
    };
    if (warp < chunks) load_next();
    for (i64 chunk = warp; chunk < chunks; chunk += WARPS) {
        Chunk b[2 * STRIPS], a[GROUPS];
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) b[row] = next[row];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) a[group] = next_a[group];
        if (chunk + WARPS < chunks) load_next();
        multiply(b, a, sums);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        __syncthreads();
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
            for (int i = 0; i < 4; ++i) parts[warp][2 * t + i % 2][strip * STRIP_ROWS + g + i / 2 * 8] = sums[strip][group][i];
        }
        __syncthreads();
        const int row = thread % SKINNY_ROWS, token = thread / SKINNY_ROWS;
        const i64 y = first_token + 8 * group + token, x = first + row;
        if (y >= m || x >= n) continue;
        float sum = parts[0][token][row];
#pragma unroll
        for (int other = 1; other < WARPS; ++other) sum += parts[other][token][row];
        store_as(epilogue.out, epilogue.out_type, y * n + x, output(rule, epilogue, sum, y, x, n));
    }
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 2)
    gemm_skinny_nvfp4(const u8* a_codes, const u8* a_scales, const u8* b_codes, const u8* b_scales, const void* c,
                      const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type,
                      const float* a_amax, int a_each, const float* b_amax, int b_each, int alpha_order, float divisor,
                      float reciprocal) {
    multiply_skinny({a_amax, b_amax, a_each, b_each, alpha_order, divisor, reciprocal}, a_codes, a_scales, b_codes, b_scales,
                    {c, bias, out, c_type, bias_type, out_type, 0, 0}, m, n, k);
}
