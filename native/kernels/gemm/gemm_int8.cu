// gemm_int8: out = fl(s_a * s_b) * sum (+ bias), a and b of 8-bit whole numbers with a float32 scale of each row.
//
//   sum      of (a - z_a) * (b - z_b) over K, int32 and exact: K at most 33 025, or 131 071 without zero points
//   a.codes  (M, K), contiguous; a.zeros (M,), or null: codes in two's complement. Codes with zero points have no sign. b
//            likewise with N rows
//   Launch: 128 threads for every 64x64 tile of the output, grid (ceil(N/64), ceil(M/64), products of a batch). Any M, N and K.
//   Numerics: the sum is converted to float32, and multiplied by fl(s_a * s_b); + bias rounds to float32; one cast.
//
// Tensor cores multiply numbers with a sign. A code c without a sign is c - 128 for them, and its zero point z is z - 128. The sums
// of a row of codes, which zero points multiply, are those of the same instruction with 1 as the other operand.
#include "gemm/epilogue.cuh"
#include "gemm/ptx.cuh"

namespace narrowgauge {

constexpr int TILE = 64, STEP = 64, THREADS = 128, PIECE = 16;  // outputs of a block; columns and threads; bytes of a load
constexpr int STRIDE = STEP + PIECE;                            // of a row in shared memory, without bank conflicts
constexpr int PIECES = TILE * STEP / PIECE / THREADS;           // of an operand, that a thread loads in a step
constexpr int HEIGHT = 2, WIDTH = 4;                            // products of 16 by 8 outputs of a warp, down and across
constexpr int ROWS = 16, COLUMNS = 8, TERMS = 32;               // of a product

struct Int8Operand {
    const u8* codes;
    const float* scales;  // (rows,)
    const u8* zeros;      // (rows,), or null
    i64 rows;
};

struct Int8Parameters {
    Int8Operand a, b;
    EpilogueParameters epilogue;
    i64 k;
    bool aligned;  // rows of codes begin at multiples of 16 bytes
};

struct alignas(16) Int8Shared {
    u8 codes[2][TILE][STRIDE];
};

// 16 codes of a row, 0 beyond the end of the operand; with a sign.
__device__ __forceinline__ ptx::Vector4 load_codes(const Int8Operand& from, i64 row, i64 column, i64 k, bool aligned) {
    ptx::Vector4 loaded = {};
    const u32 flip = from.zeros != nullptr ? 0x80808080u : 0u;
    if (row >= from.rows || column >= k) return loaded;
    const u8* const source = from.codes + row * k + column;
    if (aligned) {
        loaded = ptx::ld_global_nc_v4_u32(source);
#pragma unroll
        for (int i = 0; i < 4; ++i) loaded.words[i] ^= flip;
    } else {
        for (int i = 0; i < PIECE && column + i < k; ++i) {
            loaded.words[i / 4] |= ((source[i] ^ flip) & 0xFFu) << i % 4 * 8;
        }
    }
    return loaded;
}

// d += a * b^T of 16 rows of `a` and 8 of `b` over 32 columns. Thread 4g + t has outputs (g, 2t), (g, 2t + 1), and 8 rows below.
__device__ __forceinline__ void multiply_codes(int (&d)[4], const u8 (*a)[STRIDE], const u8 (*b)[STRIDE], int column) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#ifdef __CUDA_ARCH__
    const auto word = [&](const u8 (*rows)[STRIDE], int row, int half) {
        return *reinterpret_cast<const u32*>(&rows[row][column + 16 * half + 4 * t]);
    };
    const u32 left[4] = {word(a, g, 0), word(a, g + 8, 0), word(a, g, 1), word(a, g + 8, 1)}, right[2] = {word(b, g, 0), word(b, g, 1)};
    ptx::mma_m16n8k32_s32(d, left, right);
#else
    for (int i = 0; i < 4; ++i) {
        const u8 *left = a[g + i / 2 * 8] + column, *right = b[2 * t + i % 2] + column;
        for (int k = 0; k < TERMS; ++k) d[i] += static_cast<signed char>(left[k]) * static_cast<signed char>(right[k]);
    }
#endif
}

