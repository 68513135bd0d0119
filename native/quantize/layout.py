"""Block scales to and from the 128×4 layout of block-scaled tensor cores."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import blocks_for, check_contiguous
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.arguments import check_packed_scales, check_scales_matrix
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILES

_CHUNK = 16
"""Scales of a thread in four rows, 32 apart."""
_THREADS = 128


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Linear scales (R, C), uint8, contiguous, to padded tiles of 128×4: (⌈R/128⌉·128, ⌈C/4⌉·4); the padding is 0.

    Raises TypeError or ValueError for another dtype or shape.
    """
    check_scales_matrix(scales)
    check_contiguous(scales=scales)
    rows, columns = scales.shape
    out = torch.empty(LAYOUTS[TILES].padded_shape(scales.shape), dtype=torch.uint8, device=scales.device)
    _move("swizzle", scales, out, rows, columns)
    return out


def unswizzle(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Swizzled scales to linear scales of `shape` (R, C). Raises as `swizzle` does."""
    check_packed_scales(scales, shape)
    check_contiguous(scales=scales)
    out = torch.empty(shape, dtype=torch.uint8, device=scales.device)
    _move("unswizzle", scales, out, *shape)
    return out


def linear_scales(q: Quantized) -> torch.Tensor:
    """The scales of `q`, linear and without padding: the stored scales, or those of the layout 128x4 unswizzled."""
    return q.scales if q.scale_layout == LINEAR else unswizzle(q.scales, scales_shape(q.shape, q.recipe))


def _move(kernel: str, source: torch.Tensor, target: torch.Tensor, rows: int, columns: int) -> None:
    threads = blocks_for(rows, 128) * 32 * blocks_for(columns, _CHUNK)
    arguments = (source, target, np.int64(rows), np.int64(columns))
    launch("swizzle", kernel, (blocks_for(threads, _THREADS),), (_THREADS,), arguments, device=source.device)
