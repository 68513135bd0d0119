// gemm_skinny_weight_only: out = alpha * (a @ w.T) with few rows of a. Operands and alpha: weight_only.cuh.
//
//   K        a multiple of 256; any M; N and K to 2^20. Operands begin at a multiple of 16 bytes. Groups of INT4 are 32 columns
//            or a multiple that divides 256
//   Macros: ROWS_OF_A, 8, 16, 32 or 64 rows of a of a block of threads. A team of TEAM_WARPS warps, 4 or 8, has the same part of K.
//   STRIPS, 1 or 2: 16 rows of b of a warp each, so that a block has WEIGHT_ROWS = 16 * STRIPS * TEAM_WARPS rows of b. SLICES,
//   1 or 2, on a GPU with clusters: blocks of a cluster, each with a slice of K
//   Launch: `early`, 512 threads, grid (SLICES * ceil(M / ROWS_OF_A), ceil(N / WEIGHT_ROWS), products of a batch),
//   sizeof(WeightOnlyShared) of dynamic shared memory
//   Numerics: tensor cores add 16 products at a time to a float32 accumulator, truncated as in tensor_core_model.cuh. The
//   16 / TEAM_WARPS teams of warps of each block take equal parts of K; the sums of the teams are added in order of K, one float32
//   rounding each.
//
// The kernel is bound by decoding b: 16 rows of 256 columns of NVFP4 are 400 instructions of a warp, most of which shift and
// mask. The codes of a run of 256 columns come while those of the run before are decoded, in registers. A team brings a and the
// scales of b to shared memory, one run ahead. All blocks together read a as often as there are blocks along N, so that many rows of b
// in a block, and slices of K instead of more blocks, save reads. Two strips of a warp halve the reads of a from shared memory.
#include "gemm/cluster.cuh"
#include "gemm/e2m1_pairs.cuh"
#include "gemm/skinny/gemm_skinny.cuh"
#include "gemm/weight_only.cuh"

#ifndef TEAM_WARPS
#define TEAM_WARPS 4
#endif
#ifndef STRIPS
#define STRIPS 1
#endif
#ifndef ROWS_OF_A
#define ROWS_OF_A 16
#endif

