// formats.cuh: conversions between float32 and the formats that kernels read and write.
//
// Each has a portable form, made of IEEE float32 operations and integers, that gives the same bits with every compiler
// (no contraction, no fast-math, no flush-to-zero). Where the chip has an instruction, it is used instead and gives
// the same bits; NARROWGAUGE_PORTABLE keeps the portable forms for comparison. PTX ISA: cvt.
#pragma once

#include "common/lanes.cuh"

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
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define HAS_CVT_NARROW  // E2M1, E2M3, E3M2 and E8M0
#endif
// How cvt.rs uses its random bits is not documented, so it gives other bits than its twin, with the same expectation: it
// is taken only where NARROWGAUGE_CVT_RS asks for it.
#if defined(NARROWGAUGE_CVT_RS) && (defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL))
#define HAS_CVT_RS_E2M1
#endif
#endif

constexpr u32 FLOAT_INF_BITS = 0x7F800000u;

// Storage types: the bits, so that no vendor header is needed.
struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

// ---- float32 from and to the input dtypes ----------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

// The exponent field moves up by 112; infinities and NaN, at 2^16 and above after that, get the full field.
__device__ __forceinline__ float to_float(fp16 x) {
    const u32 magnitude = __float_as_uint(__uint_as_float((x.bits & 0x7FFFu) << 13) * 0x1p112f);
    const u32 special = magnitude >= 0x47800000u ? FLOAT_INF_BITS : 0u;
    return __uint_as_float(magnitude | special | (x.bits & 0x8000u) << 16);
}

__device__ __forceinline__ void from_float(float x, float& out) { out = x; }

__device__ __forceinline__ void from_float(float x, bf16& out) {
#ifdef HAS_CVT_HALF
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#else
    const u32 bits = __float_as_uint(x);
    const u32 rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    out.bits = static_cast<u16>((bits & 0x7FFFFFFFu) > FLOAT_INF_BITS ? 0x7FFFu : rounded);
#endif
}

