// gemm_skinny_weight_only: out = alpha * (a @ w.T) with few rows of a. Operands and alpha: weight_only.cuh.
//
//   K        a multiple of 256; any M; N and K to 2^20. Operands begin at a multiple of 16 bytes. Groups of INT4 are 32 columns
//            or a multiple that divides 256
//   The macro TEAM_WARPS, 4 or 8: a block of threads has 16 rows of a and 16 * TEAM_WARPS of b
//   The macro SLICES, 1 or 2, on a GPU with clusters: blocks of a cluster, each with a slice of K
//   Launch: `early`, 512 threads, grid (SLICES * ceil(M/16), ceil(N / (16 * TEAM_WARPS)), products of a batch),
//   sizeof(WeightOnlyShared) of dynamic shared memory
//   Numerics: tensor cores add 16 products at a time to a float32 accumulator, truncated as in tensor_core_model.cuh. The
//   16 / TEAM_WARPS teams of warps of each block take equal parts of K; the sums of the teams are added in order of K, one float32
//   rounding each.
//
// The kernel is bound by reading b and decoding it. A warp of a team has 16 rows of b, whose codes come two runs of 256 columns
// ahead and are decoded in registers. A team brings a and the scales of b to shared memory, one run ahead. All blocks together read a
// as often as there are blocks along N, so that many rows of b in a block, and slices of K instead of more blocks, save reads: with
// 64 rows of b by N = 8192 the reads of 16 rows of a are as many as those of b.
#include "gemm/cluster.cuh"
#include "gemm/e2m1_pairs.cuh"
#include "gemm/skinny/gemm_skinny.cuh"
#include "gemm/weight_only.cuh"

#ifndef TEAM_WARPS
#define TEAM_WARPS 4
#endif

