"""GEMMs with few rows of a, by kernels/gemm/skinny. The kernels read b once and decode b in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowgauge.native.gemm.operands import Product, rows_per_scale
from narrowgauge.native.gemm.wgmma import multiprocessors
from narrowgauge.native.runtime.arguments import blocks_for
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import LINEAR

_SKINNY = KernelStruct("gemm/skinny/gemm_skinny_e4m3.cuh", "SkinnyParameters")
_TOKENS = 16
"""Rows of a of a block of threads."""


class _Kernel(NamedTuple):
    source: str
    name: str
    rows: int
    """Rows of b of a block of threads; of E4M3, of a strip."""
    threads: int
    shared_bytes: int
    """Dynamic shared memory; the CPU build has a static array."""


def _e4m3_kernel(source: str, name: str) -> _Kernel:
    return _Kernel(f"gemm_skinny_{source}", f"gemm_skinny_{name}", 16, 256, 128000)


_NVFP4 = _Kernel("gemm_skinny_nvfp4", "gemm_skinny_nvfp4", 32, 256, 0)
_NVFP4_WIDE = _Kernel("gemm_skinny_nvfp4_wide", "gemm_skinny_nvfp4_wide", 64, 512, 95232)
_E4M3 = {
    "mx": _e4m3_kernel("mx", "mx"),
    "fp8_tensor": _e4m3_kernel("fp8", "fp8_tensor"),
    "fp8_block": _e4m3_kernel("fp8", "fp8_block"),
}
_H200_MULTIPROCESSORS = 132
_RUN = 512
"""Columns of K that a team of warps of the wide kernel takes at a time."""
_LONG_K = 4096
"""Smallest K for which the wide kernel was measured to be faster."""
_COLUMNS = 128
"""K is a multiple of this number."""
_LARGEST = 2**20
"""Largest N and K: the grid and offsets of 32 bits reach this far."""
_ALIGNMENT = 16
"""Bytes, of codes and of scales."""


def takes(a: Quantized, b: Quantized, family: str) -> bool:
    """Whether the kernels can multiply (M, K) by (N, K). `family`: `native.gemm.operands.product_family`."""
    n, k = b.shape
    if k % _COLUMNS or not k or max(n, k) > _LARGEST:
        return False
    return all(takes_operand(q, family) for q in (a, b))


def takes_operand(q: Quantized, family: str) -> bool:
    """Whether the layout, the alignment and the element format of an operand are those of these kernels."""
    if q.transposed or q.scale_layout != LINEAR or (family != "nvfp4" and q.recipe.element is not E4M3):
        return False
    return q.codes.data_ptr() % _ALIGNMENT == 0 and q.scales.data_ptr() % _ALIGNMENT == 0


def wide(m: int, n: int, k: int) -> bool:
    """Whether the wide kernel, with 64 rows of b in a block of threads, multiplies NVFP4 (M, K) by (N, K).

    It does if its blocks run at once on an H200 and fill more than half of the GPU. The choice depends on the shape
    alone, because the wide kernel adds in another order.
    """
    blocks = blocks_for(m, _TOKENS) * blocks_for(n, _NVFP4_WIDE.rows)
    return k >= _LONG_K and k % _RUN == 0 and _H200_MULTIPROCESSORS // 2 < blocks <= _H200_MULTIPROCESSORS


def multiply(product: Product, out: torch.Tensor) -> None:
    """Computes a GEMM into `out` (M, N), for operands that `takes` accepts."""
    m, n, k, family, device = product.m, product.n, product.k, product.family, out.device
    if m == 0 or n == 0:
        return
    kernel = _E4M3.get(family) or (_NVFP4_WIDE if wide(m, n, k) else _NVFP4)
    tokens, blocks = blocks_for(m, _TOKENS), blocks_for(n, kernel.rows)
    if family in _E4M3:  # all blocks run at once, with equally many strips of b each
        strips = blocks_for(blocks, max(multiprocessors(device) // tokens, 1))
        blocks = blocks_for(blocks, strips)
        second = _SKINNY(
            strips=strips,
            a_shift=rows_per_scale(product.a).bit_length() - 1,
            b_shift=rows_per_scale(product.b).bit_length() - 1,
        )
    else:
        second = product.alpha_parameters()
    launch(
        kernel.source, kernel.name, (tokens, blocks), (kernel.threads,), [product.parameters(out), second],
        device=device, shared_bytes=kernel.shared_bytes if device.type == "cuda" else 0, early=True,
    )  # fmt: skip
