// packed_bf16.cuh: blocks of 16 bfloat16 numbers in packed form, two per 32-bit word, the first in the low half.
#pragma once

#include "common/blocks.cuh"
#include "common/hadamard.cuh"

namespace narrowgauge {

struct PackedBf16 {
    u32 words[8];
};

__device__ __forceinline__ float low_float(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_float(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ __forceinline__ void unpack_floats(const PackedBf16& x, float (&v)[16]) {
#ifdef HAS_SIMD
    for (int i = 0; i < 16; i += SIMD_LANES) {
        store_vector(to_float_vector(reinterpret_cast<const bf16*>(x.words) + i), v + i);
    }
#else
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[2 * j] = low_float(x.words[j]);
        v[2 * j + 1] = high_float(x.words[j]);
    }
#endif
}

// Two vectorized loads of 16 bytes; `source` is aligned to 16 bytes.
__device__ __forceinline__ PackedBf16 load_packed(const u32* source) {
    PackedBf16 x;
#ifdef __CUDA_ARCH__
    const uint4 first = reinterpret_cast<const uint4*>(source)[0], second = reinterpret_cast<const uint4*>(source)[1];
    x = {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
#else
    for (int j = 0; j < 8; ++j) x.words[j] = source[j];
#endif
    return x;
}

// The low halves of two words in one word, or their high halves.
__device__ __forceinline__ u32 pack_halves(u32 a, u32 b, bool high) {
    return high ? (a >> 16) | (b & 0xFFFF0000u) : (a & 0xFFFFu) | b << 16;
}

// ---- amax ------------------------------------------------------------------------------------------------------------

// The larger magnitudes of two pairs, in the lower 15 bits of each half; the sign bits are arbitrary. NaN wins.
__device__ __forceinline__ u32 max_magnitudes(u32 a, u32 b) {
#ifdef HAS_MAX_MAGNITUDE
    return ptx::max_NaN_xorsign_abs_bf16x2(a, b);
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

// Largest magnitude of the low halves and of the high halves, with arbitrary sign bits. NaN wins.
__device__ __forceinline__ u32 max_magnitude_pair(const PackedBf16& x) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = max_magnitudes(x.words[j], x.words[j + 4]);
    return max_magnitudes(max_magnitudes(pairs[0], pairs[1]), max_magnitudes(pairs[2], pairs[3]));
}

// Largest magnitude as bits of float32. NaN wins.
__device__ __forceinline__ u32 magnitude_bound(const PackedBf16& x) {
    const u32 pair = max_magnitude_pair(x);
    return max_magnitudes(pair, pair << 16) & 0x7FFF0000u;
}

// Largest magnitude that is not above `limit`. `bound`: the block's magnitude_bound.
__device__ __forceinline__ u32 amax_of_packed(const PackedBf16& x, u32 bound, u32 limit) {
    if (bound <= limit) return bound;
#ifdef HAS_MAX_MAGNITUDE
    u32 pair = x.words[0];  // the result of two NaN is NaN
#pragma unroll
    for (int j = 1; j < 8; ++j) pair = ptx::max_xorsign_abs_bf16x2(pair, x.words[j]);
    const u32 amax = ptx::max_xorsign_abs_bf16x2(pair, pair << 16) & 0x7FFF0000u;
    return amax <= limit ? amax : 0u;
#else
    float v[16];
    unpack_floats(x, v);
    return amax_of_block(v, limit);
#endif
}

// Order of a block's elements in its words. ADJACENT: each word holds two neighbours. EVEN_FIRST: of each eight elements the
// words hold 0 2, 4 6, 1 3 and 5 7, which saves permutations if even and odd elements are processed apart.
enum PackOrder { ADJACENT, EVEN_FIRST };

template <PackOrder ORDER>
__device__ constexpr int low_index(int word) {
    return ORDER == ADJACENT ? 2 * word : word / 4 * 8 + word % 2 * 4 + word % 4 / 2;
}
template <PackOrder ORDER>
__device__ constexpr int high_index(int word) {
    return low_index<ORDER>(word) + (ORDER == ADJACENT ? 1 : 2);
}

#ifdef HAS_E2M1_BY_ADDITION
// high_float of a word with two finite numbers, in the floating-point pipe, which has less load than the integer pipe. The low
// half becomes x - x = +0; the high half x + 0 * x keeps the sign of a zero. With the same for low_float both outputs of
// nvfp4-rowscaled, 16384^2, take an H200 0.255 ms in place of 0.245.
__device__ __forceinline__ float finite_high_float(u32 word) {
    return __uint_as_float(ptx::fma_rn_bf16x2(word, 0x0000BF80u, word));
}

// magnitude_bound if all numbers are finite; else a number that is not finite.
__device__ __forceinline__ u32 finite_magnitude_bound(const PackedBf16& x) {
    const u32 pair = max_magnitude_pair(x);
    float larger;
#ifdef HAS_MAX_MAGNITUDE
    u32 larger_high;  // result in the upper half, with an arbitrary sign
    asm("{\n.reg .b16 low, high;\n.reg .b32 lows;\nmov.b32 {low, high}, %1;\nmov.b32 lows, {low, low};\n"
        "max.NaN.xorsign.abs.bf16x2 %0, %1, lows;\n}"
        : "=r"(larger_high)
        : "r"(pair));
    larger = fabsf(finite_high_float(larger_high));
#else
    larger = ptx::max_NaN_f32(fabsf(low_float(pair)), fabsf(finite_high_float(pair)));
#endif
    return __float_as_uint(larger);
}

template <PackOrder ORDER>
__device__ __forceinline__ void unpack_finite_floats(const PackedBf16& x, float (&v)[16]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[low_index<ORDER>(j)] = low_float(x.words[j]);
        v[high_index<ORDER>(j)] = finite_high_float(x.words[j]);
    }
}
#else
__device__ __forceinline__ u32 finite_magnitude_bound(const PackedBf16& x) { return magnitude_bound(x); }
#endif

// unpack_floats of words in any order.
template <PackOrder ORDER>
__device__ __forceinline__ void unpack_ordered_floats(const PackedBf16& x, float (&v)[16]) {
    if constexpr (ORDER == ADJACENT) {
        unpack_floats(x, v);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[low_index<ORDER>(j)] = low_float(x.words[j]);
            v[high_index<ORDER>(j)] = high_float(x.words[j]);
        }
    }
}

// ---- rotation --------------------------------------------------------------------------------------------------------

#ifdef __CUDA_ARCH__
// The rotation before its results are rounded to bfloat16. A quarter of a bfloat16 number is exact in float32: a fused
// multiply-add rounds exactly as a product and a sum do.
__device__ __forceinline__ void rotate16_unrounded(float (&v)[16], u32 signs) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float a = v[i] * ((signs >> i & 1u) != 0u ? -0.25f : 0.25f);
        const float factor = (signs >> (i + 1) & 1u) != 0u ? -0.25f : 0.25f, b = v[i + 1];
        v[i] = __fmaf_rn(b, factor, a);
        v[i + 1] = __fmaf_rn(b, -factor, a);
    }
    butterfly(v, 8, 2);
}
#endif

