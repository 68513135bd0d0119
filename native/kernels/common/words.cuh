// words.cuh: blocks of 16 bfloat16 numbers as they lie in memory, two a word, the first one low.
#pragma once

#include "common/blocks.cuh"
#include "common/hadamard.cuh"

struct Words {
    u32 each[8];
};

__device__ __forceinline__ float low_of(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_of(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ __forceinline__ void to_floats(const Words& x, float (&v)[16]) {
#ifdef HAS_LANES
    for (int i = 0; i < 16; i += LANES) store_lanes(to_float_lanes(reinterpret_cast<const bf16*>(x.each) + i), v + i);
#else
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[2 * j] = low_of(x.each[j]);
        v[2 * j + 1] = high_of(x.each[j]);
    }
#endif
}

// 16 bytes each, where they lie aligned.
__device__ __forceinline__ Words load_words(const u32* source) {
    Words x;
#ifdef __CUDA_ARCH__
    const uint4 first = reinterpret_cast<const uint4*>(source)[0], second = reinterpret_cast<const uint4*>(source)[1];
    x = {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
#else
    for (int j = 0; j < 8; ++j) x.each[j] = source[j];
#endif
    return x;
}

// The first numbers of two words, or their second ones, in one.
__device__ __forceinline__ u32 paired(u32 a, u32 b, bool second) {
    return second ? (a >> 16) | (b & 0xFFFF0000u) : (a & 0xFFFFu) | b << 16;
}

// The larger magnitudes of two pairs, NaN above all, in the lower 15 bits of each half.
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
#ifdef HAS_MAX_MAGNITUDE
    u32 larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    a &= 0x7FFF7FFFu;
    b &= 0x7FFF7FFFu;
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    const u32 low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a : b, high = a >> 16 > b >> 16 ? a : b;
    return (high & 0xFFFF0000u) | (low & 0xFFFFu);
#endif
#endif
}

// The largest magnitudes of first numbers of words and of second ones, NaN above all, with any signs.
__device__ __forceinline__ u32 largest_pair(const Words& x) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = larger_magnitudes(x.each[j], x.each[j + 4]);
    return larger_magnitudes(larger_magnitudes(pairs[0], pairs[1]), larger_magnitudes(pairs[2], pairs[3]));
}

// The largest magnitude as bits of float32, NaN above all.
__device__ __forceinline__ u32 bound_of_words(const Words& x) {
    const u32 pair = largest_pair(x);
    return larger_magnitudes(pair, pair << 16) & 0x7FFF0000u;
}

// The largest magnitude of those not above `highest`, where `bound` is the largest of all.
__device__ __forceinline__ u32 largest_of_words(const Words& x, u32 bound, u32 highest) {
    if (bound <= highest) return bound;
    float v[16];
    to_floats(x, v);
    return largest_magnitude(v, highest);
}

// How words hold the numbers of a block: two neighbours each, or of each eight 0 2, 4 6, 1 3 and 5 7, which saves
// permutations where even and odd numbers go apart.
enum Order { NEIGHBOURS, EVEN_FIRST };

template <Order ORDER>
__device__ constexpr int low_number(int word) {
    return ORDER == NEIGHBOURS ? 2 * word : word / 4 * 8 + word % 2 * 4 + word % 4 / 2;
}
template <Order ORDER>
__device__ constexpr int high_number(int word) {
    return low_number<ORDER>(word) + (ORDER == NEIGHBOURS ? 1 : 2);
}

#ifdef HAS_E2M1_BY_SUMS
// `high_of` a word of two finite numbers, by the units of floating point, which have less to do: the low number less
// itself is +0, the high one plus 0 times itself keeps the sign of a zero, too.
__device__ __forceinline__ float finite_high_of(u32 word) {
    u32 high;
    asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(high) : "r"(word), "r"(0x0000BF80u));
    return __uint_as_float(high);
}

// `bound_of_words` of finite numbers; else some number that is not.
__device__ __forceinline__ u32 bound_of_finite_words(const Words& x) {
    const u32 pair = largest_pair(x);
    float larger;
#ifdef HAS_MAX_MAGNITUDE
    u32 larger_high;  // in its upper half, with any sign
    asm("{\n.reg .b16 low, high;\n.reg .b32 lows;\nmov.b32 {low, high}, %1;\nmov.b32 lows, {low, low};\n"
        "max.NaN.xorsign.abs.bf16x2 %0, %1, lows;\n}"
        : "=r"(larger_high)
        : "r"(pair));
    larger = fabsf(finite_high_of(larger_high));
#else
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(low_of(pair))), "f"(fabsf(finite_high_of(pair))));
#endif
    return __float_as_uint(larger);
}

template <Order ORDER>
__device__ __forceinline__ void to_finite_floats(const Words& x, float (&v)[16]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[low_number<ORDER>(j)] = low_of(x.each[j]);
        v[high_number<ORDER>(j)] = finite_high_of(x.each[j]);
    }
}
#else
__device__ __forceinline__ u32 bound_of_finite_words(const Words& x) { return bound_of_words(x); }
#endif

