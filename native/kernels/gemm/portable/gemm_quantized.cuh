// gemm_quantized.cuh: a GEMM with a quantizing epilogue. The output is MX, or FP8 with float32 scales of blocks or with a
// given scale. A block of threads computes 128x128 outputs, a whole number of blocks of each of these recipes.
//
//   out      codes: (M, N) bytes, one for an element; of E2M1 (M, ceil(N/2)), element 2j in the low nibble of byte j
//   scales   MX: (M, ceil(N/32)) bytes. FP8: float32 (M, ceil(N/128)) of lines, (ceil(M/128), ceil(N/128)) of tiles, (1,)
//            of the tensor
//   Launch: 256 threads for every 128x128 tile of the output, grid (ceil(N/128), ceil(M/128)). Any M, N and K.
//   Numerics: the output of the GEMM, cast to `out_type`, is quantized as the quantize kernel of its format quantizes it:
//   mx.cuh, fp8.cuh; nearest even, saturating. The bytes are equal.
#pragma once

#include "common/fp8.cuh"
#include "common/mx.cuh"
#include "gemm/portable/gemm.cuh"

namespace narrowgauge {

// Elements of the output that share a scale: 32 of a row or 32x32 with E8M0; 128 of a row, 128x128 or the whole tensor with
// float32. The scale of a whole tensor is given.
enum class ScaleBlock : int { MX_LINE = 0, MX_TILE = 1, FP8_LINE = 2, FP8_TILE = 3, FP8_TENSOR = 4 };

// Parameters of a quantizing epilogue; `out` of EpilogueParameters are the codes.
struct QuantizerParameters {
    Element element;
    ScaleBlock block;
    int propagate_nan;
    MxScaleOrder scale_order;  // MX
    int up_from;             // MX
    Fp8ScaleParameters scale;
    const float* given;  // float32 (1,): encode scale of FP8_TENSOR
    void* scales;
    u32* amax;      // FP8_TENSOR: float32 (1,), 0 before the launch; amax of the output
    float* encode;  // FP8_TENSOR: float32 (1,), receives the given scale
};

constexpr int QUANTIZED_TILE = 128;  // rows and columns of the output of a block of threads
constexpr int QUANTIZED_STEP = 32;   // columns of K in shared memory at a time
constexpr int QUANTIZED_THREADS = QUANTIZED_TILE / THREAD_TILE * (QUANTIZED_TILE / THREAD_TILE);
constexpr int HALF = QUANTIZED_TILE / 2;  // rows that fit into shared memory at a time
constexpr int CHUNK = 32;                 // columns that a thread quantizes
constexpr int CHUNKS = QUANTIZED_TILE / CHUNK;
static_assert(HALF * CHUNKS == QUANTIZED_THREADS, "a thread quantizes a chunk of each half");
static_assert(CHUNK == MX_BLOCK, "a chunk is a block of MX");

struct Quantizer : QuantizerParameters {
    u32 limit;  // magnitudes above it do not count for an amax
    u8* codes;
};

// Place of output (line, x) of a half in shared memory. Each chunk is rotated by its own number of columns, so that threads
// that read one element of different chunks have no bank conflict.
__device__ __forceinline__ int rotated_place(int line, int x) {
    const int chunk = x / CHUNK;
    return line * QUANTIZED_TILE + chunk * CHUNK + (x + line % (CHUNK / CHUNKS) * CHUNKS + chunk) % CHUNK;
}

// Writes the codes of `count` elements of a chunk, 8 bytes at a time: unrolled for every format, the code would be large.
template <class F>
__device__ __forceinline__ void write_codes(const float* staged, int line, int chunk, float factor, int count, u8* target) {
    constexpr int BYTES = 8, PER_BYTE = F::BITS == 4 ? 2 : 1, ELEMENTS = BYTES * PER_BYTE;
#pragma unroll 1
    for (int first = 0; first < count; first += ELEMENTS) {
        float v[ELEMENTS];
        for (int i = 0; i < ELEMENTS; ++i) v[i] = staged[rotated_place(line, chunk * CHUNK + first + i)] * factor;
        u8 bytes[BYTES];
        if constexpr (PER_BYTE == 2) {
            for (int j = 0; j < BYTES; ++j) bytes[j] = e2m1x2_from_float(v[2 * j], v[2 * j + 1]);
        } else {
            for (int j = 0; j < BYTES; j += 2) {
                const u16 pair = pair_from_float<F>(v[j], v[j + 1]);
                bytes[j] = static_cast<u8>(pair);
                bytes[j + 1] = static_cast<u8>(pair >> 8);
            }
        }
        const int left = count - first;
        u8* destination = target + first / PER_BYTE;
        if (left >= ELEMENTS) {
            store_bytes(bytes, destination);
        } else {
            for (int j = 0; j < left / PER_BYTE; ++j) destination[j] = bytes[j];
            // The nibble beyond the last column is code 0, also under a NaN factor.
            if (left % PER_BYTE != 0) destination[left / PER_BYTE] = bytes[left / PER_BYTE] & 0xFu;
        }
    }
}

// Amax of the scale block that contains a chunk.
__device__ __forceinline__ u32 block_amax(const u32 (&amaxes)[QUANTIZED_TILE][CHUNKS], ScaleBlock block, int line, int chunk) {
    if (block == ScaleBlock::MX_LINE) return amaxes[line][chunk];
    const int lines = block == ScaleBlock::MX_TILE ? MX_BLOCK : block == ScaleBlock::FP8_TILE ? QUANTIZED_TILE : 1;
    const int chunks = block == ScaleBlock::MX_TILE ? 1 : CHUNKS;
    const int first_line = line / lines * lines, first_chunk = chunk / chunks * chunks;
    u32 largest = 0;
    for (int l = first_line; l < first_line + lines; ++l) {
        for (int c = first_chunk; c < first_chunk + chunks; ++c) largest = amaxes[l][c] > largest ? amaxes[l][c] : largest;
    }
    return largest;
}

// A chunk of a line of the staged half: its place in the half, in the tile and in the output, and its number of elements.
struct Chunk {
    int line, chunk, line_of_tile;
    i64 y, x;
    int count;
};

// Writes the scale of a chunk's block, if this chunk is the first of its block; returns the factor of the chunk's elements.
template <class F>
__device__ __forceinline__ float make_scale(const Quantizer& to, u32 amax, const Chunk& at, i64 columns) {
    if (to.block <= ScaleBlock::MX_TILE) {  // MX
        const u8 scale = mx_scale<F>(__uint_as_float(amax), to.scale_order, static_cast<u32>(to.up_from));
        static_cast<u8*>(to.scales)[at.y * ((columns + MX_BLOCK - 1) / MX_BLOCK) + at.x / MX_BLOCK] = scale;
        return mx_element_factor(scale);
    }
    if (to.block == ScaleBlock::FP8_TENSOR) return *to.given;
    const float scale = fp8_scale(__uint_as_float(amax), to.scale);
    const i64 row = to.block == ScaleBlock::FP8_TILE ? at.y / QUANTIZED_TILE : at.y;
    if (at.chunk == 0 && (to.block == ScaleBlock::FP8_LINE || at.line_of_tile == 0)) {
        const i64 blocks = (columns + QUANTIZED_TILE - 1) / QUANTIZED_TILE;
        static_cast<float*>(to.scales)[row * blocks + at.x / QUANTIZED_TILE] = 1.0f / scale;
    }
    return scale;
}

template <class F>
__device__ __forceinline__ void quantize_chunk(const float* staged, const Chunk& at, const Quantizer& to, u32 amax, i64 columns) {
    constexpr int PER_BYTE = F::BITS == 4 ? 2 : 1;
    const float factor = make_scale<F>(to, amax, at, columns);
    u8* target = to.codes + at.y * ((columns + PER_BYTE - 1) / PER_BYTE) + at.x / PER_BYTE;
    write_codes<F>(staged, at.line, at.chunk, factor, at.count, target);
}

template <class Tiles>
__device__ NOINLINE_ON_CPU void quantize_tile(Tiles& shared, u32 (&amaxes)[QUANTIZED_TILE][CHUNKS],
                                              float (&acc)[THREAD_TILE][THREAD_TILE], int row, int column,
                                              const typename Tiles::Scaling& scaling, const Epilogue& epilogue,
                                              const Quantizer& to, i64 first_row, i64 first_column, i64 rows, i64 columns) {
    static_assert(sizeof(shared.values) == HALF * QUANTIZED_TILE * sizeof(float), "half a tile overwrites the operands");
    float* staged = &shared.values[0][0][0];
    const int thread = threadIdx.x;
    const int line = thread / CHUNKS, chunk = thread % CHUNKS;
    u32 tensor_amax = 0;
    for (int half = 0; half < 2; ++half) {  // amaxes; outputs replace the sums in the registers
        const bool own_half = row / HALF == half;
        if (own_half) {
#pragma unroll
            for (int i = 0; i < THREAD_TILE; ++i) {
#pragma unroll
                for (int j = 0; j < THREAD_TILE; ++j) staged[rotated_place(row % HALF + i, column + j)] = acc[i][j];
            }
        }
        __syncthreads();
        for (int element = thread; element < HALF * QUANTIZED_TILE; element += QUANTIZED_THREADS) {
            const int at = rotated_place(element / QUANTIZED_TILE, element % QUANTIZED_TILE);
            const i64 y = first_row + half * HALF + element / QUANTIZED_TILE, x = first_column + element % QUANTIZED_TILE;
            const bool inside = y < rows && x < columns;
            staged[at] = inside ? rounded_as(epilogue.out_type, output(scaling, epilogue, staged[at], y, x, columns)) : 0.0f;
        }
        __syncthreads();
        u32 amax = 0;
        for (int i = 0; i < CHUNK; ++i) update_amax(staged[rotated_place(line, chunk * CHUNK + i)], to.limit, amax);
        amaxes[half * HALF + line][chunk] = amax;
        tensor_amax = amax > tensor_amax ? amax : tensor_amax;
        if (own_half) {
#pragma unroll
            for (int i = 0; i < THREAD_TILE; ++i) {
#pragma unroll
                for (int j = 0; j < THREAD_TILE; ++j) acc[i][j] = staged[rotated_place(row % HALF + i, column + j)];
            }
        }
        __syncthreads();
    }
    if (to.block == ScaleBlock::FP8_TENSOR) {
        if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) {
            *to.encode = *to.given;
            *static_cast<float*>(to.scales) = 1.0f / *to.given;
        }
        atomicMax(to.amax, tensor_amax);
    }
    for (int half = 0; half < 2; ++half) {  // codes
        if (row / HALF == half) {
#pragma unroll
            for (int i = 0; i < THREAD_TILE; ++i) {
#pragma unroll
                for (int j = 0; j < THREAD_TILE; ++j) staged[rotated_place(row % HALF + i, column + j)] = acc[i][j];
            }
        }
        __syncthreads();
        const i64 x = first_column + chunk * CHUNK;
        const i64 count = columns - x < CHUNK ? columns - x : CHUNK;
        const int line_of_tile = half * HALF + line;
        const Chunk at = {line, chunk, line_of_tile, first_row + line_of_tile, x, static_cast<int>(count)};
        if (at.y < rows && count > 0) {
            const u32 amax = block_amax(amaxes, to.block, line_of_tile, chunk);
            switch (to.element) {
                case Element::E2M1: quantize_chunk<E2M1>(staged, at, to, amax, columns); break;
                case Element::E2M3: quantize_chunk<E2M3>(staged, at, to, amax, columns); break;
                case Element::E3M2: quantize_chunk<E3M2>(staged, at, to, amax, columns); break;
                case Element::E4M3: quantize_chunk<E4M3>(staged, at, to, amax, columns); break;
                case Element::E5M2: quantize_chunk<E5M2>(staged, at, to, amax, columns); break;
            }
        }
        __syncthreads();
    }
}

