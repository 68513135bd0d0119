// formats.cuh: conversions between float32 and the formats that kernels read and write.
//
// Each conversion has a portable form of IEEE float32 and integer operations, which gives the same bits with every compiler
// (no contraction, no fast-math, no flush-to-zero). If the architecture has an instruction for it, the instruction is used
// and gives the same bits. NARROWGAUGE_PORTABLE selects the portable forms, for comparison. PTX ISA: cvt.
#pragma once

#include "common/ptx.cuh"
#include "common/simd.cuh"

#ifndef __CUDACC__
#define __grid_constant__  // a qualifier of kernel parameters that only the compiler for GPUs has
#endif

namespace narrowgauge {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#if defined(__CUDA_ARCH__) && !defined(NARROWGAUGE_PORTABLE)
#if __CUDA_ARCH__ >= 800
#define HAS_CVT_HALF
#endif
#if __CUDA_ARCH__ >= 860
#define HAS_MAX_MAGNITUDE
#endif
#if __CUDA_ARCH__ >= 890
#define HAS_CVT_FP8
#endif
#if __CUDA_ARCH__ >= 900
#define HAS_MUL_BF16  // mul.bf16x2
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define HAS_CVT_NARROW  // E2M1, E2M3, E3M2 and E8M0
#endif
// NVIDIA does not document how cvt.rs uses its random bits. Its codes differ from the codes of the portable form and have the
// same expectation. It is used only if NARROWGAUGE_CVT_RS is defined.
#if defined(NARROWGAUGE_CVT_RS) && (defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL))
#define HAS_CVT_RS_E2M1
#endif
#endif

constexpr u32 FLOAT_INF_BITS = 0x7F800000u;

// Storage types without arithmetic, so that no vendor header is needed.
struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

// ---- float32 from and to the input dtypes ----------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

// The exponent field grows by 112. Infinities and NaN, which are then 2^16 and above, get an exponent field of ones.
__device__ __forceinline__ float to_float(fp16 x) {
    const u32 magnitude = __float_as_uint(__uint_as_float((x.bits & 0x7FFFu) << 13) * 0x1p112f);
    const u32 special = magnitude >= 0x47800000u ? FLOAT_INF_BITS : 0u;
    return __uint_as_float(magnitude | special | (x.bits & 0x8000u) << 16);
}

__device__ __forceinline__ void from_float(float x, float& out) { out = x; }

__device__ __forceinline__ void from_float(float x, bf16& out) {
#ifdef HAS_CVT_HALF
    ptx::cvt_rn_bf16_f32(out.bits, x);
#else
    const u32 bits = __float_as_uint(x);
    const u32 rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    out.bits = static_cast<u16>((bits & 0x7FFFFFFFu) > FLOAT_INF_BITS ? 0x7FFFu : rounded);
#endif
}

// The addition of 2^(e + 13) rounds a number with exponent e to ten mantissa bits, those of fp16, nearest even.
__device__ __forceinline__ void from_float(float x, fp16& out) {
#ifdef HAS_CVT_HALF
    ptx::cvt_rn_f16_f32(out.bits, x);
#else
    const u32 bits = __float_as_uint(x);
    const u32 sign = bits >> 16 & 0x8000u;
    const u32 magnitude = bits & 0x7FFFFFFFu;
    u32 code;
    if (magnitude > FLOAT_INF_BITS) {
        code = 0x7FFFu;
    } else if (magnitude >= 0x477FF000u) {  // 65520, the midpoint of 65504 and 65536, becomes infinity
        code = 0x7C00u;
    } else {
        const u32 exponent = magnitude & FLOAT_INF_BITS;
        const u32 quantum = (exponent < 0x38800000u ? 0x38800000u : exponent) + (13u << 23);
        const float anchor = __uint_as_float(quantum);
        const float rounded = (__uint_as_float(magnitude) + anchor) - anchor;
        const u32 r = __float_as_uint(rounded);
        code = r < 0x38800000u ? static_cast<u32>(rounded * 0x1p24f) : (r >> 13) - (112u << 10);
    }
    out.bits = static_cast<u16>(magnitude > FLOAT_INF_BITS ? code : code | sign);
#endif
}

// ---- arrays of elements ----------------------------------------------------------------------------------------------

#ifdef HAS_SIMD
__forceinline__ FloatVector to_float_vector(const float* source) { return load_vector<FloatVector>(source); }

__forceinline__ FloatVector to_float_vector(const bf16* source) {
    return bit_cast<FloatVector>(__builtin_convertvector(load_vector<UshortVector>(source), UintVector) << 16);
}

__forceinline__ FloatVector to_float_vector(const fp16* source) {
    const UintVector bits = __builtin_convertvector(load_vector<UshortVector>(source), UintVector);
    const UintVector magnitude = bit_cast<UintVector>(bit_cast<FloatVector>((bits & 0x7FFFu) << 13) * 0x1p112f);
    return bit_cast<FloatVector>(magnitude | (magnitude >= 0x47800000u ? UintVector{} + FLOAT_INF_BITS : UintVector{}) |
                                 (bits & 0x8000u) << 16);
}

// bfloat16 bits in the low half of each lane.
__forceinline__ UintVector to_bf16_vector(FloatVector x) {
    const UintVector bits = bit_cast<UintVector>(x);
    const UintVector rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > FLOAT_INF_BITS ? UintVector{} + 0x7FFFu : rounded;
}

// fp16 bits in the low half of each lane, equal to those of from_float.
__forceinline__ UintVector to_fp16_vector(FloatVector x) {
    const UintVector bits = bit_cast<UintVector>(x), magnitude = bits & 0x7FFFFFFFu;
    const UintVector small = vector_min(magnitude, UintVector{} + 0x477FF000u);
    const FloatVector anchor =
        bit_cast<FloatVector>(vector_max(small & FLOAT_INF_BITS, UintVector{} + 0x38800000u) + (13u << 23));
    const FloatVector rounded = (bit_cast<FloatVector>(small) + anchor) - anchor;
    const UintVector r = bit_cast<UintVector>(rounded);
    // Only numbers up to 2^10 are converted to integers.
    const FloatVector steps = r < 0x38800000u ? rounded * 0x1p24f : FloatVector{};
    const UintVector counted = bit_cast<UintVector>(__builtin_convertvector(steps, IntVector));
    const UintVector code = (r < 0x38800000u ? counted : (r >> 13) - (112u << 10)) | (bits >> 16 & 0x8000u);
    return magnitude > FLOAT_INF_BITS ? UintVector{} + 0x7FFFu : code;
}

__forceinline__ void from_float_vector(FloatVector x, float* target) { store_vector(x, target); }
__forceinline__ void from_float_vector(FloatVector x, bf16* target) {
    store_vector(__builtin_convertvector(to_bf16_vector(x), UshortVector), target);
}
__forceinline__ void from_float_vector(FloatVector x, fp16* target) {
    store_vector(__builtin_convertvector(to_fp16_vector(x), UshortVector), target);
}
#endif

// On a GPU, vectorized loads and stores of 16 or 8 bytes if the address is aligned.
template <class T, int N>
__device__ __forceinline__ void load_elements(const T* source, float (&v)[N]) {
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(source) % 16 == 0) {
        constexpr int PER_CHUNK = 16 / sizeof(T);
        struct alignas(16) Chunk {
            T elements[PER_CHUNK];
        };
#pragma unroll
        for (int i = 0; i < N / PER_CHUNK; ++i) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(source)[i];
#pragma unroll
            for (int j = 0; j < PER_CHUNK; ++j) v[i * PER_CHUNK + j] = to_float(chunk.elements[j]);
        }
        return;
    }
