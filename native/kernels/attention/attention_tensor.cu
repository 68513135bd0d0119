// attention_tensor: attention by tensor cores over a cache of FP8 or NVFP4. Operands and results: attention.cuh.
//
//   Sizes    head dimensions of k and v: multiples of 64 up to 256; pages of a multiple of 16 keys. Elements of a head are neighbours;
//            codes of a head begin at a multiple of 16 bytes, its block scales at one of 4
//   Launch: attention_tensor_TYPE with 64 threads, grid (splits, heads, tiles of 16 rows), sizeof(Shared) of dynamic shared memory;
//           then attention_merge_TYPE of attention.cu. Rows of a request and of a head of the cache: query times group + its head.
//   Numerics: tensor cores add 16 products at a time to a float32 accumulator, truncated as in gemm/tensor_core_model.cuh: of q and
//             k in the dtype of q, of p and v in float16. Elements times block scales are exact in both; p is rounded to float16 for
//             the second product and not for l. A NaN code of k counts as 480 with bfloat16 queries.
//
// The kernel is bound by reading the cache. Each of two warps takes tiles of 32 keys in turn, with an own maximum, and copies the next
// tile to shared memory while it multiplies. Of 16 keys, lane 4g + t has a quarter of the elements of keys g and g + 8 of k, and an
// eighth of those of keys 2t, 2t + 1, 2t + 8 and 2t + 9 of v: tensor cores add products in any order of columns, if both operands have
// the same one. A lane copies the codes that it reads itself.
#include "attention/attention.cuh"
#include "attention/pairs.cuh"

#ifndef KEY_DIM
#define KEY_DIM 128
#endif
#ifndef VALUE_DIM
#define VALUE_DIM 128
#endif
#ifndef CACHE_NIBBLES
#define CACHE_NIBBLES 0
#endif
#ifndef HAS_SOFTCAP
#define HAS_SOFTCAP (p.softcap > 0.0f)
#endif
#ifndef PAGE_SIZE
#define PAGE_SIZE static_cast<u32>(p.k.page_size)
#endif

namespace narrowgauge {

using ptx::Vector4;

constexpr int ROWS = 16, KEYS = 16, PARTS = 2, TILE_KEYS = PARTS * KEYS, WARPS = 2, STAGES = 2;
constexpr int RESIDENT = VALUE_DIM <= 128 && KEY_DIM <= 128 ? 6 : 2;  // blocks of a multiprocessor
constexpr bool NIBBLES = CACHE_NIBBLES != 0;
// Neighbouring elements of a lane, and pieces of so many that it has of a key: of k, and of v.
constexpr int KEY_PIECE = NIBBLES && KEY_DIM % 128 == 0 ? 32 : 16, KEY_PIECES = KEY_DIM / 4 / KEY_PIECE;
constexpr int VALUE_PIECE = VALUE_DIM % 128 == 0 ? 16 : 8, VALUE_PIECES = VALUE_DIM / 8 / VALUE_PIECE;
constexpr int KEY_BYTES = NIBBLES ? KEY_PIECE / 2 : KEY_PIECE, VALUE_BYTES = NIBBLES ? VALUE_PIECE / 2 : VALUE_PIECE;
constexpr int STEPS = KEY_PIECE / 4;  // of tensor cores over a piece of k

// Sixteen keys: the codes of each lane, and block scales in the order of the cache.
struct Part {
    alignas(16) u8 k[2][KEY_PIECES][WARP][KEY_BYTES];
    alignas(16) u8 v[4][VALUE_PIECES][WARP][VALUE_BYTES];
#if CACHE_NIBBLES
    alignas(4) u8 k_scales[KEYS * KEY_DIM / 16], v_scales[KEYS * VALUE_DIM / 16];
#endif
};

struct Shared {
    Vector4 q[KEY_PIECES][STEPS][WARP];  // of tensor cores' lanes
    union {
        Part parts[WARPS][STAGES][PARTS];
        struct {
            float sums[WARPS][ROWS][VALUE_DIM + 4];  // + 4: lanes of a warp write to different banks
            float maxima[WARPS][ROWS], weights[WARPS][ROWS];
        } merged;
    };
};

__device__ __forceinline__ int key_of_value(int t, int i) { return 2 * t + i % 2 + i / 2 * 8; }

// Place of a lane's codes of v. Those of a key are neighbours, and half a warp reads from different banks.
__device__ __forceinline__ int value_place(int lane) { return lane % 4 * 8 + (lane / 4 ^ (lane % 4 / 2 * 4)); }

// BYTES of global memory, or zeros.
template <int BYTES>
__device__ __forceinline__ void copy(void* target, const u8* source, bool present) {
#ifdef __CUDA_ARCH__
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(target));
    const int bytes = present ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(source), "n"(BYTES), "r"(bytes) : "memory");
    }
