// delayed: the next scales of delayed scaling, and the histories of amaxes moved on by a step.
//
//   history      (H, N) float32, amaxes of N tensors, the latest first; H >= 1
//   scale        (N,) float32
//   new_history  (H, N), row i is row i + 1, the last row the first, and the first 0
//   new_scale    (N,): fl(scaled_max/amax) where the amax is finite and above 0, else scale; FLT_MAX for an infinity
//   most_recent  the amax is the first row's, else the largest of the history, NaN and what is below 0 left out
//   bulk         a tensor whose first amax is 0 keeps its history, and its scale
//   Launch: 256 threads for every 32 tensors, eight to each.
//   Exact; the division rounds once. docs/numerics.md#delayed-scaling, and Transformer Engine's delayed_scaling.cu, whose
//   kernel for one tensor and kernel for many these are.

#include "common/formats.cuh"

constexpr int TENSORS = 32, EACH = 8, THREADS = TENSORS * EACH;
constexpr u32 LARGEST = 0x7F7FFFFFu;

extern "C" __global__ void __launch_bounds__(THREADS)
    update_scale(const float* history, const float* scale, float* new_history, float* new_scale, i64 length,
                 i64 tensors, float scaled_max, int most_recent, int bulk) {
    __shared__ u32 most[EACH][TENSORS];
    const int lane = threadIdx.x % TENSORS, part = threadIdx.x / TENSORS;
    const i64 tensor = static_cast<i64>(blockIdx.x) * TENSORS + lane;
    const bool exists = tensor < tensors;
    const u32 last = exists ? __float_as_uint(history[tensor]) : 0u;
    const bool kept = bulk && (last & 0x7FFFFFFFu) == 0u;

    // Numbers that are not negative are in the order of their bits; NaN is above infinity, and below 0 is the sign bit.
    u32 largest = 0u;
    if (exists) {
        for (i64 i = part; i < length; i += EACH) {
            const float old = history[i * tensors + tensor];
            const u32 bits = __float_as_uint(old);
            const u32 counted = bits <= FLOAT_INF_BITS ? bits : 0u;
            largest = counted > largest ? counted : largest;
            const float next = i + 1 < length ? history[(i + 1) * tensors + tensor] : __uint_as_float(last);
            new_history[i * tensors + tensor] = kept ? old : i > 0 ? next : 0.0f;
        }
    }
    most[part][lane] = largest;
    __syncthreads();
    if (part != 0 || !exists) return;
    for (int p = 1; p < EACH; ++p) largest = most[p][lane] > largest ? most[p][lane] : largest;

    const u32 amax = most_recent ? last : largest;
    const bool usable = !kept && amax > 0u && amax < FLOAT_INF_BITS;
    const u32 old = __float_as_uint(scale[tensor]);
    const u32 found = usable ? __float_as_uint(scaled_max / __uint_as_float(amax)) : old;
    new_scale[tensor] = __uint_as_float((found & 0x7FFFFFFFu) == FLOAT_INF_BITS ? LARGEST : found);
}