#endif
#ifdef HAS_SIMD
    if constexpr (N % SIMD_LANES == 0) {
        // Each row of a tile lies in cache lines of its own, and behind them the rows of the next tile: without the prefetch,
        // both outputs of MXFP8 of 2048x2048 bfloat16 took 60 % longer.
        __builtin_prefetch(reinterpret_cast<const u8*>(source) + 256);
        for (int i = 0; i < N; i += SIMD_LANES) store_vector(to_float_vector(source + i), v + i);
        return;
    }
#endif
    for (int i = 0; i < N; ++i) v[i] = to_float(source[i]);
}

template <class T, int N>
__device__ __forceinline__ void store_elements(const float (&v)[N], T* target) {
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(target) % 16 == 0) {
        constexpr int PER_CHUNK = 16 / sizeof(T);
        struct alignas(16) Chunk {
            T elements[PER_CHUNK];
        };
#pragma unroll
        for (int i = 0; i < N / PER_CHUNK; ++i) {
            Chunk chunk;
#pragma unroll
            for (int j = 0; j < PER_CHUNK; ++j) from_float(v[i * PER_CHUNK + j], chunk.elements[j]);
            reinterpret_cast<Chunk*>(target)[i] = chunk;
        }
        return;
    }
#endif
#ifdef HAS_SIMD
    if constexpr (N % SIMD_LANES == 0) {
        for (int i = 0; i < N; i += SIMD_LANES) from_float_vector(load_vector<FloatVector>(v + i), target + i);
        return;
    }
