// gemm.cuh: the GEMM of quantized operands, whatever their format. A block of threads makes a tile of the output; codes
// become float32 numbers in shared memory, and each thread sums 8x8 outputs in registers.
//
// The order of summation is declared: the products of a block, which are exact, are added in order of K from 0 on; the
// sum of a block, times its scales, is added to that of the blocks before it. Every operation rounds to float32.
//
// A rule says what a block is and what becomes of its sum:
//   WIDTH         elements of K that share scales; 0: all of them, whose scales are the output's business
//   Scale, PARTS  the stored type of a scale, and the float32 numbers that it becomes in shared memory
//   decode(side, scale, parts), add(acc, inner, a_parts, b_parts)
//   scaled(sum, y, x), a method: the sum of an output times what all of K shares
//   CAST_FIRST    whether an output is cast before c is added to it
#pragma once

#include "common/sections.cuh"

constexpr int EACH = 8;  // rows and columns of the output that a thread makes

enum class Element { E2M1, E2M3, E3M2, E4M3, E5M2 };

// How an operand lies in memory: (k, rows) in place of (rows, k); a row of scales for each 128 of its rows.
enum Layout { CODES_TRANSPOSED = 1, SCALES_TRANSPOSED = 2, SCALES_OF_128_ROWS = 4 };

struct Operand {
    const u8* codes;  // two a byte of E2M1, which is never transposed
    const void* scales;
    i64 rows;
    int element, layout;

    __device__ __forceinline__ int rows_of_a_scale() const { return (layout & SCALES_OF_128_ROWS) != 0 ? 128 : 1; }
};

// What becomes of a sum: what is added, the output and its type. Types are 0 float32, 1 bfloat16, 2 float16.
struct Epilogue {
    const void* c;
    const void* bias;
    void* out;
    int c_type, bias_type, out_type;
    i64 first;       // element of c and out where the product begins
    i64 first_bias;  // element of bias
};

__device__ __forceinline__ float load_as(const void* source, int type, i64 index) {
    if (type == 0) return to_float(static_cast<const float*>(source)[index]);
    if (type == 1) return to_float(static_cast<const bf16*>(source)[index]);
    return to_float(static_cast<const fp16*>(source)[index]);
}

__device__ __forceinline__ void store_as(void* target, int type, i64 index, float value) {
    if (type == 0) from_float(value, static_cast<float*>(target)[index]);
    if (type == 1) from_float(value, static_cast<bf16*>(target)[index]);
    if (type == 2) from_float(value, static_cast<fp16*>(target)[index]);
}

template <class T>
__device__ __forceinline__ float rounded_to(float value) {
    T narrow;
    from_float(value, narrow);
    return to_float(narrow);
}

__device__ __forceinline__ float rounded_as(int type, float value) {
    return type == 0 ? value : type == 1 ? rounded_to<bf16>(value) : rounded_to<fp16>(value);
}

__device__ __forceinline__ float element_to_float(int element, u32 code) {
    switch (static_cast<Element>(element)) {
        case Element::E2M1: return e2m1_to_float(code);
        case Element::E2M3: return narrow_to_float<E2M3>(code);
        case Element::E3M2: return narrow_to_float<E3M2>(code);
        case Element::E4M3: return narrow_to_float<E4M3>(code);
        default: return narrow_to_float<E5M2>(code);
    }
}

// What a block of threads shares: STEP columns of K of TILE rows of either operand, decoded, and the value of each code.
// Behind the last row and column are zeros.
template <class R, int TILE_ROWS, int STEP_COLUMNS>
struct Staging {
    using Rule = R;
    static constexpr int TILE = TILE_ROWS, STEP = STEP_COLUMNS, SIDE = TILE / EACH, THREADS = SIDE * SIDE;
    static constexpr int WIDTH = Rule::WIDTH;
    static constexpr bool LONG = WIDTH == 0 || WIDTH > STEP;  // a block is longer than a step
    static constexpr int BLOCKS = LONG ? 1 : STEP / WIDTH;
    static_assert(WIDTH == 0 || WIDTH % STEP == 0 || STEP % WIDTH == 0, "either has whole ones of the other");

    float values[2][STEP][TILE];
    float scales[2][BLOCKS][Rule::PARTS][TILE];
    float tables[2][256];
};