// Adding 2^(e + 13) leaves the ten mantissa bits that fp16 keeps at exponent e, rounded to nearest even by the addition.
__device__ __forceinline__ void from_float(float x, fp16& out) {
#ifdef HAS_CVT_HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#else
    const u32 bits = __float_as_uint(x);
    const u32 sign = bits >> 16 & 0x8000u;
    const u32 magnitude = bits & 0x7FFFFFFFu;
    u32 code;
    if (magnitude > FLOAT_INF_BITS) {
        code = 0x7FFFu;
    } else if (magnitude >= 0x477FF000u) {  // 65520, the midpoint between 65504 and what would follow, goes to infinity
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

// ---- many elements at once -------------------------------------------------------------------------------------------

#ifdef HAS_LANES
__forceinline__ Floats to_float_lanes(const float* source) { return load_lanes<Floats>(source); }

__forceinline__ Floats to_float_lanes(const bf16* source) {
    return same_bits<Floats>(__builtin_convertvector(load_lanes<Shorts>(source), Bits) << 16);
}

__forceinline__ Floats to_float_lanes(const fp16* source) {
    const Bits bits = __builtin_convertvector(load_lanes<Shorts>(source), Bits);
    const Bits magnitude = same_bits<Bits>(same_bits<Floats>((bits & 0x7FFFu) << 13) * 0x1p112f);
    return same_bits<Floats>(magnitude | (magnitude >= 0x47800000u ? Bits{} + FLOAT_INF_BITS : Bits{}) | (bits & 0x8000u) << 16);
}

// bfloat16 in the low half of each lane.
__forceinline__ Bits bf16_lanes(Floats x) {
    const Bits bits = same_bits<Bits>(x);
    const Bits rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > FLOAT_INF_BITS ? Bits{} + 0x7FFFu : rounded;
}

// float16, as from_float makes it.
__forceinline__ Bits fp16_lanes(Floats x) {
    const Bits bits = same_bits<Bits>(x), magnitude = bits & 0x7FFFFFFFu;
    const Bits small = smaller(magnitude, Bits{} + 0x477FF000u);
    const Floats anchor = same_bits<Floats>(larger(small & FLOAT_INF_BITS, Bits{} + 0x38800000u) + (13u << 23));
    const Floats rounded = (same_bits<Floats>(small) + anchor) - anchor;
    const Bits r = same_bits<Bits>(rounded);
    // No larger number than 2^10 is asked for.
    const Floats steps = r < 0x38800000u ? rounded * 0x1p24f : Floats{};
    const Bits counted = same_bits<Bits>(__builtin_convertvector(steps, Integers));
    const Bits code = (r < 0x38800000u ? counted : (r >> 13) - (112u << 10)) | (bits >> 16 & 0x8000u);
    return magnitude > FLOAT_INF_BITS ? Bits{} + 0x7FFFu : code;
}

__forceinline__ void from_float_lanes(Floats x, float* target) { store_lanes(x, target); }
__forceinline__ void from_float_lanes(Floats x, bf16* target) {
    store_lanes(__builtin_convertvector(bf16_lanes(x), Shorts), target);
}
__forceinline__ void from_float_lanes(Floats x, fp16* target) {
    store_lanes(__builtin_convertvector(fp16_lanes(x), Shorts), target);
}
#endif

// Where they lie aligned, a GPU moves 16 bytes, or 8, with one instruction.
template <class T, int N>
__device__ __forceinline__ void load_elements(const T* source, float (&v)[N]) {
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(source) % 16 == 0) {
        constexpr int EACH = 16 / sizeof(T);
        struct alignas(16) Chunk {
            T each[EACH];
        };
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(source)[i];
#pragma unroll
            for (int j = 0; j < EACH; ++j) v[i * EACH + j] = to_float(chunk.each[j]);
        }
        return;
    }
#endif
#ifdef HAS_LANES
    if constexpr (N % LANES == 0) {
        // Of a tile, each row lies in other lines of the cache. Behind it lie those of a tile to come: 2048x2048 bfloat16 to
        // both halves of MXFP8 took 60 % longer without.
        __builtin_prefetch(reinterpret_cast<const u8*>(source) + 256);
        for (int i = 0; i < N; i += LANES) store_lanes(to_float_lanes(source + i), v + i);
        return;
    }
#endif
    for (int i = 0; i < N; ++i) v[i] = to_float(source[i]);
}

template <class T, int N>
__device__ __forceinline__ void store_elements(const float (&v)[N], T* target) {
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(target) % 16 == 0) {
        constexpr int EACH = 16 / sizeof(T);
        struct alignas(16) Chunk {
            T each[EACH];
        };
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) {
            Chunk chunk;
#pragma unroll
            for (int j = 0; j < EACH; ++j) from_float(v[i * EACH + j], chunk.each[j]);
            reinterpret_cast<Chunk*>(target)[i] = chunk;
        }
        return;
    }
#endif
#ifdef HAS_LANES
    if constexpr (N % LANES == 0) {
        for (int i = 0; i < N; i += LANES) from_float_lanes(load_lanes<Floats>(v + i), target + i);
        return;
    }
#endif
    for (int i = 0; i < N; ++i) from_float(v[i], target[i]);
}

template <int N>
__device__ __forceinline__ void load_bytes(const u8* source, u8 (&bytes)[N]) {
#ifdef __CUDA_ARCH__
    constexpr int EACH = N % 16 == 0 ? 16 : 8;
    if (reinterpret_cast<u64>(source) % EACH == 0) {
        struct alignas(EACH) Chunk {
            u32 words[EACH / 4];
        };
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(source)[i];
#pragma unroll
            for (int j = 0; j < EACH; ++j) bytes[EACH * i + j] = static_cast<u8>(chunk.words[j / 4] >> j % 4 * 8);
        }
        return;
    }
#endif
    for (int j = 0; j < N; ++j) bytes[j] = source[j];
}

