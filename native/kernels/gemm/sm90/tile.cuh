// tile.cuh: operand tiles in swizzled shared memory, and the product of bfloat16 tiles by a warpgroup.
//
// A tile is 128 rows of 128 bytes: 64 bfloat16 numbers or 128 codes. It has the 128-byte swizzle of wgmma: the 16-byte chunk c
// of row r lies at place c ^ (r % 8) of the row.
#pragma once

#include "common/sections.cuh"
#include "gemm/ptx.cuh"

namespace narrowgauge {

constexpr int TILE_ROWS = 128, ROW_BYTES = 128, TILE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int TILE_COLUMNS = ROW_BYTES / 2;  // of bfloat16
constexpr int WARPGROUP = 4 * WARP;  // threads

// Byte of a tile at which a 16-byte chunk of a row begins: eight bfloat16 numbers or 16 codes.
__device__ __forceinline__ int swizzled_offset(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

// CUtensorMap of codes: boxes of at most TILE_ROWS rows by ROW_BYTES bytes, with the 128-byte swizzle. On a CPU: the address of
// the codes, their rows, the bytes of a row, the rows of a box; and no alignment, because Python's bytes have none.
#ifdef __CUDA_ARCH__
constexpr int TENSOR_MAP_ALIGNMENT = 64;
#else
constexpr int TENSOR_MAP_ALIGNMENT = 8;
#endif
struct alignas(TENSOR_MAP_ALIGNMENT) TensorMap {
    u64 words[16];
};

// Iterator over the rows of tiles of all sections. Every section begins with a new row of tiles.
struct TiledSection {
    Sections sections;
    int number;
    Section section;
    i64 before;  // rows of tiles of the sections before this one

    __device__ __forceinline__ TiledSection(const Sections& all)
        : sections(all), number(0), section{0, all.rows}, before(0) {
        if (sections.sizes != nullptr) section = section_after(sections, 0, 0);
    }

    __device__ __forceinline__ i64 tiles() const { return (section.count + TILE_ROWS - 1) / TILE_ROWS; }

    // Moves to the next section. False at the end.
    __device__ __forceinline__ bool next() {
        before += tiles();
        if (++number >= sections.count) return false;
        section = section_after(sections, number, section.start + section.count);
        return true;
    }
};

// The same for a batch, whose products have equally many rows.
struct TiledProduct : TiledSection {
    using TiledSection::TiledSection;

    __device__ __forceinline__ bool next() {
        before += tiles();
        section.start += section.count;
        return ++number < sections.count;
    }
};

// A warpgroup accumulates 64 rows by 256 columns, 128 sums in each thread. Sum 4j + 2i + e of thread t is that of row
// t/32*16 + t%32/4 + 8i and column 8j + 2(t%4) + e.
constexpr int WGMMA_M = 64, WGMMA_N = 256, WGMMA_K = 16, SUMS = WGMMA_M * WGMMA_N / WARPGROUP;
constexpr int STEP_PAIRS = WGMMA_K / 8;         // pairs of numbers of a thread in a row, for a wgmma
constexpr int WGMMAS = TILE_COLUMNS / WGMMA_K;  // of a step of 64 columns

// First operand of the wgmma of a step: of each wgmma the pairs of rows g and g + 8 of a warp, then the second pairs.
using Fragments = u32[WGMMAS][2 * STEP_PAIRS];

#ifdef HAS_WGMMA
// Matrix descriptor of a tile, aligned to 1024 bytes: K-major, 128-byte swizzle, 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ u64 matrix_descriptor(const u8* tile) {
    const u64 address = static_cast<u64>(__cvta_generic_to_shared(tile)) & 0x3FFFFu;
    return address >> 4 | u64{1} << 16 | u64{1024 >> 4} << 32 | u64{1} << 62;
}
#endif

// A consumer warp has read a stage.
__device__ __forceinline__ void release(ptx::Mbarrier& empty, int lane) {
    ptx::bar_warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(empty);
}

// Waits for all wgmma of the warpgroup but the last PENDING groups. The compiler reads the sums after this point only.
template <int PENDING = 0, class T, int COUNT>
__device__ __forceinline__ void wait_for_sums([[maybe_unused]] T (&d)[COUNT]) {
#ifdef HAS_WGMMA
    ptx::wgmma_wait_group<PENDING>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if constexpr (static_cast<T>(0.5f) != T{}) asm volatile("" : "+f"(d[i])::"memory");
        else asm volatile("" : "+r"(d[i])::"memory");
    }
#endif
}

#ifndef __CUDA_ARCH__
// A row of a tile of T, bf16 or fp16.
template <class T>
struct TileRow {
    Decomposed values[TILE_COLUMNS];
    bool zero = true, finite = true;

    TileRow() = default;
    TileRow(const u8* tile, int row) {
        for (int column = 0; column < TILE_COLUMNS; ++column) {
            u16 bits;
            __builtin_memcpy(&bits, tile + swizzled_offset(row, column / 8) + column % 8 * 2, 2);
            set(column, bits);
        }
    }

    // Sets each column once.
    void set(int column, u16 bits) {
        const Decomposed& value = values[column] = Decomposed(to_float(T{bits}));
        zero &= value.significand == 0;
        finite &= value.finite();
    }
};