namespace narrowgauge {

using ptx::Vector4;

constexpr int RUN = 256, UNIT = 8;      // columns of a run, and of 16 bytes of a
constexpr int UNITS = RUN / 4 / UNIT;   // of a thread in a run
constexpr int WEIGHT_WARPS = 16, TEAMS = WEIGHT_WARPS / TEAM_WARPS, TEAM = TEAM_WARPS * WARP, WEIGHT_THREADS = TEAMS * TEAM;
constexpr int WEIGHT_ROWS = TEAM_WARPS * STRIP_ROWS, SCALE_BYTES = 16;  // rows of b of a block; most bytes of scales of a run
constexpr int WEIGHT_STRIDE = WEIGHT_ROWS + 4;                         // without bank conflicts when a warp writes
constexpr int PIECES = RUN * TOKENS / UNIT / TEAM, PIECE_THREADS = TEAM / TOKENS;  // of 16 bytes of a: of a thread; threads of a row
constexpr int QUADS = WEIGHT_ROWS / 4 / CLUSTER;  // four outputs of a row of a each, of a block

// Vectors of 16 bytes of a thread's codes of a row in a run. Neighbouring threads have neighbouring vectors.
__device__ constexpr int vectors_of(Weight weight) { return has_nibbles(weight) ? 2 : 4; }
__device__ constexpr int vector_units(Weight weight) { return UNITS / vectors_of(weight); }
// Factors of a thread's columns of a row.
__device__ constexpr int scales_of(Weight weight) { return weight == Weight::NVFP4 || weight == Weight::MXFP8 ? 4 : 2; }
// Bytes of the scales of a row in a run, as shared memory has them; those of INT4 do not pass through it.
__device__ constexpr int scale_bytes(Weight weight) { return is_integer(weight) || weight == Weight::FP8 ? 0 : RUN / scale_columns(weight); }

// A thread's float32 scales and zero points of INT4 of a row in a run.
struct IntegerRow {
    u32 scales[2];
    u32 zeros;
};

// A thread's factors of its columns in both halves of a register each, and what is subtracted from its codes first.
template <Weight W>
struct Factors {
    u32 scales[scales_of(W)];
    u32 shifts[scales_of(W)];
};

// Asynchronous copies of a warp: the codes of its 16 rows of b in some runs, each read by the thread that copied it, and their scales.
constexpr int RING = 16;  // vectors of 16 bytes of a thread
struct alignas(128) WeightRing {
    Vector4 codes[RING][WARP];
    u8 scales[RING / 4][STRIP_ROWS][SCALE_BYTES];
};
// Runs in a ring: one is multiplied while the others are copied.
__device__ constexpr int stages_of(Weight weight) { return RING / (2 * vectors_of(weight)); }

struct alignas(128) WeightOnlyShared {
    WeightRing rings[WEIGHT_WARPS];
    Vector4 tokens[TEAMS][2][GROUPS][UNITS][WARP];  // runs of a, double-buffered
    float sums[TEAMS][TOKENS][WEIGHT_STRIDE];
};
static_assert(sizeof(WeightOnlyShared) == (TEAM_WARPS == 4 ? 230400 : 197120), "native/gemm/weight_only.py asks for this size");

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

// `stored`: scales of the row in shared memory. `t`: the thread among the four of a row.
template <class T, Weight W>
__device__ __forceinline__ void decode_scales(const IntegerRow& row, const u8* stored, int t, Factors<W>& factors) {
    if constexpr (W == Weight::NVFP4) {
        constexpr float RESTORE = E2m1In<T>::RESTORE / E2m1In<T>::REST;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float low, high;
            ptx::cvt_f32_f16(ptx::cvt_rn_f16x2_e4m3x2(reinterpret_cast<const u16*>(stored)[4 * i + t]), low, high);
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
            const int column = (4 * i + t) * vector_units(W) * UNIT;
            factors.scales[i] = both<T>(e8m0_to_float(stored[column / scale_columns(W)]));
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

// Eight columns: columns j and j + 4 of 4 bits, neighbours of other codes. As `arrange` has them for a.
template <class T, Weight W>
__device__ __forceinline__ void decode_weight(const Vector4 (&codes)[vectors_of(W)], int unit, const Factors<W>& factors, u32 (&pairs)[4]) {
    const int part = unit * scales_of(W) / UNITS;
    if constexpr (has_nibbles(W)) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 word = codes[unit / 4].words[unit % 4];
            u32 pair;
            if constexpr (is_integer(W)) pair = integer_pair<T, W>(word, j, factors.shifts[part]);
            else pair = small_e2m1<T>(word, j);
            if constexpr (W == Weight::MXFP4) pair = times<T>(pair, both<T>(E2m1In<T>::RESTORE));
            pairs[j] = times<T>(pair, factors.scales[part]);
        }
    } else {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            ptx::cvt_rn_f16x2_e4m3x2(codes[unit / 2].words[unit % 2 * 2 + word], pairs[2 * word], pairs[2 * word + 1]);
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

// Sums of the thread's team over its part of K, of 16 rows of b for each warp.
template <class T, Weight W>
__device__ __forceinline__ void multiply_runs(WeightOnlyShared& shared, const WeightOnlyParameters& p, float (&sums)[GROUPS][4]) {
    constexpr int VECTORS = vectors_of(W), BYTES = scale_bytes(W), STAGES = stages_of(W);
    const int thread = threadIdx.x, lane = thread % WARP, team = thread / TEAM, g = lane / 4, t = lane % 4;
    const i64 first = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS, first_token = static_cast<i64>(blockIdx.x / CLUSTER) * TOKENS;
    const int strip = thread % TEAM / WARP * STRIP_ROWS, part = blockIdx.x % CLUSTER * TEAMS + team;
    const i64 runs = p.k / RUN;
    const int begin = static_cast<int>(runs * part / (CLUSTER * TEAMS)), end = static_cast<int>(runs * (part + 1) / (CLUSTER * TEAMS));
    i64 rows[2];
    const u8* codes[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        rows[row] = clamped(first + strip + 8 * row + g, p.n);
        codes[row] = p.codes + (rows[row] * runs * VECTORS * 4 + t) * 16;
    }
    const int token = thread % TEAM / PIECE_THREADS, piece = thread % PIECE_THREADS;
    const u8* const a = p.a + (clamped(first_token + token, p.m) * p.k + piece * UNIT) * 2;
    WeightRing& ring = shared.rings[thread / WARP];
    constexpr int COPY_BYTES = BYTES == 16 ? 16 : 4, COPIERS = BYTES == 0 ? 1 : BYTES / COPY_BYTES;  // of scales: threads of a row
    const int scale_row = lane / COPIERS, scale_byte = lane % COPIERS * COPY_BYTES;
    const u8* const scales = p.scales + clamped(first + strip + scale_row, p.n) * runs * BYTES + scale_byte;
    int shift = 5;  // of a group of INT4, a power of two
    while (1 << shift < p.group) ++shift;

    // Every call is a group of copies, also beyond the last run.
    const auto copy_b = [&](int run) {
        const int stage = (run - begin) % STAGES;
        if (run < end) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    Vector4& target = ring.codes[(stage * 2 + row) * VECTORS + v][lane];
                    ptx::cp_async_cg_shared_global_16(&target, codes[row] + (run * VECTORS + v) * 64, ptx::createpolicy_fractional_L2_evict_first());
                }
            }
            if constexpr (BYTES > 0) {
                u8* const target = &ring.scales[stage][scale_row % STRIP_ROWS][scale_byte];
                if constexpr (BYTES == 8) ptx::cp_async_ca_shared_global_4(target, scales + run * BYTES);
                else if (scale_row < STRIP_ROWS) ptx::cp_async_cg_shared_global_16(target, scales + run * BYTES, ptx::createpolicy_fractional_L2_evict_first());
            }
        }
        ptx::cp_async_commit_group();
    };
    const auto load_integers = [&](int run, IntegerRow(&loaded)[2]) {
        if constexpr (is_integer(W)) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                loaded[row].zeros = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const i64 place = rows[row] * (p.k >> shift) + ((run * RUN + i * (RUN / 2) + t * (RUN / 8)) >> shift);
                    loaded[row].scales[i] = reinterpret_cast<const u32*>(p.scales)[place];
                    if constexpr (W == Weight::UINT4) loaded[row].zeros |= static_cast<u32>(p.zeros[place]) << 8 * i;
                }
            }
        }
    };
    const auto bring = [&](int run, Vector4(&brought)[PIECES]) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            brought[i] = ptx::ld_global_nc_v4_u32(a + (run * RUN + i * PIECE_THREADS * UNIT) * 2);
        }
    };
    const auto store = [&](const Vector4(&brought)[PIECES], int buffer) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            constexpr int VECTOR_UNITS = vector_units(W);
            const int place = piece + i * PIECE_THREADS;  // vector, thread and unit of the vector
            const int unit = place / (4 * VECTOR_UNITS) * VECTOR_UNITS + place % VECTOR_UNITS;
            const int to = token % GROUP_ROWS * 4 + place / VECTOR_UNITS % 4;
            arrange<W>(brought[i], shared.tokens[team][buffer][token / GROUP_ROWS][unit][to].words);
        }
    };
    Vector4 next[PIECES];
    IntegerRow integers[2];
    for (int run = begin; run < begin + STAGES - 1; ++run) copy_b(run);
    if (begin < end) {
        bring(begin, next);
        load_integers(begin, integers);
        store(next, 0);
        if (begin + 1 < end) bring(begin + 1, next);
    }
