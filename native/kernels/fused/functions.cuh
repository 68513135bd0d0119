// functions.cuh: functions of float32 numbers with an error. On a GPU the chip's approximations, on a CPU the C library.
//
// Errors, PTX ISA 9.0: ex2.approx 2 ulp, div.full 2 ulp; CUDA C++ Programming Guide 13.0, table 17: erff 2 ulp, rsqrtf 2 ulp.
#pragma once

#include "common/formats.cuh"

#ifndef __CUDACC__
#include <cmath>
#endif

namespace narrowgauge {

// e^x by 2^(x * log2 e), off by 2 ulp and by the rounding of the argument. A subnormal result is 0.
__device__ __forceinline__ float exp_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 0x1.715476p+0f));
    return y;
#else
    return std::exp(x);
#endif
}

__device__ __forceinline__ float divide_approx(float a, float b) {
#ifdef __CUDA_ARCH__
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a / b;
#endif
}

__device__ __forceinline__ float rsqrt_approx(float x) {
#ifdef __CUDA_ARCH__
    return rsqrtf(x);
#else
    return 1.0f / std::sqrt(x);
#endif
}

__device__ __forceinline__ float erf_approx(float x) {
#ifdef __CUDA_ARCH__
    return erff(x);
#else
    return std::erf(x);
#endif
}

// x rounded to the dtype T, as a float32.
template <class T>
__device__ __forceinline__ float rounded(float x) {
    T narrow;
    from_float(x, narrow);
    return to_float(narrow);
}

}  // namespace narrowgauge
