// shared_tile.cuh: tiles of 64 rows and 128 columns of bfloat16 in shared memory, and the blocks of 16 of their rows and
// columns.
//
// A row has 16 chunks of 16 bytes, permuted against bank conflicts: the eight chunks that a quarter-warp accesses
// at once lie in different banks if it copies neighbouring chunks, reads every second chunk of a row (blocks of rows), or reads
// a chunk of the rows 0, 1, 16, 17, 32, 33, 48 and 49, or 0, 2, 16, 18 and so on, from an even row on (blocks of columns).
#pragma once

#include "common/packed_bf16.cuh"

namespace narrowgauge {

constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128;
constexpr int ROW_BLOCKS = TILE_COLUMNS / 16, COLUMN_BLOCKS = TILE_ROWS / 16;
constexpr u32 CHUNKS = TILE_COLUMNS / 8;  // chunks of a row
constexpr int ROW_WORDS = TILE_COLUMNS / 2;
constexpr u32 MAX_TILES = 8;  // most tiles of a thread block

// Double buffer: the threads work on a tile during the copy of the next tile. An index in one tile, `^ TILE_WORDS`, is the
// index of the same element in the other.
constexpr u32 TILE_WORDS = TILE_ROWS * ROW_WORDS;
struct Tiles {
    alignas(128) u32 words[2 * TILE_WORDS];
};

// Index of the first word of a chunk, in the first tile.
__device__ __forceinline__ u32 chunk_index(u32 row, u32 chunk) {
    const u32 permuted = chunk ^ chunk >> 3 ^ ((row ^ row >> 1) & 1) ^ (row >> 3 & 6);
    return row * ROW_WORDS + permuted * 4;
}

// First of the two rows, eight apart, of which a thread copies two chunks, eight apart. Eight consecutive threads copy
// half a row. Neither distance changes the permutation.
__device__ __forceinline__ u32 copied_row() { return threadIdx.x / 64 * 16 + threadIdx.x / 8 % 8; }

// Assignment of the tiles of a contiguous matrix to thread blocks. A thread block has several tiles, vertically adjacent:
// `deep` tiles in the first `full_blocks` * `deep` strips of 64 rows, `tail_deep` in the last strips; no multiprocessor is idle
// at the end. Grid: the tiles of a strip, times the thread blocks of a column of tiles.
struct TileSchedule {
    int deep;
    int full_blocks;
    int tail_deep;
};

// Iterates over the tiles of a thread block.
struct TileIterator {
    const u8* source;  // first chunk of the tile that the thread copies
    u32 row_bytes;
    u32 target;        // index of the chunk in shared memory
    u32 tile_column;   // column of the tiles, counted in tiles
    u32 first_strip, strip, end;  // strips of 64 rows: first, current, one past the last

    __device__ __forceinline__ TileIterator(const bf16* x, i64 rows, i64 columns, const TileSchedule& schedule)
        : row_bytes(static_cast<u32>(columns) * 2), target(chunk_index(copied_row(), threadIdx.x % 8)) {
        const u32 strips = static_cast<u32>(rows / TILE_ROWS), y = blockIdx.y;
        const u32 deep = static_cast<u32>(schedule.deep), full_blocks = static_cast<u32>(schedule.full_blocks);
        const u32 tail_deep = static_cast<u32>(schedule.tail_deep);
        tile_column = blockIdx.x;
        first_strip = y < full_blocks ? y * deep : full_blocks * deep + (y - full_blocks) * tail_deep;
        const u32 most = y < full_blocks ? deep : tail_deep;
        strip = first_strip;
        end = strips - first_strip < most ? strips : first_strip + most;
        const bf16* tile = x + strip * TILE_ROWS * columns + tile_column * TILE_COLUMNS;
        source = reinterpret_cast<const u8*>(tile + copied_row() * columns + threadIdx.x % 8 * 8);
    }

    __device__ __forceinline__ bool valid() const { return strip < end; }

    __device__ __forceinline__ void advance() {
        strip += 1;
        source += TILE_ROWS * row_bytes;
        target ^= TILE_WORDS;
#ifdef __CUDA_ARCH__
        asm volatile("" : "+l"(source));  // the compiler must not fold later offsets into the previous tile's address
#endif
    }

