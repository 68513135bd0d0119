"""Products of a few rows by kernels/gemm_skinny_*.cu, which read the other operand once and decode it on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from narrowgauge.native.gemm.operands import SCALES_OF_128_ROWS
from narrowgauge.native.gemm.tensor_core import multiprocessors
from narrowgauge.native.runtime.arguments import blocks_for
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.quantized import Quantized

_TOKENS = 16
"""Rows of a that a block has."""


class _Kernel(NamedTuple):
    source: str
    name: str
    rows: int
    """Of b that a block makes, or, of E4M3, takes at a time."""
    threads: int
    shared_bytes: int
    """sizeof(Shared), which a CPU's twin has as an array."""


def _of_e4m3(source: str, name: str) -> _Kernel:
    return _Kernel(f"gemm_skinny_{source}", f"gemm_skinny_{name}", 16, 256, 128000)


_NVFP4 = _Kernel("gemm_skinny_nvfp4", "gemm_skinny_nvfp4", 32, 256, 0)
_NVFP4_WIDE = _Kernel("gemm_skinny_nvfp4_wide", "gemm_skinny_nvfp4_wide", 64, 512, 95232)
_E4M3 = {
    "mx": _of_e4m3("mx", "mx"),
    "fp8_tensor": _of_e4m3("fp8", "fp8_tensor"),
    "fp8_block": _of_e4m3("fp8", "fp8_block"),
}
_WAVE, _RUN, _LONG = 132, 512, 4096
"""Multiprocessors of an H200; columns of K that a team of the wide kernel takes at a time; the fewest by which it was
seen to be faster."""
_COLUMNS = 128
"""K is a multiple of them."""
_LARGEST = 2**20
"""N and K: the blocks of a grid, and offsets of 32 bits, reach so far."""
_ALIGNMENT = 16
"""Bytes, of codes and of scales."""


def takes(a: Quantized, b: Quantized, rule: str) -> bool:
    """Whether the kernels can make the product (M, K) by (N, K) of a rule (`native.gemm.operands.rule_of`)."""
    n, k = b.shape
    if k % _COLUMNS or not k or max(n, k) > _LARGEST:
        return False
    return all(_taken(q, rule) for q in (a, b))


def _taken(q: Quantized, rule: str) -> bool:
    if q.transposed or q.swizzled or (rule != "nvfp4" and q.recipe.element is not E4M3):
        return False
    return q.codes.data_ptr() % _ALIGNMENT == 0 and q.scales.data_ptr() % _ALIGNMENT == 0


def wide(m: int, n: int, k: int) -> bool:
    """Whether blocks that make 64 rows of b make an NVFP4 product (M, K) by (N, K).

    They do where they run at once on an H200, and on more than half of it. It is for the shape alone to say so, as
    these blocks add in another order.
    """
    blocks = blocks_for(m, _TOKENS) * blocks_for(n, _NVFP4_WIDE.rows)
    return k >= _LONG and k % _RUN == 0 and _WAVE // 2 < blocks <= _WAVE


def multiply(
    rule: str,
    shape: tuple[int, int, int],
    operands: Sequence[Argument],
    factors: Sequence[Argument],
    ends: Sequence[Argument],
) -> None:
    """The product of operands that `takes` takes, to its output.

    `shape`: M, N and K. `operands` and `factors`: what `product_arguments` gave; `ends`: c, bias, the output and what
    `epilogue` gave.
    """
    m, n, k = shape
    if m == 0 or n == 0:
        return
    a_codes, a_scales, _, a_layout, b_codes, b_scales, _, b_layout = operands
    assert isinstance(a_codes, torch.Tensor)
    device = a_codes.device
    kernel = _E4M3.get(rule) or (_NVFP4_WIDE if wide(m, n, k) else _NVFP4)
    tokens, blocks = blocks_for(m, _TOKENS), blocks_for(n, kernel.rows)
    if rule in _E4M3:  # all at a time, with as many strips of b each
        each = blocks_for(blocks, max(multiprocessors(device) // tokens, 1))
        blocks, factors = blocks_for(blocks, each), [np.int32(each)]
    if rule == "fp8_block":
        factors = [*factors, _shift(a_layout), _shift(b_layout)]
    launch(
        kernel.source, kernel.name, (tokens, blocks), (kernel.threads,),
        (a_codes, a_scales, b_codes, b_scales, *ends, *factors), device=device,
        shared_bytes=kernel.shared_bytes if device.type == "cuda" else 0,
    )  # fmt: skip


def _shift(layout: Argument) -> np.int32:
    """The rows that have the same float32 scales, as a power of two."""
    assert isinstance(layout, np.integer)
    return np.int32(7 if layout & SCALES_OF_128_ROWS else 0)
