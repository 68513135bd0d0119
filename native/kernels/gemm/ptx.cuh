// ptx.cuh: PTX instructions of the GEMM kernels, each under its name in the PTX ISA: mbarrier, cp.async.bulk, cp.async,
// setmaxnreg, wgmma, mma, and loads with cache hints. Those of conversions and of dependent launches are in
// common/ptx.cuh.
//
// HAS_WGMMA marks targets with the instructions of Hopper (sm_90a). On all other targets the wrappers compile and trap. In the
// CPU build, mbarrier, cp.async.bulk, cp.async and mma have a model that gives the same bits; the models of wgmma are in
// sm90/tile.cuh and sm90/gemm_wgmma_fp8.cuh.
#pragma once

#include "common/formats.cuh"
#include "gemm/tensor_core_model.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA
#endif

namespace narrowgauge {

constexpr int WARP = 32;

}  // namespace narrowgauge

namespace narrowgauge::ptx {

struct alignas(16) Vector4 {
    u32 words[4];
};

// ---- mbarrier --------------------------------------------------------------------------------------------------------

// Counts arrivals and the bytes of asynchronous bulk copies. Its phase alternates between 0 and 1, from 0 on.
struct Mbarrier {
    u64 state;  // CPU model: the phase, 1 bit; arrivals of a phase, 15; pending arrivals, 15; pending bytes, 32
};

#ifdef HAS_WGMMA
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

// Repeats the instruction until the phase `parity` is complete.
__device__ __forceinline__ void mbarrier_try_wait_parity(Mbarrier& barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}
#elif defined(__CUDA_ARCH__)
__device__ __forceinline__ void mbarrier_init(Mbarrier&, int) { __trap(); }
__device__ __forceinline__ void mbarrier_arrive(Mbarrier&) { __trap(); }
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier&, u32) { __trap(); }
__device__ __forceinline__ void mbarrier_try_wait_parity(Mbarrier&, u32) { __trap(); }
#else
inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
    barrier.state = static_cast<u64>(arrivals) << 1 | static_cast<u64>(arrivals) << 16;
}

// Subtracts from the pending arrivals or bytes; the phase is complete if both are 0.
inline void mbarrier_complete(Mbarrier& barrier, u64 pending) {
    barrier.state -= pending;
    if (barrier.state >> 16 == 0) barrier.state = (barrier.state ^ 1u) | (barrier.state & 0xFFFEu) << 15;
}

inline void mbarrier_arrive(Mbarrier& barrier) { mbarrier_complete(barrier, u64{1} << 16); }

inline void mbarrier_arrive_expect_tx(Mbarrier& barrier, u32 bytes) {
    barrier.state += static_cast<u64>(bytes) << 32;
    mbarrier_arrive(barrier);
}

inline void mbarrier_try_wait_parity(Mbarrier& barrier, u32 parity) {
    while ((barrier.state & 1u) == parity) simt::worker->wait(simt::READY);
}
#endif

