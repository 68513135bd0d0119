// gemm_skinny_weight_only: out = alpha * (a @ w.T) with few rows of a. Operands and alpha: weight_only.cuh.
//
//   K        a multiple of 256; any M; N and K to 2^20. Operands begin at a multiple of 16 bytes. Groups of INT4 are 32 columns
//            or a multiple that divides 256
//   The macro SLICES, 1 or 2, on a GPU with clusters: blocks of a cluster, each with a slice of K
//   Launch: `early`, 512 threads, grid (SLICES * ceil(M/16), ceil(N/128), products of a batch), sizeof(WeightOnlyShared) of
//   dynamic shared memory
//   Numerics: tensor cores add 16 products at a time to a float32 accumulator, truncated as in tensor_core_model.cuh. A warp
//   has runs of 256 columns, each with an accumulator of its own; the sums of runs, then of warps and of blocks, are added in order
//   of K, one float32 rounding each.
//
// The kernel is bound by reading b and decoding it. A warp keeps its columns of the 16 rows of a in registers, and goes along the
// rows of b: no thread waits for another before the sums of all warps are added. The codes of 16 rows of b come while the
// rows before are decoded, in registers.
#include "gemm/cluster.cuh"
#include "gemm/e2m1_pairs.cuh"
#include "gemm/skinny/gemm_skinny.cuh"
#include "gemm/weight_only.cuh"

namespace narrowgauge {

using ptx::Vector4;

constexpr int RUN = 256, UNIT = 8;      // columns of a run, and of 16 bytes of a
constexpr int UNITS = RUN / 4 / UNIT;   // of a thread in a run
constexpr int WEIGHT_WARPS = 16, WEIGHT_THREADS = WEIGHT_WARPS * WARP, WEIGHT_ROWS = 128, STRIPS = WEIGHT_ROWS / STRIP_ROWS;

// Vectors of 16 bytes of a thread's codes of a row in a run. Neighbouring threads have neighbouring vectors.
__device__ constexpr int vectors_of(Weight weight) { return has_nibbles(weight) ? 2 : 4; }
__device__ constexpr int vector_units(Weight weight) { return UNITS / vectors_of(weight); }
// Factors of a thread's columns of a row.
__device__ constexpr int scales_of(Weight weight) { return weight == Weight::NVFP4 || weight == Weight::MXFP8 ? 4 : 2; }

// Scales of a thread's columns of a row as they are stored, 4 bytes of INT4 or 2 bytes of NVFP4 for a register, else 1; zero
// points of INT4.
template <Weight W>
struct StoredScales {
    u32 scales[W == Weight::MXFP8 ? 4 : 2];
    u32 zeros;
};

// A thread's factors of its columns in both halves of a register each, and what is subtracted from its codes first.
template <Weight W>
struct Factors {
    u32 scales[scales_of(W)];
    u32 shifts[scales_of(W)];
};

struct alignas(128) WeightOnlyShared {
    Vector4 sums[WEIGHT_WARPS][STRIPS][GROUPS][WARP];
};
static_assert(sizeof(WeightOnlyShared) == 131072, "native/gemm/weight_only.py asks for this size");

// Bits of T: a number in both halves of a register.
template <class T>
__device__ __forceinline__ u32 both(float x) {
#ifdef __CUDA_ARCH__
    if constexpr (ptx::is_bf16<T>) return ptx::cvt_rn_bf16x2_f32(x, x);
#endif
    T narrow;
    from_float(x, narrow);
    return narrow.bits * 0x10001u;
}

// A whole number below 16 in the low bits of BASE, of which T has every whole number up to 2 * BASE.
template <class T>
struct IntegerIn {
    static constexpr float BASE = ptx::is_bf16<T> ? 128.0f : 1024.0f;
    static constexpr u32 BITS = ptx::is_bf16<T> ? 0x43004300u : 0x64006400u;
};

template <class T, Weight W>
__device__ __forceinline__ void decode_scales(const StoredScales<W>& row, Factors<W>& factors) {
    if constexpr (W == Weight::NVFP4) {
        constexpr float RESTORE = E2m1In<T>::RESTORE / E2m1In<T>::REST;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float low, high;
            ptx::cvt_f32_f16(ptx::cvt_rn_f16x2_e4m3x2(row.scales[i]), low, high);
            factors.scales[2 * i] = both<T>(low * RESTORE);
            factors.scales[2 * i + 1] = both<T>(high * RESTORE);
        }
    } else if constexpr (is_integer(W)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 zero = W == Weight::UINT4 ? row.zeros >> 8 * i & 0xFFu : 8u;
            factors.scales[i] = both<T>(__uint_as_float(row.scales[i]));
            factors.shifts[i] = both<T>(IntegerIn<T>::BASE + static_cast<float>(zero));
        }
    } else if constexpr (W != Weight::FP8) {
#pragma unroll
        for (int i = 0; i < vectors_of(W); ++i) {
            factors.scales[i] = both<T>(e8m0_to_float(row.scales[i]));
        }
    }
}

