// attention_prefill: attention of many rows of a request by tensor cores, over a cache of FP8 or NVFP4. Operands and results:
// attention.cuh, without splits.
//
//   Sizes    head dimensions of k: 64, 128 or 192; of v: 64 or 128. Elements of a head are neighbours, and words of four codes are
//            aligned; rows of q are aligned to 16 bytes
//   Launch: attention_pack_TYPE with 256 threads, grid (tiles of 128 keys of the longest request, heads, requests);
//           then attention_prefill_TYPE with 384 threads, a block for each multiprocessor, sizeof(PrefillShared) + 1024 bytes of
//           dynamic shared memory. It is a persistent kernel; tiles have 128 rows.
//   Numerics: elements times block scales are numbers of TYPE, exactly. Tensor cores add 16 products at a time to a float32
//             accumulator, truncated as in gemm/tensor_core_model.cuh. p is rounded for the second product, to TYPE, or with
//             WEIGHTS_E4M3 to E4M3 of 2^8 p, and not for l. m is the largest score of the keys so far, and grows only by more
//             than `lag`.
//
// attention_pack decodes the pages to tiles of TYPE in global memory, and transposes v. Many rows read a tile, so decoding takes a
// small part of the time. In attention_prefill a producer thread copies tiles to shared memory, and two warpgroups have 64 rows
// each. A warpgroup computes the weights of the next keys while the tensor cores multiply p and v.
#include "attention/attention.cuh"
#include "attention/pairs.cuh"
#include "gemm/sm90/tile.cuh"

#ifndef KEY_DIM
#define KEY_DIM 128
#endif
#ifndef VALUE_DIM
#define VALUE_DIM 128
#endif
#ifndef CACHE_NIBBLES
#define CACHE_NIBBLES 0
#endif
#ifndef WEIGHTS_E4M3
#define WEIGHTS_E4M3 0
#endif
#ifndef HAS_SOFTCAP
#define HAS_SOFTCAP (p.softcap > 0.0f)
#endif

namespace narrowgauge {

constexpr int KEYS = TILE_ROWS, PREFILL_CONSUMERS = 2, ROWS = PREFILL_CONSUMERS * WGMMA_M, STAGES = 2;
constexpr int KEY_TILES = KEY_DIM / TILE_COLUMNS, VALUE_TILES = KEYS / TILE_COLUMNS;
constexpr int QUERY_BYTES = WGMMA_M * ROW_BYTES;   // 64 rows, 64 columns
constexpr int VALUE_BYTES = VALUE_DIM * ROW_BYTES;  // all columns of v as rows, 64 keys
constexpr int SCORES = KEYS / 2, PREFILL_SUMS = VALUE_DIM / 2;  // of a thread
constexpr int PACK_THREADS = 256, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

struct PrefillParameters {
    u8* k_tiles;    // (requests, heads, key_tiles) of KeyTiles
    u8* v_tiles;    // (requests, heads, key_tiles) of ValueTiles
    int key_tiles;  // of the longest request
    int row_tiles;  // of all requests, at most
    float lag;      // in base 2
};

// 128 keys.
using KeyTiles = u8[KEY_TILES][TILE_BYTES];
using ValueTiles = u8[VALUE_TILES][VALUE_BYTES];

struct alignas(1024) PrefillShared {
    u8 q[PREFILL_CONSUMERS][KEY_TILES][QUERY_BYTES];
    KeyTiles k[STAGES];
    ValueTiles v[STAGES];
    ptx::Mbarrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// First byte of 128 keys of a request and head among the tiles of BYTES each.
template <int BYTES>
__device__ __forceinline__ u8* tiles_of(u8* tiles, const AttentionParameters& p, const PrefillParameters& of, int request, int head) {
    return tiles + (static_cast<i64>(request) * p.heads + head) * of.key_tiles * BYTES;
}

// ---- pages to tiles --------------------------------------------------------------------------------------------------

// Four elements of a key from d on, without the given scale.
__device__ __forceinline__ void numbers_of(const CachePart& part, const Cell& cell, int d, float (&numbers)[4]) {
    const u8* const row = part.codes + code_index(part, cell, 0);
#if CACHE_NIBBLES
    const u32 codes = *reinterpret_cast<const u16*>(row + d / 2);
    const float scale = e4m3_to_float(static_cast<const u8*>(part.scales)[scale_index(part, cell, d / 16)]);
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] = e2m1_to_float(codes >> 4 * i & 0xFu) * scale;
#else
    const u32 codes = *reinterpret_cast<const u32*>(row + d);
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] = e4m3_to_float(static_cast<u8>(codes >> 8 * i));
#endif
}

