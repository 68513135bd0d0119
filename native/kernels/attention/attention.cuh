// attention.cuh: attention of rows of queries over a paged, quantized cache. The kernels: attention.cu and attention_tensor.cu.
//
//   q        (T, heads * group, KEY) of bfloat16 or float16, tokens of several requests one after the other; a row has neighbours in
//            memory
//   k, v     pages of the cache: cache.cuh. pages (B, most_pages) int32: page g of request b. lengths (B,) int32: keys of request b
//   starts   (B + 1,) int32: first token of each request in q; null if every request has T / B tokens
//   S        c * sum of q * k, c = scale * q_scale * k_scale * log2 e, each product rounded to float32; a softcap before log2 e
//   masks    query i of n sees the keys up to length - n + i with `causal`, else all; the last `window` of them if it is not 0
//   O        sum of p * v / l, times v_scale, one cast to the dtype of q; p = 2^(S - m), l = sum of p in float32, a sink adds to l.
//            With out_scale: codes of E4M3 of O / out_scale, without the cast. No key: 0
//   lse      (T, heads * group) float32, ln of the sum of e^S; minus infinity without a key
//   splits   of the keys of a request. Each has its O, m and l in float32, and attention_merge adds them
#pragma once

#include "attention/cache.cuh"
#include "fused/functions.cuh"

namespace narrowgauge {

constexpr float LOG2_E = 0x1.715476p+0f, LN_2 = 0x1.62e43p-1f;

struct AttentionParameters {
    const void* q;
    i64 token_stride, head_stride;  // of q
    CachePart k, v;
    const int* pages;
    const int* lengths;
    const int* starts;
    const float* q_scale;           // (1,), or null
    const float* k_scale;           // (1,) or (heads,), or null
    const float* v_scale;
    const float* sinks;             // (heads * group,), or null
    const float* out_scale;         // (1,), or null
    bool scale_of_heads;            // k_scale and v_scale have one number for each head
    bool causal;
    int window;                     // 0: all keys
    float scale;
    float softcap;                  // 0: none
    int batch, tokens, heads, group, most_pages;
    int row_tiles;                  // of the longest request, of kernels with tensor cores
    int splits, keys_per_split;
    void* out;                      // (T, heads * group, VALUE)
    float* lse;                     // or null
    float* sums;                    // (splits, T, heads * group, VALUE)
    float* maxima;                  // (splits, T, heads * group, 2): m and l
};

// A request's tokens in q, and its keys.
struct Request {
    int first, count, keys;
};

__device__ __forceinline__ Request request_of(const AttentionParameters& p, int b) {
    const int each = p.tokens / p.batch;
    if (p.starts == nullptr) return {b * each, each, p.lengths[b]};
    return {p.starts[b], p.starts[b + 1] - p.starts[b], p.lengths[b]};
}

// Keys that query i of a request sees: from `first` to before `last`.
struct Keys {
    int first, last;
};

__device__ __forceinline__ Keys keys_of(const AttentionParameters& p, const Request& request, int i) {
    const int last = p.causal ? request.keys - request.count + i + 1 : request.keys;
    const int first = p.window > 0 && last > p.window ? last - p.window : 0;
    return {first, last > 0 ? last : 0};
}

// A tile of ROWS rows of a request and a head of the cache: query times group + its head. `row_tiles` are those of the longest
// request.
struct Tile {
    int request, first_row;
    Request tokens;
};

template <int ROWS>
__device__ __forceinline__ Tile tile_of(const AttentionParameters& p, int tile) {
    if (p.starts == nullptr) return {tile / p.row_tiles, tile % p.row_tiles * ROWS, request_of(p, tile / p.row_tiles)};
    for (int b = 0; b < p.batch; ++b) {
        const Request request = request_of(p, b);
        const int tiles = (request.count * p.group + ROWS - 1) / ROWS;
        if (tile < tiles) return {b, tile * ROWS, request};
        tile -= tiles;
    }
    return {0, 0, {0, 0, 0}};
}

__device__ __forceinline__ float number_or_one(const float* numbers, int index) {
    return numbers == nullptr ? 1.0f : numbers[index];
}

__device__ __forceinline__ int scale_index(const AttentionParameters& p, int head) { return p.scale_of_heads ? head : 0; }

// The factor of a sum of q * k, with log2 e unless there is a softcap.
__device__ __forceinline__ float score_factor(const AttentionParameters& p, int head) {
    const float scale = p.scale * number_or_one(p.q_scale, 0) * number_or_one(p.k_scale, scale_index(p, head));
    return p.softcap > 0.0f ? scale : scale * LOG2_E;
}

// A scaled sum of q * k with a softcap.
__device__ __forceinline__ float capped_score(const AttentionParameters& p, float scaled) {
#ifdef __CUDA_ARCH__
    return p.softcap * tanhf(scaled / p.softcap) * LOG2_E;
#else
    return p.softcap * std::tanh(scaled / p.softcap) * LOG2_E;
#endif
}

__device__ __forceinline__ float no_score() { return __uint_as_float(0xFF800000u); }  // minus infinity

// What a maximum is subtracted as: 0 in place of minus infinity, so that a row without a key has p = 0 and not NaN.
__device__ __forceinline__ float finite_maximum(float m) { return m == no_score() ? 0.0f : m; }

// Adds the sink of a row's head to its m and l, and returns the factor that its sums get by that.
__device__ __forceinline__ float add_sink(const AttentionParameters& p, int head, float& m, float& l) {
    if (p.sinks == nullptr) return 1.0f;
    const float sink = p.sinks[head] * LOG2_E, larger = m > sink ? m : sink;
    const float factor = exp2_approx(m - larger);
    l = l * factor + exp2_approx(sink - larger);
    m = larger;
    return factor;
}

// Factor of a row's sums: v_scale / l, over out_scale if codes are wanted.
__device__ __forceinline__ float output_factor(const AttentionParameters& p, int head, float l) {
    const float factor = l == 0.0f ? 0.0f : number_or_one(p.v_scale, scale_index(p, head / p.group)) / l;
    return p.out_scale == nullptr ? factor : factor * (1.0f / *p.out_scale);
}

template <class T>
__device__ __forceinline__ void store_output(const AttentionParameters& p, i64 place, float number) {
    if (p.out_scale != nullptr) {
        static_cast<u8*>(p.out)[place] = e4m3_from_float(number);
    } else {
        from_float(number, static_cast<T*>(p.out)[place]);
    }
}

// Two neighbouring outputs. `place` is even.
template <class T>
__device__ __forceinline__ void store_pair(const AttentionParameters& p, i64 place, float low, float high) {
    if (p.out_scale != nullptr) {
        *reinterpret_cast<u16*>(static_cast<u8*>(p.out) + place) = pair_from_float<E4M3>(low, high);
    } else {
        T numbers[2];
        from_float(low, numbers[0]);
        from_float(high, numbers[1]);
        *reinterpret_cast<u32*>(static_cast<T*>(p.out) + place) = numbers[0].bits | static_cast<u32>(numbers[1].bits) << 16;
    }
}

__device__ __forceinline__ void store_lse(const AttentionParameters& p, i64 row, float m, float l) {
    if (p.lse != nullptr) p.lse[row] = l == 0.0f ? no_score() : (m + log2_approx(l)) * LN_2;
}

}  // namespace narrowgauge