// Columns j and j + 4 of eight codes, as whole numbers of T behind the shift.
template <class T, Weight W>
__device__ __forceinline__ u32 integer_pair(u32 word, int j, u32 shift) {
    const u32 codes = (word >> 4 * j & 0x000F000Fu) ^ (W == Weight::INT4 ? 0x00080008u : 0u);
    const u32 pair = codes | IntegerIn<T>::BITS;
    return ptx::is_bf16<T> ? ptx::sub_rn_bf16x2(pair, shift) : ptx::sub_rn_f16x2(pair, shift);
}

// Eight columns: columns j and j + 4 of 4 bits, neighbours of other codes. As `arrange` has them for a. `codes`: those of the unit.
template <class T, Weight W>
__device__ __forceinline__ void decode_weight(const Vector4& codes, int unit, const Factors<W>& factors, u32 (&pairs)[4]) {
    const int part = unit * scales_of(W) / UNITS;
    if constexpr (has_nibbles(W)) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 word = codes.words[unit % 4];
            u32 pair;
            if constexpr (is_integer(W)) pair = integer_pair<T, W>(word, j, factors.shifts[part]);
            else pair = small_e2m1<T>(word, j);
            if constexpr (W == Weight::MXFP4) pair = times<T>(pair, both<T>(E2m1In<T>::RESTORE));
            pairs[j] = times<T>(pair, factors.scales[part]);
        }
    } else {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            ptx::cvt_rn_f16x2_e4m3x2(codes.words[unit % 2 * 2 + word], pairs[2 * word], pairs[2 * word + 1]);
        }
        if constexpr (ptx::is_bf16<T>) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float low, high;
                ptx::cvt_f32_f16(pairs[j], low, high);
                pairs[j] = ptx::bf16_pair(low, high);
                if constexpr (W == Weight::MXFP8) pairs[j] = times<T>(pairs[j], factors.scales[part]);
            }
        }
    }
}

template <Weight W>
__device__ __forceinline__ void arrange(const Vector4& a, u32 (&pairs)[4]) {
    const u32(&w)[4] = a.words;
    if constexpr (has_nibbles(W)) {
        pairs[0] = (w[0] & 0xFFFFu) | w[2] << 16;
        pairs[1] = w[0] >> 16 | (w[2] & 0xFFFF0000u);
        pairs[2] = (w[1] & 0xFFFFu) | w[3] << 16;
        pairs[3] = w[1] >> 16 | (w[3] & 0xFFFF0000u);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = w[j];
    }
}

__device__ __forceinline__ i64 clamped(i64 row, i64 rows) { return row < rows ? row : rows - 1; }

// Warps that share K: as many as have a run, from 16 on. The others take further strips of rows of b.
__device__ __forceinline__ int warps_along_k(i64 runs) {
    int warps = WEIGHT_WARPS;
    while (warps > 1 && warps / 2 * CLUSTER >= runs) warps /= 2;
    return warps;
}

