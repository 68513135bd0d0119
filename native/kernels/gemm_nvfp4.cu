// gemm_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), a and b NVFP4 with 1x16 blocks along K.
//
//   a_codes (M, ceil(K/2)), a_scales (M, ceil(K/16)), a_amax float32 (1,); b likewise with N rows
//   c       (M, N) or null; bias (N,) or null
//   out     (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Numerics: elements are decoded to float32; the inner product of a block of 16 and its two scales are exact
//   (numerics.md, "NVFP4 GEMM": at most 20 bits); blocks are added in order of K, one float32 rounding each. Then
//   alpha * acc, + c, + bias round to float32, and one cast to nearest even ends it.

#include "nvfp4.cuh"

constexpr int TILE = 64;            // rows and columns of the output a block of threads makes
constexpr int STEP = 64;            // columns of K in shared memory at a time
constexpr int STEP_BLOCKS = STEP / BLOCK;
constexpr int EACH = 8;             // rows and columns of the output a thread makes
constexpr int SIDE = TILE / EACH;
constexpr int THREADS = SIDE * SIDE;
constexpr float ALPHA_DIVISOR = MAX_PRODUCT * MAX_PRODUCT;     // 7225344, exact
constexpr float ALPHA_RECIPROCAL = 0x1.293726p-23f;             // fl(1/7225344)

enum Alpha { DIVIDED = 0, TIMES_RECIPROCAL = 1 };

static_assert(THREADS == TILE, "each thread loads one row of either operand");

__device__ __forceinline__ float load_as(const void* source, int type, i64 index) {
    if (type == 0) return to_float(static_cast<const float*>(source)[index]);
    if (type == 1) return to_float(static_cast<const bf16*>(source)[index]);
    return to_float(static_cast<const fp16*>(source)[index]);
}

__device__ __forceinline__ void store_as(void* target, int type, i64 index, float value) {
    if (type == 0) from_float(value, static_cast<float*>(target)[index]);
    if (type == 1) from_float(value, static_cast<bf16*>(target)[index]);
    if (type == 2) from_float(value, static_cast<fp16*>(target)[index]);
}

// One row of an operand, STEP columns from `column` on, into column `slot` of the tile; zeros outside the matrix.
__device__ __forceinline__ void load_row(const u8* codes, const u8* scales, i64 row, i64 rows, i64 columns, i64 column,
                                         float (*values)[TILE], float (*block_scales)[TILE], int slot) {
    const bool inside = row < rows;
    const u8* source = codes + row * ((columns + 1) / 2) + column / 2;
    const i64 bytes = (columns + 1) / 2 - column / 2;
    for (int j = 0; j < STEP / 2; ++j) {
        const u32 pair = inside && j < bytes ? source[j] : 0u;
        values[2 * j][slot] = e2m1_to_float(pair & 0xFu);
        values[2 * j + 1][slot] = e2m1_to_float(pair >> 4);
    }
    const i64 blocks = (columns + BLOCK - 1) / BLOCK;
    for (int j = 0; j < STEP_BLOCKS; ++j) {
        const i64 block = column / BLOCK + j;
        block_scales[j][slot] = inside && block < blocks ? e4m3_to_float(scales[row * blocks + block]) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_nvfp4(const u8* a_codes, const u8* a_scales, const float* a_amax, const u8* b_codes, const u8* b_scales,
               const float* b_amax, const void* c, const void* bias, void* out, i64 m, i64 n, i64 k, int c_type,
               int bias_type, int out_type, int alpha_order) {
    __shared__ float a_values[STEP][TILE], b_values[STEP][TILE];
    __shared__ float a_block_scales[STEP_BLOCKS][TILE], b_block_scales[STEP_BLOCKS][TILE];
    const int thread = threadIdx.x;
    const i64 first_row = static_cast<i64>(blockIdx.y) * TILE;
    const i64 first_column = static_cast<i64>(blockIdx.x) * TILE;
    const int row = thread / SIDE * EACH;
    const int column = thread % SIDE * EACH;

    float acc[EACH][EACH] = {};
    for (i64 start = 0; start < k; start += STEP) {
        load_row(a_codes, a_scales, first_row + thread, m, k, start, a_values, a_block_scales, thread);
        load_row(b_codes, b_scales, first_column + thread, n, k, start, b_values, b_block_scales, thread);
        __syncthreads();
        for (int block = 0; block < STEP_BLOCKS; ++block) {
            float inner[EACH][EACH] = {};
            for (int e = block * BLOCK; e < (block + 1) * BLOCK; ++e) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
#pragma unroll
                    for (int j = 0; j < EACH; ++j) inner[i][j] += a_values[e][row + i] * b_values[e][column + j];
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float scale = a_block_scales[block][row + i];
#pragma unroll
                for (int j = 0; j < EACH; ++j) acc[i][j] += inner[i][j] * (scale * b_block_scales[block][column + j]);
            }
        }
        __syncthreads();
    }

    const float alpha = alpha_order == DIVIDED ? a_amax[0] * b_amax[0] / ALPHA_DIVISOR
                                               : b_amax[0] * a_amax[0] * ALPHA_RECIPROCAL;
    // Unrolled, and without a break: an index known only at run time would move acc to local memory.
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const i64 y = first_row + row + i;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const i64 x = first_column + column + j;
            if (y >= m || x >= n) continue;
            float value = alpha * acc[i][j];
            if (c != nullptr) value += load_as(c, c_type, y * n + x);
            if (bias != nullptr) value += load_as(bias, bias_type, x);
            store_as(out, out_type, y * n + x, value);
        }
    }
}
