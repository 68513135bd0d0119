// attention_tensor: attention by tensor cores over a cache of FP8 or NVFP4. Operands and results: attention.cuh.
//
//   Sizes    head dimensions of k and v: multiples of 64 up to 256; pages of a multiple of 16 keys. Elements of a head are neighbours;
//            codes of a head begin at a multiple of 16 bytes, its block scales at one of 4
//   Launch: attention_tensor_TYPE with 64 threads, grid (splits, heads, tiles of ROWS rows), sizeof(Shared) of dynamic shared memory;
//           then attention_merge_TYPE of attention.cu. Rows of a request and of a head of the cache: query times group + its head.
//   Numerics: tensor cores add 16 products at a time to a float32 accumulator, truncated as in gemm/tensor_core_model.cuh: of k and q
//             in the dtype of q, of v and p in float16. Elements times block scales are exact in both; p is rounded to float16 for
//             the second product and not for l. A NaN code of k counts as 480 with bfloat16 queries.
//
// The instructions that decode the cache bound the kernel. Keys, and then columns of v, are the 16 rows of the tensor cores' tile, and
// rows of q its 8 columns: a decoding of 8 heads of q for a head of the cache has no idle column. Each of two warps takes tiles of 32
// keys in turn, with an own maximum, and copies the next tile to shared memory while it multiplies. Of 16 keys, lane 4g + t has a
// quarter of the elements of keys g and g + 8 of k, and an eighth of those of keys 2t, 2t + 1, 2t + 8 and 2t + 9 of v: tensor cores
// add products in any order of columns, if both operands have the same one. A lane copies the codes that it reads itself.
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
#ifndef ROW_TILES
#define ROW_TILES 2
#endif
#ifndef BLOCK_HEADS
#define BLOCK_HEADS 1
#define RESIDENT_BLOCKS 1
#endif
#ifndef SWIZZLED
#define SWIZZLED p.v.swizzled
#endif
// Tokens of a page, and bytes from a token to the next. On a GPU the macros have these values.
#ifndef PAGE_SIZE
#define PAGE_SIZE static_cast<u32>(p.k.page_size)
#endif
#ifndef KEY_STRIDE
#define KEY_STRIDE static_cast<u32>(p.k.offset)
#define VALUE_STRIDE static_cast<u32>(p.v.offset)
#define KEY_SCALE_STRIDE static_cast<u32>(p.k.scale_offset)
#define VALUE_SCALE_STRIDE static_cast<u32>(p.v.scale_offset)
#endif

namespace narrowgauge {

constexpr int ROWS = 8 * ROW_TILES, KEYS = 16, PARTS = 2, TILE_KEYS = PARTS * KEYS, WARPS = 2, STAGES = 2;
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

union Shared {
    Part parts[WARPS][STAGES][PARTS];
    struct {
        float sums[WARPS][ROWS][VALUE_DIM + 4];  // + 4: lanes of a warp write to different banks
        float maxima[WARPS][ROWS], weights[WARPS][ROWS];
    } merged;
};

__device__ __forceinline__ int key_of_value(int t, int i) { return 2 * t + i % 2 + i / 2 * 8; }

// Place of a lane's codes of v. Those of a key are neighbours, and half a warp reads from different banks.
__device__ __forceinline__ int value_place(int lane) { return lane % 4 * 8 + (lane / 4 ^ (lane % 4 / 2 * 4)); }

// A lane copies 16 bytes of v for itself, or 8 bytes for itself and for the lane beside it in a key: of key `copied_row` of each
// COPIED_LANES, from the columns of lane 4 * `copied_column` + t on.
constexpr int COPIED_LANES = VALUE_BYTES == 8 ? 2 : 1;
__device__ __forceinline__ int copied_row(int g) { return g % COPIED_LANES; }
__device__ __forceinline__ int copied_column(int g) { return g / COPIED_LANES * COPIED_LANES; }

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
    const u32 codes = KEY_PIECE == 32 ? *reinterpret_cast<const u16*>(scales) : *scales * 0x0101u;
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

// Offset of a word of the block scales of KEYS keys. `row`: from one key to the next.
template <int DIM>
__device__ __forceinline__ u32 scale_word(u32 row, int word) {
    constexpr int WORDS = DIM / 16 / 4;  // of a key
    return word / WORDS * row + 4 * (word % WORDS);
}

// Copies the block scales of KEYS keys, as they lie. `source`: the word of the lane. `count`: of the keys that exist.
template <int DIM>
__device__ __forceinline__ void copy_scales(u8* target, const u8* source, u32 row, int count, bool swizzled, int lane) {
    constexpr int WORDS = DIM / 16 / 4;
#pragma unroll
    for (int first = 0; first < KEYS * WORDS; first += WARP) {
        const int word = first + lane, key = word / WORDS;
        // Swizzled, the scales of four keys are neighbours.
        const bool present = swizzled ? word / (4 * WORDS) * 4 < count : key < count;
        const u32 place = WARP % WORDS == 0 ? first / WORDS * row : scale_word<DIM>(row, word) - scale_word<DIM>(row, lane);
        if (key < KEYS) copy<4>(target + 4 * word, source + place, present);
    }
}

template <class T>
__device__ __forceinline__ void attend(const AttentionParameters& p) {
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 dynamic_shared[];
    Shared* const of_heads = reinterpret_cast<Shared*>(dynamic_shared);
#else
    __shared__ Shared of_heads[BLOCK_HEADS];
#endif
    constexpr int THREADS = WARPS * WARP;  // of a head
    const int thread = static_cast<int>(threadIdx.x) % THREADS, head_of_block = static_cast<int>(threadIdx.x) / THREADS;
    const int warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
    const int split = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y) * BLOCK_HEADS + head_of_block;
    Shared& shared = of_heads[head_of_block];
    const Tile tile = tile_of<ROWS>(p, static_cast<int>(blockIdx.z));
    const int rows = tile.tokens.count * p.group;
    const int all_rows = p.heads * p.group;

