// formats.cuh: conversions between float32 and the formats that kernels read and write.
//
// Each has a portable form, made of IEEE float32 operations and integers, that gives the same bits with every compiler
// (no contraction, no fast-math, no flush-to-zero). Where the chip has an instruction, it is used instead and gives
// the same bits; NARROWGAUGE_PORTABLE keeps the portable forms for comparison. PTX ISA: cvt.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#if defined(__CUDA_ARCH__) && !defined(NARROWGAUGE_PORTABLE)
#if __CUDA_ARCH__ >= 890
#define HAS_CVT_E4M3
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define HAS_CVT_E2M1
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
    const u32 bits = __float_as_uint(x);
    const u32 rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    out.bits = static_cast<u16>((bits & 0x7FFFFFFFu) > FLOAT_INF_BITS ? 0x7FFFu : rounded);
}

// Adding 2^(e + 13) leaves the ten mantissa bits that fp16 keeps at exponent e, rounded to nearest even by the addition.
__device__ __forceinline__ void from_float(float x, fp16& out) {
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
    out.bits = static_cast<u16>(code | sign);
}

// ---- 16 elements at once ---------------------------------------------------------------------------------------------

// Where they lie aligned, a GPU moves 16 bytes, or 8, with one instruction; a CPU's compiler finds that by itself.
template <class T>
__device__ __forceinline__ void load_16(const T* source, float (&v)[16]) {
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(source) % 16 == 0) {
        constexpr int EACH = 16 / sizeof(T);
        struct alignas(16) Chunk {
            T each[EACH];
        };
#pragma unroll
        for (int i = 0; i < 16 / EACH; ++i) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(source)[i];
#pragma unroll
            for (int j = 0; j < EACH; ++j) v[i * EACH + j] = to_float(chunk.each[j]);
        }
        return;
    }
#endif
    for (int i = 0; i < 16; ++i) v[i] = to_float(source[i]);
}

__device__ __forceinline__ void store_8(const u8 (&bytes)[8], u8* target) {
#ifdef __CUDA_ARCH__
    if (reinterpret_cast<u64>(target) % 8 == 0) {
        u64 word = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) word |= static_cast<u64>(bytes[j]) << 8 * j;
        *reinterpret_cast<u64*>(target) = word;
        return;
    }
#endif
    for (int j = 0; j < 8; ++j) target[j] = bytes[j];
}

// ---- largest magnitude -----------------------------------------------------------------------------------------------

// Magnitudes as integers are in the order of their values. Those above `highest`, which are NaN, are left out.
__device__ __forceinline__ u32 highest_counted(int propagate_nan) { return propagate_nan ? 0x7FFFFFFFu : FLOAT_INF_BITS; }

__device__ __forceinline__ void take_magnitude(float x, u32 highest, u32& largest) {
    const u32 magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
    const u32 counted = magnitude <= highest ? magnitude : 0u;
    largest = counted > largest ? counted : largest;
}

// ---- E4M3 ------------------------------------------------------------------------------------------------------------

// Nearest even, saturating at 448; NaN gives 0x7F. Exactly what cvt.rn.satfinite.e4m3x2.f32 does.
__device__ __forceinline__ u8 e4m3_from_float(float x) {
#ifdef HAS_CVT_E4M3
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return static_cast<u8>(pair);
#else
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > FLOAT_INF_BITS) return 0x7F;
    const float a = magnitude > 0x43E00000u ? 448.0f : __uint_as_float(magnitude);
    // Adding 2^(e + 20) leaves the three mantissa bits of exponent e, at least 2^-6.
    const u32 exponent = __float_as_uint(a) & FLOAT_INF_BITS;
    const float anchor = __uint_as_float((exponent < 0x3C800000u ? 0x3C800000u : exponent) + (20u << 23));
    const float rounded = (a + anchor) - anchor;
    const u32 code = rounded < 0x1p-6f ? static_cast<u32>(rounded * 512.0f) : (__float_as_uint(rounded) >> 20) - (120u << 3);
    return static_cast<u8>(code | (bits >> 24 & 0x80u));
#endif
}

__device__ __forceinline__ float e4m3_to_float(u8 code) {
    const u32 magnitude = code & 0x7Fu;
    const u32 sign = (code & 0x80u) << 24;
    if (magnitude == 0x7Fu) return __uint_as_float(0x7FC00000u | sign);
    const float small = static_cast<float>(magnitude) * 0x1p-9f;
    const float value = magnitude < 8u ? small : __uint_as_float((magnitude << 20) + (120u << 23));
    return __uint_as_float(__float_as_uint(value) | sign);
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
#ifdef HAS_CVT_E2M1
    u32 pair;
    asm("{\n.reg .b8 byte;\ncvt.rn.satfinite.e2m1x2.f32 byte, %1, %2;\ncvt.u32.u8 %0, byte;\n}" : "=r"(pair) : "f"(high), "f"(low));
    return static_cast<u8>(pair);
#else
    return static_cast<u8>(e2m1_from_float(low) | e2m1_from_float(high) << 4);
#endif
}

__device__ __forceinline__ float e2m1_step(float magnitude) {
    return magnitude < 2.0f ? 0.5f : magnitude < 4.0f ? 1.0f : 2.0f;
}

// One element to a code by a random byte: t = |x| + byte/256 * step, cut down to the grid at t, at most 6; the sign is
// kept, NaN gives 7. The product is exact, so that t rounds once. numerics.md, `nvfp4-sr`.
__device__ __forceinline__ u32 e2m1_stochastic(float x, u32 byte) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const float a = __uint_as_float(magnitude);
    const float moved = a + static_cast<float>(static_cast<int>(byte)) * 0x1p-8f * e2m1_step(a);
    const float t = moved < 6.0f ? moved : 6.0f;  // NaN is not below 6
    // Below 2 codes 0 to 3 are halves, below 4 codes 4 and 5 ones, then 6 and 7 twos.
    const float per_step = t < 2.0f ? 2.0f : t < 4.0f ? 1.0f : 0.5f;
    const int first = t < 2.0f ? 0 : t < 4.0f ? 2 : 4;
    const u32 sign = magnitude > FLOAT_INF_BITS ? 0u : bits >> 28 & 8u;
    return static_cast<u32>(static_cast<int>(t * per_step) + first) | sign;
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
#else
    u8 bytes[16];  // one a lane, so that a CPU takes several at once
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<u8>(words[i / 4] >> i % 4 * 8);
    u32 codes[16];
    for (int i = 0; i < 16; ++i) codes[i] = e2m1_stochastic(x[i], bytes[i]);
    for (int j = 0; j < 8; ++j) packed[j] = static_cast<u8>(codes[2 * j] | codes[2 * j + 1] << 4);
#endif
}

// Magnitudes in halves are 0, 1, 2, 3, 4, 6, 8, 12: (2 + m) << (e - 1), or m where e = 0.
__device__ __forceinline__ float e2m1_to_float(u32 code) {
    const u32 exponent = code >> 1 & 3u;
    const u32 mantissa = code & 1u;
    const u32 halves = exponent == 0u ? mantissa : (2u + mantissa) << (exponent - 1u);
    const u32 sign = (code & 8u) << 28;
    return __uint_as_float(__float_as_uint(static_cast<float>(halves) * 0.5f) | sign);
}