#endif
    for (int i = 0; i < N; ++i) from_float(v[i], target[i]);
}

template <int N>
__device__ __forceinline__ void load_bytes(const u8* source, u8 (&bytes)[N]) {
#ifdef __CUDA_ARCH__
    constexpr int PER_CHUNK = N % 16 == 0 ? 16 : 8;
    if (reinterpret_cast<u64>(source) % PER_CHUNK == 0) {
        struct alignas(PER_CHUNK) Chunk {
            u32 words[PER_CHUNK / 4];
        };
#pragma unroll
        for (int i = 0; i < N / PER_CHUNK; ++i) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(source)[i];
#pragma unroll
            for (int j = 0; j < PER_CHUNK; ++j) bytes[PER_CHUNK * i + j] = static_cast<u8>(chunk.words[j / 4] >> j % 4 * 8);
        }
        return;
    }
#endif
    for (int j = 0; j < N; ++j) bytes[j] = source[j];
}

template <int N>
__device__ __forceinline__ void store_bytes(const u8 (&bytes)[N], u8* target) {
#ifdef __CUDA_ARCH__
    constexpr int PER_CHUNK = N % 16 == 0 ? 16 : 8;
    if (reinterpret_cast<u64>(target) % PER_CHUNK == 0) {
        struct alignas(PER_CHUNK) Chunk {
            u32 words[PER_CHUNK / 4];
        };
#pragma unroll
        for (int i = 0; i < N / PER_CHUNK; ++i) {
            Chunk chunk;
#pragma unroll
            for (int j = 0; j < PER_CHUNK / 4; ++j) {
                const u8* four = bytes + PER_CHUNK * i + 4 * j;
                chunk.words[j] = four[0] | four[1] << 8 | four[2] << 16 | static_cast<u32>(four[3]) << 24;
            }
            reinterpret_cast<Chunk*>(target)[i] = chunk;
        }
        return;
    }
#endif
    for (int j = 0; j < N; ++j) target[j] = bytes[j];
}

// Loads `count` of four bytes and sets the others to 0.
__device__ __forceinline__ void load_bytes4(const u8* source, int count, u8* bytes) {
#ifdef __CUDA_ARCH__
    if (count == 4 && reinterpret_cast<u64>(source) % 4 == 0) {
        const u32 word = *reinterpret_cast<const u32*>(source);
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes[j] = static_cast<u8>(word >> 8 * j);
        return;
    }
#endif
    for (int j = 0; j < 4; ++j) bytes[j] = j < count ? source[j] : 0;
}

__device__ __forceinline__ void store_bytes4(const u8* bytes, int count, u8* target) {
#ifdef __CUDA_ARCH__
    if (count == 4 && reinterpret_cast<u64>(target) % 4 == 0) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) word |= static_cast<u32>(bytes[j]) << 8 * j;
        *reinterpret_cast<u32*>(target) = word;
        return;
    }
#endif
    for (int j = 0; j < 4; ++j) {
        if (j < count) target[j] = bytes[j];
    }
}

// ---- amax ------------------------------------------------------------------------------------------------------------

// Bits of magnitudes, as integers, have the order of their values, and NaN is above infinity. An amax leaves out bits above
// this limit: NaN, unless it is propagated.
__device__ __forceinline__ u32 amax_limit(int propagate_nan) { return propagate_nan ? 0x7FFFFFFFu : FLOAT_INF_BITS; }

__device__ __forceinline__ void update_amax(float x, u32 limit, u32& largest) {
    const u32 magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
    const u32 counted = magnitude <= limit ? magnitude : 0u;
    largest = counted > largest ? counted : largest;
}

// ---- narrow formats --------------------------------------------------------------------------------------------------

// A format with a sign, an exponent and MANTISSA bits. Codes of magnitudes have the order of their values; codes above MAX_CODE
// are infinity and NaN. NaN of either sign is converted to NAN_CODE, which is the largest number if the format has no NaN.
template <int WIDTH, int MANTISSA_BITS, int EXPONENT_BIAS, u32 LARGEST, u32 NOT_A_NUMBER>
struct NarrowFormat {
    static constexpr int BITS = WIDTH, MANTISSA = MANTISSA_BITS;
    static constexpr u32 MAX_CODE = LARGEST, NAN_CODE = NOT_A_NUMBER, SIGN = 1u << (WIDTH - 1);
    // The bits of a float32, shifted right by SHIFT, are a code plus REBIAS, the difference of the exponent biases.
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr u32 REBIAS = static_cast<u32>(127 - EXPONENT_BIAS) << MANTISSA;
    // As bits of float32: the largest number, the smallest normal number, and the step between subnormal numbers.
    static constexpr u32 MAX_BITS = (MAX_CODE + REBIAS) << SHIFT;
    static constexpr u32 NORMAL_BITS = static_cast<u32>(128 - EXPONENT_BIAS) << 23;
    static constexpr u32 STEP_BITS = NORMAL_BITS - (static_cast<u32>(MANTISSA) << 23);
};

