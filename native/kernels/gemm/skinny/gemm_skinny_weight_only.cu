// gemm_skinny_weight_only: out = alpha * (a @ w.T) with few rows of a. Operands and alpha: weight_only.cuh.
//
//   K        a multiple of 256; any M; N and K to 2^20. Operands begin at a multiple of 16 bytes. Groups of INT4 are 32 columns
//            or a multiple that divides 256
//   Launch: `early`, 512 threads for 16 rows of a and 64 of b, grid (ceil(M/16), ceil(N/64), products of a batch),
//   sizeof(WeightOnlyShared) of dynamic shared memory
//   Numerics: tensor cores add 16 products at a time to a float32 accumulator, truncated as in tensor_core_model.cuh. Four teams of
//   warps take chunks of 256 columns in turn; the sums of the teams are added in their order, one float32 rounding each.
//
// The kernel is bound by reading b and decoding it. A warp of a team has 16 rows of b, whose codes come two chunks ahead and are
// decoded in registers. A team brings a to shared memory, one chunk ahead.
#include "gemm/e2m1_pairs.cuh"
#include "gemm/skinny/gemm_skinny.cuh"
#include "gemm/weight_only.cuh"

namespace narrowgauge {

using ptx::Vector4;

constexpr int DEPTH = 256, LANE_COLUMNS = 64, UNIT = 8;  // columns of a chunk, of a thread of it, and of 16 bytes of a
constexpr int UNITS = LANE_COLUMNS / UNIT;
constexpr int TEAMS = 4, TEAM_WARPS = 4, TEAM = TEAM_WARPS * WARP, WEIGHT_THREADS = TEAMS * TEAM;
constexpr int WEIGHT_ROWS = TEAM_WARPS * STRIP_ROWS, WEIGHT_STRIDE = WEIGHT_ROWS + 4;  // without bank conflicts when a warp writes
constexpr int PIECES = DEPTH * TOKENS / UNIT / TEAM;                                   // of 16 bytes of a, that a thread brings

__device__ constexpr int scales_of(Weight weight) { return LANE_COLUMNS / scale_columns(weight); }
__device__ constexpr int vectors_of(Weight weight) { return has_nibbles(weight) ? 2 : 4; }

// A thread's codes of a row in a chunk, and its scales: codes, or float32 numbers of INT4 and zero points.
template <Weight W>
struct WeightRow {
    Vector4 codes[vectors_of(W)];
    u32 scales[is_integer(W) ? 2 : 1];
    u32 zeros;
};

// A thread's factors of its columns in both halves of a register each, and what is subtracted from its codes first.
template <Weight W>
struct Factors {
    u32 scales[scales_of(W)];
    u32 shifts[scales_of(W)];
};

struct alignas(128) WeightOnlyShared {
    Vector4 tokens[TEAMS][2][GROUPS][UNITS][WARP];  // chunks of a, double-buffered
    float team_sums[TEAMS][GROUP_ROWS][WEIGHT_STRIDE];
};
static_assert(sizeof(WeightOnlyShared) == 74240, "native/gemm/weight_only.py asks for this size");

// Bits of T: a number in both halves of a register.
template <class T>
__device__ __forceinline__ u32 both(float x) {
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
__device__ __forceinline__ void decode_scales(const WeightRow<W>& row, Factors<W>& factors) {
    if constexpr (W == Weight::NVFP4) {
        constexpr float RESTORE = E2m1In<T>::RESTORE / E2m1In<T>::REST;
        u32 pairs[2];
        ptx::cvt_rn_f16x2_e4m3x2(row.scales[0], pairs[0], pairs[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float low, high;
            ptx::cvt_f32_f16(pairs[i], low, high);
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
        for (int i = 0; i < 2; ++i) factors.scales[i] = both<T>(e8m0_to_float(static_cast<u8>(row.scales[0] >> 8 * i)));
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
    const int part = unit * scales_of(W) / UNITS;
    if constexpr (has_nibbles(W)) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 word = row.codes[unit / 4].words[unit % 4];
            u32 pair;
            if constexpr (is_integer(W)) pair = integer_pair<T, W>(word, j, factors.shifts[part]);
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

template <class T, Weight W>
__device__ __forceinline__ void multiply_weight_only(const WeightOnlyParameters& batch) {
    constexpr int CODE_BYTES = vectors_of(W) * 16, SCALES = scales_of(W);  // of a thread's columns of a row
    const WeightOnlyParameters p = product_of<T>(batch, blockIdx.z);
#ifdef __CUDA_ARCH__
    alignas(16) extern __shared__ u8 dynamic_shared[];
    WeightOnlyShared& shared = *reinterpret_cast<WeightOnlyShared*>(dynamic_shared);
#else
    __shared__ WeightOnlyShared shared;
#endif
    const int thread = threadIdx.x, lane = thread % WARP, team = thread / TEAM, g = lane / 4, t = lane % 4;
    const int strip = thread % TEAM / WARP * STRIP_ROWS;
    const i64 first_token = static_cast<i64>(blockIdx.x) * TOKENS, first = static_cast<i64>(blockIdx.y) * WEIGHT_ROWS;
    const int chunks = static_cast<int>(p.k / DEPTH);
    const u8 *codes[2], *scales[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const i64 place = clamped(first + strip + 8 * row + g, p.n) * chunks * 4 + t;  // of the thread's columns
        codes[row] = p.codes + place * CODE_BYTES;
        scales[row] = p.scales + place * SCALES;
    }
    // A thread brings neighbouring pieces of one row of a.
    const int token = thread % TEAM / (TEAM / TOKENS), piece = thread % (TEAM / TOKENS) * PIECES;
    const u8* const a = p.a + (clamped(first_token + token, p.m) * p.k + piece * UNIT) * 2;

    const auto load_b = [&](int chunk, WeightRow<W>(&rows)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int v = 0; v < vectors_of(W); ++v) {
                rows[row].codes[v] = ptx::ld_global_nc_v4_u32(codes[row] + chunk * 4 * CODE_BYTES + 16 * v);
            }
            if constexpr (is_integer(W)) {
                const i64 of_row = clamped(first + strip + 8 * row + g, p.n) * (p.k / p.group);
                rows[row].zeros = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const i64 place = of_row + (chunk * DEPTH + t * LANE_COLUMNS + i * (LANE_COLUMNS / 2)) / p.group;
                    rows[row].scales[i] = reinterpret_cast<const u32*>(p.scales)[place];
                    if constexpr (W == Weight::UINT4) rows[row].zeros |= static_cast<u32>(p.zeros[place]) << 8 * i;
                }
            } else {
                const u8* scale = scales[row] + chunk * 4 * SCALES;
                if constexpr (W == Weight::NVFP4) rows[row].scales[0] = *reinterpret_cast<const u32*>(scale);
                else if constexpr (W != Weight::FP8) rows[row].scales[0] = ptx::ld_global_nc_u16(scale);
            }
        }
    };
    const auto load_a = [&](int chunk, Vector4(&pieces)[PIECES]) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) pieces[i] = ptx::ld_global_nc_v4_u32(a + chunk * DEPTH * 2 + i * 16);
    };
    const auto store_a = [&](const Vector4(&pieces)[PIECES], int buffer) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int unit = (piece + i) % UNITS, place = token % GROUP_ROWS * 4 + piece / UNITS;
            arrange<W>(pieces[i], shared.tokens[team][buffer][token / GROUP_ROWS][unit][place].words);
        }
    };
    float sums[GROUPS][4] = {};
    WeightRow<W> b[2][2];
    Vector4 next[PIECES];
    if (team < chunks) {
        load_a(team, next);
        load_b(team, b[0]);
        if (team + TEAMS < chunks) load_b(team + TEAMS, b[1]);
        store_a(next, 0);
        if (team + TEAMS < chunks) load_a(team + TEAMS, next);
    }