#ifdef __CUDA_ARCH__
// Before they are rounded. A quarter of a bfloat16 number is exact, so that a fused sum rounds as often.
__device__ __forceinline__ void rotate_floats(float (&v)[16], u32 signs) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float a = v[i] * ((signs >> i & 1u) != 0u ? -0.25f : 0.25f);
        const float factor = (signs >> (i + 1) & 1u) != 0u ? -0.25f : 0.25f, b = v[i + 1];
        v[i] = __fmaf_rn(b, factor, a);
        v[i + 1] = __fmaf_rn(b, -factor, a);
    }
    butterfly(v, 8, 2);
}

__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

// A group rotated, as `rotate16` does it.
__device__ __forceinline__ void rotate_words(Words& x, u32 signs) {
    float v[16];
    to_floats(x, v);
#ifdef __CUDA_ARCH__
    rotate_floats(v, signs);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.each[j] = rounded_pair(v[2 * j], v[2 * j + 1]);
#else
    rotate16(v, signs);
    for (int j = 0; j < 8; ++j) x.each[j] = __float_as_uint(v[2 * j]) >> 16 | (__float_as_uint(v[2 * j + 1]) & 0xFFFF0000u);
#endif
}

#ifdef HAS_E2M1_BY_SUMS
// Four times a group rotated, where all numbers are finite; else the result is not. The sums are those of `rotate_floats`
// times 4, which costs no product. Rounded to bfloat16 they are, too, but where the rotated number is below 2^-126.
template <Order ORDER>
__device__ __forceinline__ void rotate_finite_words_fourfold(Words& x, u32 signs) {
    float v[16];
    to_finite_floats<ORDER>(x, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = (signs >> i & 1u) != 0u ? -v[i] : v[i];
    butterfly(v, 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.each[j] = rounded_pair(v[low_number<ORDER>(j)], v[high_number<ORDER>(j)]);
}
#endif

#ifdef HAS_E2M1_BY_SUMS
__device__ __forceinline__ u32 permuted(u32 a, u32 b, u32 bytes) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(bytes));
    return result;
}

