// tensor_core_model.cuh: sums of products as Hopper's tensor cores add them, for the CPU build.
// docs/tolerance.md#declared-order.
//
// A step adds 16 exact products to a float32 accumulator. All 17 terms are aligned to the largest exponent among them and
// truncated 25 bits below it; the exponent of a product is the sum of its factors' exponents. The sum is truncated to
// float32. A step of FP8 adds 32 products, truncated 13 bits below the largest exponent, and the sum is truncated to 13 fraction
// bits.
#pragma once

#include "common/formats.cuh"

#ifndef __CUDA_ARCH__
namespace narrowgauge {

constexpr int TERMS_PER_STEP = 16;
constexpr int ALIGNED_BITS = 25;  // bits below the largest exponent
constexpr int NO_EXPONENT = -100000;

// A float32 number in parts, of which a float16 operand uses the upper 11 bits of the significand, and a bfloat16 operand 8.
struct Decomposed {
    float value;
    int significand;  // signed, with 23 bits after the binary point
    int exponent;

    explicit Decomposed(float x = 0.0f) : value(x) {
        const u32 bits = __float_as_uint(x);
        const int fraction = static_cast<int>(bits & 0x007FFFFFu), field = static_cast<int>(bits >> 23 & 0xFFu);
        const int whole = field == 0 ? fraction : fraction | 0x00800000;
        significand = (bits >> 31) != 0u ? -whole : whole;
        exponent = field == 0 ? -126 : field - 127;
    }
    bool finite() const { return exponent < 128; }
};

inline i64 shift_truncated(i64 value, int left) {  // value * 2^left, rounded toward zero
    if (left >= 0) return value << left;
    return left < -62 ? 0 : value / (i64{1} << -left);
}

// acc + a[0]*b[0] + ... + a[15]*b[15] of bfloat16 or float16 factors, by integers. Factors are zero, or normal numbers far from both
// ends of the range; with a factor that is not finite, the sum is the IEEE sum.
inline float sum_bf16(float acc, const Decomposed* a, const Decomposed* b) {
    const Decomposed before(acc);
    int largest = before.significand != 0 ? before.exponent : NO_EXPONENT;
    bool finite = before.finite(), any_product = false;
    for (int i = 0; i < TERMS_PER_STEP; ++i) {
        finite &= a[i].finite() && b[i].finite();
        if (a[i].significand == 0 || b[i].significand == 0) continue;
        any_product = true;
        if (a[i].exponent + b[i].exponent > largest) largest = a[i].exponent + b[i].exponent;
    }
    if (!finite) {
        for (int i = 0; i < TERMS_PER_STEP; ++i) acc += a[i].value * b[i].value;
        return acc;
    }
    if (!any_product) return acc;
    i64 sum = shift_truncated(before.significand, before.exponent - largest + ALIGNED_BITS - 23);
    for (int i = 0; i < TERMS_PER_STEP; ++i) {
        const i64 product = static_cast<i64>(a[i].significand >> 13) * (b[i].significand >> 13);  // exact
        sum += shift_truncated(product, a[i].exponent + b[i].exponent - largest + ALIGNED_BITS - 20);
    }
    i64 last = 1;  // last bit of a float32 significand
    while ((sum < 0 ? -sum : sum) / last >= i64{1} << 24) last *= 2;
    return static_cast<float>(__builtin_ldexp(static_cast<double>(sum / last * last), largest - ALIGNED_BITS));
}

constexpr int FP8_TERMS_PER_STEP = 32, FP8_ALIGNED_BITS = 13;

// An element of FP8 in parts. A subnormal number has the exponent of the smallest normal number.
struct Fp8Factor {
    float value;
    int significand;  // signed, with 3 bits after the binary point
    int exponent;
    bool finite;

    Fp8Factor() = default;
    Fp8Factor(u8 code, bool e5m2) {
        const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
        const int field = (code & 0x7F) >> mantissa, fraction = code & ((1 << mantissa) - 1);
        value = e5m2 ? narrow_to_float<E5M2>(code) : narrow_to_float<E4M3>(code);
        const int whole = (field == 0 ? fraction : fraction | 1 << mantissa) << (3 - mantissa);
        significand = (code & 0x80) != 0 ? -whole : whole;
        exponent = (field == 0 ? 1 : field) - bias;
        finite = __builtin_isfinite(value);
    }
};

// acc + a[0]*b[0] + ... + a[31]*b[31] by integers; with a factor that is not finite, the IEEE sum.
inline float sum_fp8(float acc, const Fp8Factor* a, const Fp8Factor* b) {
    const Decomposed before(acc);
    int largest = before.significand != 0 ? before.exponent : NO_EXPONENT;
    bool finite = before.finite();
    for (int i = 0; i < FP8_TERMS_PER_STEP; ++i) {
        finite &= a[i].finite && b[i].finite;
        if (a[i].significand == 0 || b[i].significand == 0) continue;
        if (a[i].exponent + b[i].exponent > largest) largest = a[i].exponent + b[i].exponent;
    }
    if (!finite) {
        for (int i = 0; i < FP8_TERMS_PER_STEP; ++i) acc += a[i].value * b[i].value;
        return acc;
    }
    if (largest == NO_EXPONENT) return 0.0f;
    i64 sum = shift_truncated(before.significand, before.exponent - largest + FP8_ALIGNED_BITS - 23);
    for (int i = 0; i < FP8_TERMS_PER_STEP; ++i) {
        const i64 product = static_cast<i64>(a[i].significand) * b[i].significand;
        sum += shift_truncated(product, a[i].exponent + b[i].exponent - largest + FP8_ALIGNED_BITS - 6);
    }
    i64 last = 1;  // last bit of the accumulator
    while ((sum < 0 ? -sum : sum) / last >= i64{1} << (FP8_ALIGNED_BITS + 1)) last *= 2;
    return static_cast<float>(__builtin_ldexp(static_cast<double>(sum / last * last), largest - FP8_ALIGNED_BITS));
}

// acc + a[0]*b[0] + ... + a[15]*b[15] of float16 or bfloat16 factors, by float64, in which the aligned terms are exact.
inline float sum_fp16(float acc, const float (&a)[TERMS_PER_STEP], const float (&b)[TERMS_PER_STEP]) {
    int largest = NO_EXPONENT;
    double terms[TERMS_PER_STEP + 1];
    float special = 0.0f;
    for (int i = 0; i <= TERMS_PER_STEP; ++i) {
        const float x = i < TERMS_PER_STEP ? a[i] : acc, y = i < TERMS_PER_STEP ? b[i] : 1.0f;
        terms[i] = static_cast<double>(x) * static_cast<double>(y);
        if (!__builtin_isfinite(terms[i])) special += static_cast<float>(terms[i]);
        int left = 0, right = 0;
        __builtin_frexp(static_cast<double>(x), &left);
        __builtin_frexp(static_cast<double>(y), &right);
        const int exponent = left + right - 2;
        if (terms[i] != 0.0 && exponent > largest) largest = exponent;
    }
    if (special != 0.0f) return special;  // NaN, too
    if (largest == NO_EXPONENT) return 0.0f;
    double sum = 0.0;
    for (const double term : terms) sum += __builtin_trunc(__builtin_ldexp(term, ALIGNED_BITS - largest));
    sum = __builtin_ldexp(sum, largest - ALIGNED_BITS);
    const float nearest = static_cast<float>(sum);
    if (__builtin_fabs(static_cast<double>(nearest)) <= __builtin_fabs(sum)) return nearest;
    return __uint_as_float(__float_as_uint(nearest) - 1u);
}

}  // namespace narrowgauge
#endif
