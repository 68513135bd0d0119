// pad: copies sections of rows into longer or shorter sections. Rows that a section gains are set to 0.
//
//   source  contiguous rows of `words` words
//   target  contiguous rows of `words` words; every row is written
//   starts  (G + 1,) first row of each section in target, then the number of rows of target
//   from    (G,) first row of each section in source
//   counts  (G,) number of rows of each section that are copied, at most
//   Launch: any grid of 256 threads, a warp for a row; a grid-stride loop covers the rows of target.
//   The name of a kernel gives the bytes of a word: 1, 2, 4, 8 or 16. Both tensors are aligned to a word.

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int THREADS = 256, WARP = 32;

struct alignas(16) Bytes16 {
    u64 halves[2];
};

// Section of row `row` of target: the last section that begins at or before the row, which skips empty sections.
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
        const bool copied = offset < counts[section];
        const Word* source_row = source + (from[section] + offset) * words;
        for (i64 word = threadIdx.x % WARP; word < words; word += WARP) {
            target[row * words + word] = copied ? source_row[word] : Word{};
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
PAD(pad_16, Bytes16)

}  // namespace narrowgauge