    // Of each tile of 8 rows: row g of q, and the keys that rows 2t and 2t + 1 see.
    u32 q[ROW_TILES][KEY_PIECES][STEPS][2];
    Keys keys[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        const int of_lane = tile.first_row + 8 * r + g, query = of_lane < rows ? of_lane / p.group : 0;
        const T* source = static_cast<const T*>(p.q) + (tile.tokens.first + query) * p.token_stride +
                          (head * p.group + (of_lane < rows ? of_lane % p.group : 0)) * p.head_stride + t * KEY_PIECE;
#pragma unroll
        for (int place = 0; place < KEY_PIECES * STEPS * 2; ++place) {
            const int piece = place / (2 * STEPS), step = place / 2 % STEPS, i = place % 2;
            const T* columns = source + 4 * piece * KEY_PIECE;
            const u32 low = of_lane < rows ? columns[column_of(step, i, 0)].bits : 0u;
            const u32 high = of_lane < rows ? columns[column_of(step, i, 1)].bits : 0u;
            q[r][piece][step][i] = low | high << 16;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = tile.first_row + 8 * r + 2 * t + i;
            keys[r][i] = row < rows ? keys_of(p, tile.tokens, row / p.group) : Keys{0, 0};
        }
    }
    // Keys that a row of the tile sees, in this split, and keys that all rows see.
    const int last_query = (tile.first_row + ROWS < rows ? tile.first_row + ROWS - 1 : rows - 1) / p.group;
    const Keys of_first = keys_of(p, tile.tokens, tile.first_row / p.group), of_last = keys_of(p, tile.tokens, last_query);
    const int split_first = split * p.keys_per_split, split_last = split_first + p.keys_per_split;
    const int first = (of_first.first > split_first ? of_first.first : split_first) / TILE_KEYS * TILE_KEYS;
    const int last = rows == 0 ? 0 : of_last.last < split_last ? of_last.last : split_last;
    const Keys of_all{of_last.first, of_first.last < last ? of_first.last : last};

    // What the lane copies of the first 16 keys of page 0.
    const int* const table = p.pages + static_cast<i64>(tile.request) * p.most_pages;
    const u32 page_size = PAGE_SIZE, k_row = KEY_STRIDE, v_row = VALUE_STRIDE;
    const u8* const k_codes = p.k.codes + head * p.k.head + g * k_row + t * KEY_BYTES;
    const u8* const v_codes = p.v.codes + head * p.v.head + key_of_value(t, copied_row(g)) * v_row + copied_column(g) * VALUE_BYTES;
    const u32 k_page = static_cast<u32>(p.k.page), v_page = static_cast<u32>(p.v.page);
    int scale_places[VALUE_PIECES][4] = {};
#if CACHE_NIBBLES
    const u32 k_scale_row = KEY_SCALE_STRIDE, v_scale_row = SWIZZLED ? VALUE_DIM / 16 : VALUE_SCALE_STRIDE;
    const u8* const k_scales = static_cast<const u8*>(p.k.scales) + head * p.k.scale_head + scale_word<KEY_DIM>(k_scale_row, lane);
    const u8* const v_scales = static_cast<const u8*>(p.v.scales) + head * p.v.scale_head + scale_word<VALUE_DIM>(v_scale_row, lane);
    const u32 k_scale_page = static_cast<u32>(p.k.scale_page), v_scale_page = static_cast<u32>(p.v.scale_page);
#pragma unroll
    for (int piece = 0; piece < VALUE_PIECES; ++piece) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = key_of_value(t, i), block = (8 * piece + g) * VALUE_PIECE / 16;
            scale_places[piece][i] = SWIZZLED ? swizzled_place(VALUE_DIM / 16, key, block) : key * (VALUE_DIM / 16) + block;
        }
    }
