// gemm_skinny.cuh: products of a few rows, on tensor cores. Its contract: gemm_skinny.cu.
//
// What such a product takes is the time to read b, so b goes from memory to registers, is decoded there to float16, and is
// the operand of 16 rows of mma.m16n8k16; 8 rows of a are the other one. Warps of a block share the same rows of b and
// take columns of K in turn; their sums meet in shared memory.
#pragma once

#include "gemm_mx.cuh"
#include "gemm_nvfp4.cuh"

constexpr int WARP = 32, WARPS = 8, SKINNY_THREADS = WARPS * WARP;
constexpr int STRIPS = 2, STRIP_ROWS = 16;  // of rows of b that a block makes, and rows of one
constexpr int SKINNY_ROWS = STRIPS * STRIP_ROWS;
constexpr int TOKENS = 8;                 // rows of a in one mma
constexpr int PART_STRIDE = SKINNY_ROWS + 4;  // so that what a warp writes at once lies in different banks

// ---- float16, two in a word --------------------------------------------------------------------------------------------

__device__ __forceinline__ float low_half(u32 pair) { return to_float(fp16{static_cast<u16>(pair)}); }
__device__ __forceinline__ float high_half(u32 pair) { return to_float(fp16{static_cast<u16>(pair >> 16)}); }

__device__ __forceinline__ u32 half_pair(float low, float high) {
    fp16 halves[2];
    from_float(low, halves[0]);
    from_float(high, halves[1]);
    return halves[0].bits | static_cast<u32>(halves[1].bits) << 16;
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    return half_pair(low_half(a) * low_half(b), high_half(a) * high_half(b));
#endif
}

// Two codes of E4M3, exactly.
__device__ __forceinline__ u32 e4m3_pair(u32 codes) {
#ifdef HAS_CVT_FP8
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(codes)));
    return pair;
#else
    return half_pair(e4m3_to_float(codes & 0xFFu), e4m3_to_float(codes >> 8 & 0xFFu));
#endif
}

// Four of them.
__device__ __forceinline__ void e4m3_pairs(u32 codes, u32& low, u32& high) {
#ifdef HAS_CVT_FP8
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(codes));
#else
    low = e4m3_pair(codes);
    high = e4m3_pair(codes >> 16);
#endif
}

// Eight codes of E2M1 as those of E4M3, which stand for 2^-6 of it: the even ones, the odd ones.
__device__ __forceinline__ u32 even_as_e4m3(u32 codes) { return (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu); }
__device__ __forceinline__ u32 odd_as_e4m3(u32 codes) { return (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu); }

// ---- memory ------------------------------------------------------------------------------------------------------------

struct alignas(16) Sixteen {
    u32 words[4];
};
struct alignas(8) Eight {
    u32 words[2];
};

__device__ __forceinline__ Sixteen load_once(const Sixteen* source) {
#ifdef __CUDA_ARCH__
    Sixteen found;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3]) : "l"(source));
    return found;
#else
    return *source;
#endif
}

__device__ __forceinline__ Eight load_once(const Eight* source) {
#ifdef __CUDA_ARCH__
    Eight found;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(found.words[0]), "=r"(found.words[1]) : "l"(source));
    return found;
#else
    return *source;
#endif
}

// ---- tensor cores ------------------------------------------------------------------------------------------------------

#ifndef __CUDA_ARCH__
constexpr int KEPT_BITS = 25;

// acc + a[0]*b[0] + ... + a[15]*b[15] as tensor cores of Hopper add float16: the exact products and acc are aligned to the
// largest exponent among them, that of a product being the sum of its factors', and cut off behind 25 bits; their sum is
// cut off to a float32. numerics.md has no more of it than tolerance.md, rule 2.
inline float aligned_halves(float acc, const float (&a)[16], const float (&b)[16]) {
    int largest = -100000, exponents[17];
    double terms[17];
    float special = 0.0f;
    for (int i = 0; i < 17; ++i) {
        const float x = i < 16 ? a[i] : acc, y = i < 16 ? b[i] : 1.0f;
        terms[i] = static_cast<double>(x) * static_cast<double>(y);
        if (!__builtin_isfinite(terms[i])) special += static_cast<float>(terms[i]);
        int left = 0, right = 0;
        __builtin_frexp(static_cast<double>(x), &left);
        __builtin_frexp(static_cast<double>(y), &right);
        exponents[i] = left + right - 2;
        if (terms[i] != 0.0 && exponents[i] > largest) largest = exponents[i];
    }
    if (special != 0.0f) return special;  // NaN, too
    if (largest == -100000) return 0.0f;
    double sum = 0.0;  // of numbers of at most 32 bits on one grid: exact
    for (const double term : terms) sum += __builtin_trunc(__builtin_ldexp(term, KEPT_BITS - largest));
    sum = __builtin_ldexp(sum, largest - KEPT_BITS);
    const float near = static_cast<float>(sum);
    if (__builtin_fabs(static_cast<double>(near)) <= __builtin_fabs(sum)) return near;
    return __uint_as_float(__float_as_uint(near) - 1u);
}
#endif