namespace narrowgauge {

using ptx::Vector4;

constexpr int RUN = 256, UNIT = 8;      // columns of a run, and of 16 bytes of a
constexpr int UNITS = RUN / 4 / UNIT;   // of a thread in a run
constexpr int WEIGHT_WARPS = 16, TEAMS = WEIGHT_WARPS / TEAM_WARPS, TEAM = TEAM_WARPS * WARP, WEIGHT_THREADS = TEAMS * TEAM;
constexpr int A_ROWS = ROWS_OF_A, A_GROUPS = A_ROWS / GROUP_ROWS;
constexpr int WARP_ROWS = STRIPS * STRIP_ROWS, WEIGHT_ROWS = TEAM_WARPS * WARP_ROWS;  // rows of b of a warp, and of a block
constexpr int SCALE_BYTES = 16, SCALE_THREADS = TEAM / WEIGHT_ROWS;  // most bytes of scales of a row in a run; threads that bring them
constexpr int WEIGHT_STRIDE = WEIGHT_ROWS + 4;                       // without bank conflicts when a warp writes
constexpr int PIECES = A_ROWS / TEAM_WARPS;                          // of 16 bytes of a, of a thread in a run
constexpr int QUADS = WEIGHT_ROWS / 4 / CLUSTER;                     // four outputs of a row of a each, of a block

// Vectors of 16 bytes of a thread's codes of a row in a run. Neighbouring threads have neighbouring vectors.
__device__ constexpr int vectors_of(Weight weight) { return has_nibbles(weight) ? 2 : 4; }
__device__ constexpr int vector_units(Weight weight) { return UNITS / vectors_of(weight); }
// Factors of a thread's columns of a vector.
__device__ constexpr int scales_of(Weight weight) { return weight == Weight::NVFP4 ? 2 : 1; }
// Bytes of the scales of a row in a run, as shared memory has them; those of INT4 do not pass through it.
__device__ constexpr int scale_bytes(Weight weight) { return is_integer(weight) || weight == Weight::FP8 ? 0 : RUN / scale_columns(weight); }

// A thread's codes of a row in a run, and float32 scales and zero points of INT4.
template <Weight W>
struct WeightRow {
    Vector4 codes[vectors_of(W)];
    u32 scales[2];
    u32 zeros;
};

// A thread's factors of its columns of a vector, in both halves of a register each, and the number that is subtracted from codes first.
template <Weight W>
struct Factors {
    u32 scales[scales_of(W)];
    u32 shift;
};

struct alignas(128) WeightOnlyShared {
    union {
        Vector4 tokens[TEAMS][2][A_GROUPS][UNITS][WARP];  // runs of a, double-buffered
        float sums[TEAMS][A_ROWS][WEIGHT_STRIDE];         // after the last run
    };
    u8 scales[TEAMS][2][WEIGHT_ROWS][SCALE_BYTES];  // of b
};
static_assert(sizeof(WeightOnlyShared) == 2 * TEAMS * (A_ROWS * RUN * 2 + WEIGHT_ROWS * SCALE_BYTES),
              "native/gemm/weight_only.py asks for this size");

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

// Factors of vector v. `stored`: scales of the row in shared memory. `t`: the thread among the four of a row.
template <class T, Weight W>
__device__ __forceinline__ void decode_scales(const WeightRow<W>& row, int v, const u8* stored, u32 t, Factors<W>& factors) {
    if constexpr (W == Weight::NVFP4) {
        constexpr float RESTORE = E2m1In<T>::RESTORE / E2m1In<T>::REST;
        float low, high;
        ptx::cvt_f32_f16(ptx::cvt_rn_f16x2_e4m3x2(reinterpret_cast<const u16*>(stored)[4 * v + t]), low, high);
        factors.scales[0] = both<T>(low * RESTORE);
        factors.scales[1] = both<T>(high * RESTORE);
    } else if constexpr (is_integer(W)) {
        const u32 zero = W == Weight::UINT4 ? row.zeros >> 8 * v & 0xFFu : 8u;
        factors.scales[0] = both<T>(__uint_as_float(row.scales[v]));
        factors.shift = both<T>(IntegerIn<T>::BASE + static_cast<float>(zero));
    } else if constexpr (W != Weight::FP8) {
        const u32 column = (4 * v + t) * vector_units(W) * UNIT;
        factors.scales[0] = both<T>(e8m0_to_float(stored[column / scale_columns(W)]));
    }
}

// Columns j and j + 4 of eight codes, as whole numbers of T behind the shift.
template <class T, Weight W>
__device__ __forceinline__ u32 integer_pair(u32 word, int j, u32 shift) {
    const u32 codes = (word >> 4 * j & 0x000F000Fu) ^ (W == Weight::INT4 ? 0x00080008u : 0u);
    const u32 pair = codes | IntegerIn<T>::BITS;
    return ptx::is_bf16<T> ? ptx::sub_rn_bf16x2(pair, shift) : ptx::sub_rn_f16x2(pair, shift);
}

// Eight columns: columns j and j + 4 of 4 bits, neighbours of other codes. As `arrange` has them for a.
template <class T, Weight W>
__device__ __forceinline__ void decode_weight(const WeightRow<W>& row, int unit, const Factors<W>& factors, u32 (&pairs)[4]) {
    const int part = unit % vector_units(W) * scales_of(W) / vector_units(W);
    if constexpr (has_nibbles(W)) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 word = row.codes[unit / 4].words[unit % 4];
            u32 pair;
            if constexpr (is_integer(W)) pair = integer_pair<T, W>(word, j, factors.shift);
            else pair = small_e2m1<T>(word, j);
            if constexpr (W == Weight::MXFP4) pair = times<T>(pair, both<T>(E2m1In<T>::RESTORE));
            pairs[j] = times<T>(pair, factors.scales[part]);
        }
    } else {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            ptx::cvt_rn_f16x2_e4m3x2(row.codes[unit / 2].words[unit % 2 * 2 + word], pairs[2 * word], pairs[2 * word + 1]);
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

// Sums of the thread's team over its part of K, of the rows of b of each warp.
template <class T, Weight W>
__device__ __forceinline__ void multiply_runs(WeightOnlyShared& shared, const WeightOnlyParameters& p) {
    constexpr int VECTORS = vectors_of(W), VECTOR_UNITS = vector_units(W), BYTES = scale_bytes(W);
    const u32 thread = threadIdx.x, lane = thread % WARP, team = thread / TEAM, g = lane / 4, t = lane % 4;
    const i64 first = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS, first_token = static_cast<i64>(blockIdx.x / CLUSTER) * A_ROWS;
    const u32 warp = thread % TEAM / WARP, own = warp * WARP_ROWS, part = blockIdx.x % CLUSTER * TEAMS + team;
    const i64 runs = p.k / RUN;
    const int begin = static_cast<int>(runs * part / (CLUSTER * TEAMS)), end = static_cast<int>(runs * (part + 1) / (CLUSTER * TEAMS));
    i64 rows[STRIPS][2];
    const u8* codes[STRIPS][2];
#pragma unroll
    for (int row = 0; row < 2 * STRIPS; ++row) {
        rows[row / 2][row % 2] = clamped(first + own + 8 * row + g, p.n);
        codes[row / 2][row % 2] = p.codes + (rows[row / 2][row % 2] * runs * VECTORS * 4 + begin * VECTORS * 4 + t) * 16;
    }
    // Eight neighbouring threads bring 16 bytes each of two rows of a, which lie in different banks of shared memory. `place`: the
    // vector of codes, the thread that multiplies the vector, and the unit.
    const u32 token = warp * PIECES / 2 * 2 + lane / 4 % 2, half_of_run = PIECES > 1 ? 0 : warp % 2;
    const u32 place = half_of_run * 16 + lane / 8 / VECTOR_UNITS * 4 * VECTOR_UNITS + t * VECTOR_UNITS + lane / 8 % VECTOR_UNITS;
    const u32 unit_of_place = place / (4 * VECTOR_UNITS) * VECTOR_UNITS + place % VECTOR_UNITS;
    Vector4* const stored_tokens = &shared.tokens[team][0][token / GROUP_ROWS][unit_of_place][token % GROUP_ROWS * 4 + t];
    u32 a_rows[(PIECES + 1) / 2];
#pragma unroll
    for (u32 i = 0; i < (PIECES + 1) / 2; ++i) {
        a_rows[i] = static_cast<u32>((clamped(first_token + token + 2 * i, p.m) * p.k - first_token * p.k) * 2 + place * 16);
    }
    const u8* a = p.a + (first_token * p.k + begin * RUN) * 2;  // of the next run
    const u32 scale_row = thread % TEAM / SCALE_THREADS, scale_byte = thread % SCALE_THREADS * (BYTES / SCALE_THREADS);
    const u8* const scales = p.scales + clamped(first + scale_row, p.n) * runs * BYTES + scale_byte;
    constexpr int SCALE_WORDS = BYTES / SCALE_THREADS / 4;
    int shift = 5;  // of a group of INT4, a power of two
    while (1 << shift < p.group) ++shift;

    // Codes of 8 bits evict a from the L2 cache without a policy: N = K = 8192 took 23.7 us (FP8) and 26.6 us (MXFP8), not 21.6 and
    // 24.2, on an H200. With the policy MXFP4 took 21.9 us, not 20.5.
    constexpr bool EVICT_FIRST = !has_nibbles(W);
    const u64 policy = ptx::createpolicy_fractional_L2_evict_first();
    WeightRow<W> now[STRIPS][2];
    const auto load_codes = [&](int v) {
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) {
            const u8* const source = codes[row / 2][row % 2] + v * 64;
            Vector4& loaded = now[row / 2][row % 2].codes[v];
            if constexpr (EVICT_FIRST) loaded = ptx::ld_global_nc_L1_no_allocate_L2_128B_v4_u32(source, policy);
            else loaded = ptx::ld_global_nc_L1_no_allocate_L2_128B_v4_u32(source);
        }
    };
    const auto load_integers = [&](int run) {
        if constexpr (is_integer(W)) {
#pragma unroll
            for (int row = 0; row < 2 * STRIPS; ++row) {
                WeightRow<W>& loaded = now[row / 2][row % 2];
                loaded.zeros = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const i64 place = rows[row / 2][row % 2] * (p.k >> shift) + ((run * RUN + i * (RUN / 2) + t * (RUN / 8)) >> shift);
                    loaded.scales[i] = reinterpret_cast<const u32*>(p.scales)[place];
                    if constexpr (W == Weight::UINT4) loaded.zeros |= static_cast<u32>(p.zeros[place]) << 8 * i;
                }
            }
        }
    };
    // A thread brings half of its part of a at a time.
    Vector4 brought[PIECES];
    u32 brought_scales[SCALE_WORDS > 0 ? SCALE_WORDS : 1];
    const auto bring = [&](int half) {
#pragma unroll
        for (int i = half * PIECES / 2; i < (half + 1) * PIECES / 2; ++i) {
            brought[i] = ptx::ld_global_nc_v4_u32(a + a_rows[i / 2] + i % 2 * 16 * 16);
        }
    };
    const auto store = [&](u32 buffer, int half) {
#pragma unroll
        for (int i = half * PIECES / 2; i < (half + 1) * PIECES / 2; ++i) {
            Vector4* const to = stored_tokens + buffer * A_GROUPS * UNITS * WARP + i / 2 * 8 + i % 2 * 4 * WARP;
            arrange<W>(brought[i], to->words);
        }
    };
    const auto bring_scales = [&](int run) {
        const u8* const source = scales + run * BYTES;
        if constexpr (SCALE_WORDS == 4) {
            const Vector4 vector = ptx::ld_global_nc_v4_u32(source);
#pragma unroll
            for (int i = 0; i < 4; ++i) brought_scales[i] = vector.words[i];
        } else {
#pragma unroll
            for (int i = 0; i < SCALE_WORDS; ++i) brought_scales[i] = reinterpret_cast<const u32*>(source)[i];
        }
    };
    const auto store_scales = [&](u32 buffer) {
        u32* const words = reinterpret_cast<u32*>(shared.scales[team][buffer][scale_row] + scale_byte);
#pragma unroll
        for (int i = 0; i < SCALE_WORDS; ++i) words[i] = brought_scales[i];
    };
    float sums[STRIPS][A_GROUPS][4] = {};
    if (begin < end) {
        bring(0);
        if constexpr (EVICT_FIRST) bring(1);
        bring_scales(begin);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) load_codes(v);
        load_integers(begin);
        store(0, 0);
        if constexpr (!EVICT_FIRST) bring(1);
        store(0, 1);
        store_scales(0);
    }