// cvt instructions for a pair of numbers: to two bytes, the first number in the low byte, and back through fp16, which holds
// every number of these formats.
#define CVT_PAIR(NAME)                                                                         \
    static constexpr bool HAS_CVT = true;                                                      \
    static __device__ __forceinline__ u16 cvt_rn_satfinite_x2(float low, float high) {         \
        u16 pair;                                                                              \
        asm("cvt.rn.satfinite." NAME "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low)); \
        return pair;                                                                           \
    }                                                                                          \
    static __device__ __forceinline__ void cvt_to_floats(u16 pair, float& low, float& high) {  \
        asm("{\n.reg .b32 both;\n.reg .b16 one, other;\ncvt.rn.f16x2." NAME                    \
            "x2 both, %2;\n"                                                                   \
            "mov.b32 {one, other}, both;\ncvt.f32.f16 %0, one;\ncvt.f32.f16 %1, other;\n}"     \
            : "=f"(low), "=f"(high)                                                            \
            : "h"(pair));                                                                      \
    }
#define NO_CVT static constexpr bool HAS_CVT = false;
#ifdef HAS_CVT_FP8
#define CVT_FP8(NAME) CVT_PAIR(NAME)
#else
#define CVT_FP8(NAME) NO_CVT
#endif
#ifdef HAS_CVT_NARROW
#define CVT_FP6(NAME) CVT_PAIR(NAME)
#else
#define CVT_FP6(NAME) NO_CVT
#endif

struct E2M1 : NarrowFormat<4, 1, 1, 0x7, 0x7> {
    NO_CVT  // e2m1x2_from_float uses the instruction for a pair, which fills one byte
};
struct E2M3 : NarrowFormat<6, 3, 1, 0x1F, 0x1F> {
    CVT_FP6("e2m3")
};
struct E3M2 : NarrowFormat<6, 2, 3, 0x1F, 0x1F> {
    CVT_FP6("e3m2")
};
struct E4M3 : NarrowFormat<8, 3, 7, 0x7E, 0x7F> {
    CVT_FP8("e4m3")
};
struct E5M2 : NarrowFormat<8, 2, 15, 0x7B, 0x7F> {
    CVT_FP8("e5m2")
};

// Code of a float32 number, nearest even, saturating; the sign is kept, NaN gives NAN_CODE. Same bits as cvt.rn.satfinite.
template <class F>
__device__ __forceinline__ u32 nearest_even(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 a = magnitude < F::MAX_BITS ? magnitude : F::MAX_BITS;
    const u32 normal = ((a + ((1u << (F::SHIFT - 1)) - 1u) + (a >> F::SHIFT & 1u)) >> F::SHIFT) - F::REBIAS;
    // Adding 2^23 steps rounds a number to whole steps; the last bits of the sum are their count.
    constexpr u32 ANCHOR = F::STEP_BITS + (23u << 23);
    const u32 small = __float_as_uint(__uint_as_float(a) + __uint_as_float(ANCHOR)) - ANCHOR;
    const u32 code = (a < F::NORMAL_BITS ? small : normal) | (bits >> 31) * F::SIGN;
    return magnitude > FLOAT_INF_BITS ? F::NAN_CODE : code;
}

// Code by stochastic rounding with a random byte: t = |x| + byte/256 * step, with the step of the grid at |x|, is truncated to
// the grid at t. The product is exact; t rounds once. docs/numerics.md#stochastic-rounding.
template <class F>
__device__ __forceinline__ u32 stochastic(float x, u32 byte) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 exponent = magnitude & FLOAT_INF_BITS;
    const u32 step = (exponent > F::NORMAL_BITS ? exponent : F::NORMAL_BITS) - (static_cast<u32>(F::MANTISSA) << 23);
    const float share = static_cast<float>(static_cast<int>(byte)) * 0x1p-8f;
    const float moved = __uint_as_float(magnitude) + share * __uint_as_float(step);
    const u32 t = __float_as_uint(moved) < F::MAX_BITS ? __float_as_uint(moved) : F::MAX_BITS;
    // A division by the subnormal step, as an exact product with a power of two.
    constexpr u32 STEPS_BITS = (254u << 23) - F::STEP_BITS;
    const u32 small = static_cast<u32>(static_cast<int>(__uint_as_float(t) * __uint_as_float(STEPS_BITS)));
    const u32 code = (t < F::NORMAL_BITS ? small : (t >> F::SHIFT) - F::REBIAS) | (bits >> 31) * F::SIGN;
    return magnitude > FLOAT_INF_BITS ? F::NAN_CODE : code;
}

#ifdef HAS_SIMD
// For formats up to 8 bits wide. A power of two is added that rounds the number to whole steps of its binade, or of the
// smallest normal binade. The last bits of the sum count the steps; the exponent of the sum gives the exponent of the code.
template <class F>
__forceinline__ UintVector nearest_even_vector(FloatVector x) {
    constexpr u32 ANCHOR = static_cast<u32>(23 - F::MANTISSA) << 23;
    constexpr u32 ZERO = F::NORMAL_BITS + ANCHOR;  // bits of the sum if the number is 0
    const UintVector bits = bit_cast<UintVector>(x), magnitude = bits & 0x7FFFFFFFu;
    const UintVector a = vector_min(magnitude, UintVector{} + F::MAX_BITS);
    const UintVector anchor = vector_max(a & FLOAT_INF_BITS, UintVector{} + F::NORMAL_BITS) + ANCHOR;
    const UintVector sum = bit_cast<UintVector>(bit_cast<FloatVector>(a) + bit_cast<FloatVector>(anchor));
    const UintVector code = (sum + (sum >> F::SHIFT) - (ZERO + (ZERO >> F::SHIFT))) & (F::SIGN - 1u);
    return magnitude > FLOAT_INF_BITS ? UintVector{} + F::NAN_CODE : code | (bits >> (32 - F::BITS) & F::SIGN);
}

template <class F>
__forceinline__ UintVector stochastic_vector(FloatVector x, UintVector byte) {
    const UintVector bits = bit_cast<UintVector>(x), magnitude = bits & 0x7FFFFFFFu;
    const UintVector step =
        vector_max(magnitude & FLOAT_INF_BITS, UintVector{} + F::NORMAL_BITS) - (static_cast<u32>(F::MANTISSA) << 23);
    const FloatVector share = __builtin_convertvector(bit_cast<IntVector>(byte), FloatVector) * 0x1p-8f;
    const FloatVector moved = bit_cast<FloatVector>(magnitude) + share * bit_cast<FloatVector>(step);
    const UintVector t = vector_min(bit_cast<UintVector>(moved), UintVector{} + F::MAX_BITS);
    // Truncates to the grid. Numbers below the smallest normal number count subnormal steps.
    constexpr u32 STEPS_BITS = (254u << 23) - F::STEP_BITS;
    const FloatVector steps = bit_cast<FloatVector>(t) * __uint_as_float(STEPS_BITS);
    const UintVector normal = (t >> F::SHIFT) - F::REBIAS;
    // Only numbers up to 2^24 steps are converted to integers.
    const UintVector small =
        bit_cast<UintVector>(__builtin_convertvector(t < F::NORMAL_BITS ? steps : FloatVector{}, IntVector));
    const UintVector code = (t < F::NORMAL_BITS ? small : normal) | (bits >> (32 - F::BITS) & F::SIGN);
    return magnitude > FLOAT_INF_BITS ? UintVector{} + F::NAN_CODE : code;
}

// Codes of 8 or 6 bits fill a byte each, codes of 4 bits a nibble, the first one in the low nibble.
template <class F>
__forceinline__ UintVector load_code_vector(const u8* source) {
    if constexpr (F::BITS == 4) {
        const UlongVector pairs = __builtin_convertvector(load_vector<HalfByteVector>(source), UlongVector);
        return bit_cast<UintVector>((pairs | pairs << 28) & 0x0000000F0000000Full);
    } else {
        return __builtin_convertvector(__builtin_convertvector(load_vector<ByteVector>(source), UshortVector), UintVector);
    }
}

template <class F>
__forceinline__ void store_code_vector(UintVector codes, u8* target) {
    if constexpr (F::BITS == 4) {
        const UlongVector pairs = bit_cast<UlongVector>(codes);
        store_vector(__builtin_convertvector(pairs | pairs >> 28, HalfByteVector), target);
    } else {
        store_vector(__builtin_convertvector(__builtin_convertvector(codes, UshortVector), ByteVector), target);
    }
}
#endif

template <class F>
__device__ __forceinline__ u8 from_float(float x) {
    if constexpr (F::HAS_CVT) {
        return static_cast<u8>(F::cvt_rn_satfinite_x2(x, 0.0f));
    } else {
        return static_cast<u8>(nearest_even<F>(x));
    }
}

template <class F>
__device__ __forceinline__ u16 pair_from_float(float low, float high) {
    if constexpr (F::HAS_CVT) {
        return F::cvt_rn_satfinite_x2(low, high);
    } else {
        return static_cast<u16>(nearest_even<F>(low) | nearest_even<F>(high) << 8);
    }
}

// Bits of `code` above the width of the format are ignored.
template <class F>
__device__ __forceinline__ float narrow_to_float(u32 code) {
    const u32 magnitude = code & (F::SIGN - 1u);
#ifdef __CUDA_ARCH__
    // The shifted code, read as a float32 (subnormal too), is too small by a power of two. Not on a CPU, which is slow with
    // subnormal numbers.
    constexpr u32 POWER = ((F::REBIAS >> F::MANTISSA) + 127u) << 23;
    const u32 finite = __float_as_uint(__uint_as_float(magnitude << F::SHIFT) * __uint_as_float(POWER));
#else
    const float small = static_cast<float>(static_cast<int>(magnitude)) * __uint_as_float(F::STEP_BITS);
    const u32 normal = (magnitude + F::REBIAS) << F::SHIFT;
    const u32 finite = magnitude < 1u << F::MANTISSA ? __float_as_uint(small) : normal;
#endif
    // The code above the largest number is infinity if the format has one, else NaN.
    const bool infinite = F::MAX_CODE + 1u < F::NAN_CODE && magnitude == F::MAX_CODE + 1u;
    const u32 value = magnitude <= F::MAX_CODE ? finite : infinite ? FLOAT_INF_BITS : 0x7FC00000u;
    return __uint_as_float(value | ((code & F::SIGN) != 0u ? 0x80000000u : 0u));
}

#ifdef HAS_SIMD
template <class F>
__forceinline__ FloatVector narrow_to_float_vector(UintVector codes) {
    const UintVector magnitude = codes & (F::SIGN - 1u);
    const FloatVector small =
        __builtin_convertvector(bit_cast<IntVector>(magnitude), FloatVector) * __uint_as_float(F::STEP_BITS);
    const UintVector normal = (magnitude + F::REBIAS) << F::SHIFT;
    const UintVector finite = magnitude < 1u << F::MANTISSA ? bit_cast<UintVector>(small) : normal;
    UintVector value = magnitude <= F::MAX_CODE ? finite : UintVector{} + 0x7FC00000u;
    if constexpr (F::MAX_CODE + 1u < F::NAN_CODE) {
        value = magnitude == F::MAX_CODE + 1u ? UintVector{} + FLOAT_INF_BITS : value;
    }
    return bit_cast<FloatVector>(value | (codes & F::SIGN) << (32 - F::BITS));
}
#endif

template <class F, int N>
__device__ __forceinline__ void narrow_to_floats(const u8* codes, float (&v)[N]) {
    if constexpr (F::HAS_CVT) {
#pragma unroll
        for (int i = 0; i < N; i += 2) F::cvt_to_floats(static_cast<u16>(codes[i] | codes[i + 1] << 8), v[i], v[i + 1]);
    } else {
        for (int i = 0; i < N; ++i) v[i] = narrow_to_float<F>(codes[i]);
    }
}

__device__ __forceinline__ u8 e2m3_from_float(float x) { return from_float<E2M3>(x); }
__device__ __forceinline__ u8 e3m2_from_float(float x) { return from_float<E3M2>(x); }
__device__ __forceinline__ u8 e4m3_from_float(float x) { return from_float<E4M3>(x); }
__device__ __forceinline__ u8 e5m2_from_float(float x) { return from_float<E5M2>(x); }
__device__ __forceinline__ float e2m3_to_float(u8 code) { return narrow_to_float<E2M3>(code); }
__device__ __forceinline__ float e3m2_to_float(u8 code) { return narrow_to_float<E3M2>(code); }
__device__ __forceinline__ float e4m3_to_float(u8 code) { return narrow_to_float<E4M3>(code); }
__device__ __forceinline__ float e5m2_to_float(u8 code) { return narrow_to_float<E5M2>(code); }

// ---- E8M0 ------------------------------------------------------------------------------------------------------------

// Code of a power of two for x >= 0: the power at or below x, or the next one if the mantissa of x is at least `up_from`, 1 to
// 2^23 (never). The exponent is then reduced by `less`. Saturates at 2^-127 and 2^127; infinity counts as 2^128, NaN gives 255.
// With up_from = 1 and less = 0, cvt.rp.satfinite.ue8m0x2.f32 gives the same bits.
__device__ __forceinline__ u8 e8m0_from_float(float x, u32 up_from, int less) {
#ifdef HAS_CVT_NARROW
    if (up_from == 1u && less == 0) {
        return static_cast<u8>(ptx::cvt_rp_satfinite_ue8m0x2_f32(x, 0.0f));
    }
#endif
    // A mantissa from up_from on carries into the exponent. A subnormal number from 2^-127 on, twice, has the form of a normal
    // number, whose code is one larger. Smaller ones have code 0, also after rounding.
    const u32 bits = __float_as_uint(x), subnormal = bits < 0x00800000u ? 1u : 0u;
    const int code = static_cast<int>(((bits << subnormal) + (0x00800000u - up_from)) >> 23) - static_cast<int>(subnormal) - less;
    const int limited = code > 254 ? 254 : code < 0 ? 0 : code;
    return static_cast<u8>(bits > FLOAT_INF_BITS ? 255 : limited);
}

// 2^(code - 127). Code 0 is a subnormal number, code 255 NaN.
__device__ __forceinline__ float e8m0_to_float(u32 code) {
    const u32 bits = code == 0u ? 0x00400000u : code << 23;
    return __uint_as_float(code == 0xFFu ? 0x7FC00000u : bits);
}

// ---- E2M1 ------------------------------------------------------------------------------------------------------------

// Nearest even, saturating at 6; the sign is kept, NaN gives 7. The code is the number of midpoints below |x|. A tie counts if
// the code above it is even. Each comparison is true for NaN.
__device__ __forceinline__ u32 e2m1_from_float(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const float a = __uint_as_float(magnitude);
    const u32 code = static_cast<u32>(!(a <= 0.25f)) + static_cast<u32>(!(a < 0.75f)) + static_cast<u32>(!(a <= 1.25f)) +
                     static_cast<u32>(!(a < 1.75f)) + static_cast<u32>(!(a <= 2.5f)) + static_cast<u32>(!(a < 3.5f)) +
                     static_cast<u32>(!(a <= 5.0f));
    const u32 sign = magnitude > FLOAT_INF_BITS ? 0u : bits >> 28 & 8u;
    return code | sign;
}

// Two elements to one byte, the first in the low nibble.
__device__ __forceinline__ u8 e2m1x2_from_float(float low, float high) {
#ifdef HAS_CVT_NARROW
    return static_cast<u8>(ptx::cvt_rn_satfinite_e2m1x2_f32(low, high));
#else
    return static_cast<u8>(e2m1_from_float(low) | e2m1_from_float(high) << 4);
#endif
}

#if defined(__CUDA_ARCH__) && !defined(HAS_CVT_NARROW) && !defined(NARROWGAUGE_PORTABLE)
#define HAS_E2M1_BY_ADDITION
// A word with the code of |x|, nearest even, in its low byte. Let 2^e be the binade of |x|, at least 1 and at most 4. The sum
// of |x| and 2^(e+22) counts steps of 2^(e-1) in its last bits, and bits 22 and above, shifted down, add 2e. The term 107
// cancels the rest of the low byte.
__device__ __forceinline__ u32 e2m1_by_addition(float x) {
    const float a = fminf(fabsf(x), 6.0f);  // NaN to 6
    const float binade = __uint_as_float(__float_as_uint(fmaxf(a, 1.0f)) & FLOAT_INF_BITS);
    const u32 sum = __float_as_uint(__fmaf_rn(binade, 0x1p22f + 107.0f, a));
    return sum + (sum >> 22);
}

// The same with the rounding of `stochastic`. `byte`: a random byte, zero-extended.
__device__ __forceinline__ u32 e2m1_by_addition_stochastic(float x, u32 byte) {
    const float a = fabsf(x);
    const float binade = __uint_as_float(__float_as_uint(fmaxf(a, 1.0f)) & FLOAT_INF_BITS);
    const float share = __uint_as_float(0x46800000u | byte) - 0x1p14f;  // byte/512: the step is half of the binade
    const float t = fminf(__fmaf_rn(share, binade, a), 6.0f);           // NaN to 6
    const float grid = __uint_as_float(__float_as_uint(fmaxf(t, 1.0f)) & FLOAT_INF_BITS);
    const u32 sum = __float_as_uint(__fmaf_rz(grid, 0x1p22f + 107.0f, t));
    return sum + (sum >> 22);
}

// Packs eight codes of magnitudes, given in the low bytes of eight words, and the signs of x into one word.
__device__ __forceinline__ u32 pack_e2m1x8(const u32 (&codes)[8], const float* x) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = codes[2 * j + 1] * 16u + codes[2 * j];
    u32 signs[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const u32 low = __byte_perm(__float_as_uint(x[odd]), __float_as_uint(x[2 + odd]), 0x0073);
        const u32 high = __byte_perm(__float_as_uint(x[4 + odd]), __float_as_uint(x[6 + odd]), 0x0073);
        signs[odd] = __byte_perm(low, high, 0x5410) & 0x80808080u;
    }
    const u32 low = __byte_perm(pairs[0], pairs[1], 0x0040), high = __byte_perm(pairs[2], pairs[3], 0x0040);
    return __byte_perm(low, high, 0x5410) | signs[0] >> 4 | signs[1];
}

