// shared_tile.cuh: tiles of 64 rows and 128 columns of bfloat16 in shared memory, and the blocks of 16 of their rows and
// columns.
//
// A row holds 16 chunks of 16 bytes. They are permuted so that the eight that a quarter of a warp moves at once lie in
// different banks, whether it copies neighbours, reads every second chunk of a row (blocks of rows), or one chunk of the
// rows 0, 1, 16, 17, 32, 33, 48 and 49, or 0, 2, 16, 18 and so on, from an even row on (blocks of columns).
#pragma once

#include "common/words.cuh"

constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128;
constexpr int ROW_BLOCKS = TILE_COLUMNS / 16, COLUMN_BLOCKS = TILE_ROWS / 16;
constexpr u32 CHUNKS = TILE_COLUMNS / 8;  // of a row
constexpr int ROW_WORDS = TILE_COLUMNS / 2;
constexpr u32 DEEPEST = 8;  // tiles that a block of threads takes, at most

// Two tiles: one is worked on while the other comes. A place in one, `^ TILE_WORDS`, is that in the other.
constexpr u32 TILE_WORDS = TILE_ROWS * ROW_WORDS;
struct Tiles {
    alignas(128) u32 words[2 * TILE_WORDS];
};

// The first word of a chunk, in the first tile.
__device__ __forceinline__ u32 chunk_index(u32 row, u32 chunk) {
    const u32 moved = chunk ^ chunk >> 3 ^ ((row ^ row >> 1) & 1) ^ (row >> 3 & 6);
    return row * ROW_WORDS + moved * 4;
}

// What a thread copies of a tile: of two rows, eight apart, two chunks, eight apart, which lie alike in all of them. Eight
// threads side by side copy half a row. Here the first row.
__device__ __forceinline__ u32 copied_row() { return threadIdx.x / 64 * 16 + threadIdx.x / 8 % 8; }

// How the tiles of a contiguous matrix are dealt out: blocks of threads take `deep` of them, one below the other, of the
// first `whole` * `deep` strips of 64 rows, and `few` of the last ones, so that a GPU is busy to the end. Grid: the tiles of
// a strip, times the blocks below each other.
struct Deal {
    int deep, whole, few;
};

// The tiles of a block of threads.
struct TileWalk {
    const u8* source;  // what the thread copies first of the tile
    u32 row_bytes;
    u32 first;  // and where it goes
    u32 place, top, strip, end;  // which tile of its strip of 64 rows; strips: the first one, this one, behind the last

    __device__ __forceinline__ TileWalk(const bf16* x, i64 rows, i64 columns, const Deal& deal)
        : row_bytes(static_cast<u32>(columns) * 2), first(chunk_index(copied_row(), threadIdx.x % 8)) {
        const u32 strips = static_cast<u32>(rows / TILE_ROWS), y = blockIdx.y;
        const u32 deep = static_cast<u32>(deal.deep), whole = static_cast<u32>(deal.whole), few = static_cast<u32>(deal.few);
        place = blockIdx.x;
        top = y < whole ? y * deep : whole * deep + (y - whole) * few;
        const u32 most = y < whole ? deep : few;
        strip = top;
        end = strips - top < most ? strips : top + most;
        const bf16* tile = x + strip * TILE_ROWS * columns + place * TILE_COLUMNS;
        source = reinterpret_cast<const u8*>(tile + copied_row() * columns + threadIdx.x % 8 * 8);
    }

    __device__ __forceinline__ bool inside() const { return strip < end; }

    __device__ __forceinline__ void step() {
        strip += 1;
        source += TILE_ROWS * row_bytes;
        first ^= TILE_WORDS;
#ifdef __CUDA_ARCH__
        asm volatile("" : "+l"(source));  // what is added to it must not be added to the tile before
#endif
    }

    // All threads copy the tile, for which `tile_comes` waits.
    template <int THREADS>
    __device__ __forceinline__ void fetch(Tiles& tiles) const {
        static_assert(THREADS * 4 == TILE_ROWS * CHUNKS, "four chunks each");
        // chunk_index of row + 8 is 8 * ROW_WORDS more, that of chunk + 8 is (first ^ 4) + 32; a tile begins at a multiple
        // of 128 bytes.
#ifdef __CUDA_ARCH__
        const u32 target = static_cast<u32>(__cvta_generic_to_shared(tiles.words)) + first * 4;
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u8* from = source + i / 2 * 8 * row_bytes + i % 2 * 128;
#ifdef __CUDA_ARCH__
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((target ^ i % 2 * 16) + i % 2 * 128 +
                                                                           i / 2 * 8 * ROW_WORDS * 4),
                         "l"(from)
                         : "memory");
#else
            u32* to = &tiles.words[(first ^ i % 2 * 4) + i % 2 * 32 + i / 2 * 8 * ROW_WORDS];
            for (int j = 0; j < 4; ++j) to[j] = reinterpret_cast<const u32*>(from)[j];
#endif
        }
    }
};

// All threads wait: for what they copy, and until all have done with the tile before.
__device__ __forceinline__ void tile_comes() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

// The block of a row that begins at `first`, which is even, or the one below it in the next row.
__device__ __forceinline__ Words block_of_row(const Tiles& tiles, u32 first, u32 next) {
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
// Where a lane of a warp that moves columns of chunk `chunk` on begins, which is even. A matrix is eight rows of a chunk, of
// which a lane names one and gets two numbers of a column.
template <Order ORDER>
__device__ __forceinline__ u32 column_index(u32 chunk) {
    const u32 lane = threadIdx.x % 32;
    const u32 low = low_number<ORDER>(lane / 8), high = high_number<ORDER>(lane / 8);
    return chunk_index(lane % 8 / 2 * 16 + (lane % 2 == 0 ? low : high), chunk);
}

// The blocks of all lanes of a warp of the chunk that begins at `first` or the next one, in that order.
__device__ __forceinline__ Words blocks_of_columns(const Tiles& tiles, u32 first, u32 next) {
    Words x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows eight below are permuted alike
        const u32* from = &tiles.words[(first ^ next * 4) + half * 8 * ROW_WORDS];
        const u32 address = static_cast<u32>(__cvta_generic_to_shared(from));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.each[4 * half]), "=r"(x.each[4 * half + 1]), "=r"(x.each[4 * half + 2]),
                       "=r"(x.each[4 * half + 3])
                     : "r"(address));
    }
    return x;
}
#else
template <Order ORDER>
__device__ __forceinline__ u32 column_index(u32 chunk) {
    static_assert(ORDER == NEIGHBOURS, "of a CPU, which has no other");
    return chunk * 4;
}

__device__ __forceinline__ Words blocks_of_columns(const Tiles& tiles, u32 first, u32 next) {
    const u32 lane = threadIdx.x % 32, column = lane / 4;
    const u32 tile = first & TILE_WORDS, chunk = first % TILE_WORDS / 4 + next;
    Words x;
    for (u32 j = 0; j < 8; ++j) {
        const u32 row = lane % 4 * 16 + 2 * j;
        x.each[j] = paired(tiles.words[tile + chunk_index(row, chunk) + column / 2],
                           tiles.words[tile + chunk_index(row + 1, chunk) + column / 2], column % 2 != 0);
    }
    return x;
}
#endif
