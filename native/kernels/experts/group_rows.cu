// group_rows_FORM: where the rows of experts lie in a buffer, from the index that a grouped product is given.
//
//   sizes, starts  (G,) rows of each expert, and its first row
//   masked   index (G,): rows of each expert, whose section begins at g * step
//   ends     index (G,): end of each section, which begins at the end before it, rounded up to a multiple of step
//   starts   index (G + 1,): first row of each section, and the end of the last one
//   indices  index (rows,): expert of each row, -1 of none; the rows of an expert are neighbours
//   Launch: a block for each expert, any number of threads up to MOST_THREADS. Wrong indexes give any sizes: the products
//   clamp them.

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int MOST_THREADS = 256;

struct GroupParameters {
    const int* index;
    i64 *sizes, *starts;
    i64 rows, step;
};

__device__ __forceinline__ void store(const GroupParameters& p, i64 start, i64 size) {
    if (threadIdx.x != 0) return;
    p.starts[blockIdx.x] = start;
    p.sizes[blockIdx.x] = size < 0 ? 0 : size;
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) group_rows_masked(GroupParameters p) {
    const i64 rows = p.index[blockIdx.x];
    store(p, blockIdx.x * p.step, rows < p.step ? rows : p.step);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) group_rows_ends(GroupParameters p) {
    const i64 before = blockIdx.x == 0 ? 0 : p.index[blockIdx.x - 1];
    const i64 start = (before + p.step - 1) / p.step * p.step;
    store(p, start, p.index[blockIdx.x] - start);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) group_rows_starts(GroupParameters p) {
    store(p, p.index[blockIdx.x], i64{p.index[blockIdx.x + 1]} - p.index[blockIdx.x]);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) group_rows_indices(GroupParameters p) {
    __shared__ i64 firsts[MOST_THREADS], counts[MOST_THREADS];
    i64 first = p.rows, count = 0;
    for (i64 row = threadIdx.x; row < p.rows; row += blockDim.x) {
        if (p.index[row] != static_cast<int>(blockIdx.x)) continue;
        first = row < first ? row : first;
        ++count;
    }
    firsts[threadIdx.x] = first;
    counts[threadIdx.x] = count;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 thread = 1; thread < blockDim.x; ++thread) {
        first = firsts[thread] < first ? firsts[thread] : first;
        count += counts[thread];
    }
    store(p, first, count);
}

}  // namespace narrowgauge
