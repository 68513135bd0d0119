// gemm.cuh: GEMM of quantized operands of any format. A block of threads computes a tile of the output. Codes are decoded
// to float32 in shared memory, and each thread accumulates 8x8 outputs in registers.
//
// The order of summation is declared. The products of a scale block, which are exact, are added in order of K from 0 on.
// The sum of a block, times its scales, is added to the sum of the blocks before it. Every operation rounds to float32.
//
// A scaling policy defines the block and its scales:
//   WIDTH                            elements of K that share a scale; 0: all of K, and the epilogue applies the scales
//   Scale, FACTORS                   stored type of a scale, and the number of float32 factors that represent it
//   decode_scale(operand, scale, factors), operand 0 is a and 1 is b
//   add_block(acc, block_sum, a_factors, b_factors)
//   scale_output(sum, y, x)          a method: the sum of an output times the scales that all of K shares
//   CAST_BEFORE_C                    whether an output is cast before c is added
#pragma once

#include "common/mx.cuh"
#include "common/sections.cuh"
#include "gemm/epilogue.cuh"

namespace narrowgauge {

constexpr int THREAD_TILE = 8;  // rows and columns of the output of a thread

__device__ __forceinline__ float element_to_float(Element element, u32 code) {
    switch (element) {
        case Element::E2M1: return e2m1_to_float(code);
        case Element::E2M3: return narrow_to_float<E2M3>(code);
        case Element::E3M2: return narrow_to_float<E3M2>(code);
        case Element::E4M3: return narrow_to_float<E4M3>(code);
        default: return narrow_to_float<E5M2>(code);
    }
}

// Shared memory of a block of threads: STEP columns of K of TILE rows of both operands, decoded, and tables of decoded
// codes. Rows and columns beyond the end of an operand are zeros.
template <class ScalingPolicy, int TILE_ROWS, int STEP_COLUMNS>
struct DecodedTiles {
    using Scaling = ScalingPolicy;
    static constexpr int TILE = TILE_ROWS, STEP = STEP_COLUMNS, SIDE = TILE / THREAD_TILE, THREADS = SIDE * SIDE;
    static constexpr int WIDTH = Scaling::WIDTH;
    static constexpr bool LONG = WIDTH == 0 || WIDTH > STEP;  // a scale block is longer than a step
    static constexpr int BLOCKS = LONG ? 1 : STEP / WIDTH;
    static_assert(WIDTH == 0 || WIDTH % STEP == 0 || STEP % WIDTH == 0, "a step divides a scale block, or a block a step");