    // All threads start the asynchronous copy of the tile; wait_for_tile waits for it.
    template <int THREADS>
    __device__ __forceinline__ void copy_async(Tiles& tiles) const {
        static_assert(THREADS * 4 == TILE_ROWS * CHUNKS, "four chunks for each thread");
        // chunk_index(row + 8, chunk) is target + 8 * ROW_WORDS, chunk_index(row, chunk + 8) is (target ^ 4) + 32. A tile is
        // aligned to 128 bytes.
#ifdef __CUDA_ARCH__
        const u32 address = static_cast<u32>(__cvta_generic_to_shared(tiles.words)) + target * 4;
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u8* from = source + i / 2 * 8 * row_bytes + i % 2 * 128;
#ifdef __CUDA_ARCH__
            ptx::cp_async_cg_shared_global_16((address ^ i % 2 * 16) + i % 2 * 128 + i / 2 * 8 * ROW_WORDS * 4, from);
#else
            u32* to = &tiles.words[(target ^ i % 2 * 4) + i % 2 * 32 + i / 2 * 8 * ROW_WORDS];
            for (int j = 0; j < 4; ++j) to[j] = reinterpret_cast<const u32*>(from)[j];
#endif
        }
    }
};

// Waits for the copies of all threads, and until all threads have finished the previous tile.
__device__ __forceinline__ void wait_for_tile() {
#ifdef __CUDA_ARCH__
    ptx::cp_async_wait_all();
#endif
    __syncthreads();
}

// The block of a row whose index is `first`, in an even row, or (`next` = 1) the block below it in the next row.
__device__ __forceinline__ PackedBf16 block_of_row(const Tiles& tiles, u32 first, u32 next) {
    const u32 index = first ^ next * 4;
    const u32 *a = &tiles.words[index + next * ROW_WORDS], *b = &tiles.words[(index ^ 4) + next * ROW_WORDS];
#ifdef __CUDA_ARCH__
    const uint4 low = *reinterpret_cast<const uint4*>(a), high = *reinterpret_cast<const uint4*>(b);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
#else
    return {{a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]}};
#endif
}

// Lane 4c + s of a warp has rows 16s to 16s + 15 of column c of a chunk.
#ifdef __CUDA_ARCH__
// Index of a lane's row for a warp that reads columns from chunk `chunk` on, which is even. ldmatrix reads matrices of eight
// rows of a chunk: each lane names a row, and receives two elements of a column.
template <PackOrder ORDER>
__device__ __forceinline__ u32 column_index(u32 chunk) {
    const u32 lane = threadIdx.x % 32;
    const u32 low = low_index<ORDER>(lane / 8), high = high_index<ORDER>(lane / 8);
    return chunk_index(lane % 8 / 2 * 16 + (lane % 2 == 0 ? low : high), chunk);
}

// Blocks of all lanes of a warp: of the chunk at index `first`, or (`next` = 1) of the next chunk, in the order ORDER.
__device__ __forceinline__ PackedBf16 blocks_of_columns(const Tiles& tiles, u32 first, u32 next) {
    PackedBf16 x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows that are eight apart have the same permutation
        const u32* from = &tiles.words[(first ^ next * 4) + half * 8 * ROW_WORDS];
        ptx::ldmatrix_x4_trans_shared_b16(static_cast<u32>(__cvta_generic_to_shared(from)), x.words + 4 * half);
    }
    return x;
}
#else
template <PackOrder ORDER>
__device__ __forceinline__ u32 column_index(u32 chunk) {
    static_assert(ORDER == ADJACENT, "the only order on a CPU");
    return chunk * 4;
}

__device__ __forceinline__ PackedBf16 blocks_of_columns(const Tiles& tiles, u32 first, u32 next) {
    const u32 lane = threadIdx.x % 32, column = lane / 4;
    const u32 tile = first & TILE_WORDS, chunk = first % TILE_WORDS / 4 + next;
    PackedBf16 x;
    for (u32 j = 0; j < 8; ++j) {
        const u32 row = lane % 4 * 16 + 2 * j;
        x.words[j] = pack_halves(tiles.words[tile + chunk_index(row, chunk) + column / 2],
                                 tiles.words[tile + chunk_index(row + 1, chunk) + column / 2], column % 2 != 0);
    }
    return x;
}
#endif

}  // namespace narrowgauge