// Orders this thread's accesses to shared memory before asynchronous copies that begin later.
__device__ __forceinline__ void fence_proxy_async_shared() {
#ifdef HAS_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Makes initialized mbarriers visible to asynchronous copies.
__device__ __forceinline__ void fence_mbarrier_init_and_proxy_async() {
#ifdef HAS_WGMMA
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- clusters --------------------------------------------------------------------------------------------------------

// Waits for all threads of the cluster that have not exited. What they wrote to shared memory before is visible after.
__device__ __forceinline__ void barrier_cluster() {
#ifdef HAS_WGMMA
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
}

// The same without an order of memory accesses: it does not wait for stores.
__device__ __forceinline__ void barrier_cluster_relaxed() {
#ifdef HAS_WGMMA
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
}

// Loads 16 bytes of the shared memory of block `rank` of the cluster, at the address that `source` has in this block.
__device__ __forceinline__ Vector4 ld_shared_cluster(const Vector4* source, [[maybe_unused]] int rank) {
#ifdef HAS_WGMMA
    Vector4 v;
    asm volatile(
        "{\n.reg .u32 address;\nmapa.shared::cluster.u32 address, %4, %5;\n"
        "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [address];\n}"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
        : "r"(shared_address(source)), "r"(rank));
    return v;
#else
    return *source;
#endif
}

// ---- counters of all blocks ------------------------------------------------------------------------------------------

// Adds 1, without an order of other accesses. Returns the count before.
__device__ __forceinline__ u32 atom_inc_relaxed_gpu(u32* counter) {
#ifdef __CUDA_ARCH__
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
#else
    return __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED);
#endif
}

// Adds 1. Who sees the new count by ld_acquire_gpu sees what this thread wrote, or saw, before.
__device__ __forceinline__ void red_inc_release_gpu(u32* counter) {
#ifdef __CUDA_ARCH__
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#else
    __atomic_fetch_add(counter, 1u, __ATOMIC_RELEASE);
#endif
}

__device__ __forceinline__ u32 ld_acquire_gpu(const u32* counter) {
#ifdef __CUDA_ARCH__
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
#else
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
#endif
}

// Pauses a thread that waits for a counter, about 64 ns.
__device__ __forceinline__ void nanosleep() {
#ifdef __CUDA_ARCH__
    asm volatile("nanosleep.u32 64;");
#else
    simt::worker->wait(simt::READY);
#endif
}

// Makes a tensor map in global memory, written before the kernel, visible to copies of this thread.
__device__ __forceinline__ void fence_proxy_tensormap_acquire([[maybe_unused]] const u64 (&map)[16]) {
#ifdef HAS_WGMMA
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
#endif
}

// Orders global accesses of this thread and asynchronous copies, whose accesses are otherwise unordered.
__device__ __forceinline__ void fence_proxy_async_global() {
#ifdef HAS_WGMMA
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// ---- asynchronous copies ---------------------------------------------------------------------------------------------

// Cache policy of data that is read once: its lines of the L2 cache are evicted first.
__device__ __forceinline__ u64 createpolicy_fractional_L2_evict_first() {
    u64 policy = 0;
#ifdef __CUDA_ARCH__
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// Copies bytes from global to shared memory, both aligned to 128 bytes, as their number; the mbarrier counts the bytes.
__device__ __forceinline__ void cp_async_bulk_shared_global(u8* target, const u8* source, u32 bytes, Mbarrier& barrier) {
#ifdef HAS_WGMMA
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    __builtin_memcpy(target, source, bytes);
    mbarrier_complete(barrier, static_cast<u64>(bytes) << 32);
#endif
}

template <int BYTES>
__device__ __forceinline__ void cp_async_bulk_shared_global(u8* target, const u8* source, Mbarrier& barrier) {
    cp_async_bulk_shared_global(target, source, BYTES, barrier);
}

// Copies a box of a tensor map, rows of 128 bytes from column x and row y on, with zeros beyond the end of the tensor; the
// mbarrier counts the bytes. `target` is aligned to 1024 bytes. READ_ONCE: lines of the L2 cache are evicted first.
template <bool READ_ONCE = false>
__device__ __forceinline__ void cp_async_bulk_tensor_2d(u8* target, const u64 (&map)[16], int x, int y, Mbarrier& barrier) {
#ifdef HAS_WGMMA
    // The policy evict_normal is not the same as none: with it 128 rows by N = K = 8192 of FP8 take 25.5 us and not 22.6.
    if constexpr (READ_ONCE) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
            "l"(map), "r"(x), "r"(y), "r"(shared_address(&barrier)), "l"(createpolicy_fractional_L2_evict_first())
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                shared_address(target)),
            "l"(map), "r"(x), "r"(y), "r"(shared_address(&barrier))
            : "memory");
    }
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    const u8* source = reinterpret_cast<const u8*>(map[0]);
    const i64 rows = static_cast<i64>(map[1]), columns = static_cast<i64>(map[2]);
    const int box_rows = static_cast<int>(map[3]);
    for (int row = 0; row < box_rows; ++row) {
        for (int column = 0; column < 128; ++column) {
            const bool inside = y + row < rows && x + column < columns;
            target[row * 128 + ((column / 16 ^ row % 8) << 4) + column % 16] =
                inside ? source[(y + row) * columns + x + column] : u8{0};
        }
    }
    mbarrier_complete(barrier, static_cast<u64>(box_rows) * 128 << 32);
#endif
}

// 16 bytes, bypassing L1.
__device__ __forceinline__ void cp_async_cg_shared_global_16(void* target, const u8* source, [[maybe_unused]] u64 policy) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(target))),
                 "l"(source), "l"(policy)
                 : "memory");
#else
    __builtin_memcpy(target, source, 16);
#endif
}