template <int N>
__device__ __forceinline__ void store_bytes(const u8 (&bytes)[N], u8* target) {
#ifdef __CUDA_ARCH__
    constexpr int EACH = N % 16 == 0 ? 16 : 8;
    if (reinterpret_cast<u64>(target) % EACH == 0) {
        struct alignas(EACH) Chunk {
            u32 words[EACH / 4];
        };
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) {
            Chunk chunk;
#pragma unroll
            for (int j = 0; j < EACH / 4; ++j) {
                const u8* four = bytes + EACH * i + 4 * j;
                chunk.words[j] = four[0] | four[1] << 8 | four[2] << 16 | static_cast<u32>(four[3]) << 24;
            }
            reinterpret_cast<Chunk*>(target)[i] = chunk;
        }
        return;
    }
#endif
    for (int j = 0; j < N; ++j) target[j] = bytes[j];
}

// The first `count` of four bytes, and zeros.
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

// ---- largest magnitude -----------------------------------------------------------------------------------------------

// Magnitudes as integers are in the order of their values. Those above `highest`, which are NaN, are left out.
__device__ __forceinline__ u32 highest_counted(int propagate_nan) { return propagate_nan ? 0x7FFFFFFFu : FLOAT_INF_BITS; }

__device__ __forceinline__ void take_magnitude(float x, u32 highest, u32& largest) {
    const u32 magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
    const u32 counted = magnitude <= highest ? magnitude : 0u;
    largest = counted > largest ? counted : largest;
}

// ---- narrow formats --------------------------------------------------------------------------------------------------

// A sign, an exponent and MANTISSA bits; codes of magnitudes are in the order of their values, those above MAX_CODE are
// infinity and NaN. NAN_CODE is what NaN becomes, of either sign: the largest number where the format has no NaN.
template <int WIDTH, int MANTISSA_BITS, int EXPONENT_BIAS, u32 LARGEST, u32 NOT_A_NUMBER>
struct Narrow {
    static constexpr int BITS = WIDTH, MANTISSA = MANTISSA_BITS;
    static constexpr u32 MAX_CODE = LARGEST, NAN_CODE = NOT_A_NUMBER, SIGN = 1u << (WIDTH - 1);
    // Bits of a float32 shifted right so far are a code, whose exponent is then too large by REBIAS.
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr u32 REBIAS = static_cast<u32>(127 - EXPONENT_BIAS) << MANTISSA;
    // As bits of float32: the largest number, the smallest normal one, and the step between those below that.
    static constexpr u32 MAX_BITS = (MAX_CODE + REBIAS) << SHIFT;
    static constexpr u32 NORMAL_BITS = static_cast<u32>(128 - EXPONENT_BIAS) << 23;
    static constexpr u32 STEP_BITS = NORMAL_BITS - (static_cast<u32>(MANTISSA) << 23);
};

