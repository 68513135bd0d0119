// permute: rows of tokens copied to the sections of their experts.
//
//   ids          (T * k) experts of the choices of tokens; a negative id is no choice
//   sizes        (G,) rows of each section
//   source_rows  (rows,) number of the choice whose row lies here, -1 of none
//   x, out       contiguous rows of `words` words; out has zeros in rows of no choice
//   count_IDS: sizes, capped by the capacity, if it is not 0. Launch: a block for each expert.
//   place_IDS: source_rows, in the order of the choices. Section g begins at g * capacity, or behind section g - 1 at a
//   multiple of `alignment`. Launch: a block for each expert, and one for the rows behind the last section.
//   gather_W: the rows of out. W: bytes of a word, to which both tensors are aligned. Launch: any grid of 256 threads, a
//   warp for a row; a grid-stride loop covers the rows.
//   count and place: any number of threads up to MOST_THREADS. Exact: no operation rounds.

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int MOST_THREADS = 256, WARP = 32;

struct alignas(16) Bytes16 {
    u64 halves[2];
};

struct PermuteParameters {
    const void* ids;
    i64* sizes;
    i64* source_rows;
    i64 choices;  // of all tokens
    i64 rows, alignment, capacity;
    int experts;
};

// The choices of a thread: a part of all of them, in order.
struct Choices {
    i64 first, last;

    __device__ __forceinline__ explicit Choices(i64 count) {
        const i64 each = (count + blockDim.x - 1) / blockDim.x;
        first = each * threadIdx.x < count ? each * threadIdx.x : count;
        last = first + each < count ? first + each : count;
    }
};

// The sum of a number of the threads before this one; `total`: of all threads.
__device__ __forceinline__ i64 sum_before(i64 own, i64& total) {
    __shared__ i64 numbers[MOST_THREADS];
    __syncthreads();
    numbers[threadIdx.x] = own;
    __syncthreads();
    i64 before = 0;
    total = 0;
    for (u32 thread = 0; thread < blockDim.x; ++thread) {
        before += thread < threadIdx.x ? numbers[thread] : 0;
        total += numbers[thread];
    }
    return before;
}

template <class Id>
__device__ __forceinline__ i64 count_own(const Id* ids, const Choices& choices, i64 expert) {
    i64 own = 0;
    for (i64 choice = choices.first; choice < choices.last; ++choice) own += ids[choice] == expert ? 1 : 0;
    return own;
}

template <class Id>
__device__ __forceinline__ void count(const PermuteParameters& p) {
    i64 total;
    sum_before(count_own(static_cast<const Id*>(p.ids), Choices(p.choices), blockIdx.x), total);
    if (threadIdx.x == 0) p.sizes[blockIdx.x] = p.capacity != 0 && total > p.capacity ? p.capacity : total;
}

__device__ __forceinline__ i64 aligned(i64 rows, i64 alignment) { return (rows + alignment - 1) / alignment * alignment; }

template <class Id>
__device__ __forceinline__ void place(const PermuteParameters& p) {
    const Id* ids = static_cast<const Id*>(p.ids);
    const int expert = static_cast<int>(blockIdx.x);
    i64 own = 0, start, total;
    for (int g = static_cast<int>(threadIdx.x); g < expert; g += static_cast<int>(blockDim.x)) {
        own += p.capacity != 0 ? p.capacity : aligned(p.sizes[g], p.alignment);
    }
    sum_before(own, start);
    const bool section = expert < p.experts;
    const i64 size = section ? p.sizes[expert] : 0;
    const i64 end = !section ? p.rows : start + (p.capacity != 0 ? p.capacity : aligned(size, p.alignment));
    for (i64 row = start + size + threadIdx.x; row < end; row += blockDim.x) p.source_rows[row] = -1;
    if (!section) return;
    const Choices choices(p.choices);
    i64 place = sum_before(count_own(ids, choices, expert), total);
    for (i64 choice = choices.first; choice < choices.last && place < size; ++choice) {
        if (ids[choice] == expert) p.source_rows[start + place++] = choice;
    }
}

template <class Word>
__device__ __forceinline__ void gather(const Word* x, Word* out, const i64* source_rows, i64 rows, i64 words, i64 of_token) {
    const i64 step = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
    for (i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP; row < rows; row += step) {
        const i64 choice = source_rows[row];
        const Word* source = x + (choice < 0 ? 0 : choice / of_token) * words;
        for (i64 word = threadIdx.x % WARP; word < words; word += WARP) {
            out[row * words + word] = choice < 0 ? Word{} : source[word];
        }
    }
}

#define BY_IDS(NAME, Id)                                                                                               \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS) count_##NAME(PermuteParameters p) { count<Id>(p); }     \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS) place_##NAME(PermuteParameters p) { place<Id>(p); }

#define GATHER(NAME, Word)                                                                                             \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS)                                                         \
        NAME(const Word* x, Word* out, const i64* source_rows, i64 rows, i64 words, i64 of_token) {                    \
        gather(x, out, source_rows, rows, words, of_token);                                                            \
    }

BY_IDS(i32, int)
BY_IDS(i64, i64)
GATHER(gather_1, u8)
GATHER(gather_2, u16)
GATHER(gather_4, u32)
GATHER(gather_8, u64)
GATHER(gather_16, Bytes16)

}  // namespace narrowgauge