// 4 bytes, whose neighbours in the sector stay in L1.
__device__ __forceinline__ void cp_async_ca_shared_global_4(void* target, const u8* source) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(target))),
                 "l"(source)
                 : "memory");
#else
    __builtin_memcpy(target, source, 4);
#endif
}

__device__ __forceinline__ void cp_async_commit_group() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING groups of this thread are incomplete.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- loads -----------------------------------------------------------------------------------------------------------

// Brings a sector of 32 bytes to the L2 cache.
__device__ __forceinline__ void prefetch_global_L2([[maybe_unused]] const u8* source) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
#endif
}

// 16 bytes that are read once.
__device__ __forceinline__ Vector4 ld_global_nc_L1_no_allocate_L2_128B_v4_u32(const u8* source) {
#ifdef __CUDA_ARCH__
    Vector4 loaded;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]), "=r"(loaded.words[3])
                 : "l"(source));
    return loaded;
#else
    return *reinterpret_cast<const Vector4*>(source);
#endif
}

// 16 bytes that are read once, with a cache policy.
__device__ __forceinline__ Vector4 ld_global_nc_L1_no_allocate_L2_128B_v4_u32(const u8* source, [[maybe_unused]] u64 policy) {
#ifdef __CUDA_ARCH__
    Vector4 loaded;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]), "=r"(loaded.words[3])
                 : "l"(source), "l"(policy));
    return loaded;
#else
    return *reinterpret_cast<const Vector4*>(source);
#endif
}

__device__ __forceinline__ Vector4 ld_global_nc_v4_u32(const u8* source) {
#ifdef __CUDA_ARCH__
    Vector4 loaded;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]), "=r"(loaded.words[3])
                 : "l"(source));
    return loaded;
#else
    return *reinterpret_cast<const Vector4*>(source);
#endif
}

__device__ __forceinline__ u32 ld_global_nc_u16(const u8* source) {
#ifdef __CUDA_ARCH__
    u16 loaded;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(loaded) : "l"(source));
    return loaded;
#else
    return *reinterpret_cast<const u16*>(source);
#endif
}

// ---- warps and warpgroups --------------------------------------------------------------------------------------------

__device__ __forceinline__ void bar_warp_sync() {
#ifdef __CUDA_ARCH__
    __syncwarp();
#else
    simt::worker->exchange_lanes(0xFFFFFFFFu, 0, 0);
#endif
}

// Whether the predicate of a lane of the warp is true.
__device__ __forceinline__ bool vote_any(bool predicate) {
#ifdef __CUDA_ARCH__
    return __any_sync(0xFFFFFFFFu, predicate);
#else
    u32 any = predicate;
    for (u32 distance = 1; distance < WARP; distance *= 2) any |= __shfl_xor_sync(0xFFFFFFFFu, any, distance);
    return any != 0;
#endif
}

// Transposes a matrix of 8 rows and 8 columns, 16 bits each. Lane 4g + t has columns 2t and 2t + 1 of row g, before and after.
__device__ __forceinline__ u32 movmatrix_m8n8_trans(u32 pair) {
#ifdef __CUDA_ARCH__
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
#else
    const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 low = __shfl_sync(0xFFFFFFFFu, pair, 8 * t + g / 2), high = __shfl_sync(0xFFFFFFFFu, pair, 8 * t + 4 + g / 2);
    return (low >> g % 2 * 16 & 0xFFFFu) | (high >> g % 2 * 16) << 16;
#endif
}

// Barrier number `barrier`, 1 to 15, of THREADS threads of the block.
template <int THREADS>
__device__ __forceinline__ void bar_sync(int barrier) {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
#else
    __shared__ Mbarrier barriers[16];
    if (barriers[barrier].state == 0u) mbarrier_init(barriers[barrier], THREADS);
    const u32 phase = barriers[barrier].state & 1u;
    mbarrier_arrive(barriers[barrier]);
    mbarrier_try_wait_parity(barriers[barrier], phase);
#endif
}

// Registers of each thread from here on; all threads of a warpgroup execute it.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
#ifdef HAS_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
#ifdef HAS_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Orders accesses of a warpgroup to registers and shared memory before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
#ifdef HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit_group() {
#ifdef HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most PENDING groups are incomplete.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
#ifdef HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

