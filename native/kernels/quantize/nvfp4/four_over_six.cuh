// nvfp4/four_over_six.cuh: the scale of 4over6 for packed blocks of bfloat16. The contract is in quantize_nvfp4.cu.
//
// The exact errors of both scales take 22 instructions per element, 13 more than an estimate of both. The estimate has a proved
// bound of its error and decides all but 7 of 10 000 blocks of normal random numbers. Rows of nvfp4-4over6-448-mae, 16384^2,
// take an H200 0.23 ms in place of 1.89 with chosen_scale alone, both outputs 0.43 ms in place of 3.97.
#pragma once

#include "quantize/nvfp4/general.cuh"
#include "common/packed_bf16.cuh"

namespace narrowgauge {

// Powers of two that bring the elements of a tensor, and their factors, into the range of the estimate.
struct ErrorUnits {
    float shrink, grow;  // of elements, and of factors; 0 if the amax is too small or too large for the estimate
};

// The scales are at most 448: after `grow` every factor is at least 1, and at most 2^19.
__device__ __forceinline__ ErrorUnits error_units(float amax, float encode) {
    if (!(amax >= 0x1p-90f && amax <= 0x1p90f)) return {0.0f, 0.0f};
    const u32 exponent = __float_as_uint(encode) >> 23;  // 127 + E
    return {__uint_as_float((exponent - 9u) << 23), __uint_as_float((263u - exponent) << 23)};  // 2^(E - 9), 2^(9 - E)
}

// Both scales of a block, and what their choice needs.
struct Choice {
    Scales scales;
    const float* factors;  // nvfp4_element_factor of each scale
    float encode, amax;
    ErrorUnits units;
};

// Exact choice between two different scales of any tensor. Not inlined, since it is rare and long.
#ifdef __CUDA_ARCH__
__noinline__
#endif
static __device__ u32 choice_of_any_tensor(PackedBf16 x, u32 six, u32 four, float encode, float amax, float max_product,
                                           int candidates) {
    float v[BLOCK];
    unpack_floats(x, v);
    Settings settings = {};
    settings.candidates = static_cast<ScaleCandidates>(candidates);
    settings.max_product = max_product;
    return chosen_scale(v, {static_cast<u8>(six), static_cast<u8>(four)}, encode, amax, settings);
}

#ifdef HAS_E2M1_BY_ADDITION
// error_of_block of finite numbers, if `amax` has error_units: then a decoded number is a power of two times the decoded 1 or
// 3/2, exactly, and the difference rounds once.
__device__ __forceinline__ float exact_error(const float (&v)[BLOCK], u8 scale, float factor, float amax,
                                             const Settings& settings) {
    const float decoded = e4m3_to_float(scale);
    float one = decoded * amax / settings.max_product, three_halves = 1.5f * decoded * amax / settings.max_product;
    asm volatile("" : "+f"(one), "+f"(three_halves));  // else the compiler divides the selected dividend of each element
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        const float magnitude = fminf(fabsf(v[i] * factor), 6.0f);
        const float binade = __uint_as_float(__float_as_uint(fmaxf(magnitude, 1.0f)) & FLOAT_INF_BITS);
        // The sum counts steps of half a binade, rounded to nearest even as codes are.
        const u32 number = __float_as_uint(__fmaf_rn(binade, 0x1p22f, magnitude) - binade * 0x1p22f);
        const float power = __uint_as_float(number & FLOAT_INF_BITS);
        const float error = __fmaf_rn(power, (number & 0x00400000u) != 0u ? three_halves : one, -fabsf(v[i]));
        total += settings.candidates == FOUR_OR_SIX_BY_ABSOLUTE_ERROR ? fabsf(error) : error * error;
    }
    return total;
}

// Sum of the errors of E2M1: absolute in units of 2^-149, or squared in units of 2^-52. Multiplied by 2^-126, numbers of E2M1
// are those of float32 with one mantissa bit, since float32 also has subnormal numbers: half a step is added, and 22 bits are
// cut. A tie has the same error either way. All products are below 7: an error is a subnormal number, and its bits count units.
// Their sum is that of the absolute errors, in which the signs reach bit 31 only.
__device__ __forceinline__ float estimated_error(const float (&v)[BLOCK], float factor, bool absolute) {
    const float small = factor * 0x1p-126f;
    u32 units = 0;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        const float scaled = v[i] * small;
        const float error = __uint_as_float((__float_as_uint(scaled) + 0x00200000u) & 0xFFC00000u) - scaled;
        units += __float_as_uint(error);
        const float normal = error * 0x1p100f;
        squares = __fmaf_rn(normal, normal, squares);
    }
    return absolute ? static_cast<float>(units & 0x7FFFFFFFu) : squares;
}