#else
    for (int i = 0; i < BYTES; ++i) static_cast<u8*>(target)[i] = present ? source[i] : u8{0};
#endif
}

template <int WORDS>
__device__ __forceinline__ void load_words(const u8 (&bytes)[4 * WORDS], u32 (&words)[WORDS]) {
    struct alignas(4 * WORDS) Words {
        u32 words[WORDS];
    };
    const Words loaded = *reinterpret_cast<const Words*>(bytes);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = loaded.words[i];
}

// ---- codes to pairs of T ---------------------------------------------------------------------------------------------

// Factors of small_e2m1 from four scales, RESTORE / REST.
template <class T>
__device__ __forceinline__ void scale_pairs(u32 codes, u32& low, u32& high) {
    constexpr u32 FACTOR = ptx::is_bf16<T> ? 0x7B007B00u : 0x58005800u;  // 2^119, 2^7
    e4m3_pairs<T>(codes, low, high);
    low = times<T>(low, FACTOR);
    high = times<T>(high, FACTOR);
}

// A piece of k, and in both halves the scales of its first 16 elements and of the next.
struct KeyPiece {
    u32 words[KEY_BYTES / 4], factors[2];
};

template <class T>
__device__ __forceinline__ void load_keys(const Part& part, int n, int piece, int lane, KeyPiece& keys) {
    load_words(part.k[n][piece][lane], keys.words);
#if CACHE_NIBBLES
    const u8* const scales = part.k_scales + (lane / 4 + 8 * n) * (KEY_DIM / 16) + (4 * piece + lane % 4) * (KEY_PIECE / 16);
    const u32 codes = KEY_PIECE == 32 ? *reinterpret_cast<const u16*>(scales) * 0x10001u : *scales * 0x0101u;
    scale_pairs<T>(codes, keys.factors[0], keys.factors[1]);
    if constexpr (KEY_PIECE == 32) {
        keys.factors[1] = bytes_of(keys.factors[0], 0, 0x3232);
        keys.factors[0] = bytes_of(keys.factors[0], 0, 0x1010);
    }
#endif
}

// Pairs of a piece of k for a step of tensor cores, in the order of `column_of`.
template <class T>
__device__ __forceinline__ void decode_keys(const KeyPiece& keys, int step, u32 (&pairs)[2]) {
#if CACHE_NIBBLES
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pairs[i] = times<T>(small_e2m1<T>(keys.words[step / 2], step % 2 * 2 + i), keys.factors[step / 4]);
    }
#else
    e4m3_pairs<T>(keys.words[step], pairs[0], pairs[1]);
#endif
}

// Column of a piece of k, and of q, that `decode_keys` has at `step` in pair i: the first of them, or the second.
__device__ __forceinline__ int column_of(int step, int i, int second) {
    return NIBBLES ? step / 2 * 8 + step % 2 * 2 + i + 4 * second : 4 * step + 2 * i + second;
}

