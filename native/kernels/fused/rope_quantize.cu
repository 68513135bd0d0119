// rope_quantize: rotary embedding of the rows of x, a head each, quantized.
//
//   Parameters: struct RopeQuantizeParameters. Launch: `segments` thread blocks for each row, with a thread for every
//   ROW_CHUNKS * 16 elements, a multiple of 32, or ROW_LANES lanes for a row; on a CPU 32 threads. A recipe with a scale for a row has one segment.
//   With the macro PAIRED a thread has a chunk of the first half and the same chunk of the second, so each operand is read once.
//   Without it x, cos and sin are read twice.
//   The first `rotated` columns turn, and the others stay. The pairs are their halves: y = R(x1 * cos - x2 * sin) in the first half, R(x2 * cos + x1 * sin) in the second, with
//   R the rounding to the dtype of x, and one fused product. Scales and codes of y: quantize_row.cuh.

#include "fused/quantize_row.cuh"
#include "quantize/unit.cuh"

namespace narrowgauge {

#ifdef PAIRED
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

struct RopeQuantizeParameters {
    const void* x;  // (M, K), any strides
    i64 row_stride;
    i64 column_stride;
    int rotated;      // columns that turn: an even number, all of them with PAIRED
    const void* cos;  // (M, rotated / 2), contiguous
    const void* sin;
    ElementType angle_type;
    bool whole_halves;  // rotated / 2 is a multiple of 16, and rows of all operands are aligned as those of whole chunks
    QuantizeRowParameters result;
};

template <class T>
__device__ __forceinline__ void rope_quantize(const RopeQuantizeParameters& p) {
    __shared__ Words words;
    const int half = p.rotated / 2;
    Part part = part_of(p.result, variant_of(p.result).whole_chunks);
    if (HAS_PAIRS) {
        part.first /= 2;
        part.apart = half / CHUNK;
        if (part.first + part.thread >= part.apart) part.columns = 0;
    }
    const i64 row = part.row * p.row_stride, angles = part.row * half;
    Rounded<T> y[ROW_CHUNKS];
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        if (i >= part.steps) break;
        const RowChunk chunk = chunk_of(part, i);
        float own[CHUNK], other[CHUNK], cos[CHUNK], sin[CHUNK];
        load_as_floats<T>(p.x, type_of<T>, row, p.column_stride, chunk, own);
        if (HAS_PAIRS || p.whole_halves) {
            const bool first = HAS_PAIRS ? i == 0 : chunk.column < half;
            const int in_half = first ? chunk.column : HAS_PAIRS ? chunk_of(part, 0).column : chunk.column - half;
            const int count = HAS_PAIRS || chunk.column < p.rotated ? chunk.count : 0;
            const RowChunk angle = {in_half, count, chunk.whole};
            const RowChunk partner = {first ? chunk.column + half : in_half, count, chunk.whole};
            load_as_floats<T>(p.x, type_of<T>, row, p.column_stride, partner, other);
            load_as_floats<T>(p.cos, p.angle_type, angles, 1, angle, cos);
            load_as_floats<T>(p.sin, p.angle_type, angles, 1, angle, sin);
        } else {
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const int column = chunk.column + j, count = j < chunk.count && column < p.rotated ? 1 : 0;
                const int in_half = column < half ? column : column - half;
                const RowChunk angle = {in_half, count, false}, partner = {column < half ? column + half : in_half, count, false};
                float v[CHUNK];
                load_as_floats<T>(p.x, type_of<T>, row, p.column_stride, partner, v);
                other[j] = v[0];
                load_as_floats<T>(p.cos, p.angle_type, angles, 1, angle, v);
                cos[j] = v[0];
                load_as_floats<T>(p.sin, p.angle_type, angles, 1, angle, v);
                sin[j] = v[0];
            }
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const bool first = HAS_PAIRS ? i == 0 : chunk.column + j < half;
            const float signed_other = first ? -other[j] : other[j];
            const float turned = __fmaf_rn(own[j], cos[j], signed_other * sin[j]);
            own[j] = HAS_PAIRS || chunk.column + j < p.rotated ? turned : own[j];
        }
        round_chunk<RESULT_ORDER>(own, y[i]);
    }
    quantize_row(y, part, words, p.result, tensor_factors(p.result));
}

#define ROPE_QUANTIZE(TYPE, T)                                                           \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS)                            \
        rope_quantize_##TYPE(const __grid_constant__ RopeQuantizeParameters p) {         \
        rope_quantize<T>(p);                                                             \
    }

#if IN_UNIT(UNIT_FP32)
ROPE_QUANTIZE(fp32, float)
#endif
#if IN_UNIT(UNIT_BF16)
ROPE_QUANTIZE(bf16, bf16)
#endif
#if IN_UNIT(UNIT_FP16)
ROPE_QUANTIZE(fp16, fp16)
#endif

}  // namespace narrowgauge