__device__ __forceinline__ void store_chunk(u8* target, const u32 (&pairs)[4]) {
    *reinterpret_cast<ptx::Vector4*>(target) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

template <class T>
__device__ __forceinline__ void pack(const AttentionParameters& p, const PrefillParameters& of) {
    const int head = static_cast<int>(blockIdx.y), request = static_cast<int>(blockIdx.z);
    const int first = static_cast<int>(blockIdx.x) * KEYS, length = p.lengths[request];
    // Keys before the window of the first row have no row that sees them, and their pages may not exist.
    const int seen = keys_of(p, request_of(p, request), 0).first;
    if (first >= length || first + KEYS <= seen) return;
    const int* const table = p.pages + static_cast<i64>(request) * p.most_pages;
    // Elements of a key, or zeros if no row sees it: 0 * NaN is NaN.
    const auto load = [&](const CachePart& part, int key, int d, float (&numbers)[4]) {
#pragma unroll
        for (float& number : numbers) number = 0.0f;
        if (first + key < seen || first + key >= length) return;
        const u32 place = static_cast<u32>(first + key), size = static_cast<u32>(part.page_size);
        numbers_of(part, {table[place / size], static_cast<int>(place % size), head}, d, numbers);
    };
    u8* const k = tiles_of<sizeof(KeyTiles)>(of.k_tiles, p, of, request, head) + static_cast<i64>(blockIdx.x) * sizeof(KeyTiles);
    u8* const v = tiles_of<sizeof(ValueTiles)>(of.v_tiles, p, of, request, head) + static_cast<i64>(blockIdx.x) * sizeof(ValueTiles);
    // Eight columns of a key.
    for (int place = static_cast<int>(threadIdx.x); place < KEYS * KEY_DIM / 8; place += PACK_THREADS) {
        const int key = place / (KEY_DIM / 8), chunk = place % (KEY_DIM / 8);
        float numbers[2][4];
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load(p.k, key, 8 * chunk + 4 * i, numbers[i]);
            pairs[2 * i] = rounded_pair<T>(numbers[i][0], numbers[i][1]);
            pairs[2 * i + 1] = rounded_pair<T>(numbers[i][2], numbers[i][3]);
        }
        store_chunk(k + chunk / 8 * TILE_BYTES + swizzled_offset(key, chunk % 8), pairs);
    }
    // Four columns of eight keys.
    for (int place = static_cast<int>(threadIdx.x); place < KEYS / 8 * VALUE_DIM / 4; place += PACK_THREADS) {
        const int chunk = place / (VALUE_DIM / 4), d = place % (VALUE_DIM / 4) * 4;
        float numbers[8][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) load(p.v, 8 * chunk + i, d, numbers[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = rounded_pair<T>(numbers[2 * i][j], numbers[2 * i + 1][j]);
            store_chunk(v + chunk / 8 * VALUE_BYTES + swizzled_offset(d + j, chunk % 8), pairs);
        }
    }
}

// ---- products --------------------------------------------------------------------------------------------------------

// Tiles of keys that rows of a block see: `count` of them from `first` on; and the keys that all rows see.
struct KeyRange {
    int first, count;
    Keys of_all;
};

__device__ __forceinline__ KeyRange range_of(const AttentionParameters& p, const Tile& tile) {
    const int rows = tile.tokens.count * p.group, last_row = tile.first_row + ROWS < rows ? tile.first_row + ROWS - 1 : rows - 1;
    const Keys first = keys_of(p, tile.tokens, tile.first_row / p.group), last = keys_of(p, tile.tokens, last_row / p.group);
    const int begin = first.first / KEYS, end = (last.last + KEYS - 1) / KEYS;
    return {begin, end > begin ? end - begin : 0, {last.first, first.last}};
}

// Tiles of rows of a block, of all heads of the cache. The last rows of a request come first: with `causal` they have the most
// keys. The order of the blocks alternates from turn to turn, to balance their work.
struct Schedule {
    int turn = 0;

    __device__ __forceinline__ bool take(const AttentionParameters& p, const PrefillParameters& of, Tile& tile, int& head) {
        const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x), all = of.row_tiles * p.heads;
        while (turn * blocks < all) {
            const int place = turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
            ++turn;
            if (place >= all) continue;
            head = place % p.heads;
            tile = tile_of<ROWS>(p, of.row_tiles - 1 - place / p.heads);
            if (tile.first_row < tile.tokens.count * p.group) return true;
        }
        return false;
    }
};

