// pad: sections of rows moved to where sections of more, or of fewer, rows lie. What they have more is 0.
//
//   source    rows of `words` words, contiguous
//   target    rows of `words` words, contiguous: every one is written
//   starts    (G + 1,) the first row of each section in target, and how many rows target has
//   from      (G,) the first row of each section in source
//   counts    (G,) rows of each section in source that are moved
//   Launch: any grid of 256 threads, a warp for a row; the grid strides over the rows of target.
//   A word has 1, 2, 4, 8 or 16 bytes, as its kernel's name says; both tensors are aligned to it.

#include "common/formats.cuh"

constexpr int THREADS = 256, WARP = 32;

struct alignas(16) Words {
    u64 each[2];
};

// The section with row `row` of target: the last that begins there or before, and so none of the empty ones before it.
__device__ __forceinline__ int section_of(const i64* starts, int sections, i64 row) {
    int low = 0, high = sections - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts[middle] <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

template <class Word>
__device__ void pad(const Word* source, Word* target, const i64* starts, const i64* from, const i64* counts,
                    int sections, i64 words) {
    const i64 rows = starts[sections], step = static_cast<i64>(gridDim.x) * (THREADS / WARP);
    for (i64 row = static_cast<i64>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP; row < rows; row += step) {
        const int section = section_of(starts, sections, row);
        const i64 offset = row - starts[section];
        const bool moved = offset < counts[section];
        const Word* there = source + (from[section] + offset) * words;
        for (i64 word = threadIdx.x % WARP; word < words; word += WARP) {
            target[row * words + word] = moved ? there[word] : Word{};
        }
    }
}

#define PAD(NAME, Word)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const Word* source, Word* target, const i64* starts, const i64* from, const i64* counts, int sections,    \
             i64 words) {                                                                                              \
        pad(source, target, starts, from, counts, sections, words);                                                    \
    }

PAD(pad_1, u8)
PAD(pad_2, u16)
PAD(pad_4, u32)
PAD(pad_8, u64)
PAD(pad_16, Words)
