// ptx.cuh: instructions without a CUDA C++ function, under their names in the PTX ISA.
//
// A pair is given as `low` and `high`, its lower and upper half; PTX writes the upper half first. A caller checks that the
// architecture has the instruction (HAS_... of formats.cuh).
#pragma once

#ifdef __CUDA_ARCH__
namespace narrowgauge::ptx {

// The result is an argument: ptxas allocates other registers for a returned 16-bit value.
__device__ __forceinline__ void cvt_rn_bf16_f32(unsigned short& bits, float x) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
}

__device__ __forceinline__ void cvt_rn_f16_f32(unsigned short& bits, float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
}

__device__ __forceinline__ unsigned cvt_rn_bf16x2_f32(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned cvt_rz_f16x2_f32(float low, float high) {
    unsigned pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned cvt_rn_satfinite_e2m1x2_f32(float low, float high) {
    unsigned pair;
    asm("{\n.reg .b8 byte;\ncvt.rn.satfinite.e2m1x2.f32 byte, %1, %2;\ncvt.u32.u8 %0, byte;\n}"
        : "=r"(pair)
        : "f"(high), "f"(low));
    return pair;
}

// Four elements, the first in the lowest nibble.
__device__ __forceinline__ unsigned short cvt_rs_satfinite_e2m1x4_f32(const float (&x)[4], unsigned random) {
    unsigned short codes;
    asm("cvt.rs.satfinite.e2m1x4.f32 %0, {%4, %3, %2, %1}, %5;"
        : "=h"(codes)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(random));
    return codes;
}

// The pair in the low half of a register, zeros above.
__device__ __forceinline__ unsigned cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
    unsigned pair;
    asm("{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\nmov.b32 %0, {pair, 0};\n}"
        : "=r"(pair)
        : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned short cvt_rp_satfinite_ue8m0x2_f32(float low, float high) {
    unsigned short pair;
    asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// NaN of either input wins; without .NaN it loses.
__device__ __forceinline__ unsigned max_NaN_bf16x2(unsigned a, unsigned b) {
    unsigned pair;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ unsigned max_bf16x2(unsigned a, unsigned b) {
    unsigned pair;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ unsigned max_NaN_xorsign_abs_bf16x2(unsigned a, unsigned b) {
    unsigned pair;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// The sign is the exclusive or of both signs. NaN loses.
__device__ __forceinline__ unsigned max_xorsign_abs_bf16x2(unsigned a, unsigned b) {
    unsigned pair;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ unsigned min_xorsign_abs_f16x2(unsigned a, unsigned b) {
    unsigned pair;
    asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ float max_NaN_f32(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

__device__ __forceinline__ unsigned fma_rn_bf16x2(unsigned a, unsigned b, unsigned c) {
    unsigned pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
}

// The same with the low half of `a`, and of `c`, as both halves.
__device__ __forceinline__ unsigned fma_rn_bf16x2_low_halves(unsigned a, unsigned b, unsigned c) {
    unsigned pair;
    asm("{\n.reg .b16 low, high;\n.reg .b32 a, c;\nmov.b32 {low, high}, %1;\nmov.b32 a, {low, low};\n"
        "mov.b32 {low, high}, %3;\nmov.b32 c, {low, low};\nfma.rn.bf16x2 %0, a, %2, c;\n}"
        : "=r"(pair)
        : "r"(a), "r"(b), "r"(c));
    return pair;
}

__device__ __forceinline__ unsigned prmt_b32(unsigned a, unsigned b, unsigned selectors) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selectors));
    return bytes;
}

// Bit by bit: TRUTH_TABLE of a, b and c.
template <int TRUTH_TABLE>
__device__ __forceinline__ unsigned lop3_b32(unsigned a, unsigned b, unsigned c) {
    unsigned bits;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(bits) : "r"(a), "r"(b), "r"(c), "n"(TRUTH_TABLE));
    return bits;
}

template <unsigned FACTOR>
__device__ __forceinline__ unsigned mad_lo_u32(unsigned a, unsigned c) {
    unsigned sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "n"(FACTOR), "r"(c));
    return sum;
}

__device__ __forceinline__ unsigned long long mul_wide_u32(unsigned a, unsigned b) {
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

// Asynchronous copy of 16 bytes from global to shared memory that bypasses L1. Both addresses are aligned to 16 bytes.
__device__ __forceinline__ void cp_async_cg_shared_global_16(unsigned shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four transposed matrices of 8x8 elements of 16 bits. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4_trans_shared_b16(unsigned shared, unsigned* matrices) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared));
}

}  // namespace narrowgauge::ptx
#endif

namespace narrowgauge::ptx {

// Stores what the next kernel reads: its line of the L2 cache is evicted last.
__device__ __forceinline__ void st_global_L2_evict_last_u16(unsigned short* target, unsigned short value) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
        "st.global.L2::cache_hint.u16 [%0], %1, policy;\n}" ::"l"(target), "h"(value) : "memory");
#else
    *target = value;
#endif
}

// Lets the next kernel of the stream begin, if it was launched with `early` (native/runtime/launch.py).
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the kernel before, whose writes are visible from here on.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace narrowgauge::ptx