// Producer thread: copies tiles of keys and of values into the next stages, as soon as the consumers have released them. `done`:
// tiles of keys so far.
__device__ __forceinline__ void produce(PrefillShared& shared, const u8* k, const u8* v, int count, u32 done) {
    for (int i = 0; i < count; ++i) {
        const u32 stage = (done + i) % STAGES, released = (done + i) / STAGES % 2 ^ 1u;
        ptx::mbarrier_try_wait_parity(shared.k_empty[stage], released);
        ptx::mbarrier_arrive_expect_tx(shared.k_full[stage], sizeof(KeyTiles));
        ptx::cp_async_bulk_shared_global<sizeof(KeyTiles)>(shared.k[stage][0], k + i64{i} * sizeof(KeyTiles), shared.k_full[stage]);
        ptx::mbarrier_try_wait_parity(shared.v_empty[stage], released);
        ptx::mbarrier_arrive_expect_tx(shared.v_full[stage], sizeof(ValueTiles));
        ptx::cp_async_bulk_shared_global<sizeof(ValueTiles)>(shared.v[stage][0], v + i64{i} * sizeof(ValueTiles),
                                                             shared.v_full[stage]);
    }
}

// Rows g and g + 8 of the 16 rows of a warp, in a thread 4g + t of it.
struct ThreadRows {
    int row[2];                   // of the request
    Keys keys[2];
    float m[2], l[2], lower[2];   // lower: factor of the sums so far
    float factor, lag;
};

// Places 64 rows of q of a warpgroup, with the other sign if `flip`. Rows beyond the last row are zeros.
template <class T>
__device__ __forceinline__ void load_queries(u8 (&target)[KEY_TILES][QUERY_BYTES], const AttentionParameters& p, const Tile& tile,
                                             int first_row, int head, bool flip) {
    const int thread = static_cast<int>(threadIdx.x) % WARPGROUP, rows = tile.tokens.count * p.group;
    for (int place = thread; place < WGMMA_M * KEY_DIM / 8; place += WARPGROUP) {
        const int of_tile = place / (KEY_DIM / 8), chunk = place % (KEY_DIM / 8), row = first_row + of_tile;
        u32 words[4] = {};
        if (row < rows) {
            const T* source = static_cast<const T*>(p.q) + (tile.tokens.first + row / p.group) * p.token_stride +
                              (head * p.group + row % p.group) * p.head_stride + 8 * chunk;
            const ptx::Vector4 loaded = *reinterpret_cast<const ptx::Vector4*>(source);
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = flip ? loaded.words[i] ^ 0x80008000u : loaded.words[i];
        }
        store_chunk(target[chunk / 8] + swizzled_offset(of_tile, chunk % 8), words);
    }
}

// Replaces the scores of 128 keys from `key` on by their weights, and sets m, l and `lower`.
__device__ __forceinline__ void to_weights(float (&s)[SCORES], ThreadRows& rows, const AttentionParameters& p, int key, bool masked) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const float unit = HAS_SOFTCAP ? 1.0f : rows.factor;  // of a score
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = no_score();
#pragma unroll
        for (int j = 0; j < SCORES; j += 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = s[j + 2 * half + i];
                if (HAS_SOFTCAP) score = capped_score(p, score * rows.factor);
                const int of_score = key + 2 * j + 2 * t + i;
                if (masked && (of_score < rows.keys[half].first || of_score >= rows.keys[half].last)) score = no_score();
                largest = fmaxf(largest, score);
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        const float top = largest * unit - (WEIGHTS_E4M3 ? 8.0f : 0.0f), m = top > rows.m[half] + rows.lag ? top : rows.m[half];
        const float subtracted = finite_maximum(m);
        rows.lower[half] = exp2_approx(rows.m[half] - subtracted);
        rows.m[half] = m;
        float l = 0.0f;
#pragma unroll
        for (int j = 0; j < SCORES; j += 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = s[j + 2 * half + i];
                score = exp2_approx(__fmaf_rn(score, unit, -subtracted));
            }
            l += s[j + 2 * half] + s[j + 2 * half + 1];
        }
        rows.l[half] = rows.l[half] * rows.lower[half] + l;
    }
}

// Scales the sums of rows whose m has grown.
__device__ __forceinline__ void rescale(float (&sums)[PREFILL_SUMS], const ThreadRows& rows) {
    if (rows.lower[0] != 1.0f || rows.lower[1] != 1.0f) {
#pragma unroll
        for (int i = 0; i < PREFILL_SUMS; ++i) sums[i] *= rows.lower[i / 2 % 2];
    }
}

