"""Block scales to and from the 128×4 layout of block-scaled tensor cores."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import blocks_for, check_contiguous
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.arguments import check_scales_matrix, check_swizzled_scales
from narrowgauge.spec.quantized import Quantized, scales_shape

_CHUNK = 16
"""Scales of a thread in four rows, 32 apart."""
_THREADS = 128


def _padded(shape: tuple[int, int]) -> tuple[int, int]:
    return blocks_for(shape[0], 128) * 128 if shape[0] else 0, -(-shape[1] // 4) * 4


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Linear scales (R, C), uint8, contiguous, to padded tiles of 128×4: (⌈R/128⌉·128, ⌈C/4⌉·4); the padding is 0.

    Raises TypeError or ValueError for another dtype or shape.
    """
    check_scales_matrix(scales)
    check_contiguous(scales=scales)
    rows, columns = scales.shape
    out = torch.empty(_padded((rows, columns)), dtype=torch.uint8, device=scales.device)
    _move("swizzle", scales, out, rows, columns)
    return out


def unswizzle(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Swizzled scales to linear scales of `shape` (R, C). Raises as `swizzle` does."""
    check_swizzled_scales(scales, shape)
    check_contiguous(scales=scales)
    out = torch.empty(shape, dtype=torch.uint8, device=scales.device)
    _move("unswizzle", scales, out, *shape)
    return out


def linear_scales(q: Quantized) -> torch.Tensor:
    """The scales of `q` in linear layout, without padding: the stored scales, unswizzled if they are swizzled."""
    return unswizzle(q.scales, scales_shape(q.shape, q.recipe)) if q.swizzled else q.scales


def _move(kernel: str, source: torch.Tensor, target: torch.Tensor, rows: int, columns: int) -> None:
    threads = blocks_for(rows, 128) * 32 * blocks_for(columns, _CHUNK)
    arguments = (source, target, np.int64(rows), np.int64(columns))
    launch("swizzle", kernel, (blocks_for(threads, _THREADS),), (_THREADS,), arguments, device=source.device)
