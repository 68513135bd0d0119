// norm_quantize: RMSNorm or LayerNorm of the rows of x, of x + residual, quantized. Each input is read once.
//
//   Parameters: struct NormQuantizeParameters. Launch: thread blocks with a thread for every ROW_CHUNKS * 16 elements of a row, a
//   multiple of 32, or with ROW_LANES lanes for a row; on a CPU 32 threads. A thread block makes every gridDim.x-th row or rows.
//   z = x, or R(x + residual), which is stored; R is the rounding to the dtype of x. RMSNorm: r = rsqrt(mean z^2 + eps),
//   y = R(z * r * w). LayerNorm: m = mean z, r = rsqrt(mean (z - m)^2 + eps), y = R((z - m) * r * w + bias).
//   Sums are float32, in a tree over the threads; docs/contracts.md bounds any order. Scales and codes of y: quantize_row.cuh.

#include "fused/functions.cuh"
#include "fused/quantize_row.cuh"
#include "quantize/unit.cuh"

#ifndef KEPT
#define KEPT 0  // a thread keeps its chunks of weight and bias in shared memory
#endif

namespace narrowgauge {

// The choices of a norm. On a GPU the macro NORM gives their values.
struct NormVariant {
    bool layer_norm;       // else RMSNorm
    bool zero_centered;    // the factor is 1 + weight
    bool has_residual;
    ElementType weight_type;
};

struct NormQuantizeParameters {
    const void* x;  // (M, K), any strides
    i64 row_stride;
    i64 column_stride;
    const void* residual;  // (M, K), contiguous, of the dtype of x; or null
    void* residual_out;    // (M, K)
    const void* weight;    // (K,)
    i64 weight_stride;
    const void* bias;      // (K,), of the type of the weight, with LayerNorm
    i64 bias_stride;
    float eps;
    float per_column;      // fl(1/K)
    NormVariant variant;
    QuantizeRowParameters result;
};

__device__ __forceinline__ NormVariant norm_of(const NormQuantizeParameters& p) {
#ifdef NORM
    return NORM;
#else
    return p.variant;
#endif
}

// What a thread reads of a row; zeros behind the row.
template <class T>
struct RowInputs {
    Rounded<T> x[ROW_CHUNKS], residual[ROW_CHUNKS];
};

template <class T>
__device__ __forceinline__ void load_row(const NormQuantizeParameters& p, const NormVariant& norm, const Part& part,
                                         RowInputs<T>& inputs) {
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        const RowChunk chunk = chunk_of(part, i);
        const T* source = static_cast<const T*>(p.x) + part.row * p.row_stride + offset_of(chunk, p.column_stride);
        load_rounded(source, stride_of(chunk, p.column_stride), chunk, inputs.x[i]);
        if (!norm.has_residual) continue;
        const T* residual = static_cast<const T*>(p.residual) + part.row * p.result.columns + chunk.column;
        load_rounded(residual, 1, chunk, inputs.residual[i]);
    }
}

// z of a row; stores the sum with the residual.
template <class T>
__device__ __forceinline__ void sum_inputs(const NormQuantizeParameters& p, const NormVariant& norm, const Part& part,
                                           const RowInputs<T>& inputs, float (&z)[ROW_CHUNKS][CHUNK]) {
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        unpack_floats(inputs.x[i], z[i]);
        if (!norm.has_residual) continue;
        const RowChunk chunk = chunk_of(part, i);
        float r[CHUNK];
        unpack_floats(inputs.residual[i], r);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) z[i][j] += r[j];
        Rounded<T> total;
        round_chunk(z[i], total);
        unpack_floats(total, z[i]);
        T* target = static_cast<T*>(p.residual_out) + part.row * p.result.columns + chunk.column;
        if (!p.result.amax_alone) store_rounded(total, chunk, target);
    }
}

struct alignas(16) FourFloats {
    float v[4];
};

// Shared memory of a thread block: CHUNK floats of each thread for each of its chunks, of one vector or of two.
__device__ __forceinline__ FourFloats* kept_floats() {
#if !KEPT
    return nullptr;
#elif defined(__CUDA_ARCH__)
    extern __shared__ FourFloats floats[];
    return floats;
#else
    __shared__ FourFloats floats[2 * ROW_CHUNKS * CHUNK / 4 * BLOCK_THREADS];
    return floats;
#endif
}

// The chunks of a vector (K,), plus `offset`, for the columns of a thread. If KEPT, the thread loads its chunks once and stores
// them in shared memory. Other threads do not read them. Neighbouring threads read neighbouring groups of four numbers.
template <class T>
struct RowVector {
    const void* source;
    ElementType type;
    i64 stride;
    float offset;
    FourFloats* kept;

    __device__ __forceinline__ void load(const RowChunk& chunk, float (&v)[CHUNK]) const {
        load_as_floats<T>(source, type, 0, stride, chunk, v);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) v[j] = offset == 0.0f ? v[j] : offset + v[j];
    }

    __device__ __forceinline__ FourFloats& four(int step, int j) const {
        return kept[(step * CHUNK + j) / 4 * BLOCK_THREADS + threadIdx.x];
    }

    __device__ __forceinline__ void keep(const Part& part) const {
#pragma unroll
        for (int i = 0; KEPT && i < ROW_CHUNKS; ++i) {
            float v[CHUNK];
            load(chunk_of(part, i), v);
#pragma unroll
            for (int j = 0; j < CHUNK; j += 4) four(i, j) = {v[j], v[j + 1], v[j + 2], v[j + 3]};
        }
    }

    __device__ __forceinline__ void floats(int step, const RowChunk& chunk, float (&v)[CHUNK]) const {
        if (!KEPT) {
            load(chunk, v);
            return;
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) v[j] = four(step, j / 4 * 4).v[j % 4];
    }
};

