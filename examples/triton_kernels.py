"""Quantizers of NVFP4 and FP8 and a block-scaled GEMM in Triton as a backend, for GPUs without FP4 tensor cores.

In this folder: narrowgauge run --backend triton_kernels:Backend --device cuda -k "nvfp4/128x128/bf16"
Without a GPU: triton_interpreter.py.
Exact bytes need three things: `div_rn` (`/` is approximate), no FMA (enable_fp_fusion=False), and no fast-math.
"""

# ruff: noqa: PLR0124, RUF012 - a NaN differs from itself; a backend declares with a plain dict
import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; install it with: pip install 'narrowgauge[triton]'") from error

FLT_MAX = tl.constexpr(3.4028234663852886e38)
SIXTH = tl.constexpr(0.1666666716337204)  # 1/6, rounded to float32


@triton.jit
def amax_kernel(x, amax, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitudes = tl.abs(tl.load(x + at, mask=at < size, other=0).to(tl.float32))
    tl.atomic_max(amax, tl.max(tl.where(magnitudes == magnitudes, magnitudes, 0.0), 0))  # NaN is ignored


@triton.jit
def e4m3_code(d):  # d in [0, 448] or NaN, to the nearest code, ties to even
    bits = d.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (d + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # the ulp of 2^14 is 2^-9
    return tl.where(d == d, tl.where(d < 0.015625, subnormal, normal), 0x7F)


@triton.jit
def e4m3_value(code):  # code without a sign
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return tl.where(code == 0x7F, float("nan"), value)


@triton.jit
def e2m1_code(v):  # to the nearest code, ties to even; NaN has code 7
    a = tl.abs(v)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    sign = (v.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(v == v, code | sign, 7)


@triton.jit
def e2m1_value(code):
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126 << 23) | ((magnitude & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code < 8, value, -value)


@triton.jit
def quantize_kernel(x, amax, codes, scales, blocks, BLOCKS: tl.constexpr):
    largest = tl.load(amax)
    encode = tl.minimum(tl.math.div_rn(2688.0, largest), FLT_MAX)
    encode = tl.where((largest == 0.0) | (largest == float("inf")), 1.0, encode)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pair = byte[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    v = tl.load(x + pair, mask=(block < blocks)[:, None, None], other=0).to(tl.float32)

    magnitudes = tl.where(v == v, tl.abs(v), 0.0)
    wanted = tl.minimum(tl.max(tl.max(magnitudes, 2), 1) * (encode * SIXTH), 448.0)
    scale = e4m3_code(wanted)
    decode = e4m3_value(scale) * tl.math.div_rn(1.0, encode)
    factor = tl.where(decode == 0.0, FLT_MAX, tl.minimum(tl.math.div_rn(1.0, decode), FLT_MAX))
    low, high = tl.split(e2m1_code(v * factor[:, None, None]))
    tl.store(codes + byte, (low | (high << 4)).to(tl.uint8), mask=(block < blocks)[:, None])
    tl.store(scales + block, scale.to(tl.uint8), mask=block < blocks)


@triton.jit
def quantize_fp8_kernel(x, codes, scales, largest, columns, row_blocks, blocks, BLOCKS: tl.constexpr):
    """Blocks of 128 elements of a row. `largest`: the largest finite number of the dtype of x."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = (block % row_blocks * 128)[:, None] + tl.arange(0, 128)[None, :]
    at = (block // row_blocks * columns)[:, None] + column
    inside = (block < blocks)[:, None] & (column < columns)
    v = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    amax = tl.max(tl.where(v == v, tl.abs(v), 0.0), 1)
    scale = tl.minimum(tl.math.div_rn(448.0, amax), largest)
    scale = tl.where((amax == 0.0) | (amax == float("inf")), 1.0, scale)
    scaled = (v * scale[:, None]).to(tl.float8e4nv)
    tl.store(codes + at, scaled.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(scales + block, tl.math.div_rn(1.0, scale), mask=block < blocks)


@triton.jit
def decoded_tile(codes, scales, rows, M, K, k, BK: tl.constexpr, BM: tl.constexpr):
    """Rows of E2M1 times E4M3 from column k: at most six significant bits, exact in float16."""
    byte = k // 2 + tl.arange(0, BK // 2)
    inside = (rows < M)[:, None]
    packed = tl.load(codes + rows[:, None] * (K // 2) + byte[None, :], mask=inside & (byte < K // 2)[None, :], other=0)
    packed = packed.to(tl.int32)
    values = tl.reshape(e2m1_value(tl.join(packed & 15, packed >> 4)), (BM, BK // 16, 16))
    block = k // 16 + tl.arange(0, BK // 16)
    scale = tl.load(
        scales + rows[:, None] * (K // 16) + block[None, :], mask=inside & (block < K // 16)[None, :], other=0
    )
    scaled = values * e4m3_value(scale.to(tl.int32))[:, :, None]
    return tl.reshape(scaled, (BM, BK)).to(tl.float16)


@triton.jit
def gemm_kernel(
    a, a_scales, b, b_scales, alpha, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = decoded_tile(a, a_scales, rows, M, K, k, BK, BM)
        right = decoded_tile(b, b_scales, columns, N, K, k, BK, BN)
        total = tl.dot(left, tl.trans(right), total)
    total *= tl.load(alpha)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


class Backend:
    declares = {"accumulator": "truncating"}  # tensor cores cut off bits of a sum

    def quantize(self, x, recipe):
        if str(recipe) == "fp8-block-1x128-e4m3-fp32" and x.numel():
            return self._quantize_fp8(x.reshape(-1, x.shape[-1]).contiguous())
        if str(recipe) != "nvfp4" or x.shape[-1] % 16 or not x.numel():
            raise NotImplementedError(f"no kernel for {recipe}, shape {tuple(x.shape)}; K is a multiple of 16")
        x = x.reshape(-1, x.shape[-1]).contiguous()
        rows, columns = x.shape
        amax = x.new_zeros(1, dtype=torch.float32)
        codes = x.new_empty(rows, columns // 2, dtype=torch.uint8)
        scales = x.new_empty(rows, columns // 16, dtype=torch.uint8)
        amax_kernel[(triton.cdiv(x.numel(), 1024),)](x, amax, x.numel(), BLOCK=1024)
        blocks = scales.numel()
        grid = (triton.cdiv(blocks, 64),)
        quantize_kernel[grid](x, amax, codes, scales, blocks, BLOCKS=64, enable_fp_fusion=False)
        return codes, scales, amax

    def _quantize_fp8(self, x):
        (rows, columns), row_blocks = x.shape, triton.cdiv(x.shape[1], 128)
        codes = torch.empty_like(x, dtype=torch.uint8)
        scales = x.new_empty(rows, row_blocks, dtype=torch.float32)
        grid, largest = (triton.cdiv(scales.numel(), 32),), torch.finfo(x.dtype).max
        quantize_fp8_kernel[grid](
            x, codes, scales, largest, columns, row_blocks, scales.numel(), BLOCKS=32, enable_fp_fusion=False
        )
        return codes, scales

    def gemm(self, a, b, *, out_dtype=torch.bfloat16):
        (rows, depth), columns = a.shape, b.shape[0]
        if {str(a.recipe), str(b.recipe)} != {"nvfp4"} or a.swizzled or b.swizzled or depth % 16 or not rows * columns:
            raise NotImplementedError(f"no kernel for {a.recipe} × {b.recipe}, shapes {a.shape} and {b.shape}")
        divisor = torch.tensor(36.0 * 448 * 448, device=a.codes.device)
        alpha = a.required_amax * b.required_amax / divisor  # by a tensor: torch divides by a number inexactly on a GPU
        out = torch.empty(rows, columns, dtype=out_dtype, device=a.codes.device)
        operands = [part.contiguous() for part in (a.codes, a.scales, b.codes, b.scales)]
        grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 64))
        gemm_kernel[grid](*operands, alpha, out, rows, columns, depth, BM=64, BN=64, BK=64)
        return out