// One row of an operand, from column `start` on, into column `slot` of the tile.
template <class S>
__device__ __forceinline__ void load_row(S& shared, int side, int slot, const Operand& from, i64 row, i64 k, i64 start) {
    using Rule = typename S::Rule;
    const float* table = shared.tables[side];
    float(*values)[S::TILE] = shared.values[side];
    const bool inside = row < from.rows;
    if (static_cast<Element>(from.element) == Element::E2M1) {
        const i64 width = (k + 1) / 2;
        const u8* source = from.codes + row * width + start / 2;
        const i64 bytes = inside ? width - start / 2 : 0;
        for (int j = 0; j < S::STEP / 2; ++j) {
            const u32 pair = j < bytes ? source[j] : 0u;
            values[2 * j][slot] = table[pair & 0xFu];
            values[2 * j + 1][slot] = table[pair >> 4];
        }
    } else {
        const bool transposed = (from.layout & CODES_TRANSPOSED) != 0;
        const i64 stride = transposed ? from.rows : 1;
        const u8* source = from.codes + (transposed ? start * stride + row : row * k + start);
        const i64 count = inside ? k - start : 0;
        for (int j = 0; j < S::STEP; ++j) values[j][slot] = table[j < count ? source[j * stride] : 0u];
    }
    if constexpr (S::WIDTH != 0) {
        const i64 blocks = (k + S::WIDTH - 1) / S::WIDTH;
        const int each = from.rows_of_a_scale();
        const bool transposed = (from.layout & SCALES_TRANSPOSED) != 0;
        const i64 block_stride = transposed ? (from.rows + each - 1) / each : 1;
        const i64 first = row / each * (transposed ? 1 : blocks);
        for (int j = 0; j < S::BLOCKS; ++j) {
            const i64 block = start / S::WIDTH + j;
            float parts[Rule::PARTS] = {};
            if (inside && block < blocks) {
                Rule::decode(side, static_cast<const typename Rule::Scale*>(from.scales)[first + block * block_stride], parts);
            }
            for (int part = 0; part < Rule::PARTS; ++part) shared.scales[side][j][part][slot] = parts[part];
        }
    }
}

// A CPU looks the address of a thread-local variable up at each use, unless it comes from a caller; a GPU keeps sums in
// registers only where there is no call.
#ifdef __CUDA_ARCH__
#define GIVEN_ITS_ADDRESS __forceinline__
#else
#define GIVEN_ITS_ADDRESS __attribute__((noinline))
#endif

// The sums of the thread's outputs, those from (row, column) of the tile on; `acc` holds zeros.
template <class S>
__device__ GIVEN_ITS_ADDRESS void accumulate(S& shared, const Operand& a, const Operand& b, i64 k, i64 first_row,
                                             i64 first_column, int row, int column, float (&acc)[EACH][EACH]) {
    using Rule = typename S::Rule;
    constexpr int CHUNK = S::STEP / S::BLOCKS;
    const int thread = threadIdx.x;
    for (int code = thread; code < 256; code += S::THREADS) {
        shared.tables[0][code] = element_to_float(a.element, static_cast<u32>(code));
        shared.tables[1][code] = element_to_float(b.element, static_cast<u32>(code));
    }
    __syncthreads();
    const bool inside = first_row + row < a.rows && first_column + column < b.rows;  // else nobody asks for the sums
    float inner[EACH][EACH] = {};  // of a block, which may be longer than a step
    for (i64 start = 0; start < k; start += S::STEP) {
        for (int slot = thread; slot < 2 * S::TILE; slot += S::THREADS) {
            const int side = slot / S::TILE, place = slot % S::TILE;
            load_row(shared, side, place, side == 0 ? a : b, (side == 0 ? first_row : first_column) + place, k, start);
        }
        __syncthreads();
        for (int block = 0; inside && block < S::BLOCKS; ++block) {
            for (int e = block * CHUNK; e < (block + 1) * CHUNK; ++e) {
                const float* left = shared.values[0][e] + row;
                const float* right = shared.values[1][e] + column;
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
#pragma unroll
                    for (int j = 0; j < EACH; ++j) inner[i][j] += left[i] * right[j];
                }
            }
            if constexpr (S::WIDTH != 0) {
                if (S::LONG && (start + S::STEP) % S::WIDTH != 0 && start + S::STEP < k) continue;
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    float a_parts[Rule::PARTS];
                    for (int part = 0; part < Rule::PARTS; ++part) a_parts[part] = shared.scales[0][block][part][row + i];
#pragma unroll
                    for (int j = 0; j < EACH; ++j) {
                        float b_parts[Rule::PARTS];
                        for (int part = 0; part < Rule::PARTS; ++part) b_parts[part] = shared.scales[1][block][part][column + j];
                        acc[i][j] = Rule::add(acc[i][j], inner[i][j], a_parts, b_parts);
                        inner[i][j] = 0.0f;
                    }
                }
            }
        }
        __syncthreads();
    }
    if constexpr (S::WIDTH == 0) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) acc[i][j] = inner[i][j];
        }
    }
}

