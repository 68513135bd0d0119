// hopper.cuh: what GEMMs on a Hopper GPU are made of: barriers that count bytes, copies into shared memory that run by
// themselves, products of tiles. Each has a portable twin for a CPU that gives the same bits. Other GPUs have none of
// this: what is compiled for them traps. PTX ISA: mbarrier, cp.async.bulk, wgmma.
//
// A tile is 128 rows of 64 bfloat16 numbers of an operand: 128 bytes a row, whose chunks of 16 bytes are swapped by the
// row, as the 128-byte swizzle of wgmma has them: chunk c of row r lies at c ^ (r % 8).
#pragma once

#include "common/formats.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA
#endif

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2;
constexpr int WARP = 32, GROUP = 4 * WARP;  // threads of a warp, and of a group of warps, which makes products together

// Where the 16 bytes of columns 8 * chunk on of a row begin, in a tile.
__device__ __forceinline__ int chunk_at(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// ---- barriers --------------------------------------------------------------------------------------------------------

// Of so many arrivals and of the bytes that copies have still to bring. It has phases, 0 and 1 by turns, and begins in 0.
struct Barrier {
    u64 state;  // twin: the phase, 1 bit; arrivals of a phase, 15; those still missing, 15; bytes still missing, 32

#ifdef HAS_WGMMA
    __device__ __forceinline__ u32 address() const { return static_cast<u32>(__cvta_generic_to_shared(this)); }
    __device__ __forceinline__ void begin(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    // An arrival that says how many bytes have still to come.
    __device__ __forceinline__ void arrive_before(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ void wait_for(u32 phase) {
        asm volatile(
            "{\n.reg .pred done;\n"
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@done bra over;\nbra again;\nover:\n}" ::"r"(address()), "r"(phase) : "memory");
    }
#elif defined(__CUDA_ARCH__)
    __device__ void begin(int) { __trap(); }
    __device__ void arrive() { __trap(); }
    __device__ void arrive_before(u32) { __trap(); }
    __device__ void wait_for(u32) { __trap(); }
#else
    void begin(int arrivals) { state = static_cast<u64>(arrivals) << 1 | static_cast<u64>(arrivals) << 16; }
    void arrive() { taken(u64{1} << 16); }
    void arrive_before(u32 bytes) {
        state += static_cast<u64>(bytes) << 32;
        arrive();
    }
    void taken(u64 what) {
        state -= what;
        if (state >> 16 == 0) state = (state ^ 1u) | (state & 0xFFFEu) << 15;
    }
    void wait_for(u32 phase) {
        while ((state & 1u) == phase) simt::worker->wait(simt::READY);
    }
#endif
};

// After barriers have begun, before the first copy.
__device__ __forceinline__ void fence_barriers() {
#ifdef HAS_WGMMA
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A tile from global memory into shared memory, both aligned to 128 bytes; the barrier counts its bytes.
__device__ __forceinline__ void copy_tile(u8* target, const u8* source, Barrier& barrier) {
#ifdef HAS_WGMMA
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(target))),
                 "l"(source), "r"(TILE_BYTES), "r"(barrier.address())
                 : "memory");
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    __builtin_memcpy(target, source, TILE_BYTES);
    barrier.taken(static_cast<u64>(TILE_BYTES) << 32);
#endif
}

// The threads of a warp wait for each other, and see what each has written to shared memory.
__device__ __forceinline__ void meet_in_warp() {
#ifdef __CUDA_ARCH__
    __syncwarp();
#else
    simt::worker->exchange_lanes(0xFFFFFFFFu, 0, 0);
#endif
}

// Registers of a thread, from here on: all threads of a group of warps say the same.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
#ifdef HAS_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ __forceinline__ void leave_registers() {
#ifdef HAS_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// ---- products of tiles -----------------------------------------------------------------------------------------------

// A group of warps makes 64 rows by 256 columns of sums; thread t has 128 of them. Sum 4j + 2i + e is that of row
// t/32*16 + t%32/4 + 8i and of column 8j + 2(t%4) + e.
constexpr int PRODUCT_ROWS = 64, PRODUCT_COLUMNS = 256, SUMS = 128;
constexpr int STEP_OF_SUM = 16;  // columns that are added at a time

#ifdef HAS_WGMMA
// Of a tile that begins there, aligned to 1024 bytes: rows of 128 bytes along K, eight of them 1024 bytes, swizzled.
__device__ __forceinline__ u64 tile_descriptor(const u8* tile) {
    const u64 address = static_cast<u64>(__cvta_generic_to_shared(tile)) & 0x3FFFFu;
    return address >> 4 | u64{1} << 16 | u64{1024 >> 4} << 32 | u64{1} << 62;
}

// d += a[:, 16 columns] * b[:, 16 columns]^T, not finished before `wait_for_products`.
__device__ __forceinline__ void product_step(float (&d)[SUMS], u64 a, u64 b) {
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
#endif

// Products may be queued, which read what barriers have let through.
__device__ __forceinline__ void begin_products() {
#ifdef HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Until at most PENDING of the queued products of tiles have still to be made.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
#ifdef HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Until all have been made: sums are there from here on.
__device__ __forceinline__ void finish_products([[maybe_unused]] float (&d)[SUMS]) {
#ifdef HAS_WGMMA
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

#ifndef __CUDA_ARCH__
// acc + a[0]*b[0] + … + a[15]*b[15], as the tensor cores of Hopper add: each product, exact, and acc are aligned to the
// largest exponent among them, that of a product being the sum of its factors', cut off behind 25 bits, added, and the
// sum is cut off behind 23. Factors are 0, or normal and neither huge nor tiny; or not finite, as the sum then is, too.
constexpr int KEPT = 25;

struct Scaled {
    float value;
    int significand;  // with its sign, 23 bits behind the point
    int exponent;

    explicit Scaled(float x = 0.0f) : value(x) {
        const u32 bits = __float_as_uint(x);
        const int fraction = static_cast<int>(bits & 0x007FFFFFu), field = static_cast<int>(bits >> 23 & 0xFFu);
        const int whole = field == 0 ? fraction : fraction | 0x00800000;
        significand = (bits >> 31) != 0u ? -whole : whole;
        exponent = field == 0 ? -126 : field - 127;
    }
    bool finite() const { return exponent < 128; }
};

inline i64 cut(i64 value, int left) {  // value * 2^left, cut off towards 0
    if (left >= 0) return value << left;
    return left < -62 ? 0 : value / (i64{1} << -left);
}

inline float aligned_sum(float acc, const Scaled* a, const Scaled* b) {
    constexpr int NONE = -100000;
    const Scaled before(acc);
    int largest = before.significand != 0 ? before.exponent : NONE;
    bool finite = before.finite(), adds = false;
    for (int i = 0; i < STEP_OF_SUM; ++i) {
        finite &= a[i].finite() && b[i].finite();
        if (a[i].significand == 0 || b[i].significand == 0) continue;
        adds = true;
        if (a[i].exponent + b[i].exponent > largest) largest = a[i].exponent + b[i].exponent;
    }
    if (!finite) {
        for (int i = 0; i < STEP_OF_SUM; ++i) acc += a[i].value * b[i].value;
        return acc;
    }
    if (!adds) return acc;
    i64 sum = cut(before.significand, before.exponent - largest + KEPT - 23);
    for (int i = 0; i < STEP_OF_SUM; ++i) {
        const i64 product = static_cast<i64>(a[i].significand >> 16) * (b[i].significand >> 16);  // of bfloat16: exact
        sum += cut(product, a[i].exponent + b[i].exponent - largest + KEPT - 14);
    }
    i64 last = 1;
    while ((sum < 0 ? -sum : sum) / last >= i64{1} << 24) last *= 2;
    return static_cast<float>(__builtin_ldexp(static_cast<double>(sum / last * last), largest - KEPT));
}
#endif

// d += a * b^T: 64 rows of a tile and 256 rows of two tiles, one behind the other, over all columns in their order.
__device__ __forceinline__ void multiply_tiles(float (&d)[SUMS], const u8* a, const u8* b) {
#ifdef HAS_WGMMA
    const u64 left = tile_descriptor(a), right = tile_descriptor(b);
#pragma unroll
    for (int step = 0; step < TILE_COLUMNS / STEP_OF_SUM; ++step) {
        product_step(d, left + step * (STEP_OF_SUM * 2 >> 4), right + step * (STEP_OF_SUM * 2 >> 4));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    const int thread = static_cast<int>(threadIdx.x) % GROUP, lane = thread % WARP;
    struct Row {
        Scaled values[TILE_COLUMNS];
        bool zero = true, finite = true;

        Row(const u8* tile, int row) {
            for (int column = 0; column < TILE_COLUMNS; ++column) {
                bf16 number;
                __builtin_memcpy(&number, tile + chunk_at(row, column / 8) + column % 8 * 2, 2);
                const Scaled& value = values[column] = Scaled(to_float(number));
                zero &= value.significand == 0;
                finite &= value.finite();
            }
        }
    };
    const int top = thread / WARP * 16 + lane / 4;
    const Row left[2] = {{a, top}, {a, top + 8}};
    for (int j = 0; j < PRODUCT_COLUMNS / 8; ++j) {
        for (int e = 0; e < 2; ++e) {
            const Row right(b, 8 * j + lane % 4 * 2 + e);
            for (int i = 0; i < 2; ++i) {
                if ((left[i].zero && right.finite) || (right.zero && left[i].finite)) continue;  // as behind an edge
                float& sum = d[4 * j + 2 * i + e];
                for (int k = 0; k < TILE_COLUMNS; k += STEP_OF_SUM) {
                    sum = aligned_sum(sum, left[i].values + k, right.values + k);
                }
            }
        }
    }
#endif
}