#pragma unroll 1
    for (int run = begin; run < end; ++run) {
        const int buffer = (run - begin) % 2, stage = (run - begin) % STAGES;
        ptx::cp_async_wait_group<STAGES - 2>();
        ptx::bar_sync<TEAM>(team + 1);  // barrier 0 is that of __syncthreads
        copy_b(run + STAGES - 1);
        if (run + 1 < end) store(next, 1 - buffer);
        if (run + 2 < end) bring(run + 2, next);
        Factors<W> factors[2];
        Vector4 row_codes[2][VECTORS];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            decode_scales<T, W>(integers[row], ring.scales[stage][8 * row + g], t, factors[row]);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) row_codes[row][v] = ring.codes[(stage * 2 + row) * VECTORS + v][lane];
        }
        if (run + 1 < end) load_integers(run + 1, integers);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            u32 top[4], bottom[4];
            decode_weight<T, W>(row_codes[0], unit, factors[0], top);
            decode_weight<T, W>(row_codes[1], unit, factors[1], bottom);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const Vector4 right = shared.tokens[team][buffer][group][unit][lane];
                multiply_32_columns<T>(sums[group], top, bottom, right.words);
            }
        }
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            shared.sums[team][GROUP_ROWS * group + 2 * t + i % 2][strip + g + i / 2 * 8] = sums[group][i];
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
    float sums[GROUPS][4] = {};
    multiply_runs<T, W>(shared, p, sums);
    if constexpr (CLUSTER > 1) ptx::barrier_cluster();
    else __syncthreads();
    const float divisor = W == Weight::NVFP4 ? p.divisor / E2m1In<T>::REST : p.divisor;
#pragma unroll 1
    for (int item = threadIdx.x; item < TOKENS * QUADS; item += WEIGHT_THREADS) {
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
        const i64 y = static_cast<i64>(blockIdx.x / CLUSTER) * TOKENS + token, x = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS + row;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (y < p.m && x + i < p.n) store_output<T>(p, joined[i], y, x + i, divisor);
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
