// gemm_skinny_e4m3.cuh: out = a @ b.T (+ c) (+ bias), elements E4M3 of a byte, where a has few rows. Their contracts:
// gemm_skinny_mx.cu and gemm_skinny_fp8.cu.
//
// A block of 256 threads has 16 rows of a and some strips of 16 rows of b, one after the other. Elements become
// float16, exactly. Tensor cores add 16 products at a time to a float32 number, cut off as they do it (aligned_halves).
// Columns are taken 32 at a time: thread t of the four with a row has eight that follow each other, and gives the first
// four to one mma and the last four to the next. Of each 1024 columns, warp w of eight adds columns 128w to 128w + 127,
// in order of K; the sums of the warps are added in their order, one float32 rounding each.
//
// What takes the time is reading b. Each warp copies what it multiplies to shared memory of its own, four pieces ahead,
// and waits for no other one until all is multiplied. A piece is 16 rows of 128 columns. That of a comes first; it is
// decoded and stays in registers while those of four strips of b come and are multiplied by it. Then come the next
// columns.
//
// On an H200, 16 rows by N = K = 8192 took 18.8 us (MXFP8, in a CUDA graph), a bare read of b 16.6 us, and trials of
// this kernel 18.0 us without products; 20.7 us with 16 warps, of half the registers each; 18.9 us with five pieces
// ahead (and 4 % less than this where N = 4096), 20.0 us with nine; 19.2 us where the columns of a warp follow each
// other; 1 us more where what is read once does not leave the cache first. Scales cost nothing there: FP8 with one, or
// one of 128 columns, takes as long as MXFP8 (19.7 to 20.2 us between events).
#pragma once

#include "gemm/skinny/gemm_skinny.cuh"

constexpr int WARPS = 8, SKINNY_THREADS = WARPS * WARP;
constexpr int BLOCK = 32, BLOCKS = 4, CHUNK = BLOCKS * BLOCK;  // columns: of a scale; of a piece
constexpr int STRIPS = 4, ROWS = STRIPS * STRIP_ROWS;          // of b that are multiplied by the same columns of a
constexpr int PIECES = 1 + STRIPS;                             // of a and of each strip, from the same columns
constexpr int PAIRS = CHUNK / 8;                               // of float16, that a thread has of a row of a piece
constexpr u32 FOUR = 0x01010101u;                              // times a byte: four of them

// Scales of a row for the columns of a piece are a word: four bytes of MX, one float32 number of FP8 blocks.
template <class Rule>
constexpr bool OF_BYTES = Rule::WIDTH == BLOCK;
template <class Rule>
constexpr bool OF_FLOATS = Rule::WIDTH == CHUNK;
template <class Rule>
constexpr bool SCALED = OF_BYTES<Rule> || OF_FLOATS<Rule>;

struct alignas(8) Eight {
    u32 words[2];
};
struct alignas(16) Four {
    float each[4];
};
using Piece = u8[STRIP_ROWS][CHUNK];  // block j of row r lies at j ^ r % 4, so that threads read from different banks

struct alignas(128) Share {  // of a warp
    Piece pieces[PIECES];
    u32 scales[2][TOKENS + ROWS];  // of all pieces of some columns, and of the next: a row's
    Four factors[ROWS];            // of MX, of the columns at hand: what sums are multiplied by, of each block of b
    float sums[TOKENS][ROWS];
};
struct Shared {
    Share shares[WARPS];
};
static_assert(sizeof(Shared) == 128000, "what native/gemm/skinny.py asks for");

// What a block has to do: rows of a from `token` on, strips of b from `first` to before `last`.
struct Work {
    const u8 *a_codes, *a_scales, *b_codes, *b_scales;
    int tokens, rows, columns;  // of a, of b, of both
    int token, first, last;
    int a_shift, b_shift;  // 2^these rows have the same float32 scales

    // Rows of b before the end of the block's.
    __device__ __forceinline__ int end() const { return last * STRIP_ROWS < rows ? last * STRIP_ROWS : rows; }
};

__device__ __forceinline__ Work work_of(const u8* a_codes, const u8* a_scales, const u8* b_codes, const u8* b_scales,
                                        i64 m, i64 n, i64 k) {
    return {a_codes, a_scales, b_codes, b_scales, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)};
}

// ---- copying: cp.async of PTX ---------------------------------------------------------------------------------------

// Lines of the L2 cache that make room first.
__device__ __forceinline__ u64 read_once() {
    u64 policy = 0;
#ifdef __CUDA_ARCH__
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// 16 bytes; or 4, of which the L1 cache keeps what lies beside them, for other warps.
template <int BYTES>
__device__ __forceinline__ void copy_bytes(void* target, const u8* source) {
    static_assert(BYTES == 16 || BYTES == 4, "what cp.async has for these caches");
#ifdef __CUDA_ARCH__
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(target));
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
                     "l"(read_once())
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(source) : "memory");
    }
