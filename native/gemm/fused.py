"""GEMM and grouped GEMM that decode b in registers, on the tensor cores of a Hopper GPU, by the kernels of
kernels/gemm/sm90/gemm_fused_*.cu.

For few rows of a, or of a section: b is read once, as codes. a is dequantized to tiles first. MX operands with numbers
at the ends of bfloat16's range are refused as in `native.gemm.wgmma`, and the same second kernel multiplies them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowgauge.native.gemm import wgmma
from narrowgauge.native.gemm.operands import Fields, Product
from narrowgauge.native.gemm.paths import clusters_of
from narrowgauge.native.gemm.skinny import takes_operand
from narrowgauge.native.gemm.wgmma import dequantize, fields_of, multiply_refused, packed_tiles
from narrowgauge.native.gemm.wgmma_fp8 import tensor_map, tensor_maps
from narrowgauge.native.runtime.arguments import blocks_for
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue
from narrowgauge.spec.quantized import Quantized

_PARAMETERS = KernelStruct("gemm/sm90/gemm_fused.cuh", "FusedParameters")
_MATRICES = KernelStruct("gemm/sm90/gemm_fused.cuh", "FusedMatrices")
_ROWS, _COLUMNS = 128, 64
"""Rows of b of a block of threads, and columns of K of a step."""
_THREADS = 640
"""Of a block."""
_TOKENS = (64, 128)
"""Rows of a of a block of threads."""
_SHARED_BYTES, _SECTIONS_SHARED_BYTES = 194 * 1024, 214 * 1024
"""sizeof(FusedShared) and of SectionsShared, plus their alignment to 1024 bytes."""
_PACKING_BLOCKS = 8
"""Blocks of a multiprocessor that dequantize sections of a: a block finds its first section by a scan."""
RUNS = {"nvfp4": 256, "mx": 512}
"""Family to the columns of a run, which has 16 bytes of scales: a slice of K has a multiple of these columns."""
_LARGEST = 2**31 - _ROWS
"""Largest extent: coordinates of a box of a tensor map are 32-bit integers."""


def takes(a: Quantized, b: Quantized, family: str) -> bool:
    """Whether the kernels can multiply (M, K) by (N, K). `family`: `native.gemm.operands.product_family`."""
    return takes_operand(a, family) and a.shape[0] <= _LARGEST and takes_matrices([b], family)


def takes_matrices(b: Sequence[Quantized], family: str) -> bool:
    """Whether the kernels can decode matrices (N, K). `family`: `native.gemm.operands.product_family`."""
    n, k = b[0].shape
    if family not in RUNS or k < 2 * RUNS[family] or k % RUNS[family] or max(n, k) > _LARGEST:
        return False
    return all(takes_operand(q, family) for q in b)


def tokens_of(m: int) -> int:
    """Rows of a of a block of threads."""
    return _TOKENS[0] if m <= _TOKENS[0] else _TOKENS[1]


def slices_of(m: int, n: int, k: int, family: str, multiprocessors: int) -> tuple[int, ...]:
    """First columns of the slices of K: two slices for a block of threads, and as many blocks as `clusters_of` says."""
    tiles = blocks_for(n, _ROWS) * blocks_for(m, tokens_of(m))
    for blocks in clusters_of(tiles, k, multiprocessors):
        if starts := _starts(k, family, blocks):
            return starts
    starts = _starts(k, family, 1)
    assert starts, f"{k} columns have two runs"
    return starts


def _starts(k: int, family: str, blocks: int) -> tuple[int, ...]:
    """First columns of the slices of K of `blocks` blocks of threads; no slice if K has too few runs.

    All slices but the last have equally many columns, and the last has no more."""
    runs = k // RUNS[family]
    starts = range(0, runs, -(-runs // (2 * blocks)))
    return tuple(start * RUNS[family] for start in starts) if len(starts) == 2 * blocks else ()


def multiply(product: Product, out: torch.Tensor, *, slices: tuple[int, ...]) -> None:
    """Computes a GEMM into `out` (M, N), for operands that `takes` accepts. `slices` of K: `slices_of`."""
    if out.numel() == 0:
        return
    tokens, cluster = tokens_of(product.m), len(slices) // 2 if out.device.type == "cuda" else 1
    grid = blocks_for(product.n, _ROWS) * cluster, blocks_for(product.m, tokens)
    source, refused, own = f"gemm_fused_{product.family}", None, None
    if product.family == "mx":  # each block of threads sets its flag to 0, which costs no launch
        packed = packed_tiles(product.m, product.k)
        refused = torch.empty(packed + grid[0] * grid[1], dtype=torch.int32, device=out.device)
        own = refused[packed:]
    a = dequantize(
        product.family, product.a, product.m, product.k, 1, refused, early_kernel=(source, "pack_interleaved")
    )
    parameters = _PARAMETERS(
        a=a, b_codes=product.b["codes"], b_scales=product.b["scales"], refused=own,
        **fields_of(product, out, len(slices), _COLUMNS) | {"slice_steps": slices[1] // _COLUMNS},
    )  # fmt: skip
    launch(
        source, f"gemm_fused_{tokens}", grid, (_THREADS,),
        [tensor_map(product.b, product.n, _row_bytes(product)), parameters, *_alpha(product)], device=out.device,
        shared_bytes=_SHARED_BYTES if out.device.type == "cuda" else 0,  # the CPU build has a static array
        extra_flags=(f"-DSLICES={cluster}",) if cluster > 1 else (), early=True,
    )  # fmt: skip
    if refused is not None:
        multiply_refused(product, out, refused)


def multiply_grouped(product: Product, out: torch.Tensor, matrices: Sequence[Fields]) -> None:
    """Computes a grouped GEMM into `out` (M, N), for matrices that `takes_matrices` accepts. `matrices`:
    OperandParameters of each."""
    sizes, starts, device = product.sizes, product.starts, out.device
    assert sizes is not None
    if out.numel() == 0:
        return
    source, multiprocessors = f"gemm_fused_{product.family}", wgmma.multiprocessors(device)
    refused = torch.zeros(1, dtype=torch.int32, device=device) if product.family == "mx" else None
    first = _MATRICES(
        maps=tensor_maps(matrices, product.n, _row_bytes(product), device), codes=product.b["codes"],
        scales=product.b["scales"], sizes=sizes, starts=starts, sections=len(matrices),
    )  # fmt: skip
    a = dequantize(
        product.family, product.a, product.m, product.k, 1, refused, sizes=sizes, starts=starts,
        early_kernel=(source, "pack_interleaved"), most_blocks=_PACKING_BLOCKS * multiprocessors,
    )  # fmt: skip
    parameters = _PARAMETERS(a=a, b_codes=None, b_scales=None, refused=refused, **fields_of(product, out, 1, _COLUMNS))
    tokens = tokens_of(product.expected_rows // len(matrices))
    launch(
        source, f"gemm_fused_grouped_{tokens}", (multiprocessors,), (_THREADS,), [first, parameters, *_alpha(product)],
        device=device, shared_bytes=_SECTIONS_SHARED_BYTES if device.type == "cuda" else 0, early=True,
    )  # fmt: skip
    if refused is not None:
        multiply_refused(product, out, refused)


def _alpha(product: Product) -> list[StructValue]:
    return [] if product.family == "mx" else [product.alpha_parameters()]


def _row_bytes(product: Product) -> int:
    """Bytes of a row of b."""
    return product.k // 2 if product.family == "nvfp4" else product.k