#endif

// 16 elements to eight bytes, nearest even.
__device__ __forceinline__ void e2m1x16_from_float(const float (&x)[16], u8 (&packed)[8]) {
#ifdef HAS_E2M1_BY_ADDITION
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = e2m1_by_addition(x[8 * half + i]);
        const u32 word = pack_e2m1x8(codes, x + 8 * half);  // on a GPU a product that is NaN has no sign
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[4 * half + j] = static_cast<u8>(word >> 8 * j);
    }
#elif defined(HAS_SIMD)
    for (int i = 0; i < 16; i += SIMD_LANES) {
        store_code_vector<E2M1>(nearest_even_vector<E2M1>(load_vector<FloatVector>(x + i)), packed + i / 2);
    }
#else
    for (int j = 0; j < 8; ++j) packed[j] = e2m1x2_from_float(x[2 * j], x[2 * j + 1]);
#endif
}

// 16 elements to eight bytes by stochastic rounding. Each of four random words serves four elements, its low byte the first.
__device__ __forceinline__ void e2m1x16_stochastic(const float (&x)[16], const u32 (&words)[4], u8 (&packed)[8]) {
#ifdef HAS_CVT_RS_E2M1
    for (int j = 0; j < 4; ++j) {
        const u16 codes = ptx::cvt_rs_satfinite_e2m1x4_f32({x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]}, words[j]);
        packed[2 * j] = static_cast<u8>(codes);
        packed[2 * j + 1] = static_cast<u8>(codes >> 8);
    }