    float values[2][STEP][TILE];
    float scales[2][BLOCKS][Scaling::FACTORS][TILE];
    float tables[2][256];
};

// Decodes one row of an operand, from column `start` on, into row `slot` of its tile. `operand`: 0 of a, 1 of b.
template <class Tiles>
__device__ __forceinline__ void load_row(Tiles& shared, int operand, int slot, const Operand& from, i64 row, i64 k, i64 start) {
    using Scaling = typename Tiles::Scaling;
    const float* table = shared.tables[operand];
    float(*values)[Tiles::TILE] = shared.values[operand];
    const bool inside = row < from.rows;
    if (from.element == Element::E2M1) {
        const i64 width = (k + 1) / 2;
        const u8* source = from.codes + row * width + start / 2;
        const i64 bytes = inside ? width - start / 2 : 0;
        for (int j = 0; j < Tiles::STEP / 2; ++j) {
            const u32 pair = j < bytes ? source[j] : 0u;
            values[2 * j][slot] = table[pair & 0xFu];
            values[2 * j + 1][slot] = table[pair >> 4];
        }
    } else {
        const bool transposed = (from.layout & CODES_TRANSPOSED) != 0;
        const i64 stride = transposed ? from.rows : 1;
        const u8* source = from.codes + (transposed ? start * stride + row : row * k + start);
        const i64 count = inside ? k - start : 0;
        for (int j = 0; j < Tiles::STEP; ++j) values[j][slot] = table[j < count ? source[j * stride] : 0u];
    }
    if (from.scaled_elements() && inside) {
        const i64 blocks = (k + MX_BLOCK - 1) / MX_BLOCK;
        const bool across = (from.layout & SCALES_TRANSPOSED) != 0;
        const u8* const scales = static_cast<const u8*>(from.scales) + row * (across ? 1 : blocks);
        for (i64 j = 0; j < Tiles::STEP && start + j < k; ++j) {
            values[j][slot] *= e8m0_to_float(scales[(start + j) / MX_BLOCK * (across ? from.rows : 1)]);
        }
    }
    if constexpr (Tiles::WIDTH != 0) {
        const i64 blocks = from.scaled_elements() ? 0 : (k + Tiles::WIDTH - 1) / Tiles::WIDTH;
        const int rows_per_scale = from.rows_per_scale();
        const bool transposed = (from.layout & SCALES_TRANSPOSED) != 0;
        const i64 block_stride = transposed ? (from.rows + rows_per_scale - 1) / rows_per_scale : 1;
        const i64 first = row / rows_per_scale * (transposed ? 1 : blocks);
        for (int j = 0; j < Tiles::BLOCKS; ++j) {
            const i64 block = start / Tiles::WIDTH + j;
            float factors[Scaling::FACTORS] = {};
            if (inside && block < blocks) {
                const auto* scales = static_cast<const typename Scaling::Scale*>(from.scales);
                Scaling::decode_scale(operand, scales[first + block * block_stride], factors);
            }
            for (float& factor : factors) factor = from.scaled_elements() ? 1.0f : factor;
            for (int part = 0; part < Scaling::FACTORS; ++part) shared.scales[operand][j][part][slot] = factors[part];
        }
    }
}

// On a CPU, every use of a thread-local variable looks up its address, unless the address is an argument of a function that
// is not inlined. On a GPU, sums stay in registers only without a call.
#ifdef __CUDA_ARCH__
#define NOINLINE_ON_CPU __forceinline__
#else
#define NOINLINE_ON_CPU __attribute__((noinline))
#endif

// Sums over K of the thread's outputs, from (row, column) of the tile on. `acc` is zero before the call.
template <class Tiles>
__device__ NOINLINE_ON_CPU void accumulate(Tiles& shared, const Operand& a, const Operand& b, i64 k, i64 first_row,
                                           i64 first_column, int row, int column,
                                           float (&acc)[THREAD_TILE][THREAD_TILE]) {
    using Scaling = typename Tiles::Scaling;
    constexpr int BLOCK_COLUMNS = Tiles::STEP / Tiles::BLOCKS;
    const int thread = threadIdx.x;
    for (int code = thread; code < 256; code += Tiles::THREADS) {
        shared.tables[0][code] = element_to_float(a.element, static_cast<u32>(code));
        shared.tables[1][code] = element_to_float(b.element, static_cast<u32>(code));
    }
    __syncthreads();
    const bool inside = first_row + row < a.rows && first_column + column < b.rows;  // else the sums are not used
    float block_sum[THREAD_TILE][THREAD_TILE] = {};  // a scale block may be longer than a step
    for (i64 start = 0; start < k; start += Tiles::STEP) {
        for (int slot = thread; slot < 2 * Tiles::TILE; slot += Tiles::THREADS) {
            const int operand = slot / Tiles::TILE, place = slot % Tiles::TILE;
            const i64 first = operand == 0 ? first_row : first_column;
            load_row(shared, operand, place, operand == 0 ? a : b, first + place, k, start);
        }
        __syncthreads();
        for (int block = 0; inside && block < Tiles::BLOCKS; ++block) {
            for (int e = block * BLOCK_COLUMNS; e < (block + 1) * BLOCK_COLUMNS; ++e) {
                const float* left = shared.values[0][e] + row;
                const float* right = shared.values[1][e] + column;
#pragma unroll
                for (int i = 0; i < THREAD_TILE; ++i) {
#pragma unroll
                    for (int j = 0; j < THREAD_TILE; ++j) block_sum[i][j] += left[i] * right[j];
                }
            }
            if constexpr (Tiles::WIDTH != 0) {
                if (Tiles::LONG && (start + Tiles::STEP) % Tiles::WIDTH != 0 && start + Tiles::STEP < k) continue;
#pragma unroll
                for (int i = 0; i < THREAD_TILE; ++i) {
                    float a_factors[Scaling::FACTORS];
                    for (int part = 0; part < Scaling::FACTORS; ++part) {
                        a_factors[part] = shared.scales[0][block][part][row + i];
                    }
#pragma unroll
                    for (int j = 0; j < THREAD_TILE; ++j) {
                        float b_factors[Scaling::FACTORS];
                        for (int part = 0; part < Scaling::FACTORS; ++part) {
                            b_factors[part] = shared.scales[1][block][part][column + j];
                        }
                        acc[i][j] = Scaling::add_block(acc[i][j], block_sum[i][j], a_factors, b_factors);
                        block_sum[i][j] = 0.0f;
                    }
                }
            }
        }
        __syncthreads();
    }
    if constexpr (Tiles::WIDTH == 0) {
#pragma unroll
        for (int i = 0; i < THREAD_TILE; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_TILE; ++j) acc[i][j] = block_sum[i][j];
        }
    }
}