#ifdef HAS_WGMMA
// d += a * b^T of 64 rows of a and 256 rows of b over 16 columns, asynchronously. `a` and `b` are matrix descriptors.
__device__ __forceinline__ void wgmma_m64n256k16_f32_bf16_bf16(float (&d)[128], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, 0, 0;"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b));
}

// d += a * b^T of 64 rows of a, in registers, and 32, 64 or 128 rows of b over 16 columns, asynchronously. Numbers of type T, bf16
// or fp16. Thread 4g + t of a warp has rows g and g + 8 of the 16 rows of the warp: pairs of columns 2t and 2t + 1, of both
// rows, then 2t + 8 and 2t + 9. `b` is a matrix descriptor.
#define NARROWGAUGE_WGMMA(TYPE)                                                                                        \
    asm volatile(                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {"                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                                      \
        "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"                                                                       \
        :                                                                                                              \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <class T>
__device__ __forceinline__ void wgmma_m64n32k16_f32(float (&d)[16], const u32 (&a)[4], u64 b) {
    if constexpr (is_bf16<T>) {
        NARROWGAUGE_WGMMA("bf16");
    } else {
        NARROWGAUGE_WGMMA("f16");
    }
}
#undef NARROWGAUGE_WGMMA
#define NARROWGAUGE_WGMMA(TYPE)                                                                                        \
    asm volatile(                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                            \
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"                                                                       \
        :                                                                                                              \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <class T>
__device__ __forceinline__ void wgmma_m64n64k16_f32(float (&d)[32], const u32 (&a)[4], u64 b) {
    if constexpr (is_bf16<T>) {
        NARROWGAUGE_WGMMA("bf16");
    } else {
        NARROWGAUGE_WGMMA("f16");
    }
}
#undef NARROWGAUGE_WGMMA
#define NARROWGAUGE_WGMMA(TYPE)                                                                                        \
    asm volatile(                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                            \
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"                                                                       \
        :                                                                                                              \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <class T>
__device__ __forceinline__ void wgmma_m64n128k16_f32(float (&d)[64], const u32 (&a)[4], u64 b) {
    if constexpr (is_bf16<T>) {
        NARROWGAUGE_WGMMA("bf16");
    } else {
        NARROWGAUGE_WGMMA("f16");
    }
}
#undef NARROWGAUGE_WGMMA

// d (+)= a * b^T of 64 rows of a and 128 rows of b over 16 columns of T, asynchronously; `add`: whether d is added.
// `a` and `b` are matrix descriptors.
#define NARROWGAUGE_WGMMA(TYPE)                                                                                         \
    asm volatile(                                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                   \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                            \
        "%64, %65, p, 1, 1, 0, 0;\n}"                                                                                  \
        :                                                                                                              \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "l"(a), "l"(b), "r"(add))
template <class T>
__device__ __forceinline__ void wgmma_m64n128k16_f32(float (&d)[64], u64 a, u64 b, int add) {
    if constexpr (is_bf16<T>) {
        NARROWGAUGE_WGMMA("bf16");
    } else {
        NARROWGAUGE_WGMMA("f16");
    }
}
#undef NARROWGAUGE_WGMMA

// d (+)= a * b^T of 64 rows of a and 128 rows of b over 32 columns of FP8, asynchronously; `add`: whether d is added.
// `a` and `b` are matrix descriptors. INT8 is multiplied alike, with int32 sums.
#define NARROWGAUGE_WGMMA_8_BITS(OUT, A, B, SIGNS, R)                                                                  \
    asm volatile(                                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                   \
        "wgmma.mma_async.sync.aligned.m64n128k32." OUT "." A "." B " {"                                                \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                            \
        "%64, %65, p" SIGNS ";\n}"                                                                                     \
        :                                                                                                              \
          R(d[0]), R(d[1]), R(d[2]), R(d[3]), R(d[4]), R(d[5]), R(d[6]), R(d[7]),                                      \
          R(d[8]), R(d[9]), R(d[10]), R(d[11]), R(d[12]), R(d[13]), R(d[14]), R(d[15]),                                \
          R(d[16]), R(d[17]), R(d[18]), R(d[19]), R(d[20]), R(d[21]), R(d[22]), R(d[23]),                              \
          R(d[24]), R(d[25]), R(d[26]), R(d[27]), R(d[28]), R(d[29]), R(d[30]), R(d[31]),                              \
          R(d[32]), R(d[33]), R(d[34]), R(d[35]), R(d[36]), R(d[37]), R(d[38]), R(d[39]),                              \
          R(d[40]), R(d[41]), R(d[42]), R(d[43]), R(d[44]), R(d[45]), R(d[46]), R(d[47]),                              \
          R(d[48]), R(d[49]), R(d[50]), R(d[51]), R(d[52]), R(d[53]), R(d[54]), R(d[55]),                              \
          R(d[56]), R(d[57]), R(d[58]), R(d[59]), R(d[60]), R(d[61]), R(d[62]), R(d[63])                               \
        : "l"(a), "l"(b), "r"(add))
template <bool A_E5M2, bool B_E5M2>
__device__ __forceinline__ void wgmma_m64n128k32_f32(float (&d)[64], u64 a, u64 b, int add) {
    static_assert(!A_E5M2 || !B_E5M2, "no recipes are multiplied so");
    if constexpr (A_E5M2) {
        NARROWGAUGE_WGMMA_8_BITS("f32", "e5m2", "e4m3", ", 1, 1", "+f");
    } else if constexpr (B_E5M2) {
        NARROWGAUGE_WGMMA_8_BITS("f32", "e4m3", "e5m2", ", 1, 1", "+f");
    } else {
        NARROWGAUGE_WGMMA_8_BITS("f32", "e4m3", "e4m3", ", 1, 1", "+f");
    }
}
__device__ __forceinline__ void wgmma_m64n128k32_s32(int (&d)[64], u64 a, u64 b, int add) {
    NARROWGAUGE_WGMMA_8_BITS("s32", "s8", "s8", "", "+r");
}
#undef NARROWGAUGE_WGMMA_8_BITS
#endif

// ---- float16, two in a register --------------------------------------------------------------------------------------

__device__ __forceinline__ float low_half(u32 pair) { return to_float(fp16{static_cast<u16>(pair)}); }
__device__ __forceinline__ float high_half(u32 pair) { return to_float(fp16{static_cast<u16>(pair >> 16)}); }

__device__ __forceinline__ u32 half_pair(float low, float high) {
    fp16 halves[2];
    from_float(low, halves[0]);
    from_float(high, halves[1]);
    return halves[0].bits | static_cast<u32>(halves[1].bits) << 16;
}

__device__ __forceinline__ u32 mul_rn_f16x2(u32 a, u32 b) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    return half_pair(low_half(a) * low_half(b), high_half(a) * high_half(b));
#endif
}

__device__ __forceinline__ u32 sub_rn_f16x2(u32 a, u32 b) {
#ifdef HAS_CVT_HALF
    u32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
#else
    return half_pair(low_half(a) - low_half(b), high_half(a) - high_half(b));
#endif
}

// Both numbers of a pair times the low number of `factors`.
__device__ __forceinline__ u32 mul_rn_f16x2_low(u32 pair, u32 factors) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.rn.f16x2 %0, %1, t; }"
        : "=r"(product) : "r"(pair), "r"(factors));
    return product;
#else
    return mul_rn_f16x2(pair, (factors & 0xFFFFu) | factors << 16);
#endif
}