// Rounds the weights, as the first operand of the second product.
template <class T>
__device__ __forceinline__ void round_weights(const float (&s)[SCORES], Fragments (&weights)[VALUE_TILES]) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
        u32(&pairs)[2 * STEP_PAIRS] = weights[i / (SCORES / VALUE_TILES)][i / 8 % WGMMAS];
#if WEIGHTS_E4M3
        const u32 codes = pair_from_float<E4M3>(s[i], s[i + 1]) | static_cast<u32>(pair_from_float<E4M3>(s[i + 2], s[i + 3])) << 16;
        e4m3_pairs<T>(codes, pairs[i % 8 / 2], pairs[i % 8 / 2 + 1]);
#else
#pragma unroll
        for (int half = 0; half < 2; ++half) pairs[i % 8 / 2 + half] = rounded_pair<T>(s[i + 2 * half], s[i + 2 * half + 1]);
#endif
    }
}

// Queues q * k of a stage.
template <class T>
__device__ __forceinline__ void multiply_keys(float (&s)[SCORES], const u8 (&q)[KEY_TILES][QUERY_BYTES], const KeyTiles& k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEY_TILES; ++i) multiply_tile<T>(s, q[i], k[i], i > 0);
    ptx::wgmma_commit_group();
}

// Queues p * v of a stage: VALUE_TILES groups of wgmma.
template <class T>
__device__ __forceinline__ void multiply_values(float (&sums)[PREFILL_SUMS], const Fragments (&weights)[VALUE_TILES],
                                                const ValueTiles& v) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i) multiply_fragments<T, VALUE_DIM>(sums, weights[i], v[i], 0);
}

// The sums of p * v of a thread's rows, their m and l, over the keys of a range. `done`: tiles of keys so far.
template <class T>
__device__ __forceinline__ void accumulate(float (&sums)[PREFILL_SUMS], ThreadRows& rows, PrefillShared& shared, const AttentionParameters& p,
                                           const KeyRange& range, int warpgroup, u32 done) {
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    if (range.count == 0) return;
    float s[SCORES];
    Fragments weights[VALUE_TILES];
    const auto weigh = [&](int i) {  // the scores of tile i, which the tensor cores have added
        const int key = (range.first + i) * KEYS;
        to_weights(s, rows, p, key, key < range.of_all.first || key + KEYS > range.of_all.last);
    };
    const auto wait_for_values = [&](u32 stage) {
        wait_for_sums(sums);
#pragma unroll
        for (Fragments& of_tile : weights) keep(of_tile);
        release(shared.v_empty[stage], lane);
    };
    ptx::mbarrier_try_wait_parity(shared.k_full[done % STAGES], done / STAGES % 2);
    multiply_keys<T>(s, shared.q[warpgroup], shared.k[done % STAGES]);
    wait_for_sums(s);
    release(shared.k_empty[done % STAGES], lane);
    weigh(0);
    round_weights<T>(s, weights);
#pragma unroll 1
    for (int i = 1; i < range.count; ++i) {
        const u32 before = done % STAGES, phase = done / STAGES % 2, stage = ++done % STAGES;
        ptx::mbarrier_try_wait_parity(shared.k_full[stage], done / STAGES % 2);
        multiply_keys<T>(s, shared.q[warpgroup], shared.k[stage]);
        ptx::mbarrier_try_wait_parity(shared.v_full[before], phase);
        multiply_values<T>(sums, weights, shared.v[before]);
        wait_for_sums<VALUE_TILES>(s);
        release(shared.k_empty[stage], lane);
        weigh(i);
        wait_for_values(before);
        rescale(sums, rows);
        round_weights<T>(s, weights);
    }
    ptx::mbarrier_try_wait_parity(shared.v_full[done % STAGES], done / STAGES % 2);
    multiply_values<T>(sums, weights, shared.v[done % STAGES]);
    wait_for_values(done % STAGES);
}

// Stores the rows of a thread.
template <class T>
__device__ __forceinline__ void store_rows(const float (&sums)[PREFILL_SUMS], ThreadRows& rows, const AttentionParameters& p, const Tile& tile,
                                           int head) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float l = rows.l[half];
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
        if (rows.row[half] >= tile.tokens.count * p.group) continue;
        const int query = rows.row[half] / p.group, of_token = head * p.group + rows.row[half] % p.group;
        const float sunk = add_sink(p, of_token, rows.m[half], l), factor = output_factor(p, of_token, l) * sunk;
        const i64 target = static_cast<i64>(tile.tokens.first + query) * p.heads * p.group + of_token;
        if (t == 0) store_lse(p, target, rows.m[half], l);
