// store_words: writes the words of its parameters to memory.
//
//   out    (count,), count up to WORDS
//   Launch: one block of WORDS threads. A launch carries its parameters, so that no copy from the host is needed.

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int WORDS = 480;  // parameters of a kernel have at most 4096 bytes

struct StoredWords {
    u64* out;
    i64 count;
    u64 words[480];
};
static_assert(sizeof(StoredWords::words) == WORDS * sizeof(u64), "Python reads the number");

extern "C" __global__ void __launch_bounds__(WORDS) store_words(const __grid_constant__ StoredWords p) {
    if (threadIdx.x < p.count) p.out[threadIdx.x] = p.words[threadIdx.x];
}

}  // namespace narrowgauge
