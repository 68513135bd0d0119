"""Block scales to and from the 128×4 layout of block-scaled tensor cores, and the layouts of digits."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import THREADS, blocks_for, check_contiguous
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.arguments import check_packed_scales, check_scales_matrix, check_scales_to_pack, packing_of
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILES, Layout, Packing, ScaleLayout

_CHUNK = 16
"""Scales of a thread in four rows, 32 apart."""
_THREADS = 128
_PARAMETERS = KernelStruct("layout/pack_scales.cu", "PackParameters")
_MOST_DIGITS = 8
"""Digits of a layout that the kernel takes."""
_BLOCKS = {"cuda": 1 << 16, "cpu": 16}
"""Most blocks of a launch; a grid-stride loop covers the rest."""


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


def pack_scales(
    scales: torch.Tensor, layout: ScaleLayout | Layout, *, sections: torch.Tensor | None = None
) -> torch.Tensor:
    """Linear scales, contiguous, in a layout: uint8 of `Packing.packed_shape`. Cells of padding that the layout calls
    any or absent are not written.

    scales: uint8 (R, C) or (B, R, C); for a layout of E8M0 scales also float32 powers of two. sections: int64 (G,).
    Raises TypeError or ValueError as the reference does, ValueError for strides.
    """
    packing = packing_of(scales.shape, layout, sections)
    check_scales_to_pack(scales, packing)
    check_contiguous(scales=scales)
    out = torch.empty(packing.packed_shape, dtype=torch.uint8, device=scales.device)
    _move_digits("pack_scales", scales, out, packing)
    return out


def unpack_scales(
    packed: torch.Tensor,
    shape: tuple[int, ...],
    layout: ScaleLayout | Layout,
    *,
    sections: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed scales to linear scales of `shape` (R, C) or (B, R, C), uint8. Raises as `pack_scales` does."""
    packing = packing_of(shape, layout, sections, packed)
    check_contiguous(packed=packed)
    out = torch.empty(packing.shape, dtype=torch.uint8, device=packed.device)
    _move_digits("unpack_scales", out, packed, packing)
    return out


def linear_scales(q: Quantized) -> torch.Tensor:
    """The scales of `q`, linear and without padding: the stored scales, or those of the layout 128x4 unswizzled."""
    return q.scales if q.scale_layout == LINEAR else unswizzle(q.scales, scales_shape(q.shape, q.recipe))


def _move(kernel: str, source: torch.Tensor, target: torch.Tensor, rows: int, columns: int) -> None:
    threads = blocks_for(rows, 128) * 32 * blocks_for(columns, _CHUNK)
    arguments = (source, target, np.int64(rows), np.int64(columns))
    launch("swizzle", kernel, (blocks_for(threads, _THREADS),), (_THREADS,), arguments, device=source.device)


def _move_digits(kernel: str, linear: torch.Tensor, packed: torch.Tensor, packing: Packing) -> None:
    """Launch `pack_scales` or `unpack_scales` between linear and packed scales."""
    if not packed.numel():
        return
    layout = packing.layout
    # The size of the slowest digit of a section differs from section to section, and no digit is above it.
    sizes, row_steps, column_steps = zip(*layout.digit_strides((max(packing.rows), packing.shape[-1])), strict=True)
    rest = (_MOST_DIGITS - len(sizes)) * (0,)
    starts, rows = ([*accumulate(counts, initial=0)] for counts in (packing.part_sizes, packing.rows))
    table = torch.tensor([starts, rows], dtype=torch.int64).to(packed.device)
    parameters = _PARAMETERS(
        linear=linear, packed=packed, starts=table[0], rows=table[1],
        columns=packing.shape[-1], parts=len(packing.rows),
        is_float=linear.dtype == torch.float32, zero_rows=(layout.row_padding or layout.padding) == "0",
        zero_columns=layout.padding == "0",
        digits={"sizes": [*sizes, *rest], "row_steps": [*row_steps, *rest], "column_steps": [*column_steps, *rest],
                "count": len(sizes)},
    )  # fmt: skip
    blocks = min(blocks_for(packed.numel(), THREADS), _BLOCKS.get(packed.device.type, 1))
    launch("pack_scales", kernel, (blocks,), (THREADS,), (parameters,), device=packed.device)