// d += a * b^T of 16 rows of a (four pairs of float16 a thread) and 8 of b (two), over 16 columns: mma.m16n8k16 of PTX,
// where thread 4·g + t has rows g and g + 8 of a and g of b, columns 2t, 2t + 1 and those 8 behind them.
__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const u32 lane = threadIdx.x % WARP;
    u64 upper[WARP], lower[WARP], others[WARP];
    const u64 mine[3] = {a[0] | static_cast<u64>(a[2]) << 32, a[1] | static_cast<u64>(a[3]) << 32, b[0] | static_cast<u64>(b[1]) << 32};
    for (u32 lanes = 0; lanes < WARP; ++lanes) {
        upper[lane ^ lanes] = __shfl_xor_sync(0xFFFFFFFFu, mine[0], lanes);
        lower[lane ^ lanes] = __shfl_xor_sync(0xFFFFFFFFu, mine[1], lanes);
        others[lane ^ lanes] = __shfl_xor_sync(0xFFFFFFFFu, mine[2], lanes);
    }
    const auto row = [](const u64* from, u32 first, float (&values)[16]) {
        for (u32 t = 0; t < 4; ++t) {
            for (u32 half = 0; half < 2; ++half) {
                const u32 pair = static_cast<u32>(from[first + t] >> 32 * half);
                values[2 * t + 8 * half] = low_half(pair);
                values[2 * t + 8 * half + 1] = high_half(pair);
            }
        }
    };
    float left[16], right[16];
    for (u32 i = 0; i < 4; ++i) {
        row(i < 2 ? upper : lower, lane / 4 * 4, left);
        row(others, (lane % 4 * 2 + i % 2) * 4, right);
        d[i] = aligned_halves(d[i], left, right);
    }
#endif
}

// The same over 32 columns: four pairs of two rows of a strip, and of a row of tokens.
__device__ __forceinline__ void multiply_eight(float (&d)[4], const u32 (&top)[4], const u32 (&bottom)[4], const u32 (&right)[4]) {
    multiply_halves(d, {top[0], bottom[0], top[1], bottom[1]}, {right[0], right[1]});
    multiply_halves(d, {top[2], bottom[2], top[3], bottom[3]}, {right[2], right[3]});
}

// ---- what a format is --------------------------------------------------------------------------------------------------

// Each has
//   COLUMNS, SPAN  of K that a warp takes at a time, and bytes of their codes in a row
//   Chunk          what a thread has of a row of them
//   load(codes, scales): a chunk of a row, of where the thread's codes and the row's scales of the columns begin
//   multiply(b, a, scales, sums): all of it, of four rows of b and one of each group of a that a thread has; `scales` are
//                  those of the two rows of a of which it has sums
// and how far apart chunks are.

struct SkinnyNvfp4 {
    using Rule = Nvfp4;
    static constexpr int COLUMNS = 128, SPAN = 64, SCALES = 8, EACH_CODES = 16, EACH_SCALES = 2;
    static constexpr bool OTHER_SCALES = false;

    struct Chunk {
        Sixteen codes;
        u32 scales;  // a block in each of two bytes
    };

    static __device__ __forceinline__ Chunk load(const u8* codes, const u8* scales) {
        return {load_once(reinterpret_cast<const Sixteen*>(codes)), *reinterpret_cast<const u16*>(scales)};
    }

    struct Scales {
        u32 pairs[2];
    };

    // Each of the two twice, times 2^6 for the 2^-6 of elements. Products of the two are exact float16 numbers: at most 6
    // bits, from 2^-10 to 2688.
    static __device__ __forceinline__ Scales scales(const Chunk& chunk) {
        const u32 two = multiply_pairs(e4m3_pair(chunk.scales), 0x54005400u);
        return {{(two & 0xFFFFu) | two << 16, two >> 16 | (two & 0xFFFF0000u)}};
    }

