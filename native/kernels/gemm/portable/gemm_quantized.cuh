// gemm_quantized.cuh: a GEMM whose output is quantized by the kernel that makes it: MX, or FP8 with float32 scales of
// blocks, or with a scale that is given. A block of threads makes 128x128 of the output, whole blocks of all of these.
//
//   element  of the output: Element, gemm.cuh
//   kind     what shares a scale: 32 elements of a row (0) or a tile of 32x32 (1), E8M0; 128 elements of a row (2), a tile
//            of 128x128 (3) or the tensor, whose scale is given (4), float32
//   out      codes: (M, N) bytes, one an element; of E2M1 (M, ceil(N/2)), element 2j in the low nibble of byte j
//   scales   kinds 0 and 1 (M, ceil(N/32)) bytes, 2 (M, ceil(N/128)), 3 (ceil(M/128), ceil(N/128)), 4 (1,) float32
//   amax     kind 4: float32 (1,), 0 before the launch; the largest magnitude of the output. encode (1,): the given scale
//   Launch: 256 threads for every 128x128 tile of the output, grid (ceil(N/128), ceil(M/128)). Any M, N and K.
//   Numerics: an output is that of the GEMM, cast to `out_type`, and is quantized as the kernel for its format does it:
//   mx.cuh, fp8.cuh; nearest even, saturating. Everything is exact to the bit.
#pragma once

#include "common/fp8.cuh"
#include "gemm/portable/gemm.cuh"
#include "common/mx.cuh"

constexpr int WIDE = 128;                      // rows and columns of the output a block of threads makes
constexpr int NARROW_STEP = 32;                // columns of K in shared memory at a time
constexpr int WIDE_THREADS = WIDE / EACH * (WIDE / EACH);
constexpr int HALF = WIDE / 2;                 // rows that fit into shared memory at a time
constexpr int CHUNK = 32;                      // columns that a thread quantizes
constexpr int CHUNKS = WIDE / CHUNK;
static_assert(HALF * CHUNKS == WIDE_THREADS, "a thread quantizes a chunk of each half");
static_assert(CHUNK == BLOCK, "which is a block of MX");

enum Kind { MX_LINES = 0, MX_TILES = 1, FP8_LINES = 2, FP8_TILES = 3, FP8_TENSOR = 4 };

struct Quantizer {
    int element, kind;
    u32 highest;  // magnitude that counts
    int scale_order;
    u32 up_from;
    ScaleRule scale;
    const float* given;
    u8* codes;
    void* scales;
    u32* amax;
    float* encode;
};

// Where output (line, x) of a half lies: chunks are turned, each by another number, so that threads that read one each
// meet in no bank.
__device__ __forceinline__ int turned(int line, int x) {
    const int chunk = x / CHUNK;
    return line * WIDE + chunk * CHUNK + (x + line % (CHUNK / CHUNKS) * CHUNKS + chunk) % CHUNK;
}

// The codes of `count` elements of a chunk, a few at a time: unrolled for every format, it would be large code.
template <class F>
__device__ __forceinline__ void write_codes(const float* staged, int line, int chunk, float factor, int count, u8* target) {
    constexpr int BYTES = 8, PER_BYTE = F::BITS == 4 ? 2 : 1, SOME = BYTES * PER_BYTE;
#pragma unroll 1
    for (int first = 0; first < count; first += SOME) {
        float v[SOME];
        for (int i = 0; i < SOME; ++i) v[i] = staged[turned(line, chunk * CHUNK + first + i)] * factor;
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
        u8* here = target + first / PER_BYTE;
        if (left >= SOME) {
            store_bytes(bytes, here);
        } else {
            for (int j = 0; j < left / PER_BYTE; ++j) here[j] = bytes[j];
            // Behind the last column is code 0, under a NaN factor, too.
            if (left % PER_BYTE != 0) here[left / PER_BYTE] = bytes[left / PER_BYTE] & 0xFu;
        }
    }
}

// The largest magnitude of what shares a scale with a chunk.
__device__ __forceinline__ u32 shared_amax(const u32 (&amaxes)[WIDE][CHUNKS], int kind, int line, int chunk) {
    if (kind == MX_LINES) return amaxes[line][chunk];
    const int lines = kind == MX_TILES ? BLOCK : kind == FP8_TILES ? WIDE : 1, chunks = kind == MX_TILES ? 1 : CHUNKS;
    const int first_line = line / lines * lines, first_chunk = chunk / chunks * chunks;
    u32 most = 0;
    for (int l = first_line; l < first_line + lines; ++l) {
        for (int c = first_chunk; c < first_chunk + chunks; ++c) most = amaxes[l][c] > most ? amaxes[l][c] : most;
    }
    return most;
}

// A chunk of a line of a half that is staged: where it lies in the tile and in the output, and how many of its elements
// exist.
struct Chunk {
    int line, chunk, in_tile;
    i64 y, x;
    int count;
};

