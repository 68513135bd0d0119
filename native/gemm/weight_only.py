"""Products of a plain matrix of 16 bits and a quantized one, by kernels/gemm/weight_only.cuh."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm import wgmma
from narrowgauge.native.gemm.operands import Fields, Product, epilogue_fields, operand_fields
from narrowgauge.native.gemm.paths import MANY, is_hopper
from narrowgauge.native.quantize.layout import linear_scales
from narrowgauge.native.runtime.arguments import blocks_for, check_operand, suffix, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32
from narrowgauge.spec.quantized import BatchedQuantized, Quantized

_PARAMETERS = KernelStruct("gemm/weight_only.cuh", "WeightOnlyParameters")
_PLAIN = KernelStruct("gemm/sm90/dequantize_tiles.cuh", "PlainParameters")
_MANY_ROWS = 128
"""Fewest rows of a for which b is dequantized to memory. On an H200, N = K = 8192, NVFP4: 16 rows take 22 µs, torch's
product of bfloat16 matrices 35 µs; 32 rows 42 and 36 µs; 128 rows 134 and 37 µs; 8192 rows 1.64 and 1.40 ms."""
_DTYPES = torch.bfloat16, torch.float16
_THREADS, _TOKENS = 512, 16
"""Of a block of tensor cores: threads, and rows of a."""
_SHARED_BYTES = {4: 230400, 8: 197120}
"""Warps of a team to sizeof(WeightOnlyShared). A block has 16 rows of b for each of these warps."""
_TILINGS = ((8, 2), (4, 1), (4, 2))
"""Warps of a team and slices of K, the best one first of those that occupy as many multiprocessors. On an H200 16 rows
of NVFP4 take, in µs, N = K = 8192: 22.0, 24.7 and 29.2; N = 2048, K = 7168: 18.0, 19.5 and 12.4; N = 4096, K = 14336:
33.8, 37.9 and 22.9. Four slices took 39 µs with N = K = 8192: 32 clusters of four blocks do not run at once."""
_COLUMNS, _LARGEST, _ALIGNMENT = 256, 2**20, 16
"""For tensor cores: divisor of K, the largest N and K, and divisor of addresses."""
_SMALLEST_GROUP = 32
"""Divisor of the columns of a scale of INT4 for tensor cores."""
Shape = tuple[int, int, int]
"""Products of a batch, M and N."""


def weight_only_gemm(a: torch.Tensor, b: Quantized | BatchedQuantized) -> torch.Tensor:
    """a @ w.T: a (M, K), bfloat16 or float16, not quantized, and the numbers w (N, K) of `b`. (M, N), of a's dtype.

    `b`: nvfp4, mxfp4, mxfp8-e4m3 (with bfloat16), FP8 of E4M3 with a scale for the tensor or for each row, or INT4 with
    scales of groups, also with zero points. Elements times block scales are rounded to the dtype of a, which is exact
    except at the ends of its range; scales of INT4 are rounded to it first. The amax of NVFP4, over 2688, and scales of
    FP8 multiply the float32 sum. A batch is a (B, M, K) and a `BatchedQuantized`, and gives (B, M, N). Raises TypeError
    or ValueError for tensors of another dtype or shape, NotImplementedError for other recipes, ToolchainError if
    kernels cannot be compiled.
    """
    return _product(a, b, None)


def weight_only_gemm_bias(a: torch.Tensor, b: Quantized | BatchedQuantized, bias: torch.Tensor) -> torch.Tensor:
    """`weight_only_gemm` and a bias (N,), or (B, N) of a batch, of a's dtype, added in float32 before the rounding."""
    return _product(a, b, bias)


def _product(a: torch.Tensor, b: Quantized | BatchedQuantized, bias: torch.Tensor | None) -> torch.Tensor:
    batch, (n, k) = b.shape[:-2], b.shape[-2:]
    check_tensor(a, "a", _DTYPES, (*batch, a.shape[-2] if a.dim() > 1 else 0, k))
    if bias is not None:
        check_tensor(bias, "bias", (a.dtype,), (*batch, n))
    matrices = b.matrices() if isinstance(b, BatchedQuantized) else [b]
    if not matrices:
        return a.new_empty(*batch, a.shape[-2], n)
    weight = _weight(matrices[0], a.dtype)
    a, bias = a.contiguous(), None if bias is None else bias.contiguous()
    m, device = a.shape[-2], a.device
    out = torch.empty(*batch, m, n, dtype=a.dtype, device=device)
    if out.numel() == 0:
        return out
    on_gpu = device.type == "cuda"
    if on_gpu and _takes_tiles(a, matrices[0], weight):
        of_batch = [tensor if batch else tensor.unsqueeze(0) for tensor in (a, out)]
        biases = [None] * len(matrices) if bias is None else bias.view(-1, n).unbind()
        for matrix, one, into, added in zip(matrices, *of_batch, biases, strict=True):
            _multiply_tiles(one, matrix, added, into)
        return out
    for matrix in matrices:
        check_operand(matrix, "b")
    scales = linear_scales(matrices[0]) if len(matrices) == 1 else torch.stack(list(map(linear_scales, matrices)))
    factor, divisor = _factor(b, weight, scales)
    given: dict[str, Value] = {
        "a": a, "codes": b.codes.contiguous(), "scales": None if weight == "FP8" else scales,
        "zeros": None if b.zeros is None else b.zeros.contiguous(), "factor": factor,
        "factor_of_rows": factor is not None and factor.numel() != len(matrices), "divisor": divisor, "bias": bias,
        "out": out, "group": min(b.recipe.block[1], max(1, k)), "weight": weight, "m": m, "n": n, "k": k,
    }  # fmt: skip
    kernel = _skinny if on_gpu and _takes(a, matrices[0], weight) else _portable
    flags = (f"-DWEIGHT=Weight::{weight}",) if on_gpu else ()
    kernel(_PARAMETERS(**given), (len(matrices), m, n), a.dtype, device, flags)
    return out