    static __device__ __forceinline__ void decode(u32 codes, u32 scale, u32 (&pairs)[4]) {
        e4m3_pairs(even_as_e4m3(codes), pairs[0], pairs[1]);
        e4m3_pairs(odd_as_e4m3(codes), pairs[2], pairs[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = multiply_pairs(pairs[i], scale);
    }

    template <int GROUPS>
    static __device__ __forceinline__ void multiply(const Chunk (&b)[2 * STRIPS], const Chunk (&a)[GROUPS], const u32 (&)[GROUPS][2],
                                                    float (&sums)[STRIPS][GROUPS][4]) {
        Scales b_scales[2 * STRIPS], a_scales[GROUPS];
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) b_scales[row] = scales(b[row]);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) a_scales[group] = scales(a[group]);
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            u32 left[2 * STRIPS][4];
#pragma unroll
            for (int row = 0; row < 2 * STRIPS; ++row) decode(b[row].codes.words[unit], b_scales[row].pairs[unit / 2], left[row]);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                u32 right[4];
                decode(a[group].codes.words[unit], a_scales[group].pairs[unit / 2], right);
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) multiply_eight(sums[strip][group], left[2 * strip], left[2 * strip + 1], right);
            }
        }
    }
};

struct SkinnyMx {
    using Rule = Mx;
    static constexpr int COLUMNS = 64, BLOCKS = 2, SPAN = 64, SCALES = 2, EACH_CODES = 8, EACH_SCALES = 0;
    static constexpr bool OTHER_SCALES = true;

    struct Chunk {
        Eight codes[BLOCKS];
        u32 scales;  // a block in each of two bytes
    };

    static __device__ __forceinline__ Chunk load(const u8* codes, const u8* scales) {
        const Eight* source = reinterpret_cast<const Eight*>(codes);
        return {{load_once(source), load_once(source + 4)}, *reinterpret_cast<const u16*>(scales)};
    }

    static __device__ __forceinline__ void decode(const Eight& codes, u32 (&pairs)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) e4m3_pairs(codes.words[i], pairs[2 * i], pairs[2 * i + 1]);
    }

    // Whether both scales are from 2^-47 to 2^48. P is a multiple of 2^-18, so that P * 2^(ea+eb) is a number then, and
    // 2^(ea+eb), whose bits are the sum of those of both but for the bias, too.
    static __device__ __forceinline__ bool moderate(u32 scales) {
        return (scales & 0xFFu) - 80u < 96u && (scales >> 8) - 80u < 96u;
    }

    template <int GROUPS>
    static __device__ __forceinline__ void multiply(const Chunk (&b)[2 * STRIPS], const Chunk (&a)[GROUPS], const u32 (&scales)[GROUPS][2],
                                                    float (&sums)[STRIPS][GROUPS][4]) {
        bool plain = true;
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) plain = plain && moderate(b[row].scales);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) plain = plain && moderate(scales[group][0]) && moderate(scales[group][1]);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            u32 left[2 * STRIPS][4];
#pragma unroll
            for (int row = 0; row < 2 * STRIPS; ++row) decode(b[row].codes[block], left[row]);
            float inner[STRIPS][GROUPS][4] = {};
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                u32 right[4];
                decode(a[group].codes[block], right);
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) multiply_eight(inner[strip][group], left[2 * strip], left[2 * strip + 1], right);
            }
            if (plain) {
                u32 upper[2 * STRIPS];
#pragma unroll
                for (int row = 0; row < 2 * STRIPS; ++row) upper[row] = (b[row].scales >> 8 * block & 0xFFu) << 23;
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const u32 lower = ((scales[group][e] >> 8 * block & 0xFFu) - 127u) << 23;
#pragma unroll
                        for (int row = 0; row < 2 * STRIPS; ++row) {
                            float& sum = sums[row / 2][group][row % 2 * 2 + e];
                            sum = __fmaf_rn(inner[row / 2][group][row % 2 * 2 + e], __uint_as_float(upper[row] + lower), sum);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
#pragma unroll
                        for (int row = 0; row < 2 * STRIPS; ++row) {
                            float a_parts[2], b_parts[2];
                            Mx::decode(0, static_cast<u8>(scales[group][e] >> 8 * block), a_parts);
                            Mx::decode(1, static_cast<u8>(b[row].scales >> 8 * block), b_parts);
                            float& sum = sums[row / 2][group][row % 2 * 2 + e];
                            sum = Mx::add(sum, inner[row / 2][group][row % 2 * 2 + e], a_parts, b_parts);
                        }
                    }
                }
            }
        }
    }
};