constexpr int TILE = 64;  // rows and columns of the output of a block of threads
constexpr int STEP = 64;  // columns of K in shared memory at a time
constexpr int THREADS = TILE / THREAD_TILE * (TILE / THREAD_TILE);

// a @ b.T: an output tile for this block of threads, in the row `tile_row` of tiles. Grid.x is ceil(N/64).
template <class Scaling>
__device__ __forceinline__ void multiply(const Scaling& scaling, const Operand& a, const Operand& b, i64 k,
                                         const Epilogue& epilogue, i64 tile_row) {
    __shared__ DecodedTiles<Scaling, TILE, STEP> shared;
    const int thread = threadIdx.x;
    const i64 first_row = tile_row * TILE;
    const i64 first_column = static_cast<i64>(blockIdx.x) * TILE;
    const int row = thread / (TILE / THREAD_TILE) * THREAD_TILE, column = thread % (TILE / THREAD_TILE) * THREAD_TILE;
    float acc[THREAD_TILE][THREAD_TILE] = {};
    accumulate(shared, a, b, k, first_row, first_column, row, column, acc);

    // Sums go through shared memory, so that neighbouring threads write neighbouring outputs. The loop over outputs keeps
    // the code small: unrolled over acc, with every type of output, ptxas took two minutes.
    static_assert(STEP == TILE, "the sums of a tile overwrite the values of a");
    float(*sums)[TILE] = shared.values[0];
#pragma unroll
    for (int i = 0; i < THREAD_TILE; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_TILE; ++j) sums[row + i][column + j] = acc[i][j];
    }
    __syncthreads();
    for (int element = thread; element < TILE * TILE; element += THREADS) {
        const i64 y = first_row + element / TILE, x = first_column + element % TILE;
        if (y >= a.rows || x >= b.rows) continue;
        const float value = output(scaling, epilogue, sums[element / TILE][element % TILE], y, x, b.rows);
        store_as(epilogue.out, epilogue.out_type, epilogue.first + y * b.rows + x, value);
    }
}

template <class Scaling>
__device__ __forceinline__ void multiply(const Scaling& scaling, const GemmParameters& p, i64 tile_row = blockIdx.y) {
    multiply(scaling, Operand{p.a, p.m}, Operand{p.b, p.n}, p.k, Epilogue{p.epilogue, 0, 0}, tile_row);
}

// Replaces all of `a` by section blockIdx.z, and returns the section's first row. With given starts each row has its scales.
template <class Scaling>
__device__ __forceinline__ i64 select_section(Operand& a, const i64* sizes, const i64* starts, i64 k) {
    const int number = static_cast<int>(blockIdx.z), rows_per_scale = a.rows_per_scale();
    const Sections sections = {sizes, number + 1, a.rows, starts};
    Section section = section_after(sections, 0, 0);
    i64 scale_row = 0;
    for (int s = 1; s <= number; ++s) {
        scale_row += (section.count + rows_per_scale - 1) / rows_per_scale;
        section = section_after(sections, s, section.start + section.count);
    }
    if (rows_per_scale == 1) scale_row = section.start;
    a.codes += section.start * (a.element == Element::E2M1 ? (k + 1) / 2 : k);
    if constexpr (Scaling::WIDTH != 0) {
        a.scales = static_cast<const typename Scaling::Scale*>(a.scales) + scale_row * ((k + Scaling::WIDTH - 1) / Scaling::WIDTH);
    }
    a.rows = section.count;
    return section.start;
}

// `starts`: (sections,) first rows, or null if sections lie one behind another. The section blockIdx.z of a, times its own matrix. It may have fewer rows of tiles.
template <class Scaling>
__device__ __forceinline__ void multiply_section(const Scaling& scaling, const GroupedGemmParameters& p, const i64* starts,
                                                 i64 tile_row = blockIdx.y) {
    const int section = static_cast<int>(blockIdx.z);
    Operand a = {p.a, p.m};
    const i64 start = select_section<Scaling>(a, p.sizes, starts, p.k);
    if (tile_row * TILE >= a.rows) return;
    const Operand b = {{p.b.codes[section], p.b.scales[section], p.b.element, static_cast<int>(p.b.layouts[section])}, p.n};
    multiply(scaling, a, b, p.k, Epilogue{p.epilogue, start * p.n, section * p.n}, tile_row);
}

}  // namespace narrowgauge