// Codes of 4 bits take so long that the next row arrives in time if it is loaded behind the norm, where fewer registers are in use.
constexpr bool LOADS_LATE = PER_BYTE == 2;

// The sum of a thread's elements, or of their squares. Pipelined, in four partial sums: a single sum has the latency of every
// addition.
__device__ __forceinline__ float sum_of_chunks(const Part& part, const float (&z)[ROW_CHUNKS][CHUNK], bool squares) {
    constexpr int PARTS = PIPELINED ? 4 : 1;
    float sums[PARTS] = {};
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            float& sum = sums[j % PARTS];
            sum = squares ? __fmaf_rn(z[i][j], z[i][j], sum) : sum + z[i][j];
        }
    }
    float total = sums[0];
#pragma unroll
    for (int n = 1; n < PARTS; ++n) total += sums[n];
    return total;
}

template <class T>
__device__ __forceinline__ void norm_quantize(const NormQuantizeParameters& p) {
    // Two sets of words, used in turn: a thread may begin a row before another thread ends the row before.
    __shared__ Words words[2];
    __shared__ float factors[E4M3_MAGNITUDES];
    const NormVariant norm = norm_of(p);
    Part part = part_of(p.result, variant_of(p.result).whole_chunks);
    const i64 rows = rows_of_block(), apart = rows * gridDim.x;
    i64 first_row = blockIdx.x * rows;
    set_row(part, first_row, p.result);
    FourFloats* kept = kept_floats();
    const RowVector<T> weights{p.weight, norm.weight_type, p.weight_stride, norm.zero_centered ? 1.0f : 0.0f, kept};
    const RowVector<T> biases{p.bias, norm.weight_type, p.bias_stride, 0.0f, kept + ROW_CHUNKS * CHUNK / 4 * BLOCK_THREADS};
    weights.keep(part);
    if (norm.layer_norm) biases.keep(part);
    TensorFactors tensor = tensor_factors(p.result);
    if (KEPT && variant_of(p.result).family == NVFP4) tabulate(tensor, factors);
    RowInputs<T> inputs;
    if (PIPELINED) load_row(p, norm, part, inputs);
    for (int turn = 0; first_row < p.result.rows || (!FULL_ROWS && turn == 0); first_row += apart, ++turn) {
        float z[ROW_CHUNKS][CHUNK];
        set_row(part, first_row, p.result);
        if (!PIPELINED) load_row(p, norm, part, inputs);
        sum_inputs(p, norm, part, inputs, z);
        const auto load_next = [&] {
            if (!PIPELINED || first_row + apart >= p.result.rows) return;
            Part next = part;
            set_row(next, first_row + apart, p.result);
            load_row(p, norm, next, inputs);
        };
        if (!LOADS_LATE) load_next();
        float total = sum_over_row(sum_of_chunks(part, z, !norm.layer_norm), words[turn % 2][0]);
        if (norm.layer_norm) {
            const float mean = total * p.per_column;
#pragma unroll
            for (int i = 0; i < ROW_CHUNKS; ++i) {
                if (i >= part.steps) break;
                const int count = chunk_of(part, i).count;
                const float subtracted = count > 0 ? mean : 0.0f;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) z[i][j] -= part.whole_chunks || j < count ? subtracted : 0.0f;
            }
            total = sum_over_row(sum_of_chunks(part, z, true), words[turn % 2][1]);
        }
        const float factor = rsqrt_approx(__fmaf_rn(total, p.per_column, p.eps));
        Rounded<T> y[ROW_CHUNKS];
#pragma unroll
        for (int i = 0; i < ROW_CHUNKS; ++i) {
            if (i >= part.steps) break;
            const RowChunk chunk = chunk_of(part, i);
            float weight[CHUNK], bias[CHUNK];
            weights.floats(i, chunk, weight);
            if (norm.layer_norm) biases.floats(i, chunk, bias);
            const float by = chunk.count > 0 ? factor : 0.0f;
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const float normalized = z[i][j] * by;
                z[i][j] = norm.layer_norm ? __fmaf_rn(normalized, weight[j], bias[j]) : normalized * weight[j];
            }
            round_chunk<RESULT_ORDER>(z[i], y[i]);
            if ((!chunk.whole || ROW_LANES > 0) && chunk.count < CHUNK) keep_first<RESULT_ORDER>(y[i], chunk.count);
        }
        if (LOADS_LATE) load_next();
        quantize_row<KEPT>(y, part, words[turn % 2], p.result, tensor);
    }
}

#ifndef RESIDENT
#define RESIDENT 1  // thread blocks of a multiprocessor
#endif

#define NORM_QUANTIZE(TYPE, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, RESIDENT)                                         \
        norm_quantize_##TYPE(const __grid_constant__ NormQuantizeParameters p) {                        \
        norm_quantize<T>(p);                                                                            \
    }

#if IN_UNIT(UNIT_FP32)
NORM_QUANTIZE(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
NORM_QUANTIZE(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
NORM_QUANTIZE(fp16, fp16)
#endif

}  // namespace narrowgauge