// Both numbers of a pair times the high number of `factors`.
__device__ __forceinline__ u32 mul_rn_f16x2_high(u32 pair, u32 factors) {
#ifdef HAS_CVT_HALF
    u32 product;
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.rn.f16x2 %0, %1, t; }"
        : "=r"(product) : "r"(pair), "r"(factors));
    return product;
#else
    return mul_rn_f16x2(pair, factors >> 16 | (factors & 0xFFFF0000u));
#endif
}

// The lower two codes of a register; exact.
__device__ __forceinline__ u32 cvt_rn_f16x2_e4m3x2(u32 codes) {
#ifdef HAS_CVT_FP8
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(codes)));
    return pair;
#else
    return half_pair(e4m3_to_float(codes & 0xFFu), e4m3_to_float(codes >> 8 & 0xFFu));
#endif
}

// All four codes of a register.
__device__ __forceinline__ void cvt_rn_f16x2_e4m3x2(u32 codes, u32& low, u32& high) {
#ifdef HAS_CVT_FP8
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(codes));
#else
    low = cvt_rn_f16x2_e4m3x2(codes);
    high = cvt_rn_f16x2_e4m3x2(codes >> 16);
#endif
}

// Two bfloat16 numbers in a register.
__device__ __forceinline__ u32 mul_rn_bf16x2(u32 a, u32 b) {
#ifdef HAS_MUL_BF16
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    const auto number = [](u32 bits) { return __uint_as_float(bits << 16); };
    bf16 low, high;
    from_float(number(a) * number(b), low);
    from_float(number(a >> 16) * number(b >> 16), high);
    return low.bits | static_cast<u32>(high.bits) << 16;
#endif
}