#pragma unroll 1
    for (int chunk = team; chunk < chunks; chunk += 2 * TEAMS) {
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
            const int current = chunk + turn * TEAMS;
            if (current >= chunks) break;
            ptx::bar_sync<TEAM>(team + 1);  // barrier 0 is that of __syncthreads
            if (current + TEAMS < chunks) store_a(next, 1 - turn);
            if (current + 2 * TEAMS < chunks) load_a(current + 2 * TEAMS, next);
            Factors<W> factors[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) decode_scales<T, W>(b[turn][row], factors[row]);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                u32 top[4], bottom[4];
                decode_weight<T, W>(b[turn][0], unit, factors[0], top);
                decode_weight<T, W>(b[turn][1], unit, factors[1], bottom);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const Vector4 right = shared.tokens[team][turn][group][unit][lane];
                    multiply_32_columns<T>(sums[group], top, bottom, right.words);
                }
            }
            if (current + 2 * TEAMS < chunks) load_b(current + 2 * TEAMS, b[turn]);
        }
    }
    const float divisor = W == Weight::NVFP4 ? p.divisor / E2m1In<T>::REST : p.divisor;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i) shared.team_sums[team][2 * t + i % 2][strip + g + i / 2 * 8] = sums[group][i];
        __syncthreads();
        const int row = thread % WEIGHT_ROWS, y_of_group = thread / WEIGHT_ROWS;
        const i64 y = first_token + GROUP_ROWS * group + y_of_group, x = first + row;
        if (y >= p.m || x >= p.n) continue;
        float sum = shared.team_sums[0][y_of_group][row];
#pragma unroll
        for (int other = 1; other < TEAMS; ++other) sum += shared.team_sums[other][y_of_group][row];
        store_output<T>(p, sum, y, x, divisor);
    }
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

extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, 1)
    gemm_skinny_weight_only_bf16(const __grid_constant__ WeightOnlyParameters p) {
    multiply_weight_only<bf16>(p);
}

extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, 1)
    gemm_skinny_weight_only_fp16(const __grid_constant__ WeightOnlyParameters p) {
    multiply_weight_only<fp16>(p);
}

}  // namespace narrowgauge