// Two numbers of magnitudes below 8, cut to E2M10, the first one low: E2M1 with nine more bits. That is what fp16 is, of
// which E2M1 has the smallest normal number 2^14 times larger: both numbers are given so much smaller.
__device__ __forceinline__ u32 cut_pair(float first, float second) {
    u32 pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// a where the mask has a bit, b elsewhere: one instruction, which the compiler does not always find.
__device__ __forceinline__ u32 selected(u32 mask, u32 a, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}

// Its complement.
__device__ __forceinline__ u32 unselected(u32 mask, u32 a, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0x35;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}

// A number below 7 in magnitude, 2^14 times smaller, and moved such that ties go to even where half a step is added and
// the sum is cut: those that are to go down, 1/4, 5/4, 5/2 and 5, to the number below. Those that go up, 3/4, 7/4 and 7/2,
// are 1.5 and 1.75 times a power of two, not 1 and 1.25 times: from 4/3 on, numbers first go one up, and then all go down.
// Every float32 number below 7 was tried.
__device__ __forceinline__ float ties_moved(float x) {
    return __fmul_rz(__fmaf_rn(x, 0x1.8p-25f, x), 0x1.fffffep-15f);
}

// Codes of the products of eight numbers and a factor, all of which are smaller than 7.
__device__ __forceinline__ u32 e2m1x8_of_products_below_7(const float* v, float factor) {
    u32 even[2], odd[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float* four = v + 4 * j;
        even[j] = cut_pair(ties_moved(four[0] * factor), ties_moved(four[2] * factor));
        odd[j] = cut_pair(ties_moved(four[1] * factor), ties_moved(four[3] * factor));
    }
    // A byte is the sign, three zeros, the code, and a half step, to which another one is added.
    const u32 low = permuted(even[0], even[1], 0x7531), high = permuted(odd[0], odd[1], 0x7531);
    const u32 codes = selected(0x70707070u, high * 8u + 0x08080808u, (low + 0x01010101u) >> 1);
    return selected(0x88888888u, selected(0x80808080u, high, low >> 4), codes);
}

// `x`: the words of eight numbers. Selectors from 8 on fill a byte with the sign of the one they select.
template <Order ORDER>
__device__ __forceinline__ u32 with_signs(u32 codes, const u32* x) {
    u32 even, odd;
    if constexpr (ORDER == NEIGHBOURS) {
        // Of numbers 0, 2, 1, 3, then 4, 6, 5, 7.
        const u32 low = permuted(x[0], x[1], 0xFBD9), high = permuted(x[2], x[3], 0xFBD9);
        even = permuted(low, high, 0x5410);
        odd = permuted(low, high, 0x7632);
    } else {
        even = permuted(x[0], x[1], 0xFDB9);
        odd = permuted(x[2], x[3], 0xFDB9);
    }
    return codes | (even & 0x08080808u) | (odd & 0x80808080u);
}

// The magnitude of a number that is given 2^14 times too small. `stochastic` rounds |x| + byte/512; where |x| is below 1/4
// and has finer steps than the sum just below 1/2, that lifts it to 1/2 from 2^-26 below it on. Elsewhere the sum is exact.
__device__ __forceinline__ float sum_rounded(float x) { return __fadd_rz(fabsf(x), 0x1p-40f); }

// Two numbers as `cut_pair` has them, where a step of E2M1 is 2^9, and as many 256th parts of one as two bytes say. One
// instruction, which the compiler would make two of.
__device__ __forceinline__ u32 with_shares(u32 pair, u32 bytes) {
    u32 sum;
    asm("mad.lo.u32 %0, %1, 2, %2;" : "=r"(sum) : "r"(bytes), "r"(pair));
    return sum;
}

// The even bytes of a word. A mask would do, but the units of integers have most to do, and those of floating point
// multiply integers: with it both halves of nvfp4-rht-sr, 16384^2, take an H200 0.317 ms in place of 0.309.
__device__ __forceinline__ u32 without_odd_bytes(u32 word, u32 odd_bytes) {
    u32 even_bytes;
    asm("mad.lo.u32 %0, %1, 0xFFFFFF00, %2;" : "=r"(even_bytes) : "r"(odd_bytes), "r"(word));
    return even_bytes;
}

// The same by the bytes of two random words, as `stochastic` does it; `x` are the words of the numbers. The factor is given
// 2^14 times too small.
template <Order ORDER>
__device__ __forceinline__ u32 e2m1x8_of_products_below_8(const u32* x, const float* v, float factor, const u32* random) {
    u32 even[2], odd[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float* four = v + 4 * j;
        even[j] = cut_pair(sum_rounded(four[0] * factor), sum_rounded(four[2] * factor));
        odd[j] = cut_pair(sum_rounded(four[1] * factor), sum_rounded(four[3] * factor));
        const u32 odd_bytes = permuted(random[j], 0u, 0x4341);
        odd[j] = with_shares(odd[j], odd_bytes);
        even[j] = with_shares(even[j], without_odd_bytes(random[j], odd_bytes));
    }
    const u32 low = permuted(even[0], even[1], 0x7531), high = permuted(odd[0], odd[1], 0x7531);
    // 8 is to be 7, which complements, 7 and 8, take a sum for and not a difference: that comes with the shift.
    const u32 complements = unselected(0xF0F0F0F0u, high * 8u, low >> 1);
    return with_signs<ORDER>(~(complements + ((~complements & 0x88888888u) >> 3)), x);
}
#endif

// 16 codes as they lie in memory, eight a word.
struct Codes {
    u32 each[2];
};

__device__ __forceinline__ void store_codes(const Codes& codes, u8* target) {  // aligned
#ifdef __CUDA_ARCH__
    *reinterpret_cast<uint2*>(target) = {codes.each[0], codes.each[1]};
#else
    for (int j = 0; j < 8; ++j) target[j] = static_cast<u8>(codes.each[j / 4] >> j % 4 * 8);
#endif
}

// Codes of the products of 16 numbers and a factor: nearest even, or, where `random` is not null, by four random words as
// `e2m1x16_stochastic` takes them.
__device__ __forceinline__ Codes e2m1x16_of_products(const Words& x, float factor, const u32 (*random)[4]) {
    float v[16];
    to_floats(x, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= factor;
    u8 packed[8];
    if (random != nullptr) {
        e2m1x16_stochastic(v, *random, packed);
    } else {
        e2m1x16_from_float(v, packed);
    }
    Codes codes = {{0u, 0u}};
#pragma unroll
    for (int j = 0; j < 8; ++j) codes.each[j / 4] |= static_cast<u32>(packed[j]) << j % 4 * 8;
    return codes;
}

// The same where all products are below 7, none of them NaN, as nearly always; `below_7` says so, where it is worth asking.
// `bound`: `bound_of_words` of the numbers.
#ifdef HAS_E2M1_BY_SUMS
__device__ __forceinline__ bool below_7(u32 bound, float factor) { return __uint_as_float(bound) * factor < 7.0f; }

template <Order ORDER = NEIGHBOURS>
__device__ __forceinline__ Codes e2m1x16_of_products_below_7(const Words& x, float factor) {
    float v[16];
    to_finite_floats<ORDER>(x, v);
    return {{e2m1x8_of_products_below_7(v, factor), e2m1x8_of_products_below_7(v + 8, factor)}};
}

// By random words, and a factor that is given 2^14 times too small; where products are below 8.
constexpr float RANDOM_FACTOR = 0x1p-14f;
template <Order ORDER = NEIGHBOURS>
__device__ __forceinline__ Codes e2m1x16_of_products_below_8(const Words& x, float factor, const u32 (&random)[4]) {
    float v[16];
    to_finite_floats<ORDER>(x, v);
    return {{e2m1x8_of_products_below_8<ORDER>(x.each, v, factor, random),
             e2m1x8_of_products_below_8<ORDER>(x.each + 4, v + 8, factor, random + 2)}};
}
#else
__device__ __forceinline__ bool below_7(u32, float) { return false; }

__device__ __forceinline__ Codes e2m1x16_of_products_below_7(const Words& x, float factor) {
    return e2m1x16_of_products(x, factor, nullptr);
}
#endif