#pragma unroll
        for (int i = 0; i < PREFILL_SUMS; i += 4) {
            store_pair<T>(p, target * VALUE_DIM + 2 * i + 2 * t, sums[i + 2 * half] * factor, sums[i + 2 * half + 1] * factor);
        }
    }
}

// A tile of rows of a consumer warpgroup.
template <class T>
__device__ __forceinline__ void consume(PrefillShared& shared, const AttentionParameters& p, const PrefillParameters& of, const Tile& tile,
                                        const KeyRange& range, int head, u32 done) {
    const int thread = static_cast<int>(threadIdx.x) - WARPGROUP, warpgroup = thread / WARPGROUP, lane = thread % WARP;
    const int first_row = tile.first_row + warpgroup * WGMMA_M, count = tile.tokens.count * p.group;
    // A factor of 0 times minus infinity would be NaN; a negative one would exchange the smallest and the largest score.
    const float factor = score_factor(p, head), magnitude = factor == 0.0f ? 0x1p-126f : fabsf(factor);
    ThreadRows rows{{}, {}, {no_score(), no_score()}, {}, {}, magnitude, of.lag};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + thread % WARPGROUP / WARP * 16 + lane / 4 + 8 * half;
        rows.row[half] = row;
        rows.keys[half] = row < count ? keys_of(p, tile.tokens, row / p.group) : Keys{0, 0};
    }
    ptx::bar_sync<WARPGROUP>(1 + warpgroup);  // all warps have multiplied the last queries
    load_queries<T>(shared.q[warpgroup], p, tile, first_row, head, factor < 0.0f);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync<WARPGROUP>(1 + warpgroup);
    float sums[PREFILL_SUMS] = {};
    accumulate<T>(sums, rows, shared, p, range, warpgroup, done);
    store_rows<T>(sums, rows, p, tile, head);
}

template <class T>
__device__ __forceinline__ void attend(const AttentionParameters& p, const PrefillParameters& of) {
#ifdef __CUDA_ARCH__
    extern __shared__ u8 dynamic_shared[];
    const u32 skipped = -static_cast<u32>(__cvta_generic_to_shared(dynamic_shared)) & 1023u;
    PrefillShared& shared = *reinterpret_cast<PrefillShared*>(dynamic_shared + skipped);
#else
    __shared__ PrefillShared shared;
#endif
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::mbarrier_init(shared.k_full[stage], 1);
            ptx::mbarrier_init(shared.v_full[stage], 1);
            ptx::mbarrier_init(shared.k_empty[stage], PREFILL_CONSUMERS * WARPGROUP / WARP);
            ptx::mbarrier_init(shared.v_empty[stage], PREFILL_CONSUMERS * WARPGROUP / WARP);
        }
        ptx::fence_mbarrier_init_and_proxy_async();
    }
    __syncthreads();
    Schedule schedule;
    Tile tile;
    int head;
    u32 done = 0;
    if (threadIdx.x < WARPGROUP) {
        ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        while (threadIdx.x == 0 && schedule.take(p, of, tile, head)) {
            const KeyRange range = range_of(p, tile);
            const u8* const k = tiles_of<sizeof(KeyTiles)>(of.k_tiles, p, of, tile.request, head);
            const u8* const v = tiles_of<sizeof(ValueTiles)>(of.v_tiles, p, of, tile.request, head);
            produce(shared, k + i64{range.first} * sizeof(KeyTiles), v + i64{range.first} * sizeof(ValueTiles), range.count, done);
            done += range.count;
        }
    } else {
        ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        while (schedule.take(p, of, tile, head)) {
            const KeyRange range = range_of(p, tile);
            consume<T>(shared, p, of, tile, range, head, done);
            done += range.count;
        }
    }
}

extern "C" __global__ void __launch_bounds__(PACK_THREADS)
    attention_pack_bf16(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters of) {
    pack<bf16>(p, of);
}

extern "C" __global__ void __launch_bounds__(PACK_THREADS)
    attention_pack_fp16(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters of) {
    pack<fp16>(p, of);
}

extern "C" __global__ void __launch_bounds__((1 + PREFILL_CONSUMERS) * WARPGROUP, 1)
    attention_prefill_bf16(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters of) {
    attend<bf16>(p, of);
}

extern "C" __global__ void __launch_bounds__((1 + PREFILL_CONSUMERS) * WARPGROUP, 1)
    attention_prefill_fp16(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters of) {
    attend<fp16>(p, of);
}

}  // namespace narrowgauge
