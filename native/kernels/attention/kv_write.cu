// kv_write: quantizes rows of keys and of values, and stores them in the slots of a paged cache.
//
//   rows     (tokens, heads, columns) of float32, bfloat16 or float16, any strides; slots (tokens,) int64, negative: not stored
//   target   CACHE_FP8 in any layout of cache.cuh
//   codes    E4M3 of x / s or of x * fl(1/s), nearest even, saturating; s is the decode scale of the tensor, or of each head.
//            With an encode scale: of x * scale
//   Launch: kv_write_TYPE with a thread for 16 elements of a row, 256 threads, grid (ceil of the longer part / 256, 2): keys and values
//   kv_store: the bytes of rows that are quantized already, in the same way
#include "attention/cache.cuh"

namespace narrowgauge {

enum ScaleUse : int { DIVIDE = 0, TIMES_RECIPROCAL = 1, TIMES = 2 };

struct KvRows {
    const void* rows;
    i64 token, head, column;  // strides of rows, elements
    const float* scale;       // (1,) or (heads,)
    CachePart target;
};

struct KvWriteParameters {
    KvRows keys, values;
    const i64* slots;
    int tokens, heads;
    bool scale_of_heads;
    ScaleUse use;
};

constexpr int CHUNK = 16;

// A thread's chunk of a row, and its place in the cache. `count`: elements, 0 if the row is not stored.
struct Chunk {
    int token, head, column, count;
    Cell cell;
};

__device__ __forceinline__ Chunk chunk_of(const KvWriteParameters& p, const CachePart& target, int columns) {
    const i64 place = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int chunks = (columns + CHUNK - 1) / CHUNK;
    const i64 row = place / chunks;
    Chunk chunk{static_cast<int>(row / p.heads), static_cast<int>(row % p.heads), static_cast<int>(place % chunks) * CHUNK, 0, {}};
    if (chunk.token >= p.tokens) return chunk;
    const i64 slot = p.slots[chunk.token];
    if (slot < 0) return chunk;
    const int left = columns - chunk.column;
    chunk.count = left < CHUNK ? left : CHUNK;
    chunk.cell = {slot / target.page_size, static_cast<int>(slot % target.page_size), chunk.head};
    return chunk;
}

__device__ __forceinline__ void store_chunk(const CachePart& target, const Chunk& chunk, const u8 (&bytes)[CHUNK]) {
    const bool neighbours = target.element == 1 && target.chunk % CHUNK == 0;
    if (neighbours) {
        store_partial(bytes, chunk.count, target.codes + code_index(target, chunk.cell, chunk.column));
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i < chunk.count) target.codes[code_index(target, chunk.cell, chunk.column + i)] = bytes[i];
    }
}

template <class T>
__device__ __forceinline__ void write(const KvWriteParameters& p) {
    const KvRows& rows = blockIdx.y == 0 ? p.keys : p.values;
    const Chunk chunk = chunk_of(p, rows.target, rows.target.dim);
    if (chunk.count == 0) return;
    const T* source = static_cast<const T*>(rows.rows) + chunk.token * rows.token + chunk.head * rows.head + chunk.column * rows.column;
    float v[CHUNK] = {};
    if (rows.column == 1 && chunk.count == CHUNK) {
        load_elements(source, v);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (i < chunk.count) v[i] = to_float(source[i * rows.column]);
        }
    }
    const float scale = rows.scale[p.scale_of_heads ? chunk.head : 0];
    if (p.use == DIVIDE) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) v[i] /= scale;
    }
    u8 codes[CHUNK];
    encode_row<E4M3>(v, p.use == DIVIDE ? 1.0f : p.use == TIMES_RECIPROCAL ? 1.0f / scale : scale, codes);
    store_chunk(rows.target, chunk, codes);
}

extern "C" __global__ void __launch_bounds__(256) kv_write_fp32(const __grid_constant__ KvWriteParameters p) { write<float>(p); }

extern "C" __global__ void __launch_bounds__(256) kv_write_bf16(const __grid_constant__ KvWriteParameters p) { write<bf16>(p); }

extern "C" __global__ void __launch_bounds__(256) kv_write_fp16(const __grid_constant__ KvWriteParameters p) { write<fp16>(p); }

// Rows of `rows` are bytes here. `target.dim` counts them.
extern "C" __global__ void __launch_bounds__(256) kv_store(const __grid_constant__ KvWriteParameters p) {
    const KvRows& rows = blockIdx.y == 0 ? p.keys : p.values;
    const Chunk chunk = chunk_of(p, rows.target, rows.target.dim);
    const u8* source = static_cast<const u8*>(rows.rows) + chunk.token * rows.token + chunk.head * rows.head + chunk.column * rows.column;
    u8 bytes[CHUNK] = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (i < chunk.count) bytes[i] = source[i * rows.column];
    }
    if (chunk.count > 0) store_chunk(rows.target, chunk, bytes);
}

}  // namespace narrowgauge