#pragma unroll 1
    for (int run = begin; run < end; ++run) {
        const u32 buffer = static_cast<u32>(run - begin) % 2u;
        const bool more = run + 1 < end;
        ptx::bar_sync<TEAM>(team + 1);  // barrier 0 is that of __syncthreads
        if (more) bring_scales(run + 1);
        a += RUN * 2;
#pragma unroll
        for (int row = 0; row < 2 * STRIPS; ++row) codes[row / 2][row % 2] += VECTORS * 64;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v % (VECTORS / 2) == 0 && more) bring(v / (VECTORS / 2));
            Factors<W> factors[STRIPS][2];
#pragma unroll
            for (int row = 0; row < 2 * STRIPS; ++row) {
                const u8* const stored = shared.scales[team][buffer][own + 8 * row + g];
                decode_scales<T, W>(now[row / 2][row % 2], v, stored, t, factors[row / 2][row % 2]);
            }
            if (v == VECTORS - 1 && more) load_integers(run + 1);
#pragma unroll
            for (int unit = v * VECTOR_UNITS; unit < (v + 1) * VECTOR_UNITS; ++unit) {
                Vector4 right[A_GROUPS];
#pragma unroll
                for (int group = 0; group < A_GROUPS; ++group) right[group] = shared.tokens[team][buffer][group][unit][lane];
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) {
                    u32 top[4], bottom[4];
                    decode_weight<T, W>(now[strip][0], unit, factors[strip][0], top);
                    decode_weight<T, W>(now[strip][1], unit, factors[strip][1], bottom);
#pragma unroll
                    for (int group = 0; group < A_GROUPS; ++group) {
                        multiply_32_columns<T>(sums[strip][group], top, bottom, right[group].words);
                    }
                }
            }
            if (more) {
                load_codes(v);
                if ((v + 1) % (VECTORS / 2) == 0) store(1 - buffer, v / (VECTORS / 2));
            }
        }
        if (more) store_scales(1 - buffer);
    }
    __syncthreads();  // no thread reads a any more
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int group = 0; group < A_GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = GROUP_ROWS * group + 2 * t + i % 2;
                shared.sums[team][token][own + strip * STRIP_ROWS + g + i / 2 * 8] = sums[strip][group][i];
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
    const float divisor = W == Weight::NVFP4 ? p.divisor / E2m1In<T>::REST : p.divisor;
    const float alpha = factor_of_sums(p, divisor);  // loaded before the sums
    multiply_runs<T, W>(shared, p);
    if constexpr (CLUSTER > 1) ptx::barrier_cluster();
    else __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < A_ROWS * QUADS; item += WEIGHT_THREADS) {
        const int token = item / QUADS, row = (blockIdx.x % CLUSTER * QUADS + item % QUADS) * 4;
        float joined[4];
#pragma unroll
        for (int from = 0; from < CLUSTER * TEAMS; ++from) {
            const Vector4* const source = reinterpret_cast<const Vector4*>(&shared.sums[from % TEAMS][token][row]);
            Vector4 words;
            if constexpr (CLUSTER > 1) words = ptx::ld_shared_cluster(source, from / TEAMS);
            else words = *source;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = __uint_as_float(words.words[i]);
                joined[i] = from == 0 ? sum : joined[i] + sum;
            }
        }
        const i64 y = static_cast<i64>(blockIdx.x / CLUSTER) * A_ROWS + token, x = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS + row;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (y < p.m && x + i < p.n) store_output<T>(p, joined[i], y, x + i, alpha, divisor);
        }
    }
    if constexpr (CLUSTER > 1) ptx::barrier_cluster_relaxed();  // all blocks have read this block's sums
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