// cvt of two numbers at once, where the chip has it: to the bytes of one word, the first one low, and back by way of
// fp16, which holds every number of these formats.
#define CVT_PAIR(NAME)                                                                                                 \
    static constexpr bool HAS_CVT = true;                                                                              \
    static __device__ __forceinline__ u16 cvt_pair(float low, float high) {                                            \
        u16 pair;                                                                                                      \
        asm("cvt.rn.satfinite." NAME "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));                         \
        return pair;                                                                                                   \
    }                                                                                                                  \
    static __device__ __forceinline__ void cvt_to_floats(u16 pair, float& low, float& high) {                          \
        asm("{\n.reg .b32 both;\n.reg .b16 one, other;\ncvt.rn.f16x2." NAME "x2 both, %2;\n"                          \
            "mov.b32 {one, other}, both;\ncvt.f32.f16 %0, one;\ncvt.f32.f16 %1, other;\n}"                             \
            : "=f"(low), "=f"(high)                                                                                    \
            : "h"(pair));                                                                                              \
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

struct E2M1 : Narrow<4, 1, 1, 0x7, 0x7> {
    NO_CVT  // but that of a whole byte, e2m1x2_from_float
};
struct E2M3 : Narrow<6, 3, 1, 0x1F, 0x1F> {
    CVT_FP6("e2m3")
};
struct E3M2 : Narrow<6, 2, 3, 0x1F, 0x1F> {
    CVT_FP6("e3m2")
};
struct E4M3 : Narrow<8, 3, 7, 0x7E, 0x7F> {
    CVT_FP8("e4m3")
};
struct E5M2 : Narrow<8, 2, 15, 0x7B, 0x7F> {
    CVT_FP8("e5m2")
};

// The code of a float32 number, nearest even, saturating, the sign kept; NaN gives NAN_CODE. What cvt.rn.satfinite does.
template <class F>
__device__ __forceinline__ u32 nearest_even(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 a = magnitude < F::MAX_BITS ? magnitude : F::MAX_BITS;
    const u32 normal = ((a + ((1u << (F::SHIFT - 1)) - 1u) + (a >> F::SHIFT & 1u)) >> F::SHIFT) - F::REBIAS;
    // 2^23 steps plus a number rounds it to whole steps, which the last bits of the sum count.
    constexpr u32 ANCHOR = F::STEP_BITS + (23u << 23);
    const u32 small = __float_as_uint(__uint_as_float(a) + __uint_as_float(ANCHOR)) - ANCHOR;
    const u32 code = (a < F::NORMAL_BITS ? small : normal) | (bits >> 31) * F::SIGN;
    return magnitude > FLOAT_INF_BITS ? F::NAN_CODE : code;
}

// The same by a random byte: t = |x| + byte/256 * step, the step of the grid at |x|, cut down to the grid at t. The
// product is exact, so that t rounds once. docs/numerics.md#stochastic-rounding.
template <class F>
__device__ __forceinline__ u32 stochastic(float x, u32 byte) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 exponent = magnitude & FLOAT_INF_BITS;
    const u32 step = (exponent > F::NORMAL_BITS ? exponent : F::NORMAL_BITS) - (static_cast<u32>(F::MANTISSA) << 23);
    const float share = static_cast<float>(static_cast<int>(byte)) * 0x1p-8f;
    const float moved = __uint_as_float(magnitude) + share * __uint_as_float(step);
    const u32 t = __float_as_uint(moved) < F::MAX_BITS ? __float_as_uint(moved) : F::MAX_BITS;
    // 2^23 steps in one number of steps: a power of two times a number is exact.
    constexpr u32 STEPS_BITS = (254u << 23) - F::STEP_BITS;
    const u32 small = static_cast<u32>(static_cast<int>(__uint_as_float(t) * __uint_as_float(STEPS_BITS)));
    const u32 code = (t < F::NORMAL_BITS ? small : (t >> F::SHIFT) - F::REBIAS) | (bits >> 31) * F::SIGN;
    return magnitude > FLOAT_INF_BITS ? F::NAN_CODE : code;
}

#ifdef HAS_LANES
// Bits of formats no wider than a byte: at the number's exponent, and not below the smallest normal one, a power of two
// is added that leaves whole steps. Those of the sum's last bits are counted, its exponent is that of the code.
template <class F>
__forceinline__ Bits nearest_even_lanes(Floats x) {
    constexpr u32 ANCHOR = static_cast<u32>(23 - F::MANTISSA) << 23;
    constexpr u32 ZERO = F::NORMAL_BITS + ANCHOR;  // what 0 becomes
    const Bits bits = same_bits<Bits>(x), magnitude = bits & 0x7FFFFFFFu;
    const Bits a = smaller(magnitude, Bits{} + F::MAX_BITS);
    const Bits anchor = larger(a & FLOAT_INF_BITS, Bits{} + F::NORMAL_BITS) + ANCHOR;
    const Bits sum = same_bits<Bits>(same_bits<Floats>(a) + same_bits<Floats>(anchor));
    const Bits code = (sum + (sum >> F::SHIFT) - (ZERO + (ZERO >> F::SHIFT))) & (F::SIGN - 1u);
    return magnitude > FLOAT_INF_BITS ? Bits{} + F::NAN_CODE : code | (bits >> (32 - F::BITS) & F::SIGN);
}

template <class F>
__forceinline__ Bits stochastic_lanes(Floats x, Bits byte) {
    const Bits bits = same_bits<Bits>(x), magnitude = bits & 0x7FFFFFFFu;
    const Bits step = larger(magnitude & FLOAT_INF_BITS, Bits{} + F::NORMAL_BITS) - (static_cast<u32>(F::MANTISSA) << 23);
    const Floats share = __builtin_convertvector(same_bits<Integers>(byte), Floats) * 0x1p-8f;
    const Floats moved = same_bits<Floats>(magnitude) + share * same_bits<Floats>(step);
    const Bits t = smaller(same_bits<Bits>(moved), Bits{} + F::MAX_BITS);
    // Cut down to the grid: what lies below the smallest normal number counts steps, too.
    constexpr u32 STEPS_BITS = (254u << 23) - F::STEP_BITS;
    const Floats steps = same_bits<Floats>(t) * __uint_as_float(STEPS_BITS);
    const Bits normal = (t >> F::SHIFT) - F::REBIAS;
    // No larger number than 2^24 steps is asked for.
    const Bits small = same_bits<Bits>(__builtin_convertvector(t < F::NORMAL_BITS ? steps : Floats{}, Integers));
    const Bits code = (t < F::NORMAL_BITS ? small : normal) | (bits >> (32 - F::BITS) & F::SIGN);
    return magnitude > FLOAT_INF_BITS ? Bits{} + F::NAN_CODE : code;
}

// Codes, one a byte, or, of elements of four bits, two: the first one low.
template <class F>
__forceinline__ Bits load_code_lanes(const u8* source) {
    if constexpr (F::BITS == 4) {
        const Pairs pairs = __builtin_convertvector(load_lanes<BytesOfPairs>(source), Pairs);
        return same_bits<Bits>((pairs | pairs << 28) & 0x0000000F0000000Full);
    } else {
        return __builtin_convertvector(__builtin_convertvector(load_lanes<Bytes>(source), Shorts), Bits);
    }
}

template <class F>
__forceinline__ void store_code_lanes(Bits codes, u8* target) {
    if constexpr (F::BITS == 4) {
        const Pairs pairs = same_bits<Pairs>(codes);
        store_lanes(__builtin_convertvector(pairs | pairs >> 28, BytesOfPairs), target);
    } else {
        store_lanes(__builtin_convertvector(__builtin_convertvector(codes, Shorts), Bytes), target);
    }
}
#endif

template <class F>
__device__ __forceinline__ u8 from_float(float x) {
    if constexpr (F::HAS_CVT) {
        return static_cast<u8>(F::cvt_pair(x, 0.0f));
    } else {
        return static_cast<u8>(nearest_even<F>(x));
    }
}

template <class F>
__device__ __forceinline__ u16 pair_from_float(float low, float high) {
    if constexpr (F::HAS_CVT) {
        return F::cvt_pair(low, high);
    } else {
        return static_cast<u16>(nearest_even<F>(low) | nearest_even<F>(high) << 8);
    }
}

// Bits above those of the format are not looked at.
template <class F>
__device__ __forceinline__ float narrow_to_float(u32 code) {
    const u32 magnitude = code & (F::SIGN - 1u);
#ifdef __CUDA_ARCH__
    // As bits of float32, subnormal ones too, it is a power of two too small. A CPU is slow with subnormal numbers.
    constexpr u32 POWER = ((F::REBIAS >> F::MANTISSA) + 127u) << 23;
    const u32 finite = __float_as_uint(__uint_as_float(magnitude << F::SHIFT) * __uint_as_float(POWER));
#else
    const float small = static_cast<float>(static_cast<int>(magnitude)) * __uint_as_float(F::STEP_BITS);
    const u32 normal = (magnitude + F::REBIAS) << F::SHIFT;
    const u32 finite = magnitude < 1u << F::MANTISSA ? __float_as_uint(small) : normal;
#endif
    // Above the largest number lies infinity where NaN does not follow at once, then NaN.
    const bool infinite = F::MAX_CODE + 1u < F::NAN_CODE && magnitude == F::MAX_CODE + 1u;
    const u32 value = magnitude <= F::MAX_CODE ? finite : infinite ? FLOAT_INF_BITS : 0x7FC00000u;
    return __uint_as_float(value | ((code & F::SIGN) != 0u ? 0x80000000u : 0u));
}

#ifdef HAS_LANES
template <class F>
__forceinline__ Floats narrow_lanes(Bits codes) {
    const Bits magnitude = codes & (F::SIGN - 1u);
    const Floats small = __builtin_convertvector(same_bits<Integers>(magnitude), Floats) * __uint_as_float(F::STEP_BITS);
    const Bits normal = (magnitude + F::REBIAS) << F::SHIFT;
    const Bits finite = magnitude < 1u << F::MANTISSA ? same_bits<Bits>(small) : normal;
    Bits value = magnitude <= F::MAX_CODE ? finite : Bits{} + 0x7FC00000u;
    if constexpr (F::MAX_CODE + 1u < F::NAN_CODE) {
        value = magnitude == F::MAX_CODE + 1u ? Bits{} + FLOAT_INF_BITS : value;
    }
    return same_bits<Floats>(value | (codes & F::SIGN) << (32 - F::BITS));
}
#endif

template <class F, int N>
__device__ __forceinline__ void narrows_to_floats(const u8* codes, float (&v)[N]) {
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

// The power of two at or below x, which is not negative, or the next one where the mantissa of x is at least `up_from`, 1
// to 2^23 (never); then `less` powers of two smaller. Saturating, from 2^-127 to 2^127, with infinity for 2^128; NaN gives
// 255. Up from 1, this is what cvt.rp.satfinite.ue8m0x2.f32 does.
__device__ __forceinline__ u8 e8m0_from_float(float x, u32 up_from, int less) {
#ifdef HAS_CVT_NARROW
    if (up_from == 1u && less == 0) {
        u16 pair;
        asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
        return static_cast<u8>(pair);
    }
#endif
    const u32 bits = __float_as_uint(x);
    // Of subnormal numbers those from 2^-127 on have a mantissa of one bit less; the others are code 0, and stay it.
    const u32 subnormal = bits >= 0x00400000u ? bits << 1 : 0u;
    const u32 mantissa = (bits < 0x00800000u ? subnormal : bits) & 0x007FFFFFu;
    const int code = static_cast<int>((bits >> 23) + (mantissa >= up_from ? 1u : 0u)) - less;
    const int limited = code > 254 ? 254 : code < 0 ? 0 : code;
    return static_cast<u8>(bits > FLOAT_INF_BITS ? 255 : limited);
}

// 2^(code - 127), of which code 0 is subnormal; 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(u8 code) {
    const u32 bits = code == 0u ? 0x00400000u : static_cast<u32>(code) << 23;
    return __uint_as_float(code == 0xFFu ? 0x7FC00000u : bits);
}

// ---- E2M1 ------------------------------------------------------------------------------------------------------------

// Nearest even, saturating at 6, sign kept, NaN gives 7: the count of midpoints passed. A tie goes up where the code
// above is even. The comparisons are written so that NaN passes them all.
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
    u32 pair;
    asm("{\n.reg .b8 byte;\ncvt.rn.satfinite.e2m1x2.f32 byte, %1, %2;\ncvt.u32.u8 %0, byte;\n}" : "=r"(pair) : "f"(high), "f"(low));
    return static_cast<u8>(pair);
#else
    return static_cast<u8>(e2m1_from_float(low) | e2m1_from_float(high) << 4);
#endif
}