def _factor(
    b: Quantized | BatchedQuantized, weight: str, scales: torch.Tensor
) -> tuple[torch.Tensor | None, float]:  # fmt: skip
    """What multiplies the sums, of every matrix, and its divisor."""
    if weight == "FP8":
        return scales, 1.0
    return (b.amax.contiguous(), b.recipe.max_product) if b.amax is not None else (None, 1.0)


def _portable(
    parameters: StructValue, shape: Shape, dtype: torch.dtype, device: torch.device, flags: tuple[str, ...]
) -> None:
    batch, m, n = shape
    kernel, grid = f"gemm_weight_only_{suffix(dtype)}", (blocks_for(m * n, 256), 1, batch)
    launch("gemm_weight_only", kernel, grid, (256,), [parameters], device=device, extra_flags=flags)


def _skinny(
    parameters: StructValue, shape: Shape, dtype: torch.dtype, device: torch.device, flags: tuple[str, ...]
) -> None:
    source, (batch, m, n) = "gemm_skinny_weight_only", shape
    warps, slices = tiling(shape, device)
    grid = slices * blocks_for(m, _TOKENS), blocks_for(n, 16 * warps), batch
    shared = _SHARED_BYTES[warps] if device.type == "cuda" else 0
    launch(
        source, f"{source}_{suffix(dtype)}", grid, (_THREADS,), [parameters], device=device,
        extra_flags=(*flags, f"-DTEAM_WARPS={warps}", f"-DSLICES={slices}"), shared_bytes=shared, early=True,
    )  # fmt: skip


def tiling(shape: Shape, device: torch.device) -> tuple[int, int]:
    """Warps of a team, and slices of K, which need the clusters of Hopper: of `_TILINGS` the one whose last wave of
    blocks leaves the fewest multiprocessors idle."""
    batch, m, n = shape

    def occupied(tiling: tuple[int, int]) -> float:
        warps, slices = tiling
        blocks, at_once = (
            batch * slices * blocks_for(m, _TOKENS) * blocks_for(n, 16 * warps),
            wgmma.multiprocessors(device),
        )
        return blocks / (blocks_for(blocks, at_once) * at_once)

    fitting = [tiling for tiling in _TILINGS if tiling[1] == 1 or is_hopper(device)]
    return max(fitting, key=occupied)


def _multiply_tiles(a: torch.Tensor, b: Quantized, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The product by the kernels of dequantized tiles, `native.gemm.wgmma`."""
    (m, k), n, device = a.shape, b.shape[0], a.device
    fields, amax = operand_fields(b, "b")
    factor, divisor = (fields["scales"], 1.0) if b.recipe.scale is FP32 else (amax, b.recipe.max_product)
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
    product = Product(family, m, n, k, {}, fields, epilogue_fields((m, n), out.dtype, None, bias), alpha)
    arguments = [wgmma.parameters(product, out, tiles, matrix, None), product.alpha_parameters()]
    blocks = (wgmma.blocks_of(product, 1, device),)
    shared = wgmma.SHARED_BYTES
    launch(wgmma.SOURCE, "gemm_tensor", blocks, (wgmma.THREADS,), arguments, device=device, shared_bytes=shared)


def _takes_tiles(a: torch.Tensor, b: Quantized, weight: str) -> bool:
    """Whether the kernels of dequantized tiles multiply the operands. MX may exceed the range of tiles."""
    (m, k), n = a.shape[-2:], b.shape[0]
    fits = weight in ("NVFP4", "FP8") and a.dtype == torch.bfloat16 and k % wgmma.COLUMNS == 0
    return fits and m >= _MANY_ROWS and n * k >= MANY and is_hopper(a.device) and a.data_ptr() % _ALIGNMENT == 0


def _takes(a: torch.Tensor, b: Quantized, weight: str) -> bool:
    """Whether the kernel of tensor cores multiplies the operands."""
    n, k = b.shape
    if weight in ("INT4", "UINT4") and (b.recipe.block[1] % _SMALLEST_GROUP or _COLUMNS % b.recipe.block[1]):
        return False
    aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (a, b.codes, b.scales))
    return k % _COLUMNS == 0 and max(n, k) <= _LARGEST and aligned


def _weight(b: Quantized, dtype: torch.dtype) -> str:
    """The enumerator of Weight. Raises NotImplementedError for an operand that the kernels do not have."""
    recipe = b.recipe if b.recipe.integer else supported(b.recipe, block=(b.recipe.block,))
    if recipe.integer and recipe.element.bits == 4 and not recipe.spans_k:
        return recipe.element.name
    if not b.transposed and not recipe.integer:
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
        "weight_only_gemm multiplies nvfp4, mxfp4 and mxfp8-e4m3 (by bfloat16), E4M3 with a scale of the tensor or for "
        f"each row, and INT4 with scales of groups, stored along K; b is {b}, and a {str(dtype).removeprefix('torch.')}"
    )