// Elements of a piece of v: pairs of keys 0 and 1, and of keys 2 and 3, of a lane. `scale_places`: of their scales. `present`: a
// byte of ones for each of the four keys that exists.
__device__ __forceinline__ void decode_values(const Part& part, int piece, int lane, [[maybe_unused]] const int (&scale_places)[4], [[maybe_unused]] u32 present,
                                              u32 (&pairs)[VALUE_PIECE][2]) {
    u32 words[4][VALUE_BYTES / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) load_words(part.v[i][piece][value_place(lane)], words[i]);
#if CACHE_NIBBLES
    u32 scales = 0, factors[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) scales |= static_cast<u32>(part.v_scales[scale_places[i]]) << 8 * i;
    scales &= present;  // a swizzled word has scales of keys that do not exist, which may be NaN
    scale_pairs<fp16>(scales, factors[0], factors[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int w = 0; w < VALUE_PIECE / 8; ++w) {
            // Upper bytes of float16 of the lower nibbles of a word, and of the upper ones.
            const auto even = [](u32 x) { return (x << 4 & 0x80808080u) | (x << 1 & 0x0E0E0E0Eu); };
            const auto uneven = [](u32 x) { return (x & 0x80808080u) | (x >> 3 & 0x0E0E0E0Eu); };
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // two bytes of both keys
                const u32 merged = bytes_of(words[2 * i][w], words[2 * i + 1][w], half == 0 ? 0x5140 : 0x7362);
                const u32 bytes[2] = {even(merged), uneven(merged)};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 small = bytes_of(bytes[j % 2], 0, j < 2 ? 0x1404 : 0x3424);
                    pairs[8 * w + 4 * half + j][i] = times<fp16>(small, factors[i]);
                }
            }
        }
    }
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int w = 0; w < VALUE_BYTES / 4; ++w) {
            const u32 a = words[2 * i][w], b = words[2 * i + 1][w];
            ptx::cvt_rn_f16x2_e4m3x2(bytes_of(a, b, 0x5140), pairs[4 * w][i], pairs[4 * w + 1][i]);
            ptx::cvt_rn_f16x2_e4m3x2(bytes_of(a, b, 0x7362), pairs[4 * w + 2][i], pairs[4 * w + 3][i]);
        }
    }
#endif
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 bytes_to(int page, u32 bytes_of_page) {
    return static_cast<u64>(static_cast<u32>(page)) * bytes_of_page;
}

// Copies the block scales of 16 keys, as they lie. `row`: from one key to the next. `count`: of the keys that exist.
template <int DIM>
__device__ __forceinline__ void copy_scales(u8* target, const u8* source, u32 row, int count, bool swizzled, int lane) {
    constexpr int WORDS = DIM / 16 / 4;  // of a key
#pragma unroll
    for (int first = 0; first < KEYS * WORDS; first += WARP) {
        const int word = first + lane, key = word / WORDS;
        // Swizzled, the scales of four keys are neighbours.
        const bool present = swizzled ? word / (4 * WORDS) * 4 < count : key < count;
        if (key < KEYS) copy<4>(target + 4 * word, source + key * row + 4 * (word % WORDS), present);
    }
}