#endif
    const auto page_of = [&](int key) { return static_cast<u32>(key < last ? table[static_cast<u32>(key) / page_size] : 0); };
    // Copies parts of a page from `key` on, of which `count` keys exist. The codes of the others are zeros: 0 * NaN is NaN.
    const auto copy_parts = [&](int key, int count, u32 page, Part* parts, int several) {
        const u32 offset = static_cast<u32>(key) % page_size;
        const auto place = [&](const u8* first_page, u32 of_page, u32 row) {
            return first_page + static_cast<u64>(page) * of_page + static_cast<u64>(offset) * row;
        };
        const u8* const k = place(k_codes, k_page, k_row);
        const u8* const v = place(v_codes, v_page, v_row);
#if CACHE_NIBBLES
        const u8* const of_k = place(k_scales, k_scale_page, k_scale_row);
        const u8* const of_v = place(v_scales, v_scale_page, v_scale_row);
#endif
#pragma unroll
        for (int part = 0; part < several; ++part) {
            const int before = part * KEYS;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int piece = 0; piece < KEY_PIECES; ++piece) {
                    copy<KEY_BYTES>(parts[part].k[n][piece][lane], k + (before + 8 * n) * k_row + 4 * piece * KEY_BYTES,
                                    before + g + 8 * n < count);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i += COPIED_LANES) {
                const int row = i + copied_row(g);
#pragma unroll
                for (int piece = 0; piece < VALUE_PIECES; ++piece) {
                    copy<COPIED_LANES * VALUE_BYTES>(parts[part].v[row][piece][value_place(4 * copied_column(g) + t)],
                                                     v + (before + key_of_value(0, i)) * v_row + 8 * piece * VALUE_BYTES,
                                                     before + key_of_value(t, row) < count);
                }
            }
#if CACHE_NIBBLES
            copy_scales<KEY_DIM>(parts[part].k_scales, of_k + before * k_scale_row, k_scale_row, count - before, false, lane);
            copy_scales<VALUE_DIM>(parts[part].v_scales, of_v + before * v_scale_row, v_scale_row, count - before, SWIZZLED, lane);
#endif
        }
    };
    const bool whole = page_size % TILE_KEYS == 0;  // a tile is of one page
    u32 pages[PARTS];
    const auto find_pages = [&](int key) {
        pages[0] = page_of(key);
#pragma unroll
        for (int part = 1; part < PARTS; ++part) pages[part] = whole ? pages[0] : page_of(key + part * KEYS);
    };
    const auto load = [&](int key, Part* parts) {
        if (whole && key + TILE_KEYS <= last) {
            copy_parts(key, TILE_KEYS, pages[0], parts, PARTS);
            return;
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            copy_parts(key + part * KEYS, last - key - part * KEYS, pages[part], parts + part, 1);
        }
    };

    float sums[ROW_TILES][VALUE_PIECES * VALUE_PIECE / 2][4] = {};
    float m[ROW_TILES][2], l[ROW_TILES][2] = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) m[r][0] = m[r][1] = no_score();
    const float factor = score_factor(p, head) * (NIBBLES ? E2m1In<fp16>::REST : 1.0f);
    const int apart = WARPS * TILE_KEYS, start = first + warp * TILE_KEYS;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        const int key = start + stage * apart;
        find_pages(key);
        if (stage < STAGES - 1) {
            if (key < last) load(key, shared.parts[warp][stage]);
            ptx::cp_async_commit_group();
        }
    }
    int turn = 0;
#pragma unroll 1
    for (int key = start; key < last; key += apart) {
        if (NIBBLES) ptx::bar_warp_sync();  // all lanes have read the scales that the next ones replace
        const int next = key + (STAGES - 1) * apart;
        if (next < last) load(next, shared.parts[warp][turn == 0 ? STAGES - 1 : turn - 1]);
        find_pages(next + apart);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<STAGES - 1>();
        if (NIBBLES) ptx::bar_warp_sync();  // all lanes have copied their scales
        const Part(&parts)[PARTS] = shared.parts[warp][turn];
        turn = turn == STAGES - 1 ? 0 : turn + 1;

        float scores[PARTS][ROW_TILES][4] = {};  // keys g and g + 8: of rows 2t and 2t + 1 each
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; ++piece) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                KeyPiece of_keys[2];
#pragma unroll
                for (int n = 0; n < 2; ++n) load_keys<T>(parts[part], n, piece, lane, of_keys[n]);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    u32 pairs[2][2];
