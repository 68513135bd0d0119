"""Products of a few rows by kernels/gemm_skinny_*.cu, which read the other operand once and decode it on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from native.arguments import blocks_for
from native.gemm_tensor import multiprocessors
from native.launch import Argument, launch
from reference.formats import E4M3
from reference.quantized import Quantized

_TOKENS = 16
"""Rows of a that a block has."""
_ROWS, _THREADS = {"nvfp4": 32, "mx": 16}, {"nvfp4": 256, "mx": 640}
"""Rows of b that a block makes, or, of MX, takes at a time; and its threads."""
_SHARED_BYTES = {"nvfp4": 0, "mx": 203904}
"""sizeof(Shared) of MX, which a CPU's twin has as an array."""
_COLUMNS = {"nvfp4": 128, "mx": 512}
"""K is a multiple of them; a rule that is not here has no such kernel."""
_LARGEST = 2**20
"""N and K: the blocks of a grid, and offsets of 32 bits, reach so far."""
_CODES_ALIGNMENT, _SCALES_ALIGNMENT = 16, {"nvfp4": 2, "mx": 16}
"""Bytes."""


def takes(a: Quantized, b: Quantized, rule: str) -> bool:
    """Whether the kernels can make the product (M, K) by (N, K) of a rule (`native.operands.rule_of`)."""
    n, k = b.shape
    if rule not in _COLUMNS or k % _COLUMNS[rule] or not k or max(n, k) > _LARGEST:
        return False
    return all(_taken(q, rule) for q in (a, b))


def _taken(q: Quantized, rule: str) -> bool:
    if q.transposed or q.swizzled or (rule == "mx" and q.recipe.element is not E4M3):
        return False
    return q.codes.data_ptr() % _CODES_ALIGNMENT == 0 and q.scales.data_ptr() % _SCALES_ALIGNMENT[rule] == 0


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
    m, n, _ = shape
    if m == 0 or n == 0:
        return
    a_codes, a_scales, _, _, b_codes, b_scales, _, _ = operands
    assert isinstance(a_codes, torch.Tensor)
    device = a_codes.device
    tokens, blocks = blocks_for(m, _TOKENS), blocks_for(n, _ROWS[rule])
    if rule == "mx":  # all at a time, with as many strips of b each
        blocks = blocks_for(blocks, blocks_for(blocks, max(multiprocessors(device) // tokens, 1)))
    launch(
        f"gemm_skinny_{rule}", f"gemm_skinny_{rule}", (tokens, blocks), (_THREADS[rule],),
        (a_codes, a_scales, b_codes, b_scales, *ends, *factors), device=device,
        shared_bytes=_SHARED_BYTES[rule] if device.type == "cuda" else 0,
    )  # fmt: skip