// ---- all of it ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ i64 within(i64 row, i64 rows) { return row < rows ? row : rows - 1; }

// GROUPS * 8 rows of a, those of blockIdx.x. What stands behind the last row of either operand is read as the last one, and
// made of no use.
template <class Format, int GROUPS, class Rule>
__device__ __forceinline__ void multiply_skinny(const Rule& rule, const u8* a_codes, const u8* a_scales, const u8* b_codes,
                                                const u8* b_scales, const Epilogue& epilogue, i64 m, i64 n, i64 k) {
    __shared__ float parts[WARPS][TOKENS][PART_STRIDE];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const i64 first_token = static_cast<i64>(blockIdx.x) * (GROUPS * TOKENS), first = static_cast<i64>(blockIdx.y) * SKINNY_ROWS;
    const i64 chunks = k / Format::COLUMNS, codes_row = chunks * Format::SPAN, scales_row = chunks * Format::SCALES;
    using Chunk = typename Format::Chunk;

    // Where what the thread has of the next chunk begins: of its first row, and how many bytes behind it the others.
    const i64 b_row = within(first + g, n), a_row = within(first_token + g, m);
    const i64 codes_start = warp * Format::SPAN + t * Format::EACH_CODES, scales_start = warp * Format::SCALES + t * Format::EACH_SCALES;
    const u8* b_code = b_codes + b_row * codes_row + codes_start;
    const u8* b_scale = b_scales + b_row * scales_row + scales_start;
    const u8* a_code = a_codes + a_row * codes_row + codes_start;
    const u8* a_scale = a_scales + a_row * scales_row + scales_start;
    u32 b_codes_at[2 * STRIPS], b_scales_at[2 * STRIPS], a_codes_at[GROUPS], a_scales_at[GROUPS];
    int others_at[GROUPS][2];
#pragma unroll
    for (int row = 0; row < 2 * STRIPS; ++row) {
        const i64 behind = within(first + 8 * row + g, n) - b_row;
        b_codes_at[row] = static_cast<u32>(behind * codes_row);
        b_scales_at[row] = static_cast<u32>(behind * scales_row);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const i64 behind = within(first_token + 8 * group + g, m) - a_row;
        a_codes_at[group] = static_cast<u32>(behind * codes_row);
        a_scales_at[group] = static_cast<u32>(behind * scales_row);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            others_at[group][e] = static_cast<int>((within(first_token + 8 * group + 2 * t + e, m) - a_row) * scales_row);
        }
    }

    float sums[STRIPS][GROUPS][4] = {};
    Chunk next[2 * STRIPS], next_a[GROUPS];
    u32 next_scales[GROUPS][2] = {};
    const auto load_chunk = [&] {
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) {
            next[row] = Format::load(b_code + b_codes_at[row], b_scale + b_scales_at[row]);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            next_a[group] = Format::load(a_code + a_codes_at[group], a_scale + a_scales_at[group]);
            if constexpr (Format::OTHER_SCALES) {
#pragma unroll
                for (int e = 0; e < 2; ++e) next_scales[group][e] = *reinterpret_cast<const u16*>(a_scale + others_at[group][e]);
            }
        }
        b_code += WARPS * Format::SPAN;
        b_scale += WARPS * Format::SCALES;
        a_code += WARPS * Format::SPAN;
        a_scale += WARPS * Format::SCALES;
    };
    if (warp < chunks) load_chunk();
    for (i64 chunk = warp; chunk < chunks; chunk += WARPS) {
        Chunk b[2 * STRIPS], a[GROUPS];
        u32 scales[GROUPS][2];
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) b[row] = next[row];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            a[group] = next_a[group];
#pragma unroll
            for (int e = 0; e < 2; ++e) scales[group][e] = next_scales[group][e];
        }
        if (chunk + WARPS < chunks) load_chunk();
        Format::multiply(b, a, scales, sums);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        __syncthreads();
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
            for (int i = 0; i < 4; ++i) parts[warp][2 * t + i % 2][strip * STRIP_ROWS + g + i / 2 * 8] = sums[strip][group][i];
        }
        __syncthreads();
        const int row = thread % SKINNY_ROWS, token = thread / SKINNY_ROWS;
        const i64 y = first_token + 8 * group + token, x = first + row;
        if (y >= m || x >= n) continue;
        float sum = parts[0][token][row];
#pragma unroll
        for (int other = 1; other < WARPS; ++other) sum += parts[other][token][row];
        store_as(epilogue.out, epilogue.out_type, y * n + x, output(rule, epilogue, sum, y, x, n));
    }
}