#pragma unroll
                    for (int n = 0; n < 2; ++n) decode_keys<T>(of_keys[n], step, pairs[n]);
                    const u32 a[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) ptx::mma_m16n8k16_f32<T>(scores[part][r], a, q[r][piece][step]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int n = 0; n < 4 * PARTS; ++n) {
                float& s = scores[n / 4][r][n % 4];
                s *= factor;
                if (HAS_SOFTCAP) s = capped_score(p, s);
            }
        }
        if (key < of_all.first || key + TILE_KEYS > of_all.last) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int n = 0; n < 4 * PARTS; ++n) {
                    const int of_score = key + 8 * (n / 2) + g;
                    const Keys& seen = keys[r][n % 2];
                    if (of_score < seen.first || of_score >= seen.last || of_score >= last) scores[n / 4][r][n % 4] = no_score();
                }
            }
        }
        float largest[ROW_TILES][2];
        bool grows = false;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                largest[r][i] = m[r][i];
#pragma unroll
                for (int n = 0; n < 2 * PARTS; ++n) largest[r][i] = fmaxf(largest[r][i], scores[n / 2][r][n % 2 * 2 + i]);
                grows = grows || largest[r][i] > m[r][i];
            }
        }
        if (ptx::vote_any(grows)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int distance = 4; distance < WARP; distance *= 2) {
                        largest[r][i] = fmaxf(largest[r][i], __shfl_xor_sync(0xFFFFFFFFu, largest[r][i], distance));
                    }
                    const float lower = largest[r][i] > m[r][i] ? exp2_approx(m[r][i] - largest[r][i]) : 1.0f;
                    m[r][i] = largest[r][i];
                    l[r][i] *= lower;
#pragma unroll
                    for (auto& sum : sums[r]) {
                        sum[i] *= lower;
                        sum[2 + i] *= lower;
                    }
                }
            }
        }
        u32 weights[PARTS][ROW_TILES][2];  // row g: keys 2t and 2t + 1, and 2t + 8 and 2t + 9
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const float subtracted[2] = {finite_maximum(m[r][0]), finite_maximum(m[r][1])};
#pragma unroll
            for (int n = 0; n < 2 * PARTS; ++n) {
                float of_rows[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    of_rows[i] = exp2_approx(scores[n / 2][r][n % 2 * 2 + i] - subtracted[i]);
                    l[r][i] += of_rows[i];
                }
                weights[n / 2][r][n % 2] = ptx::movmatrix_m8n8_trans(rounded_pair<fp16>(of_rows[0], of_rows[1]));
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
                for (int j = 0; j < VALUE_PIECE; j += 2) {
                    const u32 a[4] = {values[j][0], values[j + 1][0], values[j][1], values[j + 1][1]};
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
                        ptx::mma_m16n8k16_f32<fp16>(sums[r][(piece * VALUE_PIECE + j) / 2], a, weights[part][r]);
                    }
                }
            }
        }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // all warps have read their stages, whose memory the sums take

#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * r + 2 * t + i;
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) {
                l[r][i] += __shfl_xor_sync(0xFFFFFFFFu, l[r][i], distance);
            }
            if (g == 0) {
                shared.merged.maxima[warp][row] = m[r][i];
                shared.merged.weights[warp][row] = l[r][i];
            }
#pragma unroll
            for (int j = 0; j < VALUE_PIECES * VALUE_PIECE; ++j) {
                const int d = (j / VALUE_PIECE * 8 + g) * VALUE_PIECE + j % VALUE_PIECE;
                shared.merged.sums[warp][row][d] = sums[r][j / 2][j % 2 * 2 + i];
            }
        }
    }
    __syncthreads();
    const float rest = NIBBLES ? E2m1In<fp16>::REST : 1.0f;
    for (int place = thread; place < ROWS * VALUE_DIM; place += THREADS) {
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

extern "C" __global__ void __launch_bounds__(BLOCK_HEADS * WARPS * WARP, RESIDENT_BLOCKS) attention_tensor_bf16(const __grid_constant__ AttentionParameters p) {
    attend<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(BLOCK_HEADS * WARPS * WARP, RESIDENT_BLOCKS) attention_tensor_fp16(const __grid_constant__ AttentionParameters p) {
    attend<fp16>(p);
}

}  // namespace narrowgauge