// Rotates a packed group, with the same bits as rotate16.
template <PackOrder ORDER = ADJACENT>
__device__ __forceinline__ void rotate_packed(PackedBf16& x, u32 signs) {
    float v[16];
    unpack_ordered_floats<ORDER>(x, v);
#ifdef __CUDA_ARCH__
    rotate16_unrounded(v, signs);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.words[j] = ptx::cvt_rn_bf16x2_f32(v[low_index<ORDER>(j)], v[high_index<ORDER>(j)]);
#else
    rotate16(v, signs);
    for (int j = 0; j < 8; ++j) {
        x.words[j] = __float_as_uint(v[2 * j]) >> 16 | (__float_as_uint(v[2 * j + 1]) & 0xFFFF0000u);
    }
#endif
}

#ifdef HAS_E2M1_BY_ADDITION
// Four times the rotated group if all numbers are finite; else the result is not finite. Without the factor 1/4 the sums are
// exactly four times those of rotate16_unrounded and need no multiplication. Rounding to bfloat16 commutes with the factor,
// except for rotated numbers below 2^-126.
template <PackOrder ORDER>
__device__ __forceinline__ void rotate_finite_packed_times4(PackedBf16& x, u32 signs) {
    float v[16];
    unpack_finite_floats<ORDER>(x, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = (signs >> i & 1u) != 0u ? -v[i] : v[i];
    butterfly(v, 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.words[j] = ptx::cvt_rn_bf16x2_f32(v[low_index<ORDER>(j)], v[high_index<ORDER>(j)]);
}
#endif

// ---- codes of E2M1 ---------------------------------------------------------------------------------------------------

#ifdef HAS_E2M1_BY_ADDITION
constexpr int SELECT = 0xCA;             // truth tables of lop3: b if a is set, else c,
constexpr int SELECT_COMPLEMENT = 0x35;  // and its complement

// E2M1 has the exponent range of fp16 if fp16 is scaled by 2^14: numbers below 8 in magnitude, given 2^14 times too small, are
// truncated by cvt.rz.f16x2.f32 to E2M10, which is E2M1 with nine more mantissa bits. A tie is half a step above a code.

// Scales a number below 7 in magnitude, given as the product of `x` and `factor`, by 2^-14, and nudges it: adding half a step
// and truncating then rounds ties to even:
// the ties 1/4, 5/4, 5/2 and 5, which round down, go to the next smaller number. The ties that round up, 3/4, 7/4 and 7/2, are
// 1.5 or 1.75 times a power of two, and not 1 or 1.25 times: the first operation moves numbers with a mantissa from 4/3 on one
// ulp up, the second moves all numbers down. Checked for every float32 number below 7.
__device__ __forceinline__ float nudge_ties(float x, float factor) {
    x *= factor;
    return __fmul_rz(__fmaf_rn(x, 0x1.8p-25f, x), 0x1.fffffep-15f);
}

// Which products of a number and a factor a conversion accepts: numbers below 7, or below 8 with stochastic rounding, or also
// larger ones, infinity and NaN.
enum Products { SMALL_PRODUCTS, ANY_PRODUCTS };

// A pair of E2M10 numbers, of which those above 6 and infinity become 6. The sign stays; NaN without a sign becomes 6.
template <Products PRODUCTS>
__device__ __forceinline__ u32 saturate_pair(u32 pair) {
    if constexpr (PRODUCTS == SMALL_PRODUCTS) return pair;
#ifdef HAS_MAX_MAGNITUDE
    return ptx::min_xorsign_abs_f16x2(pair, 0x0E000E00u);
#else
    const u32 low = pair & 0x7FFFu, high = pair & 0x7FFF0000u;
    return (pair & 0x80008000u) | (low < 0x0E00u ? low : 0x0E00u) | (high < 0x0E000000u ? high : 0x0E000000u);
#endif
}

// Codes of the products of eight numbers and a factor, nearest even.
template <Products PRODUCTS>
__device__ __forceinline__ u32 e2m1x8_of_products(const float* v, float factor) {
    const auto nudged = [&](float number) { return nudge_ties(number, factor); };
    u32 even[2], odd[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float* four = v + 4 * j;
        even[j] = saturate_pair<PRODUCTS>(ptx::cvt_rz_f16x2_f32(nudged(four[0]), nudged(four[2])));
        odd[j] = saturate_pair<PRODUCTS>(ptx::cvt_rz_f16x2_f32(nudged(four[1]), nudged(four[3])));
    }
    // A byte is the sign, three zeros, the code, and the half-step bit, to which another half step is added.
    const u32 low = ptx::prmt_b32(even[0], even[1], 0x7531), high = ptx::prmt_b32(odd[0], odd[1], 0x7531);
    const u32 codes = ptx::lop3_b32<SELECT>(0x70707070u, high * 8u + 0x08080808u, (low + 0x01010101u) >> 1);
    return ptx::lop3_b32<SELECT>(0x88888888u, ptx::lop3_b32<SELECT>(0x80808080u, high, low >> 4), codes);
}

// Inserts the signs of eight numbers, given as words, into their codes. A prmt selector from 8 on replicates the sign of the
// byte.
template <PackOrder ORDER>
__device__ __forceinline__ u32 insert_signs(u32 codes, const u32* x) {
    u32 even, odd;
    if constexpr (ORDER == ADJACENT) {
        // Elements 0, 2, 1, 3, then 4, 6, 5, 7.
        const u32 low = ptx::prmt_b32(x[0], x[1], 0xFBD9), high = ptx::prmt_b32(x[2], x[3], 0xFBD9);
        even = ptx::prmt_b32(low, high, 0x5410);
        odd = ptx::prmt_b32(low, high, 0x7632);
    } else {
        even = ptx::prmt_b32(x[0], x[1], 0xFDB9);
        odd = ptx::prmt_b32(x[2], x[3], 0xFDB9);
    }
    return codes | (even & 0x08080808u) | (odd & 0x80808080u);
}

// Magnitude of a number that is given 2^14 times too small, such that truncation gives the sum |x| + byte/512 of `stochastic`.
// If |x| is below 1/4, its ulp is smaller than that of the sum just below 1/2, and the addition lifts |x| to 1/2 from 2^-26
// below it on. Elsewhere the sum is exact.
__device__ __forceinline__ float lift_below_half(float x) { return __fadd_rz(fabsf(x), 0x1p-40f); }

// Adds random bytes to a pair of E2M10 numbers with steps of E2M1 of 2^9: byte/256 of a step. One mad in place of the
// compiler's two instructions.
__device__ __forceinline__ u32 add_random_bytes(u32 pair, u32 bytes) { return ptx::mad_lo_u32<2>(bytes, pair); }

// Clears the odd bytes of a word. A mask would do, but the integer pipe is the busiest one, and the floating-point pipe
// executes integer multiply-adds: with a mask both outputs of nvfp4-rht-sr, 16384^2, take an H200 0.317 ms in place of 0.309.
__device__ __forceinline__ u32 clear_odd_bytes(u32 word, u32 odd_bytes) {
    return ptx::mad_lo_u32<0xFFFFFF00u>(odd_bytes, word);
}

// The products of the stochastic rounding are given multiplied by this.
constexpr float STOCHASTIC_FACTOR_SCALE = 0x1p-14f;

// Codes of the products of eight numbers and a factor, rounded as `stochastic` does with the bytes of two random words. `x`:
// the words of the numbers; NaN has no sign. A product that STOCHASTIC_FACTOR_SCALE makes subnormal is far below a code.
template <Products PRODUCTS, PackOrder ORDER>
__device__ __forceinline__ u32 e2m1x8_stochastic(const u32* x, const float* v, float factor, const u32* random) {
    const auto lifted = [&](float number) { return lift_below_half(number * factor); };
    u32 even[2], odd[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float* four = v + 4 * j;
        even[j] = saturate_pair<PRODUCTS>(ptx::cvt_rz_f16x2_f32(lifted(four[0]), lifted(four[2])));
        odd[j] = saturate_pair<PRODUCTS>(ptx::cvt_rz_f16x2_f32(lifted(four[1]), lifted(four[3])));
        const u32 odd_bytes = ptx::prmt_b32(random[j], 0u, 0x4341);
        odd[j] = add_random_bytes(odd[j], odd_bytes);
        even[j] = add_random_bytes(even[j], clear_odd_bytes(random[j], odd_bytes));
    }
    const u32 low = ptx::prmt_b32(even[0], even[1], 0x7531), high = ptx::prmt_b32(odd[0], odd[1], 0x7531);
    // Code 8 becomes code 7. On the complements, 7 and 8, this is an addition in place of a subtraction, which the shift makes
    // free.
    const u32 complements = ptx::lop3_b32<SELECT_COMPLEMENT>(0xF0F0F0F0u, high * 8u, low >> 1);
    return insert_signs<ORDER>(~(complements + ((~complements & 0x88888888u) >> 3)), x);
}
#endif

// 16 codes of E2M1 in memory order, eight in each word.
struct PackedE2m1 {
    u32 words[2];
};

__device__ __forceinline__ void store_codes(const PackedE2m1& codes, u8* target) {  // aligned to 8 bytes
#ifdef __CUDA_ARCH__
    *reinterpret_cast<uint2*>(target) = {codes.words[0], codes.words[1]};
#else
    for (int j = 0; j < 8; ++j) target[j] = static_cast<u8>(codes.words[j / 4] >> j % 4 * 8);
#endif
}

// Codes of the products of 16 numbers and a factor: nearest even, or, if `random` is not null, rounded stochastically with four
// random words (e2m1x16_stochastic).
template <PackOrder ORDER = ADJACENT>
__device__ __forceinline__ PackedE2m1 e2m1x16_of_products(const PackedBf16& x, float factor, const u32 (*random)[4]) {
    float v[16];
#ifdef HAS_E2M1_BY_ADDITION
    if (random == nullptr) {
        unpack_ordered_floats<ORDER>(x, v);
        return {{e2m1x8_of_products<ANY_PRODUCTS>(v, factor), e2m1x8_of_products<ANY_PRODUCTS>(v + 8, factor)}};
    }
    PackedBf16 canonical;  // the numbers, or NaN without a sign if the number or the factor is NaN
    const u32 one = factor == factor ? 0x3F803F80u : 0x7FFF7FFFu;
#pragma unroll
    for (int j = 0; j < 8; ++j) canonical.words[j] = ptx::fma_rn_bf16x2(x.words[j], one, 0x80008000u);
    unpack_ordered_floats<ORDER>(canonical, v);
    if (factor < 0x1p-112f) {  // the factor would be subnormal
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] *= STOCHASTIC_FACTOR_SCALE;
    } else {
        factor *= STOCHASTIC_FACTOR_SCALE;
    }
    return {{e2m1x8_stochastic<ANY_PRODUCTS, ORDER>(canonical.words, v, factor, *random),
             e2m1x8_stochastic<ANY_PRODUCTS, ORDER>(canonical.words + 4, v + 8, factor, *random + 2)}};
#else
    unpack_ordered_floats<ORDER>(x, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= factor;
    u8 packed[8];
    if (random != nullptr) {
        e2m1x16_stochastic(v, *random, packed);
    } else {
        e2m1x16_from_float(v, packed);
    }
    PackedE2m1 codes = {{0u, 0u}};
#pragma unroll
    for (int j = 0; j < 8; ++j) codes.words[j / 4] |= static_cast<u32>(packed[j]) << j % 4 * 8;
    return codes;
#endif
}

#ifdef HAS_E2M1_BY_ADDITION
// The same in fewer instructions if all products are below 7 in magnitude and no number is NaN.
template <PackOrder ORDER = ADJACENT>
__device__ __forceinline__ PackedE2m1 e2m1x16_of_products_below_7(const PackedBf16& x, float factor) {
    float v[16];
    unpack_finite_floats<ORDER>(x, v);
    return {{e2m1x8_of_products<SMALL_PRODUCTS>(v, factor), e2m1x8_of_products<SMALL_PRODUCTS>(v + 8, factor)}};
}

// The same for a power of two, two elements in an instruction: the products are exact in bfloat16. Let 2^e be the binade of a
// product, at least 1. Its sum with 67 * 2^e rounds to steps of 2^(e-1), which the last bits of the sum count, from 6 on;
// bits 6 and above, shifted down, add 2e + 10. The low nibble of the total is the code.
#ifdef HAS_MAX_MAGNITUDE
__device__ __forceinline__ PackedE2m1 e2m1x16_of_exact_products_below_7(const PackedBf16& x, float power) {
    const u32 factors = ptx::prmt_b32(__float_as_uint(power), 0u, 0x3232);
    PackedE2m1 codes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32* words = x.words + 4 * half;
        u32 steps[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 products = ptx::fma_rn_bf16x2(words[j], factors, 0x80008000u);
            const u32 binades = ptx::max_xorsign_abs_bf16x2(products, 0x3F803F80u) & 0xFF80FF80u;
            const u32 sums = ptx::fma_rn_bf16x2(binades, 0x42864286u, products);
            steps[j] = sums + (sums >> 6);
        }
        const u32 even = ptx::prmt_b32(steps[0], steps[1], 0x6420), odd = ptx::prmt_b32(steps[2], steps[3], 0x6420);
        codes.words[half] = insert_signs<EVEN_FIRST>(ptx::lop3_b32<SELECT>(0xF0F0F0F0u, odd * 16u, even), words);
    }
    return codes;
}
#endif

// The stochastic rounding, if all products are below 8 in magnitude. `factor` has been multiplied by STOCHASTIC_FACTOR_SCALE.
template <PackOrder ORDER = ADJACENT>
__device__ __forceinline__ PackedE2m1 e2m1x16_of_products_below_8(const PackedBf16& x, float factor,
                                                                  const u32 (&random)[4]) {
    float v[16];
    unpack_finite_floats<ORDER>(x, v);
    return {{e2m1x8_stochastic<SMALL_PRODUCTS, ORDER>(x.words, v, factor, random),
             e2m1x8_stochastic<SMALL_PRODUCTS, ORDER>(x.words + 4, v + 8, factor, random + 2)}};
}
#endif

}  // namespace narrowgauge
