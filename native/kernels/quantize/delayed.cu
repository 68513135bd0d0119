// delayed: one step of delayed scaling: next scales, and rolled histories of amaxes.
//
//   history      (H, N) float32, amaxes of N tensors, the latest first; H >= 1
//   scale        (N,) float32
//   new_history  (H, N): row i is row i + 1 of history, the last row is its first row, and row 0 is 0
//   new_scale    (N,): fl(scaled_max/amax) if the amax is finite and above 0, else the old scale; FLT_MAX for an infinity
//   most_recent  the amax is the first row, else the largest number of the history without NaN and negative numbers
//   bulk         a tensor whose first amax is 0 keeps its history and its scale
//   Launch: 256 threads for every 32 tensors, eight threads per tensor.
//   Exact; the division rounds once. docs/numerics.md#delayed-scaling. Source: delayed_scaling.cu of Transformer Engine,
//   its kernel for one tensor and its kernel for many (`bulk`).

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int TENSORS = 32, PARTS = 8, THREADS = TENSORS * PARTS;  // parts of a history
constexpr u32 FLT_MAX_BITS = 0x7F7FFFFFu;

extern "C" __global__ void __launch_bounds__(THREADS)
    update_scale(const float* history, const float* scale, float* new_history, float* new_scale, i64 length,
                 i64 tensors, float scaled_max, int most_recent, int bulk) {
    __shared__ u32 maxima[PARTS][TENSORS];
    const int lane = threadIdx.x % TENSORS, part = threadIdx.x / TENSORS;
    const i64 tensor = static_cast<i64>(blockIdx.x) * TENSORS + lane;
    const bool exists = tensor < tensors;
    const u32 latest = exists ? __float_as_uint(history[tensor]) : 0u;
    const bool unchanged = bulk && (latest & 0x7FFFFFFFu) == 0u;

    // Bits of numbers that are not negative have the order of the numbers. NaN and numbers with a sign are above infinity.
    u32 largest = 0u;
    if (exists) {
        for (i64 i = part; i < length; i += PARTS) {
            const float old = history[i * tensors + tensor];
            const u32 bits = __float_as_uint(old);
            const u32 counted = bits <= FLOAT_INF_BITS ? bits : 0u;
            largest = counted > largest ? counted : largest;
            const float next = i + 1 < length ? history[(i + 1) * tensors + tensor] : __uint_as_float(latest);
            new_history[i * tensors + tensor] = unchanged ? old : i > 0 ? next : 0.0f;
        }
    }
    maxima[part][lane] = largest;
    __syncthreads();
    if (part != 0 || !exists) return;
    for (int p = 1; p < PARTS; ++p) largest = maxima[p][lane] > largest ? maxima[p][lane] : largest;

    const u32 amax = most_recent ? latest : largest;
    const bool usable = !unchanged && amax > 0u && amax < FLOAT_INF_BITS;
    const u32 old = __float_as_uint(scale[tensor]);
    const u32 new_bits = usable ? __float_as_uint(scaled_max / __uint_as_float(amax)) : old;
    new_scale[tensor] = __uint_as_float((new_bits & 0x7FFFFFFFu) == FLOAT_INF_BITS ? FLT_MAX_BITS : new_bits);
}

}  // namespace narrowgauge
