// gemm_nvfp4: out = alpha * (a @ b.T) (+ c) (+ bias), a and b NVFP4 with blocks of 16 along K.
// gemm_grouped_nvfp4: the same for each section of a, with a matrix of b of its own.
//
//   a_codes (M, ceil(K/2)), a_scales (M, ceil(K/16)), a_amax float32 (1,), or (M,) where a_each; b likewise with N rows
//   c       (M, N) or null; bias (N,) or null
//   out     (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: 64 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64)). Any M, N and K.
//   Grouped: sizes (G,) rows of each section, a_amax (G,), b_codes, b_scales, b_amax the addresses of G matrices of one
//   shape, bias (G, N); grid.z = G, and blocks beyond the end of a section do nothing.
//   Numerics: elements are decoded to float32; the inner product of a block of 16 and its two scales are exact
//   (numerics.md, "NVFP4 GEMM": at most 20 bits); blocks are added in order of K, one float32 rounding each. Then
//   alpha * acc, + c, + bias round to float32, and one cast to nearest even ends it.

#include "sections.cuh"

constexpr int TILE = 64;            // rows and columns of the output a block of threads makes
constexpr int STEP = 64;            // columns of K in shared memory at a time
constexpr int STEP_BLOCKS = STEP / BLOCK;
constexpr int EACH = 8;             // rows and columns of the output a thread makes
constexpr int SIDE = TILE / EACH;
constexpr int THREADS = SIDE * SIDE;

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

// One operand: codes, scales and amaxes of `rows` rows.
struct Operand {
    const u8* codes;
    const u8* scales;
    const float* amax;
    i64 rows;
    int each;  // whether every row has an amax of its own
};

// How the sum becomes an output: alpha's divisor d and fl(1/d), what is added, and types.
struct Epilogue {
    float divisor, reciprocal;
    int alpha_order;
    const void* c;
    const void* bias;
    void* out;
    int c_type, bias_type, out_type;
    i64 first;       // element of c and out where the product begins
    i64 first_bias;  // element of bias
};

__device__ void multiply(Operand a, Operand b, i64 k, Epilogue epilogue) {
    __shared__ float a_values[STEP][TILE], b_values[STEP][TILE];
    __shared__ float a_block_scales[STEP_BLOCKS][TILE], b_block_scales[STEP_BLOCKS][TILE];
    const int thread = threadIdx.x;
    const i64 first_row = static_cast<i64>(blockIdx.y) * TILE;
    const i64 first_column = static_cast<i64>(blockIdx.x) * TILE;
    const int row = thread / SIDE * EACH;
    const int column = thread % SIDE * EACH;

    float acc[EACH][EACH] = {};
    for (i64 start = 0; start < k; start += STEP) {
        load_row(a.codes, a.scales, first_row + thread, a.rows, k, start, a_values, a_block_scales, thread);
        load_row(b.codes, b.scales, first_column + thread, b.rows, k, start, b_values, b_block_scales, thread);
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

    // Through shared memory, so that neighbours write neighbours; and small code: unrolled over acc, with every type of
    // output, it took ptxas two minutes.
    static_assert(STEP == TILE, "the sums of a tile take the place of a's values");
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) a_values[row + i][column + j] = acc[i][j];
    }
    __syncthreads();
    for (int element = thread; element < TILE * TILE; element += THREADS) {
        const i64 y = first_row + element / TILE, x = first_column + element % TILE;
        if (y >= a.rows || x >= b.rows) continue;
        const float product = a.amax[a.each ? y : 0] * b.amax[b.each ? x : 0];
        const float alpha = epilogue.alpha_order == DIVIDED ? product / epilogue.divisor : product * epilogue.reciprocal;
        const i64 place = epilogue.first + y * b.rows + x;
        float value = alpha * a_values[element / TILE][element % TILE];
        if (epilogue.c != nullptr) value += load_as(epilogue.c, epilogue.c_type, place);
        if (epilogue.bias != nullptr) value += load_as(epilogue.bias, epilogue.bias_type, epilogue.first_bias + x);
        store_as(epilogue.out, epilogue.out_type, place, value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_nvfp4(const u8* a_codes, const u8* a_scales, const float* a_amax, int a_each, const u8* b_codes,
               const u8* b_scales, const float* b_amax, int b_each, const void* c, const void* bias, void* out, i64 m, i64 n,
               i64 k, int c_type, int bias_type, int out_type, int alpha_order, float divisor, float reciprocal) {
    multiply(Operand{a_codes, a_scales, a_amax, m, a_each}, Operand{b_codes, b_scales, b_amax, n, b_each}, k,
             Epilogue{divisor, reciprocal, alpha_order, c, bias, out, c_type, bias_type, out_type, 0, 0});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_grouped_nvfp4(const u8* a_codes, const u8* a_scales, const float* a_amax, const i64* sizes,
                       const u8* const* b_codes, const u8* const* b_scales, const float* const* b_amax, const void* c,
                       const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type,
                       int alpha_order, float divisor, float reciprocal) {
    const int section = static_cast<int>(blockIdx.z);
    const Section rows = find_section(Sections{sizes, section + 1, m}, section);
    if (static_cast<i64>(blockIdx.y) * TILE >= rows.count) return;
    const Operand a = {a_codes + rows.start * ((k + 1) / 2), a_scales + rows.start * ((k + BLOCK - 1) / BLOCK),
                       a_amax + section, rows.count, 0};
    multiply(a, Operand{b_codes[section], b_scales[section], b_amax[section], n, 0}, k,
             Epilogue{divisor, reciprocal, alpha_order, c, bias, out, c_type, bias_type, out_type, rows.start * n,
                      section * n});
}