// The sums of a thread: of rows `left` of a, and COLUMNS rows of tiles of b.
template <int COLUMNS, class T>
inline void multiply_rows(float (&d)[COLUMNS / 2], const TileRow<T> (&left)[2], const u8* b, int lane) {
    static_assert(WGMMA_K == TERMS_PER_STEP, "a wgmma is a step of the model");
    for (int j = 0; j < COLUMNS / 8; ++j) {
        for (int e = 0; e < 2; ++e) {
            const TileRow<T> right(b, 8 * j + lane % 4 * 2 + e);
            for (int i = 0; i < 2; ++i) {
                // Rows beyond the end of an operand are zeros and are skipped.
                if ((left[i].zero && right.finite) || (right.zero && left[i].finite)) continue;
                float& sum = d[4 * j + 2 * i + e];
                for (int k = 0; k < TILE_COLUMNS; k += WGMMA_K) sum = sum_bf16(sum, left[i].values + k, right.values + k);
            }
        }
    }
}
#endif

// d += a * b^T: 64 rows of a tile and 256 rows of two consecutive tiles, over all 64 columns in order of K. Asynchronous on a
// GPU: one wgmma group.
__device__ __forceinline__ void multiply_tiles(float (&d)[SUMS], const u8* a, const u8* b) {
#ifdef HAS_WGMMA
    const u64 left = matrix_descriptor(a), right = matrix_descriptor(b);
#pragma unroll
    for (int step = 0; step < TILE_COLUMNS / WGMMA_K; ++step) {
        ptx::wgmma_m64n256k16_f32_bf16_bf16(d, left + step * (WGMMA_K * 2 >> 4), right + step * (WGMMA_K * 2 >> 4));
    }
    ptx::wgmma_commit_group();
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    const int thread = static_cast<int>(threadIdx.x) % WARPGROUP, lane = thread % WARP, top = thread / WARP * 16 + lane / 4;
    const TileRow<bf16> left[2] = {{a, top}, {a, top + 8}};
    multiply_rows<WGMMA_N>(d, left, b, lane);
#endif
}

// d += a * b^T, or d = a * b^T unless `add`: 64 rows of a tile and 128 rows of a tile, over 64 columns of T in order. Asynchronous
// on a GPU, in the group that is next committed.
template <class T>
__device__ __forceinline__ void multiply_tile(float (&d)[TILE_ROWS / 2], const u8* a, const u8* b, bool add) {
#ifdef HAS_WGMMA
    const u64 left = matrix_descriptor(a), right = matrix_descriptor(b);
#pragma unroll
    for (int step = 0; step < TILE_COLUMNS / WGMMA_K; ++step) {
        ptx::wgmma_m64n128k16_f32<T>(d, left + step * (WGMMA_K * 2 >> 4), right + step * (WGMMA_K * 2 >> 4), add || step > 0);
    }
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    const int thread = static_cast<int>(threadIdx.x) % WARPGROUP, lane = thread % WARP, top = thread / WARP * 16 + lane / 4;
    const TileRow<T> left[2] = {{a, top}, {a, top + 8}};
    for (float& sum : d) sum = add ? sum : 0.0f;
    multiply_rows<TILE_ROWS>(d, left, b, lane);
#endif
}

// d += a * b^T over 64 columns: 64 rows of a, in registers, and ROWS rows of a tile, `offset` bytes behind the tile `first`.
// Asynchronous on a GPU: one wgmma group.
template <class T, int ROWS>
__device__ __forceinline__ void multiply_fragments(float (&d)[ROWS / 2], const Fragments& a, const u8* first, u32 offset) {
#ifdef HAS_WGMMA
    const u64 right = matrix_descriptor(first) + (offset >> 4);
#pragma unroll
    for (int i = 0; i < WGMMAS; ++i) {
        if constexpr (ROWS == 32) {
            ptx::wgmma_m64n32k16_f32<T>(d, a[i], right + i * (WGMMA_K * 2 >> 4));
        } else if constexpr (ROWS == 64) {
            ptx::wgmma_m64n64k16_f32<T>(d, a[i], right + i * (WGMMA_K * 2 >> 4));
        } else {
            ptx::wgmma_m64n128k16_f32<T>(d, a[i], right + i * (WGMMA_K * 2 >> 4));
        }
    }
    ptx::wgmma_commit_group();
#elif defined(__CUDA_ARCH__)
    __trap();
#else
    struct Words {
        Fragments of;
    } own;
    __builtin_memcpy(own.of, a, sizeof a);
    const int lane = threadIdx.x % WARP;
    TileRow<T> left[2];
    for (int distance = 0; distance < 4; ++distance) {
        const Words words = distance == 0 ? own : simt::exchange(0xFFFFFFFFu, own, static_cast<unsigned>(distance));
        for (int i = 0; i < WGMMAS; ++i) {
            for (int j = 0; j < 2 * STEP_PAIRS; ++j) {
                const int column = i * WGMMA_K + j / 2 * 8 + 2 * (lane % 4 ^ distance);
                left[j % 2].set(column, static_cast<u16>(words.of[i][j]));
                left[j % 2].set(column + 1, static_cast<u16>(words.of[i][j] >> 16));
            }
        }
    }
    multiply_rows<ROWS>(d, left, first + offset, lane);
#endif
}

// Marks fragments as read until here: the compiler does not write other numbers to their registers before.
__device__ __forceinline__ void keep([[maybe_unused]] Fragments& read) {
#ifdef HAS_WGMMA
#pragma unroll
    for (int i = 0; i < WGMMAS; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * STEP_PAIRS; ++j) asm volatile("" : "+r"(read[i][j]));
    }
#endif
}

}  // namespace narrowgauge