#if defined(__CUDA_ARCH__) && !defined(HAS_CVT_NARROW) && !defined(NARROWGAUGE_PORTABLE)
#define HAS_E2M1_BY_SUMS
// A word whose low byte is the code of |x|, nearest even: |x| plus 2^22 of its binade 2^e, which is from 1 to 4, counts
// steps of 2^(e-1) in its last bits, and 2e lies 22 bits above. The 107 makes all that lies in that byte besides 0.
__device__ __forceinline__ u32 e2m1_by_sum(float x) {
    const float a = fminf(fabsf(x), 6.0f);  // NaN to 6
    const float binade = __uint_as_float(__float_as_uint(fmaxf(a, 1.0f)) & FLOAT_INF_BITS);
    const u32 sum = __float_as_uint(__fmaf_rn(binade, 0x1p22f + 107.0f, a));
    return sum + (sum >> 22);
}

// As `stochastic` does it; `byte` is a random one, alone in its word.
__device__ __forceinline__ u32 e2m1_by_sum_stochastic(float x, u32 byte) {
    const float a = fabsf(x);
    const float binade = __uint_as_float(__float_as_uint(fmaxf(a, 1.0f)) & FLOAT_INF_BITS);
    const float share = __uint_as_float(0x46800000u | byte) - 0x1p14f;  // byte/512: the step is half of the binade
    const float t = fminf(__fmaf_rn(share, binade, a), 6.0f);           // NaN to 6
    const float grid = __uint_as_float(__float_as_uint(fmaxf(t, 1.0f)) & FLOAT_INF_BITS);
    const u32 sum = __float_as_uint(__fmaf_rz(grid, 0x1p22f + 107.0f, t));
    return sum + (sum >> 22);
}