// Sums of a warp over its part of K, for its strips of 16 rows of b.
template <class T, Weight W>
__device__ __forceinline__ void multiply_runs(WeightOnlyShared& shared, const WeightOnlyParameters& p) {
    constexpr int VECTORS = vectors_of(W), VECTOR_UNITS = vector_units(W);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const i64 first = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS, first_token = static_cast<i64>(blockIdx.x / CLUSTER) * TOKENS;
    const i64 runs = p.k / RUN;
    const int along = warps_along_k(runs), parts = CLUSTER * along, part = blockIdx.x % CLUSTER * along + warp % along;
    const int begin = static_cast<int>(runs * part / parts), end = static_cast<int>(runs * (part + 1) / parts);
    const int own = warp / along, step = WEIGHT_WARPS / along;  // strips: own, own + step, ...
    int shift = 5;  // of a group of INT4, a power of two
    while (1 << shift < p.group) ++shift;

    const auto load = [&](i64 row, int run, int vector) {
        const u8* const source = p.codes + ((row * runs + run) * VECTORS + vector) * 64 + t * 16;
        return ptx::ld_global_nc_L1_no_allocate_L2_128B_v4_u32(source);
    };
    const auto load_scales = [&](i64 row, int run, StoredScales<W>& loaded) {
        if constexpr (is_integer(W)) {
            loaded.zeros = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const i64 place = row * (p.k >> shift) + ((run * RUN + i * (RUN / 2) + t * (RUN / 8)) >> shift);
                loaded.scales[i] = reinterpret_cast<const u32*>(p.scales)[place];
                if constexpr (W == Weight::UINT4) loaded.zeros |= static_cast<u32>(p.zeros[place]) << 8 * i;
            }
        } else if constexpr (W != Weight::FP8) {
            const u8* const source = p.scales + (row * runs + run) * (RUN / scale_columns(W));
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if constexpr (W == Weight::NVFP4) loaded.scales[i] = ptx::ld_global_nc_u16(source + 2 * (4 * i + t));
                else loaded.scales[i] = source[(4 * i + t) * VECTOR_UNITS * UNIT / scale_columns(W)];
            }
        }
    };
    i64 rows[2];
    const auto locate = [&](int strip) {
#pragma unroll
        for (int row = 0; row < 2; ++row) rows[row] = clamped(first + strip * STRIP_ROWS + 8 * row + g, p.n);
    };
    if (begin == end) {  // no run: K has fewer than warps
        for (int strip = own; strip < STRIPS; strip += step) {
            for (int group = 0; group < GROUPS; ++group) shared.sums[warp % along][strip][group][lane] = {};
        }
    }
    for (int run = begin; run < end; ++run) {
        Vector4 codes[2][VECTORS];
        StoredScales<W> scales[2];
        locate(own);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) codes[row][v] = load(rows[row], run, v);
            load_scales(rows[row], run, scales[row]);
        }
        u32 tokens[GROUPS][UNITS][4];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const u8* const a = p.a + (clamped(first_token + group * GROUP_ROWS + g, p.m) * p.k + run * RUN) * 2;
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const int place = (unit / VECTOR_UNITS * 4 + t) * VECTOR_UNITS + unit % VECTOR_UNITS;
                arrange<W>(ptx::ld_global_nc_v4_u32(a + place * UNIT * 2), tokens[group][unit]);
            }
        }
