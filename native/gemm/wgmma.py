"""GEMM by wgmma, on the tensor cores of a Hopper GPU: operands are dequantized to bfloat16 tiles, then multiplied.

The dequantizing kernel, `pack`, refuses an MX operand with numbers at the ends of bfloat16's range. Then a second
kernel computes the GEMM as the portable kernels do. The second kernel is always launched, and returns at once if no
operand was refused: the CPU need not wait for the GPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from narrowgauge.native.gemm.operands import Fields, Product
from narrowgauge.native.gemm.paths import tiles_of
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value

SOURCE = "gemm_wgmma"
_WGMMA = KernelStruct("gemm/sm90/gemm_wgmma.cuh", "WgmmaParameters")
_DEQUANTIZE = KernelStruct("gemm/sm90/dequantize_tiles.cuh", "DequantizeParameters")
ROWS, COLUMNS = 128, 64
"""Of a tile."""
TILE_BYTES = ROWS * COLUMNS * 2
DEQUANTIZE_THREADS, THREADS = 256, 384
SHARED_BYTES = 213 * 1024 + 1024
"""sizeof(WgmmaShared), plus its alignment to 1024 bytes."""
_PORTABLE_TILE = _PORTABLE_THREADS = 64
_PORTABLE_ROWS_OF_TILES = 8
"""Rows of thread blocks of the second kernel, of all matrices together, but at least one of each: a block takes
several tiles. 8192 rows by 8 matrices (8192, 8192) had 131 072 thread blocks, which took 80 µs on an H200 to return at
once."""
BLOCK_SCALES = {"nvfp4": "E4M3", "mx": "E8M0", "fp8_tensor": "NONE"}
"""Family to the enumerator of BlockScales."""


def multiply(product: Product, out: torch.Tensor, *, slices: int = 1) -> None:
    """Computes a GEMM or a grouped GEMM into `out` (M, N). The family is a key of `BLOCK_SCALES`. `slices` of K, of a
    GEMM that is not grouped: `paths.slices_of`."""
    device, family, sizes = out.device, product.family, product.sizes
    refused = torch.zeros(1, dtype=torch.int32, device=device) if family == "mx" else None
    grouped = sizes is not None
    matrices = 1 if sizes is None else len(sizes)
    a = dequantize(family, product.a, product.m, product.k, 1, refused, sizes=sizes, starts=product.starts)
    b = dequantize(family, product.b, product.n, product.k, 2, refused, matrices=matrices)
    arguments: list[Argument] = [
        parameters(product, out, a, b, refused, slices),
        product.alpha_parameters(),
    ]
    if grouped:
        arguments += [sizes, product.starts, np.int32(matrices)]
    launch(
        SOURCE, "gemm_tensor_grouped" if grouped else "gemm_tensor", (blocks_of(product, slices, device),), (THREADS,),
        arguments, device=device,
        shared_bytes=SHARED_BYTES if device.type == "cuda" else 0,  # the CPU build has a static array
        extra_flags=(f"-DSLICES={slices}",) if slices > 1 and device.type == "cuda" else (),
    )  # fmt: skip
    if refused is not None:
        multiply_refused(product, out, refused)


def parameters(
    product: Product,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    refused: torch.Tensor | None,
    slices: int = 1,
) -> StructValue:
    """WgmmaParameters of packed tiles of both operands."""
    return _WGMMA(a=a, b=b, refused=refused, **fields_of(product, out, slices, COLUMNS))


def multiply_refused(product: Product, out: torch.Tensor, refused: torch.Tensor) -> None:
    """Computes an MX product into `out` (M, N) as the portable kernels do, if a flag of `refused` (flags,) is set. The
    kernel waits for the kernel before."""
    matrices = 1 if product.sizes is None else len(product.sizes)
    rows_of_tiles = min(_ceil_div(product.m, _PORTABLE_TILE), max(1, _PORTABLE_ROWS_OF_TILES // matrices))
    grid = (_ceil_div(product.n, _PORTABLE_TILE), rows_of_tiles, matrices)
    kernel = "gemm_mx_refused" if product.sizes is None else "gemm_grouped_mx_refused"
    starts: list[Argument] = [] if product.sizes is None else [product.starts]
    arguments: list[Argument] = [product.parameters(out), *starts, refused, np.int32(len(refused))]
    launch(SOURCE, kernel, grid, (_PORTABLE_THREADS,), arguments, device=out.device, early=True)


def refuses(operand: Fields, rows: int, k: int) -> bool:
    """Whether an MX operand (rows, K) is refused. Waits for its device. `operand`: OperandParameters."""
    refused = torch.zeros(1, dtype=torch.int32, device=_device(operand))
    dequantize("mx", operand, rows, k, 1, refused)
    return bool(refused)


def packed_tiles(rows: int, k: int, multiple: int = 1, sections: int = 1) -> int:
    """Most tiles of an operand (rows, K), with a multiple of `multiple` rows of tiles."""
    # A section begins with a new row of tiles, and the last row of tiles of a section may be short.
    return (multiple * _ceil_div(rows, multiple * ROWS) + sections - 1) * _ceil_div(k, COLUMNS)


def dequantize(
    family: str,
    operand: Fields,
    rows: int,
    k: int,
    multiple: int,
    refused: torch.Tensor | None,
    *,
    sizes: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    matrices: int = 1,
    early_kernel: tuple[str, str] | None = None,
    most_blocks: int | None = None,
) -> torch.Tensor:
    """bfloat16 tiles of an operand (rows, K), uint8, with a multiple of `multiple` rows of tiles.

    `operand`: OperandParameters, of all sections if `sizes` is given, `starts` as in Product; or MatricesParameters of
    `matrices` matrices.
    `early_kernel`: source and name of a kernel with the parameters of `pack`, launched `early` in its place, with
    `most_blocks` blocks at most.
    """
    sections = 1 if sizes is None else len(sizes)
    tiles = packed_tiles(rows, k, multiple, sections)
    device = _device(operand)
    packed = torch.empty(matrices * tiles * TILE_BYTES, dtype=torch.uint8, device=device)
    if tiles:
        layouts = operand.get("layouts")
        one = {"codes": operand["codes"], "scales": operand["scales"], "element": operand["element"]}
        arguments = _DEQUANTIZE(
            operand={**one, "layout": operand.get("layout", 0)}, layouts=layouts, rows=rows, k=k,
            block_scales=BLOCK_SCALES[family], sizes=sizes, starts=starts, sections=sections, tiles=packed,
            refused=refused,
        )  # fmt: skip
        source, kernel = early_kernel or (SOURCE, "pack")
        early = early_kernel is not None
        grid = min(tiles, most_blocks or tiles), matrices
        launch(source, kernel, grid, (DEQUANTIZE_THREADS,), [arguments], device=device, early=early)
    return packed


def fields_of(product: Product, out: torch.Tensor, slices: int, columns: int) -> dict[str, Value]:
    """Fields that the structs of both wgmma kernels share. `columns`: of K in a step of the pipeline."""
    return {
        "epilogue": product.epilogue_parameters(out), "m": product.m, "n": product.n, "k": product.k, "slices": slices,
        "slice_steps": _ceil_div(product.k, slices * columns),
    }  # fmt: skip


def blocks_of(product: Product, slices: int, device: torch.device, columns: int = 256) -> int:
    """Blocks of a persistent kernel; with slices on a GPU a block for each slice of each output tile. `columns`: of an
    output tile."""
    split = slices > 1 and device.type == "cuda"
    return tiles_of(product.m, product.n, columns) * slices if split else multiprocessors(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Blocks of a persistent kernel: the GPU's multiprocessors; 3 on a CPU, for several tiles in a block."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _device(operand: Fields) -> torch.device:
    codes = operand["codes"]
    assert isinstance(codes, torch.Tensor)
    return codes.device


def _ceil_div(items: int, divisor: int) -> int:
    return -(-items // divisor)