// Sum of the codes of a row of a tile in shared memory, 64 columns.
__device__ __forceinline__ int sum_of_codes(const u8 (&row)[STRIDE]) {
    int sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int column = 0; column < STEP; column += 4) sum = __dp4a(*reinterpret_cast<const int*>(row + column), 0x01010101, sum);
#else
    for (int column = 0; column < STEP; ++column) sum += static_cast<signed char>(row[column]);
#endif
    return sum;
}

__device__ __forceinline__ Int8Operand product_of(Int8Operand of, i64 number, i64 k) {
    of.codes += number * of.rows * k;
    of.scales += number * of.rows;
    if (of.zeros != nullptr) of.zeros += number * of.rows;
    return of;
}

// Modulo 2^32: partial sums may exceed int32 where the whole sum does not.
__device__ __forceinline__ u32 zero_of(const Int8Operand& of, i64 row) { return of.zeros == nullptr ? 0u : of.zeros[row] - 128u; }

extern "C" __global__ void __launch_bounds__(THREADS) gemm_int8(const __grid_constant__ Int8Parameters p) {
    __shared__ Int8Shared shared;
    const Int8Operand a = product_of(p.a, blockIdx.z, p.k), b = product_of(p.b, blockIdx.z, p.k);
    const i64 first[2] = {static_cast<i64>(blockIdx.y) * TILE, static_cast<i64>(blockIdx.x) * TILE};
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int top = warp / 2 * HEIGHT * ROWS, left = warp % 2 * WIDTH * COLUMNS;
    int sums[HEIGHT][WIDTH][4] = {};
    int of_row = 0;  // sum of the codes of row thread % 64 of a, or of b: what zero points multiply
    ptx::Vector4 pieces[2][PIECES];
    const auto load = [&](i64 start) {
#pragma unroll
        for (int operand = 0; operand < 2; ++operand) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int place = thread + i * THREADS;
                const i64 row = first[operand] + place / (STEP / PIECE), column = start + place % (STEP / PIECE) * PIECE;
                pieces[operand][i] = load_codes(operand == 0 ? a : b, row, column, p.k, p.aligned);
            }
        }
    };
    load(0);
    for (i64 start = 0; start < p.k; start += STEP) {
        __syncthreads();
#pragma unroll
        for (int operand = 0; operand < 2; ++operand) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int place = thread + i * THREADS;
                u8* const target = &shared.codes[operand][place / (STEP / PIECE)][place % (STEP / PIECE) * PIECE];
                *reinterpret_cast<ptx::Vector4*>(target) = pieces[operand][i];
            }
        }
        __syncthreads();
        if (start + STEP < p.k) load(start + STEP);
        if ((thread < TILE ? b : a).zeros != nullptr) of_row += sum_of_codes(shared.codes[thread / TILE][thread % TILE]);
#pragma unroll
        for (int column = 0; column < STEP; column += TERMS) {
#pragma unroll
            for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    multiply_codes(sums[i][j], shared.codes[0] + top + i * ROWS, shared.codes[1] + left + j * COLUMNS, column);
                }
            }
        }
    }
    __syncthreads();
    u32* const of_rows = reinterpret_cast<u32*>(&shared);  // sums of codes of 64 rows of a, then of b
    of_rows[thread] = static_cast<u32>(of_row);
    __syncthreads();
    const i64 n = b.rows, of_batch = blockIdx.z;
    const Epilogue epilogue = {p.epilogue, of_batch * a.rows * n, of_batch * n};
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = top + i * ROWS + lane / 4 + e / 2 * 8, column = left + j * COLUMNS + lane % 4 * 2 + e % 2;
                const i64 y = first[0] + row, x = first[1] + column;
                if (y >= a.rows || x >= n) continue;
                const u32 z_a = zero_of(a, y), z_b = zero_of(b, x), k = static_cast<u32>(p.k);
                const u32 sum = sums[i][j][e] - z_a * of_rows[TILE + column] - z_b * of_rows[row] + k * z_a * z_b;
                float value = static_cast<float>(static_cast<int>(sum)) * (a.scales[y] * b.scales[x]);
                if (epilogue.bias != nullptr) value += load_as(epilogue.bias, epilogue.bias_type, epilogue.first_bias + x);
                store_as(epilogue.out, epilogue.out_type, epilogue.first + y * n + x, value);
            }
        }
    }
}

}  // namespace narrowgauge