// Eight words whose low bytes are codes of magnitudes, and the signs of x, to one word.
__device__ __forceinline__ u32 e2m1x8_packed(const u32 (&codes)[8], const float* x) {
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
#ifdef HAS_E2M1_BY_SUMS
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = e2m1_by_sum(x[8 * half + i]);
        const u32 word = e2m1x8_packed(codes, x + 8 * half);  // a product that is NaN has no sign on a GPU
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[4 * half + j] = static_cast<u8>(word >> 8 * j);
    }
#elif defined(HAS_LANES)
    for (int i = 0; i < 16; i += LANES) {
        store_code_lanes<E2M1>(nearest_even_lanes<E2M1>(load_lanes<Floats>(x + i)), packed + i / 2);
    }
#else
    for (int j = 0; j < 8; ++j) packed[j] = e2m1x2_from_float(x[2 * j], x[2 * j + 1]);
#endif
}

// 16 elements to eight bytes by four random words, the lowest byte of a word for the first element of four.
__device__ __forceinline__ void e2m1x16_stochastic(const float (&x)[16], const u32 (&words)[4], u8 (&packed)[8]) {
#ifdef HAS_CVT_RS_E2M1
    for (int j = 0; j < 4; ++j) {
        u16 codes;
        asm("cvt.rs.satfinite.e2m1x4.f32 %0, {%4, %3, %2, %1}, %5;"
            : "=h"(codes)
            : "f"(x[4 * j]), "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3]), "r"(words[j]));
        packed[2 * j] = static_cast<u8>(codes);
        packed[2 * j + 1] = static_cast<u8>(codes >> 8);
    }
#elif defined(HAS_E2M1_BY_SUMS)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = e2m1_by_sum_stochastic(x[8 * half + i], words[2 * half + i / 4] >> i % 4 * 8 & 0xFFu);
        }
        const u32 word = e2m1x8_packed(codes, x + 8 * half);
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[4 * half + j] = static_cast<u8>(word >> 8 * j);
    }