template <class T>
__device__ __forceinline__ void attend(const AttentionParameters& p) {
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
#else
    __shared__ Shared shared;
#endif
    const int thread = static_cast<int>(threadIdx.x), warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
    const int split = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    const Tile tile = tile_of<ROWS>(p, static_cast<int>(blockIdx.z));
    const int rows = tile.tokens.count * p.group;
    const int all_rows = p.heads * p.group;

    // Rows g and g + 8: their queries and keys.
    Keys keys[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = tile.first_row + g + 8 * half, query = row < rows ? row / p.group : 0;
        keys[half] = row < rows ? keys_of(p, tile.tokens, query) : Keys{0, 0};
        const T* source = static_cast<const T*>(p.q) + (tile.tokens.first + query) * p.token_stride +
                          (head * p.group + (row < rows ? row % p.group : 0)) * p.head_stride;
        for (int place = warp; place < KEY_PIECES * STEPS; place += WARPS) {
            const int piece = place / STEPS, step = place % STEPS;
            const T* columns = source + (4 * piece + t) * KEY_PIECE;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 low = row < rows ? columns[column_of(step, i, 0)].bits : 0u;
                const u32 high = row < rows ? columns[column_of(step, i, 1)].bits : 0u;
                shared.q[piece][step][lane].words[2 * i + half] = low | high << 16;
            }
        }
    }
    __syncthreads();
    // Keys that a row of the tile sees, in this split, and keys that all rows see.
    const int last_query = (tile.first_row + ROWS < rows ? tile.first_row + ROWS - 1 : rows - 1) / p.group;
    const Keys of_first = keys_of(p, tile.tokens, tile.first_row / p.group), of_last = keys_of(p, tile.tokens, last_query);
    const int split_first = split * p.keys_per_split, split_last = split_first + p.keys_per_split;
    const int first = (of_first.first > split_first ? of_first.first : split_first) / KEYS * KEYS;
    const int last = rows == 0 ? 0 : of_last.last < split_last ? of_last.last : split_last;
    const Keys of_all{of_last.first, of_first.last < last ? of_first.last : last};

    // Bytes from the first of 16 keys to what the lane copies.
    const int* const table = p.pages + static_cast<i64>(tile.request) * p.most_pages;
    const u32 page_size = PAGE_SIZE;
    const u8* const k_codes = p.k.codes + head * p.k.head;
    const u8* const v_codes = p.v.codes + head * p.v.head;
    const u32 k_page = static_cast<u32>(p.k.page), k_row = static_cast<u32>(p.k.offset);
    const u32 v_page = static_cast<u32>(p.v.page), v_row = static_cast<u32>(p.v.offset);
    u32 k_bytes[2], v_bytes[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) k_bytes[n] = (g + 8 * n) * k_row + t * KEY_BYTES;
#pragma unroll
    for (int i = 0; i < 4; ++i) v_bytes[i] = key_of_value(t, i) * v_row + g * VALUE_BYTES;
    int scale_places[VALUE_PIECES][4] = {};
#if CACHE_NIBBLES
    const u8* const k_scales = static_cast<const u8*>(p.k.scales) + head * p.k.scale_head;
    const u8* const v_scales = static_cast<const u8*>(p.v.scales) + head * p.v.scale_head;
    const u32 k_scale_page = static_cast<u32>(p.k.scale_page), v_scale_page = static_cast<u32>(p.v.scale_page);
    const u32 k_scale_row = static_cast<u32>(p.k.scale_offset);
    const u32 v_scale_row = p.v.swizzled ? VALUE_DIM / 16 : static_cast<u32>(p.v.scale_offset);
#pragma unroll
    for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = key_of_value(t, i), block = (8 * piece + g) * VALUE_PIECE / 16;
            scale_places[piece][i] =
                p.v.swizzled ? swizzled_place(VALUE_DIM / 16, key, block) : key * (VALUE_DIM / 16) + block;
        }
    }
#endif
    const auto page_of = [&](int key) { return key < last ? table[static_cast<u32>(key) / page_size] : 0; };
    // Copies `count` keys of 16 from `key` on, of a page. The codes of the others are zeros: 0 * NaN is NaN.
    const auto copy_keys = [&](int key, int count, int page, Part& part) {
        const u32 offset = static_cast<u32>(key) % page_size;
        const u8* const k = k_codes + bytes_to(page, k_page) + offset * k_row;
        const u8* const v = v_codes + bytes_to(page, v_page) + offset * v_row;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int piece = 0; piece < KEY_PIECES; ++piece) {
                copy<KEY_BYTES>(part.k[n][piece][lane], k + k_bytes[n] + 4 * piece * KEY_BYTES, g + 8 * n < count);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; ++piece) {
                copy<VALUE_BYTES>(part.v[i][piece][value_place(lane)], v + v_bytes[i] + 8 * piece * VALUE_BYTES,
                                  key_of_value(t, i) < count);
            }
        }