#else
    __builtin_memcpy(target, source, BYTES);
#endif
}

// A thread's copies since the last end of some are one of those that can be waited for.
__device__ __forceinline__ void end_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most PENDING of them have still to come.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Rows of an operand that are copied next, and how many are left of them.
struct Source {
    const u8* codes;
    int left;

    // A thread has 16 bytes of every fourth row.
    __device__ __forceinline__ void copy(Piece& piece, u32 columns) {
        const int lane = threadIdx.x % WARP, first = lane / 8, block = lane % 8 / 2;
        u8* const target = &piece[first][(block ^ first) * BLOCK + lane % 2 * 16];
#pragma unroll
        for (int row = 0; row < STRIP_ROWS; row += 4) {
            if (row + first < left) copy_bytes<16>(target + row * CHUNK, codes);
            codes += 4 * columns;
        }
        left -= STRIP_ROWS;
    }
};

// A warp's copies, piece after piece: of some columns, then of its next ones; last, of the next strips. There are none
// behind the last row of an operand, or when all has been copied.
template <class Rule>
struct Copies {
    Share& share;
    const Work& work;
    int strip, column, turn = 0;
    Source b = {};

    __device__ __forceinline__ Copies(Share& share, const Work& work, int start)
        : share(share), work(work), strip(start < work.columns ? work.first : work.last), column(start) {}

    __device__ __forceinline__ void copy(int piece) {
        Piece& target = share.pieces[piece];
        const u32 columns = work.columns;
        if (piece == 0) {
            const int lane = threadIdx.x % WARP, row = strip * STRIP_ROWS;
            const u32 start = column + lane % 8 * 16;
            b = {work.b_codes + (static_cast<u64>(row + lane / 8) * columns + start), work.end() - row};
            if (strip < work.last) {
                const u64 first = static_cast<u64>(work.token + lane / 8) * columns;
                Source a = {work.a_codes + (first + start), work.tokens - work.token};
                a.copy(target, columns);
                if constexpr (SCALED<Rule>) copy_scales();
            }
        } else {
            b.copy(target, columns);
        }
        end_copies();
        if (piece == PIECES - 1) next();
    }

    // Where there is no row, those of the last one: moderate, where the others are.
    __device__ __forceinline__ void copy_scales() {
        u32* const target = share.scales[turn % 2];
        const u32 width = work.columns / BLOCK, block = column / BLOCK;  // in bytes
        const auto copy = [&](const u8* scales, int place, int row, int rows, [[maybe_unused]] int shift) {
            u32 within = row < rows ? row : rows - 1;
            if constexpr (OF_FLOATS<Rule>) within >>= shift;
            copy_bytes<4>(target + place, scales + (static_cast<u64>(within) * width + block));
        };
        const int lane = threadIdx.x % WARP, first = strip * STRIP_ROWS;
        if (lane < TOKENS) copy(work.a_scales, lane, work.token + lane, work.tokens, work.a_shift);
#pragma unroll
        for (int row = lane; row < ROWS; row += WARP) {
            copy(work.b_scales, TOKENS + row, first + row, work.rows, work.b_shift);
        }
    }

    __device__ __forceinline__ void next() {
        ++turn;
        column += WARPS * CHUNK;
        if (column < work.columns) return;
        column %= WARPS * CHUNK;
        strip += STRIPS;
    }
};

// ---- multiplying ----------------------------------------------------------------------------------------------------

// Thread 4g + t has, of a piece, eight columns of each block of rows g and g + 8; of the sums of a strip, those of its
// rows g and g + 8 by tokens 2t and 2t + 1 of each group.

// Scales of a from 2^-5 to 2^7 times one power of two become part of its elements, which stay normal numbers: 2^-14 to
// 57344. P, which is cut off at the same places, is larger by as much: a multiple of 2^-23 and below 2^30. What is left
// of a's scale, times that of b, is 2^-126 to 2^97 where both are moderate. P times that is a number, so that a product
// and a sum that are rounded together are rounded as by themselves.
constexpr u32 DOWN = 5, SPAN = 12, BEFORE = 6;  // BEFORE: from the least of these scales to the first that there is
__device__ __forceinline__ bool moderate_token(u32 least) { return least + DOWN - 64u <= 96u; }
// Of four: from 2^-63 to 2^64, as the two highest bits of each differ.
__device__ __forceinline__ bool moderate_four(u32 scales) {
    return ((scales ^ scales << 1) & 0x80808080u) == 0x80808080u;
}
// Whether one of four, less the least, is none of 0 to the span. The first that is less than 0 is above 100 then.
__device__ __forceinline__ bool outside(u32 above) {
    return ((above | (above + (15u - SPAN) * FOUR)) & 0xF0F0F0F0u) != 0u;
}