// Output (y, x) of its sum, still to be cast.
template <class Rule>
__device__ __forceinline__ float output(const Rule& rule, const Epilogue& epilogue, float sum, i64 y, i64 x, i64 columns) {
    float value = rule.scaled(sum, y, x);
    const bool add_c = epilogue.c != nullptr;
    const float c = add_c ? load_as(epilogue.c, epilogue.c_type, epilogue.first + y * columns + x) : 0.0f;
    if (!Rule::CAST_FIRST && add_c) value += c;
    if (epilogue.bias != nullptr) value += load_as(epilogue.bias, epilogue.bias_type, epilogue.first_bias + x);
    if (Rule::CAST_FIRST && add_c) value = rounded_as(epilogue.out_type, value) + c;
    return value;
}

constexpr int TILE = 64;  // rows and columns of the output a block of threads makes
constexpr int STEP = 64;  // columns of K in shared memory at a time
constexpr int THREADS = TILE / EACH * (TILE / EACH);

// a @ b.T: the tile of the output that this block of threads has, in a grid (ceil(N/64), ceil(M/64)).
template <class Rule>
__device__ __forceinline__ void multiply(const Rule& rule, const Operand& a, const Operand& b, i64 k, const Epilogue& epilogue) {
    __shared__ Staging<Rule, TILE, STEP> shared;
    const int thread = threadIdx.x;
    const i64 first_row = static_cast<i64>(blockIdx.y) * TILE;
    const i64 first_column = static_cast<i64>(blockIdx.x) * TILE;
    const int row = thread / (TILE / EACH) * EACH, column = thread % (TILE / EACH) * EACH;
    float acc[EACH][EACH] = {};
    accumulate(shared, a, b, k, first_row, first_column, row, column, acc);

    // Through shared memory, so that neighbours write neighbours; and small code: unrolled over acc, with every type of
    // output, it took ptxas two minutes.
    static_assert(STEP == TILE, "the sums of a tile take the place of a's values");
    float(*sums)[TILE] = shared.values[0];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[row + i][column + j] = acc[i][j];
    }
    __syncthreads();
    for (int element = thread; element < TILE * TILE; element += THREADS) {
        const i64 y = first_row + element / TILE, x = first_column + element % TILE;
        if (y >= a.rows || x >= b.rows) continue;
        const float value = output(rule, epilogue, sums[element / TILE][element % TILE], y, x, b.rows);
        store_as(epilogue.out, epilogue.out_type, epilogue.first + y * b.rows + x, value);
    }
}

// The section of `a` that this block of threads has, blockIdx.z, in place of all of it. Returns its first row; it has
// no rows where there are none for this block.
template <class Rule>
__device__ __forceinline__ i64 take_section(Operand& a, const i64* sizes, i64 k) {
    const int number = static_cast<int>(blockIdx.z), each = a.rows_of_a_scale();
    const Sections sections = {sizes, number + 1, a.rows};
    Section section = section_after(sections, 0, 0);
    i64 scale_row = 0;
    for (int s = 1; s <= number; ++s) {
        scale_row += (section.count + each - 1) / each;
        section = section_after(sections, s, section.start + section.count);
    }
    a.codes += section.start * (static_cast<Element>(a.element) == Element::E2M1 ? (k + 1) / 2 : k);
    if constexpr (Rule::WIDTH != 0) {
        a.scales = static_cast<const typename Rule::Scale*>(a.scales) + scale_row * ((k + Rule::WIDTH - 1) / Rule::WIDTH);
    }
    a.rows = section.count;
    return section.start;
}

// The parameters of a kernel, and what is made of them; grouped, b's are the addresses of a matrix for each section.
#define GEMM_PARAMETERS                                                                                                \
    const u8 *a_codes, const void *a_scales, int a_element, int a_layout, const u8 *b_codes, const void *b_scales,     \
        int b_element, int b_layout, const void *c, const void *bias, void *out, i64 m, i64 n, i64 k, int c_type,      \
        int bias_type, int out_type
#define GEMM_OPERANDS                                                                                                  \
    Operand{a_codes, a_scales, m, a_element, a_layout}, Operand{b_codes, b_scales, n, b_element, b_layout}, k,         \
        Epilogue { c, bias, out, c_type, bias_type, out_type, 0, 0 }

#define GROUPED_PARAMETERS                                                                                             \
    const i64 *sizes, const u8 *a_codes, const void *a_scales, int a_element, int a_layout, const u8 *const *b_codes,  \
        const void *const *b_scales, int b_element, const int *b_layouts, const void *c, const void *bias, void *out,  \
        i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type

#define MULTIPLY_SECTION(RULE)                                                                                         \
    const int section = static_cast<int>(blockIdx.z);                                                                  \
    Operand a = {a_codes, a_scales, m, a_element, a_layout};                                                           \
    const i64 start = take_section<decltype(RULE)>(a, sizes, k);                                                       \
    if (static_cast<i64>(blockIdx.y) * TILE >= a.rows) return;                                                         \
    multiply(RULE, a, Operand{b_codes[section], b_scales[section], n, b_element, b_layouts[section]}, k,               \
             Epilogue{c, bias, out, c_type, bias_type, out_type, start * n, section * n})