#elif defined(HAS_LANES)
    for (int i = 0; i < 16; i += LANES) {
        const Bits bytes = __builtin_convertvector(__builtin_convertvector(load_lanes<Bytes>(words + i / 4), Shorts), Bits);
        store_code_lanes<E2M1>(stochastic_lanes<E2M1>(load_lanes<Floats>(x + i), bytes), packed + i / 2);
    }
#else
    u8 bytes[16];  // one a lane, so that a CPU takes several at once
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
    u32 codes[16];
    for (int i = 0; i < 16; ++i) codes[i] = stochastic<E2M1>(x[i], bytes[i]);
    for (int j = 0; j < 8; ++j) packed[j] = static_cast<u8>(codes[2 * j] | codes[2 * j + 1] << 4);
#endif
}

// Magnitudes in halves are 0, 1, 2, 3, 4, 6, 8, 12: (2 + m) << (e - 1), or m where e = 0.
__device__ __forceinline__ float e2m1_to_float(u32 code) {
#ifdef __CUDA_ARCH__
    // As bits of float32, of which a half is subnormal, it is 2^126 too small.
    return __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
#else
    const u32 exponent = code >> 1 & 3u;
    const u32 mantissa = code & 1u;
    const u32 halves = exponent == 0u ? mantissa : (2u + mantissa) << (exponent - 1u);
    const u32 sign = (code & 8u) << 28;
    return __uint_as_float(__float_as_uint(static_cast<float>(halves) * 0.5f) | sign);
#endif
}