template <class Scaling>
__device__ __forceinline__ void multiply_quantized(const Scaling& scaling, const GemmParameters& p, const QuantizerParameters& quantizer) {
    __shared__ DecodedTiles<Scaling, QUANTIZED_TILE, QUANTIZED_STEP> shared;
    __shared__ u32 amaxes[QUANTIZED_TILE][CHUNKS];
    const int thread = threadIdx.x;
    const i64 first_row = static_cast<i64>(blockIdx.y) * QUANTIZED_TILE;
    const i64 first_column = static_cast<i64>(blockIdx.x) * QUANTIZED_TILE;
    const int row = thread / (QUANTIZED_TILE / THREAD_TILE) * THREAD_TILE;
    const int column = thread % (QUANTIZED_TILE / THREAD_TILE) * THREAD_TILE;
    const Operand a = {p.a, p.m}, b = {p.b, p.n};
    float acc[THREAD_TILE][THREAD_TILE] = {};
    accumulate(shared, a, b, p.k, first_row, first_column, row, column, acc);
    const Quantizer to = {quantizer, amax_limit(quantizer.propagate_nan), static_cast<u8*>(p.epilogue.out)};
    quantize_tile(shared, amaxes, acc, row, column, scaling, Epilogue{p.epilogue, 0, 0}, to, first_row, first_column,
                  a.rows, b.rows);
}

}  // namespace narrowgauge
