// row_part.cuh: the threads of a row of a matrix, and reductions over them.
//
// A thread has chunks of 16 neighbouring elements: chunk i of thread t of a row is chunk i * n + t of n threads. A row belongs
// to one thread block, or to several. Short rows have ROW_LANES lanes of a warp each.
#pragma once

#include "fused/rounded.cuh"

// Chunks of a thread, at most. A CPU has a loop over those that the row needs.
#ifndef ROW_CHUNKS
#ifdef __CUDA_ARCH__
#define ROW_CHUNKS 1
#else
#define ROW_CHUNKS 128
#endif
#endif

#ifndef ROW_THREADS
#define ROW_THREADS 32  // of a thread block, at most
#endif

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 0  // threads of a block that has whole rows, if the compiler knows them
#endif

#ifndef ROW_LANES
#define ROW_LANES 0  // lanes of a row: a power of two up to 32; 0 if a row has all threads of its block
#endif

#ifndef ROW_FULL
#define ROW_FULL 0  // the threads of a block have exactly the chunks of a row
#endif

#ifndef PIPELINED
#define PIPELINED 0  // a kernel with a loop over rows loads the next row during the work on a row
#endif

namespace narrowgauge {

constexpr int LANES = 32;
constexpr bool FULL_ROWS = ROW_FULL && PIPELINED;

// The part of a row that a thread block makes.
struct Part {
    i64 row;
    int thread;   // of the row
    int first;    // chunk of thread 0
    int apart;    // from a chunk of a thread to its next one
    int columns;  // of the row; 0 behind the last row
    int steps;    // chunks of a thread
    bool whole_chunks;
};

// Rows of a thread block.
__device__ __forceinline__ int rows_of_block() { return ROW_LANES > 0 ? static_cast<int>(blockDim.x) / ROW_LANES : 1; }

// The row that a thread has in a block whose first row is `first_row`.
template <class Rows>
__device__ __forceinline__ void set_row(Part& part, i64 first_row, const Rows& p) {
    part.row = first_row + (ROW_LANES > 0 ? threadIdx.x / (ROW_LANES > 0 ? ROW_LANES : 1) : 0);
    part.columns = part.row < p.rows ? p.columns : 0;
}

// `p`: rows, columns, and the thread blocks of a row, `segments`.
template <class Rows>
__device__ __forceinline__ Part part_of(const Rows& p, bool whole_chunks) {
    const u32 segments = static_cast<u32>(p.segments), block = blockIdx.x;
    const int threads = ROW_LANES > 0 ? ROW_LANES : BLOCK_THREADS > 0 ? BLOCK_THREADS : static_cast<int>(blockDim.x);
    Part part;
    set_row(part, static_cast<i64>(block / segments) * rows_of_block(), p);
    part.thread = ROW_LANES > 0 ? static_cast<int>(threadIdx.x) % threads : static_cast<int>(threadIdx.x);
    part.first = BLOCK_THREADS > 0 ? 0 : static_cast<int>(block % segments) * threads * ROW_CHUNKS;
    part.apart = threads;
    part.steps = ROW_CHUNKS;
    part.whole_chunks = whole_chunks;
#ifndef __CUDA_ARCH__
    const int left = (p.columns + CHUNK - 1) / CHUNK - part.first, needed = (left + threads - 1) / threads;
    part.steps = needed < ROW_CHUNKS ? needed : ROW_CHUNKS;
#endif
    return part;
}

__device__ __forceinline__ RowChunk chunk_of(const Part& part, int step) {
    const int column = (part.first + step * part.apart + part.thread) * CHUNK, left = part.columns - column;
    const int count = FULL_ROWS ? CHUNK : part.whole_chunks ? (left > 0 ? CHUNK : 0) : valid_count<CHUNK>(left);
    return {column, count, part.whole_chunks};
}

constexpr int WARPS = ROW_THREADS / LANES;  // of a thread block, at most; a power of two

// A word for each warp, for each reduction of a row.
using Words = float[3][WARPS];

// `value` of 2 * `from` neighbouring lanes, combined in a tree. All of them get the result.
template <class Combine>
__device__ __forceinline__ float over_lanes(float value, int from, Combine combine) {
#pragma unroll
    for (int apart = from; apart > 0; apart /= 2) value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, apart));
    return value;
}

// The values of all threads, combined in a tree. `words`: of a reduction that the kernel runs once.
template <class Combine>
__device__ __forceinline__ float over_block(float value, float (&words)[WARPS], float neutral, Combine combine) {
    value = over_lanes(value, LANES / 2, combine);
    if (WARPS == 1) return value;
    const int warp = static_cast<int>(threadIdx.x) / LANES, lane = static_cast<int>(threadIdx.x) % LANES;
    if (lane == 0) words[warp] = value;
    __syncthreads();
    value = lane % WARPS < static_cast<int>(blockDim.x) / LANES ? words[lane % WARPS] : neutral;
    return over_lanes(value, WARPS / 2, combine);
}

// The values of the threads of a row.
template <class Combine>
__device__ __forceinline__ float over_row(float value, float (&words)[WARPS], float neutral, Combine combine) {
    return ROW_LANES > 0 ? over_lanes(value, ROW_LANES / 2, combine) : over_block(value, words, neutral, combine);
}

// The largest u32 of the threads of a row, which has all threads of its block.
__device__ __forceinline__ u32 largest_of_block(u32 value, float (&words)[WARPS]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    value = __reduce_max_sync(0xFFFFFFFFu, value);
    if (WARPS == 1) return value;
    const int warp = static_cast<int>(threadIdx.x) / LANES, lane = static_cast<int>(threadIdx.x) % LANES;
    if (lane == 0) words[warp] = __uint_as_float(value);
    __syncthreads();
    const bool counts = lane < static_cast<int>(blockDim.x) / LANES;
    return __reduce_max_sync(0xFFFFFFFFu, counts ? __float_as_uint(words[lane]) : 0u);
#else
    const auto larger = [](float a, float b) { return __float_as_uint(a) < __float_as_uint(b) ? b : a; };
    return __float_as_uint(over_block(__uint_as_float(value), words, 0.0f, larger));
#endif
}

__device__ __forceinline__ float sum_over_row(float value, float (&words)[WARPS]) {
    return over_row(value, words, 0.0f, [](float a, float b) { return a + b; });
}

}  // namespace narrowgauge
