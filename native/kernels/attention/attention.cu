// attention: every format, layout and size of a cache. Operands and results: attention.cuh.
//
//   Launch: attention_TYPE with a thread for each row (token and head of q), 32 threads, grid (ceil(T * heads * group / 32), splits);
//           then attention_merge_TYPE with a warp for each row, 128 threads, grid ceil(T * heads * group / 4).
//   Numerics: one fused multiply-add for each product of q * k and of p * v, in their order, in float32; p is not rounded. A maximum
//             that grows scales l and the sums. Splits are added in their order.
//   merge_results_TYPE, launched in the same way: merges two results with their lse; +infinity counts as minus infinity.
#include "attention/attention.cuh"

namespace narrowgauge {

template <class T>
__device__ __forceinline__ void attend(const AttentionParameters& p) {
    const int rows = p.heads * p.group, row = static_cast<int>(blockIdx.x) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    if (row >= p.tokens * rows) return;
    const int token = row / rows, of_token = row % rows, split = static_cast<int>(blockIdx.y);
    int b = 0;
    Request request = request_of(p, 0);
    while (token >= request.first + request.count) request = request_of(p, ++b);
    const T* q = static_cast<const T*>(p.q) + token * p.token_stride + of_token * p.head_stride;
    const int head = of_token / p.group, dims = p.v.dim;
    const i64 place = static_cast<i64>(split) * p.tokens * rows + row;
    float* const sums = p.sums + place * dims;
    for (int d = 0; d < dims; ++d) sums[d] = 0.0f;

    const float factor = score_factor(p, head);
    const Keys keys = keys_of(p, request, token - request.first);
    const int begin = split * p.keys_per_split, end = begin + p.keys_per_split;
    float m = no_score(), l = 0.0f;
    for (int key = keys.first > begin ? keys.first : begin; key < (keys.last < end ? keys.last : end); ++key) {
        const Cell cell{p.pages[b * p.most_pages + key / p.k.page_size], key % p.k.page_size, head};
        float sum = 0.0f;
        for (int d = 0; d < p.k.dim; ++d) sum = __fmaf_rn(to_float(q[d]), number_of(p.k, cell, d), sum);
        const float s = p.softcap > 0.0f ? capped_score(p, sum * factor) : sum * factor;
        if (s > m) {
            const float lower = exp2_approx(m - s);
            l *= lower;
            for (int d = 0; d < dims; ++d) sums[d] *= lower;
            m = s;
        }
        const float weight = exp2_approx(s - finite_maximum(m));
        l += weight;
        for (int d = 0; d < dims; ++d) sums[d] = __fmaf_rn(weight, number_of(p.v, cell, d), sums[d]);
    }
    p.maxima[2 * place] = m;
    p.maxima[2 * place + 1] = l;
}

template <class T>
__device__ __forceinline__ void merge(const AttentionParameters& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32, rows = p.heads * p.group;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32, all = static_cast<i64>(p.tokens) * rows;
    if (row >= all) return;
    const int dims = p.v.dim, of_token = static_cast<int>(row % rows);
    float m = no_score(), l = 0.0f;
    for (int split = 0; split < p.splits; ++split) m = fmaxf(m, p.maxima[2 * (split * all + row)]);
    const float largest = finite_maximum(m);
    for (int split = 0; split < p.splits; ++split) {
        const float* of_split = p.maxima + 2 * (split * all + row);
        l += of_split[1] * exp2_approx(of_split[0] - largest);
    }
    const float sunk = add_sink(p, of_token, m, l), factor = output_factor(p, of_token, l) * sunk;
    if (lane == 0) store_lse(p, row, m, l);
    for (int d = lane; d < dims; d += 32) {
        float sum = 0.0f;
        for (int split = 0; split < p.splits; ++split) {
            sum += p.sums[(split * all + row) * dims + d] * exp2_approx(p.maxima[2 * (split * all + row)] - largest);
        }
        store_output<T>(p, row * dims + d, sum * factor);
    }
}

struct MergeParameters {
    const void* out_a;   // (rows, dims) of the dtype of out
    const void* out_b;
    const float* lse_a;  // (rows,), ln of the sum of e^S
    const float* lse_b;
    void* out;
    float* lse;
    i64 rows;
    int dims;
    bool base_2;         // lse is the logarithm to the base 2, else to e
};

template <class T>
__device__ __forceinline__ void merge_results(const MergeParameters& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const auto usable = [](float lse) { return lse == -no_score() ? no_score() : lse; };
    const float a = usable(p.lse_a[row]), b = usable(p.lse_b[row]), m = a > b ? a : b, largest = finite_maximum(m);
    const float to_2 = p.base_2 ? 1.0f : LOG2_E, from_2 = p.base_2 ? 1.0f : LN_2;
    const float of_a = exp2_approx((a - largest) * to_2), of_b = exp2_approx((b - largest) * to_2), sum = of_a + of_b;
    if (lane == 0) p.lse[row] = sum == 0.0f ? no_score() : m + log2_approx(sum) * from_2;
    for (int d = lane; d < p.dims; d += 32) {
        const i64 place = row * p.dims + d;
        const float left = to_float(static_cast<const T*>(p.out_a)[place]), right = to_float(static_cast<const T*>(p.out_b)[place]);
        const float merged = sum == 0.0f ? 0.0f : left * (of_a / sum) + right * (of_b / sum);
        from_float(merged, static_cast<T*>(p.out)[place]);
    }
}

extern "C" __global__ void __launch_bounds__(32) attention_bf16(const __grid_constant__ AttentionParameters p) { attend<bf16>(p); }

extern "C" __global__ void __launch_bounds__(32) attention_fp16(const __grid_constant__ AttentionParameters p) { attend<fp16>(p); }

extern "C" __global__ void __launch_bounds__(128) attention_merge_bf16(const __grid_constant__ AttentionParameters p) {
    merge<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(128) attention_merge_fp16(const __grid_constant__ AttentionParameters p) {
    merge<fp16>(p);
}

extern "C" __global__ void __launch_bounds__(128) merge_results_bf16(const __grid_constant__ MergeParameters p) {
    merge_results<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(128) merge_results_fp16(const __grid_constant__ MergeParameters p) {
    merge_results<fp16>(p);
}

}  // namespace narrowgauge
