// produced_rows: the pass over whole rows in training: numbers of rows, gradients, and their sums over the rows. Each operand
// is read once.
//
//   Parameters: struct ProducedRowsParameters. Launch: thread blocks with a thread for every ROW_CHUNKS * 16 elements of `half`,
//   a multiple of 32, or with ROW_LANES lanes for a row; on a CPU 32 threads. A thread block makes every gridDim.x-th row or rows.
//   RMSNORM stores rs = rsqrt(mean x^2 + eps) of each row. RMSNORM_BACKWARD stores projection = mean(g * n), and sums dy * n;
//   SILU_MUL_BACKWARD sums its unrounded result. Both store the rounded gradients (producers.cuh), if they are wanted.
//   column_sums: the sum of the partial sums of all thread blocks, rounded to T. Launch: a thread for each column.
//   Sums are float32, of a row in a tree over the threads, over rows in order of the rows of a thread block;
//   docs/contracts.md bounds any order.

#include "fused/producers.cuh"
#include "fused/row_part.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

struct ProducedRowsParameters {
    i64 rows;          // M
    int columns;       // of a half
    int segments;      // 1
    float eps;         // of RMSNORM
    float per_column;  // fl(1/K)
    float* numbers;    // (M,), rs or projection, of norms
    void* y;           // (M, K), the rounded gradient; or null
    float* sums;       // (gridDim.x * rows of a thread block, K), partial sums over rows; or null
    ProducerParameters producer;
};

struct ColumnSumsParameters {
    const float* sums;  // (parts, columns)
    i64 parts;
    i64 columns;
    void* out;  // (columns,)
};

// Rounds the gradient of a chunk and stores it, if it is wanted.
template <class T>
__device__ __forceinline__ void store_gradient(const float (&gradient)[CHUNK], const ProducedRowsParameters& p, i64 row,
                                               int columns, const RowChunk& chunk) {
    if (p.y == nullptr || chunk.count == 0) return;
    Rounded<T> y;
    round_chunk(gradient, y);
    store_rounded(y, chunk, static_cast<T*>(p.y) + row * columns + chunk.column);
}

template <class T>
__device__ __forceinline__ void produced_rows(const ProducedRowsParameters& p) {
    // Two sets of words, used in turn: a thread may begin a row before another thread ends the row before.
    __shared__ Words words[2];
    const ProducerVariant variant = variant_of(p.producer);
    const Producer producer = variant.producer;
    const bool gated = producer == SILU_MUL_BACKWARD;
    const int columns = gated ? 2 * p.columns : p.columns;
    Part part = part_of(p, variant.whole_chunks);
    const i64 rows = rows_of_block(), apart = rows * gridDim.x;
    i64 first_row = blockIdx.x * rows;
    float sums[ROW_CHUNKS][CHUNK] = {}, sums_of_up[ROW_CHUNKS][CHUNK] = {};
    for (int turn = 0; first_row < p.rows || turn == 0; first_row += apart, ++turn) {
        set_row(part, first_row, p);
        const float rs = producer == RMSNORM_BACKWARD && part.columns > 0 ? p.producer.rs[part.row] : 0.0f;
        Rounded<T> x[ROW_CHUNKS], dy[ROW_CHUNKS];
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < ROW_CHUNKS; ++i) {
            if (i >= part.steps) break;
            const RowChunk chunk = chunk_of(part, i);
            Operands operands;
            load_operands<T>(p.producer, variant, part.row, chunk, operands);
            if (gated) {
                float gate[CHUNK], up[CHUNK];
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    const SiluGradients gradients = silu_gradients(operands.x[j], operands.up[j], operands.dy[j]);
                    gate[j] = gradients.gate;
                    up[j] = gradients.up;
                    sums[i][j] += gate[j];
                    sums_of_up[i][j] += up[j];
                }
                store_gradient<T>(gate, p, part.row, columns, chunk);
                store_gradient<T>(up, p, part.row, columns, RowChunk{chunk.column + p.columns, chunk.count, chunk.whole});
                continue;
            }
            if (producer == RMSNORM) {
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) total = __fmaf_rn(operands.x[j], operands.x[j], total);
                continue;
            }
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const float n = operands.x[j] * (j < chunk.count ? rs : 0.0f);  // rs may be infinite or NaN
                total = __fmaf_rn(operands.dy[j] * operands.weight[j], n, total);
                sums[i][j] = __fmaf_rn(operands.dy[j], n, sums[i][j]);
            }
            round_chunk(operands.x, x[i]);
            round_chunk(operands.dy, dy[i]);
        }
        if (gated) continue;
        total = sum_over_row(total, words[turn % 2][0]);
        const float mean = total * p.per_column, number = producer == RMSNORM ? rsqrt_approx(mean + p.eps) : mean;
        if (part.thread == 0 && part.columns > 0 && p.numbers != nullptr) p.numbers[part.row] = number;
        if (producer == RMSNORM || p.y == nullptr) continue;
#pragma unroll
        for (int i = 0; i < ROW_CHUNKS; ++i) {
            if (i >= part.steps) break;
            const RowChunk chunk = chunk_of(part, i);
            float of_x[CHUNK], of_dy[CHUNK], weight[CHUNK];
            unpack_floats(x[i], of_x);
            unpack_floats(dy[i], of_dy);
            load_as_floats<T>(p.producer.weight, variant.weight_type, 0, p.producer.weight_stride, chunk, weight);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const float w = variant.zero_centered ? 1.0f + weight[j] : weight[j];
                of_x[j] = rmsnorm_gradient(of_x[j], of_dy[j], w, rs, number);
            }
            store_gradient<T>(of_x, p, part.row, columns, chunk);
        }
    }
    if (p.sums == nullptr) return;
    const i64 lanes = ROW_LANES > 0 ? threadIdx.x / (ROW_LANES > 0 ? ROW_LANES : 1) : 0;
    float* target = p.sums + (blockIdx.x * rows + lanes) * columns;
    part.columns = p.columns;  // also without a row of its own
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        const RowChunk chunk = chunk_of(part, i);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            if (j < chunk.count) target[chunk.column + j] = sums[i][j];
            if (gated && j < chunk.count) target[p.columns + chunk.column + j] = sums_of_up[i][j];
        }
    }
}

template <class T>
__device__ __forceinline__ void column_sums(const ColumnSumsParameters& p) {
    const i64 column = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= p.columns) return;
    float total = 0.0f;
#pragma unroll 8
    for (i64 part = 0; part < p.parts; ++part) total += p.sums[part * p.columns + column];
    from_float(total, static_cast<T*>(p.out)[column]);
}

#ifndef RESIDENT
#define RESIDENT 1  // thread blocks of a multiprocessor
#endif

#define PRODUCED_ROWS(TYPE, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, RESIDENT)                                            \
        produced_rows_##TYPE(const __grid_constant__ ProducedRowsParameters p) {                                   \
        produced_rows<T>(p);                                                                                       \
    }                                                                                                              \
    extern "C" __global__ void column_sums_##TYPE(const __grid_constant__ ColumnSumsParameters p) { column_sums<T>(p); }

#if IN_UNIT(UNIT_FP32)
PRODUCED_ROWS(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
PRODUCED_ROWS(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
PRODUCED_ROWS(fp16, fp16)
#endif

}  // namespace narrowgauge
