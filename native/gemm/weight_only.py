"""Products of a plain matrix of 16 bits and a quantized one, by kernels/gemm/weight_only.cuh."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm import wgmma
from narrowgauge.native.gemm.operands import Fields, Product, epilogue_fields, operand_fields
from narrowgauge.native.gemm.paths import MANY, is_hopper
from narrowgauge.native.runtime.arguments import blocks_for, suffix, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32
from narrowgauge.spec.quantized import Quantized

_PARAMETERS = KernelStruct("gemm/weight_only.cuh", "WeightOnlyParameters")
_PLAIN = KernelStruct("gemm/sm90/dequantize_tiles.cuh", "PlainParameters")
_MANY_ROWS = 128
"""Fewest rows of a for which b is dequantized to memory. On an H200, N = K = 8192, NVFP4: 16 rows take 23 µs, torch's
product of bfloat16 matrices 33 µs; 32 rows 39 and 34 µs; 128 rows 134 and 37 µs; 8192 rows 1.64 and 1.40 ms."""
_DTYPES = torch.bfloat16, torch.float16
_THREADS, _TOKENS, _ROWS = 512, 16, 64
"""Of a block of tensor cores: threads, rows of a, rows of b."""
_SHARED_BYTES = 74240
"""sizeof(WeightOnlyShared)."""
_COLUMNS, _LARGEST, _ALIGNMENT = 256, 2**20, 16
"""For tensor cores: divisor of K, the largest N and K, and divisor of addresses."""


def weight_only_gemm(a: torch.Tensor, b: Quantized) -> torch.Tensor:
    """a @ w.T: a (M, K), bfloat16 or float16, not quantized, and the numbers w (N, K) of `b`. (M, N), of a's dtype.

    `b`: nvfp4, mxfp4, mxfp8-e4m3 (with bfloat16), or FP8 of E4M3 with a scale for the tensor or for each row. Elements
    times block scales are rounded to the dtype of a, which is exact except at the ends of its range. The amax of NVFP4,
    over 2688, and scales of FP8 multiply the float32 sum. Raises TypeError or ValueError for tensors of another dtype
    or shape, NotImplementedError for other recipes, ToolchainError if kernels cannot be compiled.
    """
    check_tensor(a, "a", _DTYPES, (a.shape[0] if a.dim() else 0, b.shape[1]))
    weight = _weight(b, a.dtype)
    a = a.contiguous()
    fields, amax = operand_fields(b, "b")
    (m, k), n, device = a.shape, b.shape[0], a.device
    out = torch.empty(m, n, dtype=a.dtype, device=device)
    if out.numel() == 0:
        return out
    scales = fields["scales"]
    factor, divisor = (scales, 1.0) if weight == "FP8" else (amax, b.recipe.max_product)
    given: dict[str, Value] = {
        "a": a, "codes": fields["codes"], "scales": None if weight == "FP8" else scales, "factor": factor,
        "factor_of_rows": isinstance(factor, torch.Tensor) and factor.numel() != 1, "divisor": divisor, "out": out,
        "weight": weight, "m": m, "n": n, "k": k,
    }  # fmt: skip
    on_gpu = device.type == "cuda"
    if on_gpu and _takes_tiles(a, b, weight):
        _multiply_tiles(a, b, fields, factor, divisor, out)
    else:
        kernel = _skinny if on_gpu and _takes(a, b) else _portable
        flags = (f"-DWEIGHT=Weight::{weight}",) if on_gpu else ()
        kernel(_PARAMETERS(**given), m, n, a.dtype, device, flags)
    return out


def _portable(
    parameters: StructValue, m: int, n: int, dtype: torch.dtype, device: torch.device, flags: tuple[str, ...]
) -> None:
    kernel, grid = f"gemm_weight_only_{suffix(dtype)}", (blocks_for(m * n, 256),)
    launch("gemm_weight_only", kernel, grid, (256,), [parameters], device=device, extra_flags=flags)


def _skinny(
    parameters: StructValue, m: int, n: int, dtype: torch.dtype, device: torch.device, flags: tuple[str, ...]
) -> None:
    source = "gemm_skinny_weight_only"
    grid, shared = (blocks_for(m, _TOKENS), blocks_for(n, _ROWS)), _SHARED_BYTES if device.type == "cuda" else 0
    launch(
        source, f"{source}_{suffix(dtype)}", grid, (_THREADS,), [parameters], device=device, extra_flags=flags,
        shared_bytes=shared, early=True,
    )  # fmt: skip


def _multiply_tiles(
    a: torch.Tensor, b: Quantized, fields: Fields, factor: Value, divisor: float, out: torch.Tensor
) -> None:
    """The product by the kernels of dequantized tiles, `native.gemm.wgmma`. `fields`: OperandParameters of b."""
    (m, k), n, device = a.shape, b.shape[0], a.device
    tiles = torch.empty(wgmma.packed_tiles(m, k) * wgmma.TILE_BYTES, dtype=torch.uint8, device=device)
    grid = (len(tiles) // wgmma.TILE_BYTES,)
    plain = _PLAIN(matrix=a, rows=m, k=k, tiles=tiles)
    launch(wgmma.SOURCE, "pack_plain", grid, (wgmma.DEQUANTIZE_THREADS,), [plain], device=device)
    family = "nvfp4" if b.recipe.scale is E4M3 else "fp8_tensor"
    matrix = wgmma.dequantize(family, fields, n, k, 2, None)
    alpha: Fields = {
        "a": torch.ones(1, device=device), "b": factor, "a_per_row": False, "order": "DIVIDE", "divisor": divisor,
        "b_per_row": isinstance(factor, torch.Tensor) and factor.numel() != 1, "reciprocal": 1 / divisor,
    }  # fmt: skip
    product = Product(family, m, n, k, {}, fields, epilogue_fields((m, n), out.dtype, None, None), alpha)
    arguments = [wgmma.parameters(product, out, tiles, matrix, None), product.alpha_parameters()]
    blocks = (wgmma.blocks_of(product, 1, device),)
    shared = wgmma.SHARED_BYTES
    launch(wgmma.SOURCE, "gemm_tensor", blocks, (wgmma.THREADS,), arguments, device=device, shared_bytes=shared)


def _takes_tiles(a: torch.Tensor, b: Quantized, weight: str) -> bool:
    """Whether the kernels of dequantized tiles multiply the operands. MX may exceed the range of tiles."""
    (m, k), n = a.shape, b.shape[0]
    fits = weight in ("NVFP4", "FP8") and a.dtype == torch.bfloat16 and k % wgmma.COLUMNS == 0
    return fits and m >= _MANY_ROWS and n * k >= MANY and is_hopper(a.device) and a.data_ptr() % _ALIGNMENT == 0


def _takes(a: torch.Tensor, b: Quantized) -> bool:
    """Whether the kernel of tensor cores multiplies the operands."""
    n, k = b.shape
    aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (a, b.codes, b.scales))
    return k % _COLUMNS == 0 and max(n, k) <= _LARGEST and aligned


def _weight(b: Quantized, dtype: torch.dtype) -> str:
    """The enumerator of Weight. Raises NotImplementedError for an operand that the kernels do not have."""
    recipe = supported(b.recipe, block=(b.recipe.block,))
    if not b.transposed:
        if recipe.scale is E4M3 and recipe.block[1] == 16:
            return "NVFP4"
        if (
            recipe.scale is E8M0
            and recipe.block[1] == 32
            and dtype == torch.bfloat16
            and recipe.element in (E2M1, E4M3)
        ):
            return "MXFP4" if recipe.element is E2M1 else "MXFP8"
        if recipe.scale is FP32 and recipe.element is E4M3 and recipe.spans_k:
            return "FP8"
    raise NotImplementedError(
        "weight_only_gemm multiplies nvfp4, mxfp4 and mxfp8-e4m3 (by bfloat16), and E4M3 with a scale of the tensor or "
        f"for each row, stored along K; b is {b}, and a {str(dtype).removeprefix('torch.')}"
    )