__device__ __forceinline__ u32 sub_rn_bf16x2(u32 a, u32 b) {
#ifdef HAS_MUL_BF16
    u32 difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
#else
    const auto number = [](u32 bits) { return __uint_as_float(bits << 16); };
    bf16 low, high;
    from_float(number(a) - number(b), low);
    from_float(number(a >> 16) - number(b >> 16), high);
    return low.bits | static_cast<u32>(high.bits) << 16;
#endif
}

// Two float32 numbers that are bfloat16 numbers, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
#ifdef __CUDA_ARCH__
    return prmt_b32(__float_as_uint(low), __float_as_uint(high), 0x7632u);
#else
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
#endif
}

// Both float16 numbers of a register.
__device__ __forceinline__ void cvt_f32_f16(u32 pair, float& low, float& high) {
#ifdef HAS_CVT_HALF
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
#else
    low = low_half(pair);
    high = high_half(pair);
#endif
}

// A pair of float16 or bfloat16 numbers as float32.
template <class T>
__device__ __forceinline__ float low_of(u32 pair) { return to_float(T{static_cast<u16>(pair)}); }
template <class T>
__device__ __forceinline__ float high_of(u32 pair) { return to_float(T{static_cast<u16>(pair >> 16)}); }

#ifdef __CUDA_ARCH__
// d += a * b^T of 16 rows of a and 8 rows of b over 32 columns of 8-bit whole numbers with a sign, int32. Thread 4g + t has rows g and
// g + 8 of a and row g of b, columns 4t to 4t + 3, then those 16 to the right.
__device__ __forceinline__ void mma_m16n8k32_s32(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// d += a * b^T of 16 rows of a (four pairs of T, float16 or bfloat16, in a thread) and 8 rows of b (two pairs), over 16 columns.
// Thread 4g + t has rows g and g + 8 of a and row g of b, columns 2t, 2t + 1, 2t + 8 and 2t + 9.
#define NARROWGAUGE_MMA(TYPE)                                                                                          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                         \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                         \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <class T>
__device__ __forceinline__ void mma_m16n8k16_f32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef __CUDA_ARCH__
    if constexpr (is_bf16<T>) {
        NARROWGAUGE_MMA("bf16");
    } else {
        NARROWGAUGE_MMA("f16");
    }
#else
    const u32 lane = threadIdx.x % WARP;
    u64 a_upper[WARP], a_lower[WARP], b_rows[WARP];  // fragments of all lanes: rows g of a, rows g + 8, rows g of b
    const u64 own[3] = {a[0] | static_cast<u64>(a[2]) << 32, a[1] | static_cast<u64>(a[3]) << 32,
                        b[0] | static_cast<u64>(b[1]) << 32};
    for (u32 mask = 0; mask < WARP; ++mask) {
        a_upper[lane ^ mask] = __shfl_xor_sync(0xFFFFFFFFu, own[0], mask);
        a_lower[lane ^ mask] = __shfl_xor_sync(0xFFFFFFFFu, own[1], mask);
        b_rows[lane ^ mask] = __shfl_xor_sync(0xFFFFFFFFu, own[2], mask);
    }
    const auto row = [](const u64* fragments, u32 first, float (&values)[16]) {
        for (u32 t = 0; t < 4; ++t) {
            for (u32 half = 0; half < 2; ++half) {
                const u32 pair = static_cast<u32>(fragments[first + t] >> 32 * half);
                values[2 * t + 8 * half] = low_of<T>(pair);
                values[2 * t + 8 * half + 1] = high_of<T>(pair);
            }
        }
    };
    float left[16], right[16];
    for (u32 i = 0; i < 4; ++i) {
        row(i < 2 ? a_upper : a_lower, lane / 4 * 4, left);
        row(b_rows, (lane % 4 * 2 + i % 2) * 4, right);
        d[i] = sum_fp16(d[i], left, right);
    }
#endif
}
#undef NARROWGAUGE_MMA

}  // namespace narrowgauge::ptx