__device__ __forceinline__ u32 byte_of(u32 word, int byte) { return word >> 8 * byte & 0xFFu; }

// Whether all threads of a warp say so.
__device__ __forceinline__ bool all_of_warp(bool mine) {
#ifdef __CUDA_ARCH__
    return __all_sync(0xFFFFFFFFu, mine) != 0;
#else
    u32 all = mine ? 1u : 0u;
    for (u32 lanes = 1; lanes < WARP; lanes *= 2) all &= __shfl_xor_sync(0xFFFFFFFFu, all, lanes);
    return all != 0u;
#endif
}

// Of row `half` * 8 + g.
__device__ __forceinline__ void decode(const Piece& piece, int half, int block, u32* pairs) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const Eight codes = *reinterpret_cast<const Eight*>(&piece[half * GROUP_ROWS + g][(block ^ g % 4) * BLOCK + 8 * t]);
#pragma unroll
    for (int i = 0; i < 2; ++i) e4m3_pairs(codes.words[i], pairs[2 * i], pairs[2 * i + 1]);
}

// Adds the sum of a block of MX, or that of all columns of a piece, of tokens 2t and 2t + 1 of a group and rows `row`
// and `row` + 8 of b.
template <class Rule, bool MODERATE>
__device__ __forceinline__ void add_block(const u32 (&scales)[TOKENS + ROWS], const Four (&factors)[2], int group,
                                          int row, int block, const float (&inner)[4], float (&sums)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 of_a = scales[group * GROUP_ROWS + 2 * t + i % 2], of_b = scales[TOKENS + row + i / 2 * 8];
        if constexpr (MODERATE) {
            sums[i] = __fmaf_rn(inner[i], factors[i / 2].each[block], sums[i]);
        } else if constexpr (OF_BYTES<Rule>) {
            float a_parts[2], b_parts[2];
            Rule::decode(0, byte_of(of_a, block), a_parts);
            Rule::decode(1, byte_of(of_b, block), b_parts);
            sums[i] = Rule::add(sums[i], inner[i], a_parts, b_parts);
        } else if constexpr (OF_FLOATS<Rule>) {
            sums[i] = Rule::add(sums[i], inner[i], {__uint_as_float(of_a)}, {__uint_as_float(of_b)});
        } else {
            sums[i] += inner[i];
        }
    }
}

// Adds the products of `count` strips of b, of the columns at hand. `above`: of MX, scales of rows g and g + 8 of a,
// less the least.
template <class Rule, bool MODERATE, class Take>
__device__ __forceinline__ void multiply_pieces(const Share& share, int turn, const u32 (&above)[GROUPS], int count,
                                                const Take& take, float (&sums)[STRIPS][GROUPS][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    u32 a[GROUPS][PAIRS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const u32 exponents = (above[group] + (15u - DOWN) * FOUR) << 2;  // as they lie in the high bytes of float16
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            u32* const pairs = a[group] + 4 * block;
            decode(share.pieces[0], group, block, pairs);
            if constexpr (MODERATE) {
                const u32 powers = byte_of(exponents, block) * 0x01000100u;
#pragma unroll
                for (int i = 0; i < 4; ++i) pairs[i] = multiply_pairs(pairs[i], powers);
            }
        }
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        take(1 + strip);
        if (strip >= count) continue;
        const int row = strip * STRIP_ROWS + g;
        Four factors[2];
        if constexpr (MODERATE) factors[0] = share.factors[row], factors[1] = share.factors[row + 8];
        float inner[GROUPS][4] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            u32 left[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) decode(share.pieces[1 + strip], half, block, left[half]);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                multiply_eight(inner[group], left[0], left[1], a[group] + 4 * block);
            }
            if (!OF_BYTES<Rule> && block + 1 < BLOCKS) continue;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                add_block<Rule, MODERATE>(share.scales[turn % 2], factors, group, row, block, inner[group],
                                          sums[strip][group]);
#pragma unroll
                for (int i = 0; i < 4; ++i) inner[group][i] = 0.0f;
            }
        }
    }
}

// Those of a row of tokens and of b in Share::sums: what threads write at once lies in different banks.
__device__ __forceinline__ int place_of_sum(int token, int row) { return token * ROWS + (row ^ token / 2 % 4 * 8); }