// Elements times units.shrink, exactly, or small enough to have code 0. A fused multiply-add by a pair with a 0 unpacks and
// multiplies at once; the addition of 0 makes the other half +0.
template <PackOrder ORDER>
__device__ __forceinline__ void unpack_shrunk(const PackedBf16& x, ErrorUnits units, float (&v)[BLOCK]) {
    const u32 factors = __float_as_uint(units.shrink);  // as a pair: high half shrink, low half 0
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[low_index<ORDER>(j)] = __uint_as_float(ptx::fma_rn_bf16x2_low_halves(x.words[j], factors, 0u));
        v[high_index<ORDER>(j)] = __uint_as_float(ptx::fma_rn_bf16x2(x.words[j], factors, 0u));
    }
}

enum Decision { NO_ESTIMATE, CLOSE, DECIDED };  // the estimate does not apply, does not decide, decides

// Whether all products of a block are below 7. `bound`: the largest magnitude, with NaN.
__device__ __forceinline__ bool estimate_applies(u32 bound, const Choice& choice) {
    const float six = choice.factors[choice.scales.six] * choice.units.grow;
    return choice.units.grow > 0.0f && __uint_as_float(bound) * choice.units.shrink * six < 6.99f;
}

// Estimates the choice.
//
// Let an error be given in units of a code's step of 1, v = x * factor. In chosen_scale the decoded number has a relative error
// of 2 roundings and the factor of 4, each 2^-24: 6 * 6 * 2^-24. The product, below 7, the subnormal unit 2^-23, the
// difference and the choice of a neighbour near a tie add at most 26 * 2^-24: 62 * 2^-24 < 2^-18 per element. 16 elements, and
// 16 roundings of each sum below 16, give 2^-14 + 2^-15. Squared errors, of differences of at most 1, have twice the error.
// Both sums together: below 2^-12, or 2^-11, of the larger unit, that of the scale for 4.
template <PackOrder ORDER>
__device__ __forceinline__ Decision estimate_choice(const PackedBf16& x, u32 bound, const Choice& choice,
                                                    const Settings& settings, u8& scale) {
    const Scales& scales = choice.scales;
    scale = scales.six;
    const ErrorUnits& units = choice.units;
    const float six = choice.factors[scales.six] * units.grow, four = choice.factors[scales.four] * units.grow;
    const bool absolute = settings.candidates == FOUR_OR_SIX_BY_ABSOLUTE_ERROR;
    float v[BLOCK];
    unpack_shrunk<ORDER>(x, units, v);
    const float error_of_six = estimated_error(v, six, absolute),
                error_of_four = estimated_error(v, four, absolute);
    // Each error times the factor of the other scale, or times its square.
    const float difference = absolute ? error_of_four * six - error_of_six * four
                                      : error_of_four * (six * six) - error_of_six * (four * four);
    const float margin = absolute ? six * 0x1p11f : six * six * 0x1p-63f;
    if (difference < 0.0f) scale = scales.four;
    if (!estimate_applies(bound, choice)) return NO_ESTIMATE;
    return fabsf(difference) > margin || scales.six == scales.four ? DECIDED : CLOSE;
}

// The exact choice, if the amax has error_units and all numbers are finite.
template <PackOrder ORDER>
__device__ __forceinline__ u8 exact_choice(const PackedBf16& x, const Choice& choice, const Settings& settings) {
    const Scales& scales = choice.scales;
    float v[BLOCK];
    unpack_ordered_floats<ORDER>(x, v);
    const float six = exact_error(v, scales.six, choice.factors[scales.six], choice.amax, settings);
    return exact_error(v, scales.four, choice.factors[scales.four], choice.amax, settings) < six ? scales.four : scales.six;
}
#endif

// A packed block in memory order.
template <PackOrder ORDER>
__device__ __forceinline__ PackedBf16 in_memory_order(const PackedBf16& x) {
    if constexpr (ORDER == ADJACENT) return x;
    PackedBf16 ordered;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const u32 even = x.words[j / 4 * 4 + j % 4 / 2], odd = x.words[j / 4 * 4 + j % 4 / 2 + 2];
        ordered.words[j] = pack_halves(even, odd, j % 2 != 0);
    }
    return ordered;
}

// The choice of chosen_scale for a packed block of any numbers. `bound`: its magnitude_bound.
template <PackOrder ORDER>
__device__ __forceinline__ u8 chosen_packed_scale(const PackedBf16& x, u32 bound, const Choice& choice,
                                                  const Settings& settings) {
    const Scales& scales = choice.scales;
    // An error with NaN is NaN, and no error is smaller.
    if (settings.candidates == SIX || scales.four == scales.six || bound > FLOAT_INF_BITS) return scales.six;
#ifdef HAS_E2M1_BY_ADDITION
    if (choice.units.grow > 0.0f && bound < FLOAT_INF_BITS) return exact_choice<ORDER>(x, choice, settings);
#endif
    return static_cast<u8>(choice_of_any_tensor(in_memory_order<ORDER>(x), scales.six, scales.four, choice.encode, choice.amax,
                                                settings.max_product, settings.candidates));
}

}  // namespace narrowgauge
