// functions.cuh: functions of float32 numbers with an error. On a GPU the chip's approximations, on a CPU the C library.
//
// Errors, PTX ISA 9.0: ex2.approx 2 ulp, rcp.approx 1 ulp; CUDA C++ Programming Guide 13.0, table 17: erff 2 ulp, expf 2 ulp,
// log2f 1 ulp, rsqrtf 2 ulp.
#pragma once

#include "common/formats.cuh"

#ifndef __CUDACC__
#include <cmath>
#endif

namespace narrowgauge {

// 2^x, off by 2 ulp. A subnormal result is 0.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return std::exp2(x);
#endif
}

__device__ __forceinline__ float log2_approx(float x) {
#ifdef __CUDA_ARCH__
    return log2f(x);
#else
    return std::log2(x);
#endif
}

// e^x by 2^(x * log2 e), off by 2 ulp and by the rounding of the argument. A subnormal result is 0.
__device__ __forceinline__ float exp_approx(float x) {
#ifdef __CUDA_ARCH__
    return exp2_approx(x * 0x1.715476p+0f);
#else
    return std::exp(x);
#endif
}

// e^x, off by 2 ulp.
__device__ __forceinline__ float exp_accurate(float x) {
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    return std::exp(x);
#endif
}

// 1 / (1 + e^-x). The instruction takes (1 + e^-x) / 4, which is below 2^126 for a finite e^-x, so its result is a normal number.
// The product with 1/4 then rounds as 1 / (1 + e^-x) does, to a subnormal number too. `refined`: a Newton step reduces the error
// to 2^-24 relative, plus 2^-43.
__device__ __forceinline__ float sigmoid_approx(float x, bool refined) {
    const float e = exp_approx(-x);
#ifdef __CUDA_ARCH__
    const float quarter = __fmaf_rn(e, 0.25f, 0.25f);
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(quarter));
    if (refined && quarter < 0x1p127f) r = __fmaf_rn(r, __fmaf_rn(-quarter, r, 1.0f), r);
    return r * 0.25f;
#else
    return 1.0f / (1.0f + e);
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

}  // namespace narrowgauge