// The sums of all warps, of strips from `strip` on, to the output.
template <class Rule>
__device__ __forceinline__ void store_strips(const Rule& rule, const Shared& shared, const Work& work,
                                             const Epilogue& epilogue, int strip) {
    constexpr int EACH = 4;  // rows that follow each other
    static_assert(TOKENS * ROWS == SKINNY_THREADS * EACH, "each thread has so many");
    const int token = threadIdx.x / (ROWS / EACH), row = threadIdx.x % (ROWS / EACH) * EACH;
    Four sum;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float* const sums = &shared.shares[warp].sums[0][0] + place_of_sum(token, row);
        const Four part = *reinterpret_cast<const Four*>(sums);
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum.each[i] = warp == 0 ? part.each[i] : sum.each[i] + part.each[i];
    }
    const int x = strip * STRIP_ROWS + row, y = work.token + token, count = y < work.tokens ? work.end() - x : 0;
    const i64 n = work.rows;
    if (!SCALED<Rule> || epilogue.c != nullptr || epilogue.bias != nullptr) {  // else that code need not be fetched
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (i < count) sum.each[i] = output(rule, epilogue, sum.each[i], y, x + i, n);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (i < count) store_as(epilogue.out, epilogue.out_type, y * n + x + i, sum.each[i]);
    }
}

// Of MX: writes the factors of b and what is above the least scale of a; whether those this thread sees are moderate.
__device__ __forceinline__ bool prepare_scales(Share& share, int turn, u32 (&above)[GROUPS]) {
    const int lane = threadIdx.x % WARP, g = lane / 4;
    const u32* const scales = share.scales[turn % 2];
    const u32 least = byte_of(scales[0], 0) - BEFORE;
    bool moderate = moderate_token(least);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        above[group] = scales[group * GROUP_ROWS + g] - least * FOUR;
        moderate &= !outside(above[group]);
    }
#pragma unroll
    for (int row = lane; row < ROWS; row += WARP) {
        const u32 own = scales[TOKENS + row], product = own + (least + DOWN - 127u) * FOUR;
        moderate &= moderate_four(own);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            share.factors[row].each[block] = __uint_as_float(byte_of(product, block) << 23);
        }
    }
    return moderate;
}

template <class Rule>
__device__ __forceinline__ void multiply_rows(const Rule& rule, Shared& shared, const Work& work,
                                              const Epilogue& epilogue) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    Share& share = shared.shares[warp];
    Copies<Rule> copies(share, work, warp * CHUNK);
#pragma unroll 1
    for (int piece = 0; piece < PIECES - 1; ++piece) copies.copy(piece);
    // A piece has come, and the one before it makes room.
    const auto take = [&](int piece) {
        wait_for_copies<PIECES - 2>();
        meet_in_warp();
        copies.copy((piece + PIECES - 1) % PIECES);
    };
    int turn = 0;
    for (int strip = work.first; strip < work.last; strip += STRIPS) {
        float sums[STRIPS][GROUPS][4] = {};
#pragma unroll 1
        for (int column = warp * CHUNK; column < work.columns; column += WARPS * CHUNK, ++turn) {
            take(0);
            u32 above[GROUPS] = {};
            bool moderate = false;
            if constexpr (OF_BYTES<Rule>) moderate = prepare_scales(share, turn, above);
            const int count = work.last - strip;
            if (OF_BYTES<Rule> && all_of_warp(moderate)) {
                multiply_pieces<Rule, OF_BYTES<Rule>>(share, turn, above, count, take, sums);
            } else {
                multiply_pieces<Rule, false>(share, turn, above, count, take, sums);
            }
        }
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = group * GROUP_ROWS + 2 * t + i % 2, row = s * STRIP_ROWS + g + i / 2 * 8;
                    (&share.sums[0][0])[place_of_sum(token, row)] = sums[s][group][i];
                }
            }
        }
        __syncthreads();
        store_strips(rule, shared, work, epilogue, strip);
        if (strip + STRIPS < work.last) __syncthreads();
    }
}

// What a kernel does. `each`: strips of b a block.
template <class Rule>
__device__ __forceinline__ void multiply_skinny(const Rule& rule, Work work, const Epilogue& epilogue, int each) {
#ifdef __CUDA_ARCH__
    alignas(128) extern __shared__ u8 room[];
    Shared& shared = *reinterpret_cast<Shared*>(room);
#else
    __shared__ Shared shared;
#endif
    const int strips = (work.rows + STRIP_ROWS - 1) / STRIP_ROWS;
    work.token = static_cast<int>(blockIdx.x) * TOKENS;
    work.first = static_cast<int>(blockIdx.y) * each;
    work.last = strips - work.first < each ? strips : work.first + each;
    multiply_rows(rule, shared, work, epilogue);
}