#pragma unroll 1
        for (int strip = own; strip < STRIPS; strip += step) {
            Factors<W> factors[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) decode_scales<T, W>(scales[row], factors[row]);
            locate(strip + step < STRIPS ? strip + step : strip);
#pragma unroll
            for (int row = 0; row < 2; ++row) load_scales(rows[row], run, scales[row]);
            float sums[GROUPS][4] = {};
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const int v = unit / VECTOR_UNITS;
                u32 top[4], bottom[4];
                decode_weight<T, W>(codes[0][v], unit, factors[0], top);
                decode_weight<T, W>(codes[1][v], unit, factors[1], bottom);
                if (unit % VECTOR_UNITS == VECTOR_UNITS - 1) {
#pragma unroll
                    for (int row = 0; row < 2; ++row) codes[row][v] = load(rows[row], run, v);
                }
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) multiply_32_columns<T>(sums[group], top, bottom, tokens[group][unit]);
            }
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                Vector4& stored = shared.sums[warp % along][strip][group][lane];
                Vector4 words;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float before = run == begin ? 0.0f : __uint_as_float(stored.words[i]);
                    words.words[i] = __float_as_uint(run == begin ? sums[group][i] : before + sums[group][i]);
                }
                stored = words;
            }
        }
    }
}

template <class T, Weight W>
__device__ __forceinline__ void multiply_weight_only(const WeightOnlyParameters& batch) {
    const WeightOnlyParameters p = product_of<T>(batch, blockIdx.z);
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 dynamic_shared[];
    WeightOnlyShared& shared = *reinterpret_cast<WeightOnlyShared*>(dynamic_shared);
#else
    __shared__ WeightOnlyShared shared;
#endif
    multiply_runs<T, W>(shared, p);
    if constexpr (CLUSTER > 1) ptx::barrier_cluster();
    else __syncthreads();
    const float divisor = W == Weight::NVFP4 ? p.divisor / E2m1In<T>::REST : p.divisor;
    const int along = warps_along_k(p.k / RUN);
    constexpr int ITEMS = STRIPS * GROUPS * WARP / CLUSTER;  // of four outputs, of a block
    for (int item = threadIdx.x; item < ITEMS; item += WEIGHT_THREADS) {
        const int place = blockIdx.x % CLUSTER * ITEMS + item, lane = place % WARP, group = place / WARP % GROUPS;
        const int strip = place / WARP / GROUPS;
        float joined[4] = {};
#pragma unroll 8
        for (int from = 0; from < CLUSTER * along; ++from) {
            const Vector4* const source = &shared.sums[from % along][strip][group][lane];
            Vector4 words;
            if constexpr (CLUSTER > 1) words = ptx::ld_shared_cluster(source, from / along);
            else words = *source;
#pragma unroll
            for (int i = 0; i < 4; ++i) joined[i] += __uint_as_float(words.words[i]);
        }
        const i64 first_token = static_cast<i64>(blockIdx.x / CLUSTER) * TOKENS, first = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 y = first_token + group * GROUP_ROWS + lane % 4 * 2 + i % 2, x = first + strip * STRIP_ROWS + lane / 4 + i / 2 * 8;
            if (y < p.m && x < p.n) store_output<T>(p, joined[i], y, x, divisor);
        }
    }
    if constexpr (CLUSTER > 1) ptx::barrier_cluster();  // all blocks have read this block's sums
}

template <class T>
__device__ __forceinline__ void multiply_weight_only(const WeightOnlyParameters& p) {
    ptx::griddepcontrol_wait();
    switch (WEIGHT) {
        case Weight::NVFP4: return multiply_weight_only<T, Weight::NVFP4>(p);
        case Weight::MXFP4: return multiply_weight_only<T, Weight::MXFP4>(p);
        case Weight::MXFP8: return multiply_weight_only<T, Weight::MXFP8>(p);
        case Weight::INT4: return multiply_weight_only<T, Weight::INT4>(p);
        case Weight::UINT4: return multiply_weight_only<T, Weight::UINT4>(p);
        default: return multiply_weight_only<T, Weight::FP8>(p);
    }
}

extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, 1) CLUSTER_OF_SLICES
    gemm_skinny_weight_only_bf16(const __grid_constant__ WeightOnlyParameters p) {
    multiply_weight_only<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, 1) CLUSTER_OF_SLICES
    gemm_skinny_weight_only_fp16(const __grid_constant__ WeightOnlyParameters p) {
    multiply_weight_only<fp16>(p);
}

}  // namespace narrowgauge