#if CACHE_NIBBLES
        copy_scales<KEY_DIM>(part.k_scales, k_scales + bytes_to(page, k_scale_page) + offset * k_scale_row, k_scale_row, count,
                             false, lane);
        copy_scales<VALUE_DIM>(part.v_scales, v_scales + bytes_to(page, v_scale_page) + offset * v_scale_row, v_scale_row, count,
                               p.v.swizzled, lane);
#endif
    };
    const auto load = [&](int key, int page, Part& part) {
        if (key + KEYS <= last) {
            copy_keys(key, KEYS, page, part);
        } else {
            copy_keys(key, last - key, page, part);
        }
    };

    float sums[VALUE_PIECES * VALUE_PIECE][4] = {};
    float m[2] = {no_score(), no_score()}, l[2] = {0.0f, 0.0f};
    const int halves = rows - tile.first_row > ROWS / 2 ? 2 : 1;  // of the tile, that have a row
    const float factor = score_factor(p, head) * (NIBBLES ? E2m1In<fp16>::REST : 1.0f);
    const int apart = WARPS * TILE_KEYS, start = first + warp * TILE_KEYS;
    int pages[PARTS];
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        const int key = start + stage * apart;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            pages[part] = page_of(key + part * KEYS);
            if (stage < STAGES - 1 && key < last) load(key + part * KEYS, pages[part], shared.parts[warp][stage][part]);
        }
        if (stage < STAGES - 1) ptx::cp_async_commit_group();
    }
    int turn = 0;
#pragma unroll 1
    for (int key = start; key < last; key += apart) {
        if (NIBBLES) ptx::bar_warp_sync();  // all lanes have read the scales that the next ones replace
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int next = key + (STAGES - 1) * apart;
            if (next < last) load(next + part * KEYS, pages[part], shared.parts[warp][turn == 0 ? STAGES - 1 : turn - 1][part]);
            pages[part] = page_of(next + apart + part * KEYS);
        }
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<STAGES - 1>();
        if (NIBBLES) ptx::bar_warp_sync();  // all lanes have copied their scales
        const Part(&parts)[PARTS] = shared.parts[warp][turn];
        turn = turn == STAGES - 1 ? 0 : turn + 1;
        float scores[2 * PARTS][4] = {};  // keys 8n + 2t and + 1 of row g, and of row g + 8
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; ++piece) {
            KeyPiece of_keys[2 * PARTS];
#pragma unroll
            for (int n = 0; n < 2 * PARTS; ++n) load_keys<T>(parts[n / 2], n % 2, piece, lane, of_keys[n]);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const Vector4 q = shared.q[piece][step][lane];
#pragma unroll
                for (int n = 0; n < 2 * PARTS; ++n) {
                    u32 pairs[2];
                    decode_keys<T>(of_keys[n], step, pairs);
                    ptx::mma_m16n8k16_f32<T>(scores[n], q.words, pairs);
                }
            }
        }
        const bool masked = key < of_all.first || key + TILE_KEYS > of_all.last;
        u32 weights[PARTS][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == halves) break;
            float largest = m[half];
#pragma unroll
            for (int n = 0; n < 2 * PARTS; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& s = scores[n][2 * half + i];
                    s *= factor;
                    if (HAS_SOFTCAP) s = capped_score(p, s);
                    const int of_score = key + 8 * n + 2 * t + i;
                    if (masked && (of_score < keys[half].first || of_score >= keys[half].last || of_score >= last)) {
                        s = no_score();
                    }
                    largest = fmaxf(largest, s);
                }
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
            if (largest > m[half]) {
                const float lower = exp2_approx(m[half] - largest);
                l[half] *= lower;
#pragma unroll
                for (int i = 0; i < VALUE_PIECES * VALUE_PIECE; ++i) {
                    sums[i][2 * half] *= lower;
                    sums[i][2 * half + 1] *= lower;
                }
                m[half] = largest;
            }
            const float subtracted = finite_maximum(largest);
