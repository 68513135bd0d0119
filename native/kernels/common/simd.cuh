// simd.cuh: vectors as wide as a SIMD register of the CPU, for the vectorized forms of conversions on a CPU.
//
// They are vector types of the compiler. Loops over 16 elements alone would not be vectorized, because the compiler unrolls
// them first. Every use has a portable form beside it; NARROWGAUGE_PORTABLE selects the portable form.
#pragma once

#if !defined(__CUDA_ARCH__) && !defined(NARROWGAUGE_PORTABLE)
#define HAS_SIMD

namespace narrowgauge {

#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int SIMD_LANES = 16;
#elif defined(__AVX2__)
constexpr int SIMD_LANES = 8;
#else
constexpr int SIMD_LANES = 4;
#endif

typedef float FloatVector __attribute__((vector_size(4 * SIMD_LANES)));
typedef unsigned int UintVector __attribute__((vector_size(4 * SIMD_LANES)));
typedef int IntVector __attribute__((vector_size(4 * SIMD_LANES)));
typedef unsigned long long UlongVector __attribute__((vector_size(4 * SIMD_LANES)));  // an element has two lanes
typedef unsigned short UshortVector __attribute__((vector_size(2 * SIMD_LANES)));
typedef unsigned char ByteVector __attribute__((vector_size(SIMD_LANES)));
typedef unsigned char HalfByteVector __attribute__((vector_size(SIMD_LANES / 2)));  // a byte for two lanes

template <class V>
__forceinline__ V load_vector(const void* source) {
    V lanes;
    __builtin_memcpy(&lanes, source, sizeof lanes);
    return lanes;
}

template <class V>
__forceinline__ void store_vector(V lanes, void* target) {
    __builtin_memcpy(target, &lanes, sizeof lanes);
}

template <class To, class From>
__forceinline__ To bit_cast(From lanes) {
    static_assert(sizeof(To) == sizeof(From), "both types have the same size");
    return reinterpret_cast<To>(lanes);
}

__forceinline__ UintVector vector_max(UintVector a, UintVector b) { return a > b ? a : b; }
__forceinline__ UintVector vector_min(UintVector a, UintVector b) { return a < b ? a : b; }

__forceinline__ unsigned int reduce_max(UintVector lanes) {
    unsigned int largest = 0;
    for (int i = 0; i < SIMD_LANES; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

__forceinline__ UintVector lane_indices() {
    UintVector lanes;
    for (int i = 0; i < SIMD_LANES; ++i) lanes[i] = static_cast<unsigned int>(i);
    return lanes;
}

// Lane i of the result is lane i ^ DISTANCE of x.
template <int DISTANCE>
__forceinline__ FloatVector shuffle_xor(FloatVector x) {
    FloatVector result;
    for (int i = 0; i < SIMD_LANES; ++i) result[i] = x[i ^ DISTANCE];
    return result;
}

}  // namespace narrowgauge
#endif