#elif defined(HAS_E2M1_BY_ADDITION)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = e2m1_by_addition_stochastic(x[8 * half + i], words[2 * half + i / 4] >> i % 4 * 8 & 0xFFu);
        }
        const u32 word = pack_e2m1x8(codes, x + 8 * half);
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[4 * half + j] = static_cast<u8>(word >> 8 * j);
    }
#elif defined(HAS_SIMD)
    for (int i = 0; i < 16; i += SIMD_LANES) {
        const UintVector bytes =
            __builtin_convertvector(__builtin_convertvector(load_vector<ByteVector>(words + i / 4), UshortVector), UintVector);
        store_code_vector<E2M1>(stochastic_vector<E2M1>(load_vector<FloatVector>(x + i), bytes), packed + i / 2);
    }
#else
    u8 bytes[16];  // arrays of elements; a CPU vectorizes the loop
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
    u32 codes[16];
    for (int i = 0; i < 16; ++i) codes[i] = stochastic<E2M1>(x[i], bytes[i]);
    for (int j = 0; j < 8; ++j) packed[j] = static_cast<u8>(codes[2 * j] | codes[2 * j + 1] << 4);
#endif
}

// Magnitudes, counted in halves, are 0, 1, 2, 3, 4, 6, 8, 12: (2 + m) << (e - 1), or m if e = 0.
__device__ __forceinline__ float e2m1_to_float(u32 code) {
#ifdef __CUDA_ARCH__
    // The shifted code, read as a float32 (1/2 is subnormal), is 2^126 times too small.
    return __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
#else
    const u32 exponent = code >> 1 & 3u;
    const u32 mantissa = code & 1u;
    const u32 halves = exponent == 0u ? mantissa : (2u + mantissa) << (exponent - 1u);
    const u32 sign = (code & 8u) << 28;
    return __uint_as_float(__float_as_uint(static_cast<float>(halves) * 0.5f) | sign);
#endif
}

}  // namespace narrowgauge
