// shared_tile.cuh: tiles of 64 rows and 128 columns of bfloat16 in shared memory, and the blocks of 16 of their rows and
// columns.
//
// A row holds 16 chunks of 16 bytes. They are permuted so that the eight that a quarter of a warp moves at once lie in
// different banks, whether it copies neighbours, reads every second chunk of a row (blocks of rows), or one chunk of the
// rows 0, 1, 16, 17, 32, 33, 48 and 49 from an even row on (blocks of columns).
#pragma once

#include "words.cuh"

constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128;
constexpr int ROW_BLOCKS = TILE_COLUMNS / 16, COLUMN_BLOCKS = TILE_ROWS / 16;
constexpr int CHUNKS = TILE_COLUMNS / 8;  // of a row
constexpr int ROW_WORDS = TILE_COLUMNS / 2;
constexpr u32 DEEPEST = 8, FEW = 2;  // tiles that a block of threads takes, at most, and of the last strips
constexpr u32 LAST = 16;             // strips

struct Tile {
    alignas(128) u32 words[TILE_ROWS * ROW_WORDS];
};

// The first word of a chunk.
__device__ __forceinline__ int chunk_index(int row, int chunk) {
    const int moved = chunk ^ chunk >> 3 ^ ((row ^ (row >> 3 & 6)) & 7);
    return row * ROW_WORDS + moved * 4;
}

// The tiles of a contiguous matrix that a block of threads takes: `deep`, one below the other, of the last strips of 64 rows
// two, so that a GPU is busy to the end. Grid: the tiles of a strip, times the blocks below each other: as many of `deep`
// tiles as leave LAST strips, and those of two.
struct TileWalk {
    const bf16* source;  // what the thread copies first of the tile
    i64 columns;
    u32 place, top, strip, end;  // which tile of its strip of 64 rows; strips: the first one, this one, behind the last

    __device__ __forceinline__ TileWalk(const bf16* x, i64 rows, i64 length, u32 deep) : columns(length) {
        const u32 strips = static_cast<u32>(rows / TILE_ROWS);
        place = blockIdx.x;
        const u32 whole = strips > LAST ? (strips - LAST) / deep : 0u, y = blockIdx.y;
        if (y >= whole && deep > FEW) {
            top = whole * deep + (y - whole) * FEW;
            deep = FEW;
        } else {
            top = y * deep;
        }
        strip = top;
        end = strips - top < deep ? strips : top + deep;
        source = x + (strip * TILE_ROWS + threadIdx.x / CHUNKS) * length + place * TILE_COLUMNS + threadIdx.x % CHUNKS * 8;
    }

    __device__ __forceinline__ bool inside() const { return strip < end; }

    __device__ __forceinline__ void step() {
        strip += 1;
        source += TILE_ROWS * columns;
    }

    // All threads copy the tile, if there is one; it has come after `tile_waits` and a barrier.
    template <int THREADS>
    __device__ __forceinline__ void fetch(Tile& tile) const {
        if (!inside()) return;
        static_assert(THREADS == 16 * CHUNKS, "rows 16 apart");
        const int first = chunk_index(static_cast<int>(threadIdx.x) / CHUNKS, static_cast<int>(threadIdx.x) % CHUNKS);
#ifdef __CUDA_ARCH__
        const u32 target = static_cast<u32>(__cvta_generic_to_shared(&tile.words[first]));
#endif
#pragma unroll
        for (int i = 0; i < TILE_ROWS / 16; ++i) {
            const bf16* from = source + i * 16 * columns;
            // chunk_index of row + 16 * i is (first ^ i * 8) + i * 16 * ROW_WORDS; a tile begins at a multiple of 128 bytes.
#ifdef __CUDA_ARCH__
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((target ^ i * 32) + i * 16 * ROW_WORDS * 4),
                         "l"(from)
                         : "memory");
#else
            u32* to = &tile.words[(first ^ i * 8) + i * 16 * ROW_WORDS];
            for (int j = 0; j < 4; ++j) to[j] = reinterpret_cast<const u32*>(from)[j];
#endif
        }
    }
};

__device__ __forceinline__ void tile_waits() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Block `block` of row `row`, which is even, or of the next one.
__device__ __forceinline__ Words block_of_row(const Tile& tile, int row, int block, int next) {
    const int index = chunk_index(row, 2 * block) ^ next * 4;
    const u32 *first = &tile.words[index + next * ROW_WORDS], *second = &tile.words[(index ^ 4) + next * ROW_WORDS];
#ifdef __CUDA_ARCH__
    const uint4 a = *reinterpret_cast<const uint4*>(first), b = *reinterpret_cast<const uint4*>(second);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
#else
    return {{first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]}};
#endif
}

// Lane 4c + s of a warp gets rows 16s to 16s + 15 of column c of chunk `chunk`, which is even, or of the next one. All
// lanes of the warp call.
__device__ __forceinline__ Words block_of_column(const Tile& tile, int chunk, int next) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Words x;
#ifdef __CUDA_ARCH__
    // A matrix is eight rows of a chunk, of which a lane names one and gets two numbers of a column.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane % 8 / 2 * 16 + lane / 8 * 2 + lane % 2;  // and eight below, which are permuted alike
        const u32* first = &tile.words[(chunk_index(row, chunk) ^ next * 4) + half * 8 * ROW_WORDS];
        const u32 address = static_cast<u32>(__cvta_generic_to_shared(first));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.each[4 * half]), "=r"(x.each[4 * half + 1]), "=r"(x.each[4 * half + 2]),
                       "=r"(x.each[4 * half + 3])
                     : "r"(address));
    }
#else
    const int column = lane / 4, stripe = lane % 4;
    for (int j = 0; j < 8; ++j) {
        const int row = stripe * 16 + 2 * j;
        x.each[j] = paired(tile.words[chunk_index(row, chunk + next) + column / 2],
                           tile.words[chunk_index(row + 1, chunk + next) + column / 2], column % 2 != 0);
    }
#endif
    return x;
}
