// pack: an operand, its sections, or the matrices of sections as tiles of bfloat16 for gemm_tensor (pack.cuh).
// gemm_tensor: out = alpha * (a @ b.T) (+ c) (+ bias) of packed operands, on the tensor cores of a Hopper GPU.
// gemm_tensor_grouped: the same for each section of a, with a matrix of b of its own.
// gemm_mx_refused, gemm_grouped_mx_refused: the product of gemm_mx.cu, where packing has refused an operand.
//
//   codes, scales  NVFP4, MX, or FP8 with a scale of the tensor, in any layout (gemm.cuh); where there are layouts (G,),
//            the addresses of those of G matrices
//   packed   tiles of 128 rows by 64 columns (hopper.cuh), those of a row of tiles one after the other, zeros behind the
//            last row and column. A section begins with a row of tiles; the rows of tiles of b are an even number
//   refused  a word, 0 before the first launch; null where no operand can be refused
//   a_alpha  float32 (1,), (M,) where a_each, or null where there is no alpha; b_alpha likewise with N
//   c        (M, N) or null; bias (N,) or null
//   out      (M, N)
//   Types of c, bias and out: 0 float32, 1 bfloat16, 2 float16.
//   Launch: pack with 256 threads for every tile, grid ceil(K/64) * rows of tiles, of G matrices (…, G); gemm_tensor with
//   384 threads in any grid, best as many blocks as the GPU has multiprocessors, and sizeof(TensorShared) + 1024 bytes of
//   shared memory. Any M, N and K. Grouped: sizes (G,) rows of each section; a_alpha (G,), b_alpha the addresses of G
//   numbers, bias (G, N).
//   Numerics: a packed number is exact. Sums are those of Hopper's tensor cores, `aligned_sum` in hopper.cuh: 16 columns
//   at a time, in order of K from 0 on. Then alpha * sum, + c, + bias round to float32, and one cast ends it.

#include "gemm/portable/gemm_mx.cuh"
#include "gemm/sm90/gemm_tensor.cuh"

extern "C" __global__ void __launch_bounds__(PACKING_THREADS)
    pack(const void* codes, const void* scales, int element, int layout, const int* layouts, i64 rows, i64 k, int kind,
         const i64* sizes, int sections, u8* packed, u32* refused) {
    const i64 steps = (k + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles = gridDim.x / steps;
    const i64 tile = blockIdx.x / steps, step = blockIdx.x % steps, number = blockIdx.y;
    Operand from = {static_cast<const u8*>(codes), scales, rows, element, layout};
    if (layouts != nullptr) {
        from.codes = static_cast<const u8* const*>(codes)[number];
        from.scales = static_cast<const void* const*>(scales)[number];
        from.layout = layouts[number];
    }
    i64 first = tile * TILE_ROWS;
    if (sizes != nullptr) {
        TiledSection here({sizes, sections, rows});
        while (tile - here.before >= here.tiles()) {
            if (!here.next()) return;
        }
        from.rows = here.section.start + here.section.count;
        first = here.section.start + (tile - here.before) * TILE_ROWS;
    }
    u8* target = packed + ((number * tiles + tile) * steps + step) * TILE_BYTES;
    pack_as(kind, from, first, step * TILE_COLUMNS, k, target, refused);
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS)
    gemm_tensor(const u8* a, const u8* b, const u32* refused, const void* c, const void* bias, void* out, i64 m, i64 n,
                i64 k, int c_type, int bias_type, int out_type, const float* a_alpha, int a_each, const float* b_alpha,
                int b_each, int order, float divisor, float reciprocal) {
    if (refused != nullptr && *refused != 0) return;
    const Alpha alpha = {a_alpha, b_alpha, a_each, b_each, order, divisor, reciprocal};
    const Epilogue epilogue = {c, bias, out, c_type, bias_type, out_type, 0, 0};
    multiply_packed(a, b, {nullptr, 1, m}, n, k, [&](const OutputTile&) { return alpha; },
                    [&](const OutputTile&) { return epilogue; });
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS)
    gemm_tensor_grouped(const u8* a, const u8* b, const u32* refused, const i64* sizes, int sections, const void* c,
                        const void* bias, void* out, i64 m, i64 n, i64 k, int c_type, int bias_type, int out_type,
                        const float* a_alpha, const float* const* b_alpha, int order, float divisor, float reciprocal) {
    if (refused != nullptr && *refused != 0) return;
    multiply_packed(
        a, b, {sizes, sections, m}, n, k,
        [&](const OutputTile& tile) {
            if (a_alpha == nullptr) return Alpha{};
            return Alpha{a_alpha + tile.section, b_alpha[tile.section], 0, 0, order, divisor, reciprocal};
        },
        [&](const OutputTile& tile) {
            return Epilogue{c, bias, out, c_type, bias_type, out_type, tile.section_start * n, tile.section * n};
        });
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_mx_refused(const u32* refused, GEMM_PARAMETERS) {
    if (*refused != 0) multiply(Mx{}, GEMM_OPERANDS);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_grouped_mx_refused(const u32* refused, GROUPED_PARAMETERS) {
    if (*refused == 0) return;
    MULTIPLY_SECTION(Mx{});
}