#pragma unroll
            for (int n = 0; n < 2 * PARTS; ++n) {
                const float low = exp2_approx(scores[n][2 * half] - subtracted);
                const float high = exp2_approx(scores[n][2 * half + 1] - subtracted);
                l[half] += low + high;
                weights[n / 2][n % 2 * 2 + half] = rounded_pair<fp16>(low, high);
            }
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            u32 present = 0xFFFFFFFFu;
#if CACHE_NIBBLES
            if (key + TILE_KEYS > last) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (key + part * KEYS + key_of_value(t, i) >= last) present &= ~(0xFFu << 8 * i);
                }
            }
#endif
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; ++piece) {
                u32 values[VALUE_PIECE][2];
                decode_values(parts[part], piece, lane, scale_places[piece], present, values);
#pragma unroll
                for (int j = 0; j < VALUE_PIECE; ++j) {
                    ptx::mma_m16n8k16_f32<fp16>(sums[piece * VALUE_PIECE + j], weights[part], values[j]);
                }
            }
        }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // all warps have read their stages, whose memory the sums take

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        l[half] += __shfl_xor_sync(0xFFFFFFFFu, l[half], 1);
        l[half] += __shfl_xor_sync(0xFFFFFFFFu, l[half], 2);
        if (t == 0) {
            shared.merged.maxima[warp][g + 8 * half] = m[half];
            shared.merged.weights[warp][g + 8 * half] = l[half];
        }
#pragma unroll
        for (int i = 0; i < VALUE_PIECES * VALUE_PIECE; ++i) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {  // a lane of number g of the tile of tensor cores has column g: here 2t + n
                const int d = (i / VALUE_PIECE * 8 + 2 * t + n) * VALUE_PIECE + i % VALUE_PIECE;
                shared.merged.sums[warp][g + 8 * half][d] = sums[i][2 * half + n];
            }
        }
    }
    __syncthreads();
    const float rest = NIBBLES ? E2m1In<fp16>::REST : 1.0f;
    for (int place = thread; place < ROWS * VALUE_DIM; place += WARPS * WARP) {
        const int of_tile = place / VALUE_DIM, d = place % VALUE_DIM, row = tile.first_row + of_tile;
        if (row >= rows) break;
        float largest = no_score();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, shared.merged.maxima[w][of_tile]);
        const float subtracted = finite_maximum(largest);
        float sum = 0.0f, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float lower = exp2_approx(shared.merged.maxima[w][of_tile] - subtracted);
            sum += shared.merged.sums[w][of_tile][d] * lower;
            weight += shared.merged.weights[w][of_tile] * lower;
        }
        sum *= rest;
        const int of_token = head * p.group + row % p.group;
        const i64 target = static_cast<i64>(tile.tokens.first + row / p.group) * all_rows + of_token;
        if (p.splits == 1) {
            const float sunk = add_sink(p, of_token, largest, weight);
            store_output<T>(p, target * VALUE_DIM + d, sum * (output_factor(p, of_token, weight) * sunk));
            if (d == 0) store_lse(p, target, largest, weight);
        } else {
            const i64 of_split = static_cast<i64>(split) * p.tokens * all_rows + target;
            p.sums[of_split * VALUE_DIM + d] = sum;
            if (d == 0) {
                p.maxima[2 * of_split] = largest;
                p.maxima[2 * of_split + 1] = weight;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, RESIDENT) attention_tensor_bf16(const __grid_constant__ AttentionParameters p) {
    attend<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, RESIDENT) attention_tensor_fp16(const __grid_constant__ AttentionParameters p) {
    attend<fp16>(p);
}

}  // namespace narrowgauge
