"""Grouped GEMM on the tensor cores of a Hopper GPU that dequantizes its matrices while it multiplies.

The matrix of the largest section is dequantized first. Idle warps of the multiplying kernel dequantize the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from narrowgauge.native.gemm import wgmma
from narrowgauge.native.gemm.operands import Fields, Product
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.native.runtime.structs import KernelStruct

_SOURCE = "gemm_wgmma_grouped"
_MATRICES = KernelStruct(f"gemm/sm90/{_SOURCE}.cu", "DequantizedMatrices")
_OUT_COLUMNS = 256
"""Columns of an output tile: rows of a matrix whose tiles are counted together."""


def takes(m: int, n: int, k: int, matrices: Sequence[Fields], fewest: int) -> bool:
    """Whether the kernel multiplies sections of `m` rows together by matrices (N, K), and is the faster one.

    `matrices`: OperandParameters of each. `fewest`: rows of a section on average from which it is."""
    if n % _OUT_COLUMNS or k % wgmma.COLUMNS or n * k == 0 or m < fewest * len(matrices):
        return False
    return not any(matrix["layout"] or _misaligned(matrix) for matrix in matrices)


def _misaligned(matrix: Fields) -> bool:
    """Whether a thread cannot load 16 bytes of codes, or two scales, at once."""
    codes, scales = matrix["codes"], matrix["scales"]
    assert isinstance(codes, torch.Tensor)
    assert isinstance(scales, torch.Tensor)
    return codes.data_ptr() % 16 != 0 or scales.data_ptr() % 2 != 0


def multiply(product: Product, out: torch.Tensor) -> None:
    """Computes a grouped GEMM that `takes` accepts into `out` (M, N)."""
    assert product.sizes is not None
    device, family, sizes, count = out.device, product.family, product.sizes, len(product.sizes)
    tiles = wgmma.packed_tiles(product.n, product.k)
    refused = torch.zeros(1, dtype=torch.int32, device=device) if family == "mx" else None
    a = wgmma.dequantize(family, product.a, product.m, product.k, 1, refused, sizes=sizes, starts=product.starts)
    b = torch.empty(count * tiles * wgmma.TILE_BYTES, dtype=torch.uint8, device=device)
    counts = torch.zeros(1 + count * product.n // _OUT_COLUMNS, dtype=torch.int32, device=device)
    matrices = _MATRICES(
        operand=product.b, block_scales=wgmma.BLOCK_SCALES[family], tiles=b, refused=refused, counts=counts
    )
    rows: list[Argument] = [sizes, product.starts, np.int32(count)]
    shape = np.int64(product.n), np.int64(product.k)
    first: list[Argument] = [matrices, *shape, *rows, np.int64(product.m)]
    launch(_SOURCE, "pack_first", (tiles,), (wgmma.DEQUANTIZE_THREADS,), first, device=device)
    launch(
        _SOURCE, "gemm_tensor_dequantizing", (wgmma.multiprocessors(device),), (wgmma.THREADS,),
        [wgmma.parameters(product, out, a, b, refused), product.alpha_parameters(), *rows, matrices],
        device=device, shared_bytes=wgmma.SHARED_BYTES if device.type == "cuda" else 0,
    )  # fmt: skip
    if refused is not None:
        wgmma.multiply_refused(product, out, refused)
