// lanes.cuh: as many numbers at once as a register of the CPU holds, for what formats.cuh does of arrays on a CPU.
//
// Vectors of the compiler, as wide as the CPU's own: loops over 16 elements are unrolled before they could be vectorized.
// Each use has the portable form beside it, which NARROWGAUGE_PORTABLE keeps.
#pragma once

#if !defined(__CUDA_ARCH__) && !defined(NARROWGAUGE_PORTABLE)
#define HAS_LANES
#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef unsigned int Bits __attribute__((vector_size(4 * LANES)));
typedef int Integers __attribute__((vector_size(4 * LANES)));
typedef unsigned long long Pairs __attribute__((vector_size(4 * LANES)));  // of lanes
typedef unsigned short Shorts __attribute__((vector_size(2 * LANES)));
typedef unsigned char Bytes __attribute__((vector_size(LANES)));
typedef unsigned char BytesOfPairs __attribute__((vector_size(LANES / 2)));

template <class V>
__forceinline__ V load_lanes(const void* source) {
    V lanes;
    __builtin_memcpy(&lanes, source, sizeof lanes);
    return lanes;
}

template <class V>
__forceinline__ void store_lanes(V lanes, void* target) {
    __builtin_memcpy(target, &lanes, sizeof lanes);
}

template <class To, class From>
__forceinline__ To same_bits(From lanes) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    return reinterpret_cast<To>(lanes);
}

__forceinline__ Bits larger(Bits a, Bits b) { return a > b ? a : b; }
__forceinline__ Bits smaller(Bits a, Bits b) { return a < b ? a : b; }

__forceinline__ unsigned int largest_lane(Bits lanes) {
    unsigned int largest = 0;
    for (int i = 0; i < LANES; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

__forceinline__ Bits lane_numbers() {
    Bits lanes;
    for (int i = 0; i < LANES; ++i) lanes[i] = static_cast<unsigned int>(i);
    return lanes;
}

// Lane i of the result is lane i ^ DISTANCE.
template <int DISTANCE>
__forceinline__ Floats exchanged(Floats x) {
    Floats result;
    for (int i = 0; i < LANES; ++i) result[i] = x[i ^ DISTANCE];
    return result;
}
#endif
