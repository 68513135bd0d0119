"""Products of a plain matrix of 16 bits and a quantized one, by kernels/gemm/weight_only.cuh."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

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


@dataclass(frozen=True)
class Tiling:
    """Work of a block of tensor cores."""

    team_warps: int
    """Warps of a team, each with the same part of K."""
    strips: int
    """16 rows of b each, of a warp."""
    slices: int
    """Slices of K, which need the clusters of Hopper."""
    rows_of_a: int

    @property
    def rows_of_b(self) -> int:
        return 16 * self.strips * self.team_warps

    @property
    def shared_bytes(self) -> int:
        """sizeof(WeightOnlyShared): two runs of 256 columns of a, and their scales of b, for each team."""
        return 32 // self.team_warps * (self.rows_of_a * 512 + self.rows_of_b * 16)

    def for_rows(self, m: int) -> Tiling:
        """The same tiling with no more rows of a than M rows need: 8, 16, 32 or 64."""
        return replace(
            self, rows_of_a=next((rows for rows in (8, 16, 32) if m <= rows < self.rows_of_a), self.rows_of_a)
        )

    def macros(self) -> tuple[str, ...]:
        names = "TEAM_WARPS", "STRIPS", "SLICES", "ROWS_OF_A"
        return tuple(f"-D{name}={value}" for name, value in zip(names, astuple(self), strict=True))


_PARAMETERS = KernelStruct("gemm/weight_only.cuh", "WeightOnlyParameters")
_PLAIN = KernelStruct("gemm/sm90/dequantize_tiles.cuh", "PlainParameters")
_MANY_ROWS = 128
"""Fewest rows of a for which b is dequantized to memory. On an H200, N = K = 8192, NVFP4: 16 rows take 20 µs, torch's
product of bfloat16 matrices 36 µs; 32 rows 29 and 36 µs; 64 rows 48 and 39 µs."""
_DTYPES = torch.bfloat16, torch.float16
_THREADS = 512
"""Of a block of tensor cores."""
_SHARED_BYTES = 99 * 1024
"""Most shared memory of a block on GPUs before Hopper."""
_NIBBLES = "NVFP4", "MXFP4", "INT4", "UINT4"
"""Weights with codes of 4 bits."""
_TILINGS: dict[bool, tuple[Tiling, ...]] = {
    True: (Tiling(4, 2, 2, 16), Tiling(4, 2, 1, 16), Tiling(8, 1, 2, 64), Tiling(4, 1, 1, 32), Tiling(4, 1, 2, 32)),
    False: (Tiling(8, 1, 2, 32), Tiling(8, 1, 1, 32), Tiling(4, 1, 1, 32), Tiling(4, 1, 2, 32)),
}
"""Tilings by whether codes have 4 bits. Of equal times the first tiling is chosen."""
_START, _DECODE, _MULTIPLY = 4.4, 0.6, 0.53
"""µs on an H200: of a block without its runs, to decode 128 rows of b of a run of 256 columns, and to multiply them by
16 rows of a."""
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
    kernel(_PARAMETERS(**given), (len(matrices), m, n), k, weight, a.dtype, device)
    return out


def _factor(
    b: Quantized | BatchedQuantized, weight: str, scales: torch.Tensor
) -> tuple[torch.Tensor | None, float]:  # fmt: skip
    """What multiplies the sums, of every matrix, and its divisor."""
    if weight == "FP8":
        return scales, 1.0
    return (b.amax.contiguous(), b.recipe.max_product) if b.amax is not None else (None, 1.0)


def _portable(
    parameters: StructValue, shape: Shape, k: int, weight: str, dtype: torch.dtype, device: torch.device
) -> None:
    batch, m, n = shape
    kernel, grid = f"gemm_weight_only_{suffix(dtype)}", (blocks_for(m * n, 256), 1, batch)
    flags = _flags(weight, device)
    launch("gemm_weight_only", kernel, grid, (256,), [parameters], device=device, extra_flags=flags)


def _skinny(
    parameters: StructValue, shape: Shape, k: int, weight: str, dtype: torch.dtype, device: torch.device
) -> None:
    source, (batch, m, n) = "gemm_skinny_weight_only", shape
    tiles = tiling(shape, k, weight, device)
    grid = tiles.slices * blocks_for(m, tiles.rows_of_a), blocks_for(n, tiles.rows_of_b), batch
    flags = *_flags(weight, device), *tiles.macros()
    shared = tiles.shared_bytes if device.type == "cuda" else 0
    launch(
        source, f"{source}_{suffix(dtype)}", grid, (_THREADS,), [parameters], device=device, extra_flags=flags,
        shared_bytes=shared, early=True,
    )  # fmt: skip


def _flags(weight: str, device: torch.device) -> tuple[str, ...]:
    return (f"-DWEIGHT=Weight::{weight}",) if device.type == "cuda" else ()


def tiling(shape: Shape, k: int, weight: str, device: torch.device) -> Tiling:
    """The tiling with the shortest time, all multiprocessors together."""
    batch, m, n = shape
    at_once = wgmma.multiprocessors(device)

    def time(tiling: Tiling) -> float:
        blocks = batch * tiling.slices * blocks_for(m, tiling.rows_of_a) * blocks_for(n, tiling.rows_of_b)
        runs = tiling.rows_of_b / 128 * k / _COLUMNS / tiling.slices
        return blocks_for(blocks, at_once) * (_START + runs * (_DECODE + _MULTIPLY * tiling.rows_of_a / 16))

    tilings = [tiling.for_rows(m) for tiling in _TILINGS[weight in _NIBBLES]]
    if not is_hopper(device):
        tilings = [tiling for tiling in tilings if tiling.slices == 1 and tiling.shared_bytes <= _SHARED_BYTES]
    return min(tilings, key=time)


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
