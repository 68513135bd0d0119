// gemm_skinny_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), NVFP4, with few rows of a.
//
//   a.codes  (M, K/2); a.scales (M, K/16); b likewise with N rows. Codes begin at a multiple of 16 bytes, scales of 2
//   K        a multiple of 128; any M; N and K to 2^20
//   alpha    from the tensor amaxes: float32 (1,), or (M,) or (N,) with an amax for each row
//   Launch: `early`, 256 threads for 16 rows of a and 32 of b, grid (ceil(M/16), ceil(N/32)): blocks with the same rows of b
//   run at the same time, and share the loads of b in the L2 cache.
//   Numerics: elements become float16 numbers with the scale of their block, exactly. Tensor cores add 16 products at a time
//   to a float32 accumulator, truncated as in tensor_core_model.cuh (sum_fp16). The 16 columns of an mma: a thread has 32
//   consecutive columns of a chunk of 128, a quarter of a row. Of eight columns, the four even columns belong to an mma and
//   the four odd columns to the next. Eight warps take chunks in turn, in order of K. The sums of the warps are added
//   in their order, one float32 rounding each. Then alpha * sum, + c and + bias each round to float32, and the last step is
//   one cast.
//
// The kernel is bound by reading b and decoding it. b goes from memory to registers, one chunk ahead. It is decoded to float16
// in registers, as the operand with 16 rows of mma.m16n8k16; 8 rows of a are the other operand. Warps of a block share the
// same rows of b. Their sums are added in shared memory.
#include "gemm/skinny/gemm_skinny_nvfp4.cuh"

namespace narrowgauge {

constexpr int WARPS = 8, SKINNY_THREADS = WARPS * WARP;
constexpr int STRIPS = 2, SKINNY_ROWS = STRIPS * STRIP_ROWS;  // rows of b of a block of threads
constexpr int SUMS_STRIDE = SKINNY_ROWS + 4;                  // without bank conflicts when a warp writes

struct Chunk {
    Vector4 codes;
    u32 scales;  // two block scales, a byte each
};

__device__ __forceinline__ Chunk load_chunk(const u8* codes, const u8* scales) {
    return {ptx::ld_global_nc_L1_no_allocate_L2_128B_v4_u32(codes), *reinterpret_cast<const u16*>(scales)};
}

// Multiplies a chunk: a thread has four rows of b, and one row of each group of a.
__device__ __forceinline__ void multiply(const Chunk (&b)[2 * STRIPS], const Chunk (&a)[GROUPS], float (&sums)[STRIPS][GROUPS][4]) {
    u32 b_scales[2 * STRIPS], a_scales[GROUPS];
#pragma unroll
    for (int row = 0; row < 2 * STRIPS; ++row) b_scales[row] = decode_scales(b[row].scales);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) a_scales[group] = decode_scales(a[group].scales);
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
            for (int strip = 0; strip < STRIPS; ++strip) multiply_32_columns(sums[strip][group], left[2 * strip], left[2 * strip + 1], right);
        }
    }
}

__device__ __forceinline__ void multiply_skinny(const Nvfp4Scaling& scaling, const u8* a_codes, const u8* a_scales,
                                                const u8* b_codes, const u8* b_scales, const Epilogue& epilogue, i64 m,
                                                i64 n, i64 k) {
    __shared__ float warp_sums[WARPS][GROUP_ROWS][SUMS_STRIDE];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const i64 first_token = static_cast<i64>(blockIdx.x) * TOKENS, first = static_cast<i64>(blockIdx.y) * SKINNY_ROWS;
    const i64 chunks = k / COLUMNS, codes_row = chunks * CODE_BYTES, scales_row = chunks * SCALE_BYTES;

    // Addresses of the thread's part of the next chunk: its first row, and offsets in bytes of its other rows.
    const i64 b_row = clamp_row(first + g, n), a_row = clamp_row(first_token + g, m);
    const i64 codes_start = warp * CODE_BYTES + t * 16, scales_start = warp * SCALE_BYTES + t * 2;
    const u8* b_code = b_codes + b_row * codes_row + codes_start;
    const u8* b_scale = b_scales + b_row * scales_row + scales_start;
    const u8* a_code = a_codes + a_row * codes_row + codes_start;
    const u8* a_scale = a_scales + a_row * scales_row + scales_start;
    u32 b_codes_at[2 * STRIPS], b_scales_at[2 * STRIPS], a_codes_at[GROUPS], a_scales_at[GROUPS];
#pragma unroll
    for (int row = 0; row < 2 * STRIPS; ++row) {
        const i64 distance = clamp_row(first + 8 * row + g, n) - b_row;
        b_codes_at[row] = static_cast<u32>(distance * codes_row);
        b_scales_at[row] = static_cast<u32>(distance * scales_row);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const i64 distance = clamp_row(first_token + 8 * group + g, m) - a_row;
        a_codes_at[group] = static_cast<u32>(distance * codes_row);
        a_scales_at[group] = static_cast<u32>(distance * scales_row);
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
        b_code += WARPS * CODE_BYTES;
        b_scale += WARPS * SCALE_BYTES;
        a_code += WARPS * CODE_BYTES;
        a_scale += WARPS * SCALE_BYTES;
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
            for (int i = 0; i < 4; ++i) warp_sums[warp][2 * t + i % 2][strip * STRIP_ROWS + g + i / 2 * 8] = sums[strip][group][i];
        }
        __syncthreads();
        const int row = thread % SKINNY_ROWS, token = thread / SKINNY_ROWS;
        const i64 y = first_token + 8 * group + token, x = first + row;
        if (y >= m || x >= n) continue;
        float sum = warp_sums[0][token][row];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum += warp_sums[w][token][row];
        store_as(epilogue.out, epilogue.out_type, y * n + x, output(scaling, epilogue, sum, y, x, n));
    }
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 2) gemm_skinny_nvfp4(GemmParameters p, Alpha alpha) {
    ptx::griddepcontrol_wait();
    multiply_skinny({alpha}, p.a.codes, static_cast<const u8*>(p.a.scales), p.b.codes, static_cast<const u8*>(p.b.scales),
                    {p.epilogue, 0, 0}, p.m, p.n, p.k);
}

}  // namespace narrowgauge
