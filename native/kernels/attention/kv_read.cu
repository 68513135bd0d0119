// kv_read: the numbers of tokens of a paged cache.
//
//   slots    (tokens,) int64, of the cache
//   out      (tokens, heads, dim): elements times block scales, which is exact in float32, times the scale of the tensor or of the
//            head, one float32 rounding, and one to the dtype of out
//   Launch: kv_read_TYPE with a thread for 16 elements of a row, 256 threads, grid (ceil of the longer part / 256, 2): keys and values
#include "attention/cache.cuh"

namespace narrowgauge {

struct KvNumbers {
    CachePart source;
    const float* scale;  // decode scale, (1,) or (heads,), or null
    void* out;
};

struct KvReadParameters {
    KvNumbers keys, values;
    const i64* slots;
    int tokens, heads;
    bool scale_of_heads;
};

constexpr int CHUNK = 16;

template <class T>
__device__ __forceinline__ void read(const KvReadParameters& p) {
    const KvNumbers& part = blockIdx.y == 0 ? p.keys : p.values;
    const CachePart& source = part.source;
    const u32 place = blockIdx.x * blockDim.x + threadIdx.x, chunks = static_cast<u32>(source.dim + CHUNK - 1) / CHUNK;
    const u32 of_heads = place / chunks, heads = static_cast<u32>(p.heads);
    const i64 row = of_heads;
    const int token = static_cast<int>(of_heads / heads), head = static_cast<int>(of_heads % heads);
    if (token >= p.tokens) return;
    const int first = static_cast<int>(place % chunks) * CHUNK, left = source.dim - first, count = left < CHUNK ? left : CHUNK;
    const Cell cell = cell_of(p.slots[token], source.page_size, head);
    const float scale = part.scale == nullptr ? 1.0f : part.scale[p.scale_of_heads ? head : 0];
    float v[CHUNK] = {};
    if (source.format == CACHE_FP8 && source.element == 1 && source.chunk % CHUNK == 0 && count == CHUNK) {
        u8 codes[CHUNK];
        load_bytes(source.codes + code_index(source, cell, first), codes);
        narrow_to_floats<E4M3>(codes, v);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (i < count) v[i] = number_of(source, cell, first + i);
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] *= scale;
    T* const target = static_cast<T*>(part.out) + row * source.dim + first;
    if (count == CHUNK) {
        store_elements(v, target);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i < count) from_float(v[i], target[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256) kv_read_bf16(const __grid_constant__ KvReadParameters p) { read<bf16>(p); }

extern "C" __global__ void __launch_bounds__(256) kv_read_fp16(const __grid_constant__ KvReadParameters p) { read<fp16>(p); }

}  // namespace narrowgauge