// Writes the scale of a chunk, as far as this chunk is the one that does; returns what its elements are multiplied by.
template <class F>
__device__ __forceinline__ float make_scale(const Quantizer& to, u32 amax, const Chunk& at, i64 columns) {
    if (to.kind <= MX_TILES) {
        const u8 scale = mx_scale<F>(__uint_as_float(amax), to.scale_order, to.up_from);
        static_cast<u8*>(to.scales)[at.y * ((columns + BLOCK - 1) / BLOCK) + at.x / BLOCK] = scale;
        return mx_element_factor(scale);
    }
    if (to.kind == FP8_TENSOR) return *to.given;
    const float scale = fp8_scale(__uint_as_float(amax), to.scale);
    const i64 row = to.kind == FP8_TILES ? at.y / WIDE : at.y;
    if (at.chunk == 0 && (to.kind == FP8_LINES || at.in_tile == 0)) {
        static_cast<float*>(to.scales)[row * ((columns + WIDE - 1) / WIDE) + at.x / WIDE] = 1.0f / scale;
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

template <class S>
__device__ GIVEN_ITS_ADDRESS void quantize_tile(S& shared, u32 (&amaxes)[WIDE][CHUNKS], float (&acc)[EACH][EACH], int row,
                                                int column, const typename S::Rule& rule, const Epilogue& epilogue,
                                                const Quantizer& to, i64 first_row, i64 first_column, i64 rows, i64 columns) {
    static_assert(sizeof(shared.values) == HALF * WIDE * sizeof(float), "half of a tile takes the place of the operands");
    float* staged = &shared.values[0][0][0];
    const int thread = threadIdx.x;
    const int line = thread / CHUNKS, chunk = thread % CHUNKS;
    u32 most_of_all = 0;
    for (int half = 0; half < 2; ++half) {  // outputs, back to where the sums were
        const bool mine = row / HALF == half;
        if (mine) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < EACH; ++j) staged[turned(row % HALF + i, column + j)] = acc[i][j];
            }
        }
        __syncthreads();
        for (int element = thread; element < HALF * WIDE; element += WIDE_THREADS) {
            const int at = turned(element / WIDE, element % WIDE);
            const i64 y = first_row + half * HALF + element / WIDE, x = first_column + element % WIDE;
            const bool inside = y < rows && x < columns;
            staged[at] = inside ? rounded_as(epilogue.out_type, output(rule, epilogue, staged[at], y, x, columns)) : 0.0f;
        }
        __syncthreads();
        u32 most = 0;
        for (int i = 0; i < CHUNK; ++i) take_magnitude(staged[turned(line, chunk * CHUNK + i)], to.highest, most);
        amaxes[half * HALF + line][chunk] = most;
        most_of_all = most > most_of_all ? most : most_of_all;
        if (mine) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < EACH; ++j) acc[i][j] = staged[turned(row % HALF + i, column + j)];
            }
        }
        __syncthreads();
    }
    if (to.kind == FP8_TENSOR) {
        if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) {
            *to.encode = *to.given;
            *static_cast<float*>(to.scales) = 1.0f / *to.given;
        }
        atomicMax(to.amax, most_of_all);
    }
    for (int half = 0; half < 2; ++half) {  // codes
        if (row / HALF == half) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < EACH; ++j) staged[turned(row % HALF + i, column + j)] = acc[i][j];
            }
        }
        __syncthreads();
        const i64 x = first_column + chunk * CHUNK;
        const i64 count = columns - x < CHUNK ? columns - x : CHUNK;
        const int in_tile = half * HALF + line;
        const Chunk at = {line, chunk, in_tile, first_row + in_tile, x, static_cast<int>(count)};
        if (at.y < rows && count > 0) {
            const u32 amax = shared_amax(amaxes, to.kind, in_tile, chunk);
            switch (static_cast<Element>(to.element)) {
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

template <class Rule>
__device__ __forceinline__ void multiply_quantized(const Rule& rule, const Operand& a, const Operand& b, i64 k,
                                                   const Epilogue& epilogue, const Quantizer& to) {
    __shared__ Staging<Rule, WIDE, NARROW_STEP> shared;
    __shared__ u32 amaxes[WIDE][CHUNKS];
    const int thread = threadIdx.x;
    const i64 first_row = static_cast<i64>(blockIdx.y) * WIDE;
    const i64 first_column = static_cast<i64>(blockIdx.x) * WIDE;
    const int row = thread / (WIDE / EACH) * EACH, column = thread % (WIDE / EACH) * EACH;
    float acc[EACH][EACH] = {};
    accumulate(shared, a, b, k, first_row, first_column, row, column, acc);
    quantize_tile(shared, amaxes, acc, row, column, rule, epilogue, to, first_row, first_column, a.rows, b.rows);
}

// What a kernel has beside GEMM_PARAMETERS, whose `out` are codes.
#define QUANTIZER_PARAMETERS                                                                                           \
    int element, int kind, int propagate_nan, int scale_order, int up_from, float largest_element,                     \
        float smallest_amax, float largest_scale, int power_of_two, const float *given, void *scales, u32 *amax,       \
        float *encode
#define QUANTIZER                                                                                                      \
    Quantizer {                                                                                                        \
        element, kind, highest_counted(propagate_nan), scale_order, static_cast<u32>(up_from),                         \
            ScaleRule{largest_element, smallest_amax, largest_scale, power_of_two}, given, static_cast<u8*>(out),      \
            scales, amax, encode                                                                                       \
    }
