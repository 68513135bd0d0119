"""Quantize to MX: blocks of 32, or tiles of 32×32, whose scales are powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from narrowgauge.native.quantize.amax import in_tiles, strips
from narrowgauge.native.quantize.sections import check_sizes_of
from narrowgauge.native.runtime.arguments import ANY_THREADS, STRIP, blocks_for, check_contiguous, suffix
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import (
    as_matrix,
    check_amax,
    check_random,
    check_random_of_sections,
    check_scale,
    split_random,
)
from narrowgauge.spec.quantized import GroupedQuantized, Quantized, codes_shape, scales_shape, swizzled_shape
from narrowgauge.spec.recipes import Recipe

_THREADS = 128
_TILE = (32, 128)
"""Rows and columns of a tile of bfloat16, and the threads that hold one: the kernel's PIECE_ROWS."""
_TILE_THREADS = {"cuda": 64, "cpu": 16}
_SCALE_ORDER = {"amax*(1/max)": 0, "amax/max": 1, "amax*2^-emax": 2}


def scale_rule(r: Recipe) -> tuple[np.int32, np.int32]:
    """How an amax becomes a scale: what is rounded, and the mantissa, of 23 bits, from which on it is rounded up."""
    up_from = {
        "up": 1,
        "down": 1 << 23,
        "as-element": (1 << 23) - (1 << (22 - r.element.mantissa_bits)),  # half a step of the element below 2
        "up-from-1.75": 3 << 21,
        "nearest-log2": 0x3504F4,  # the first float32 above √2
    }[r.scale_rounding]
    return np.int32(_SCALE_ORDER[r.block_scale]), np.int32(up_from)


@dataclass
class _Half:
    """One orientation of a result, as the kernel writes it."""

    codes: torch.Tensor
    scales: torch.Tensor
    random: object

    def arguments(self) -> list[Argument]:
        words = self.random if isinstance(self.random, torch.Tensor) else None
        offset = self.random[1] if isinstance(self.random, tuple) else 0
        return [np.int32(1), self.codes, self.scales, words, np.uint64(offset % 2**64)]


_NO_HALF: list[Argument] = [np.int32(0), None, None, None, np.uint64(0)]


def quantize(
    x: torch.Tensor,
    r: Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
    swizzled: bool = False,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, any strides, along K. Any M and K; more dimensions are rows.

    `random`: words, int32 (M, ⌈K/4⌉), or (seed, offset) of Philox. Source: docs/numerics.md#mx. Raises TypeError or
    ValueError for inputs that do not fit, an amax and an encode scale among them, which MX has not; ToolchainError
    where kernels cannot be compiled.
    """
    x = as_matrix(x)
    _check_options(amax, scale, r)
    shape = (x.shape[0], x.shape[1])
    half = _half(shape, r, random, x.device, swizzled=swizzled)
    _launch(x, r, half, None, swizzled=swizzled)
    return Quantized(half.codes, half.scales, None, r, shape, swizzled=swizzled)


def quantize_both(
    x: torch.Tensor,
    r: Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Sequence[torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
    swizzled: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K), any strides, in one read: rowwise (M, K), and columnwise (K, M), its transpose.

    That is stored as the recipe says. `random`: the words of either half, or seed and offset, of which the columnwise
    half uses offset + 1. A half that is not wanted is None. Raises as `quantize` does.
    """
    x = as_matrix(x)
    for given in amax or ():
        _check_options(given, scale, r)
    check_scale(scale, 1, r)
    shape, shape_t = (x.shape[0], x.shape[1]), (x.shape[1], x.shape[0])
    bits, bits_t = split_random(random)
    in_place = r.columnwise == "in-place"
    row = _half(shape, r, bits, x.device, swizzled=swizzled) if rowwise else None
    column = _half(shape_t, r, bits_t, x.device, swizzled=swizzled, transposed=in_place) if columnwise else None
    _launch(x, r, row, column, swizzled=swizzled)
    return (
        None if row is None else Quantized(row.codes, row.scales, None, r, shape, swizzled=swizzled),
        None
        if column is None
        else Quantized(column.codes, column.scales, None, r, shape_t, swizzled=swizzled, transposed=in_place),
    )


def quantize_grouped(
    x: torch.Tensor,
    sizes: torch.Tensor,
    r: Recipe,
    *,
    columnwise: bool = False,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
) -> GroupedQuantized:
    """Quantize `x` (M, K) in sections of `sizes` rows, int64 (G,), each by itself, some perhaps empty.

    One launch for all, which reads the sizes where they lie: the host does not wait for a GPU. Sizes on a CPU are
    checked; on a GPU, what is wrong in them is cut to the rows of x. `columnwise`: of the transpose of each section.
    Raises as `quantize` does.
    """
    x = as_matrix(x)
    rows, columns = x.shape
    check_sizes_of(sizes, rows)
    _check_options(amax, scale, r)
    check_random_of_sections(random, r)
    half = _half((rows, columns), r, random, x.device, swizzled=False)
    if columnwise:  # flat, with room for a half byte and a short block of every section
        count = len(sizes)
        codes = columns * ((rows + count) // 2 + 1) if r.element.bits == 4 else columns * rows
        half.codes = torch.empty(codes, dtype=torch.uint8, device=x.device)
        half.scales = torch.empty(columns * (rows // r.block[1] + count), dtype=torch.uint8, device=x.device)
    _launch(x, r, None if columnwise else half, half if columnwise else None, sizes=sizes)
    return GroupedQuantized(half.codes, half.scales, None, r, (rows, columns), sizes, columnwise=columnwise)


def _check_options(amax: torch.Tensor | None, scale: torch.Tensor | None, r: Recipe) -> None:
    check_amax(amax, (1,), r)
    check_scale(scale, 1, r)


def _half(
    shape: tuple[int, int],
    r: Recipe,
    random: object,
    device: torch.device,
    *,
    swizzled: bool,
    transposed: bool = False,
) -> _Half:
    check_random(random, shape, r)
    check_contiguous(random=random)
    # The padding of swizzled scales is 0, and no thread has it.
    scales = (
        torch.zeros(swizzled_shape(shape, r), dtype=torch.uint8, device=device)
        if swizzled
        else torch.empty(scales_shape(shape, r, transposed=transposed), dtype=torch.uint8, device=device)
    )
    codes = torch.empty(codes_shape(shape, r, transposed=transposed), dtype=torch.uint8, device=device)
    return _Half(codes, scales, random)


def _launch(
    x: torch.Tensor,
    r: Recipe,
    row: _Half | None,
    column: _Half | None,
    *,
    sizes: torch.Tensor | None = None,
    swizzled: bool = False,
) -> None:
    rows, columns = x.shape
    stochastic, tiles = r.rounding == "stochastic", r.block[0] > 1
    rule = scale_rule(r)
    propagate_nan = np.int32(r.nan == "propagate")
    halves = [_NO_HALF if half is None else half.arguments() for half in (row, column)]
    plain = column is None and sizes is None and x.is_contiguous() and not (stochastic or tiles or swizzled)
    matrix: list[Argument] = [x, np.int64(rows), np.int64(columns)]
    # Where both do, a CPU is faster with the plain kernel, which has no barrier.
    tiled = sizes is None and _in_tiles(x, r, column)
    if tiled and not (plain and x.device.type == "cpu"):
        name, grid = "quantize_mx_tiles_bf16", x.numel() // (_TILE[0] * _TILE[1])
        threads = _TILE_THREADS.get(x.device.type, 1)
        arguments = [*matrix, *halves[0][:3], *halves[1][:3], *rule, np.int32(tiles), propagate_nan, np.int32(swizzled)]
    elif plain and row is not None:
        name, grid, threads = f"quantize_mx_plain_{suffix(x.dtype)}", blocks_for(row.scales.numel(), _THREADS), _THREADS
        arguments = [*matrix, *halves[0][1:3], *rule, propagate_nan]
    else:
        grid = max(1, strips(rows, sizes)) * blocks_for(columns, STRIP)
        threads = ANY_THREADS["quantize_mx"].get(x.device.type, 1)
        name, sections = f"quantize_mx_{suffix(x.dtype)}", 1 if sizes is None else len(sizes)
        seed = next((h.random[0] for h in (row, column) if h is not None and isinstance(h.random, tuple)), 0)
        arguments = [
            x, np.int64(x.stride(0)), np.int64(x.stride(1)), *matrix[1:], sizes, np.int32(sections), *halves[0],
            *halves[1], *rule, np.int32(tiles), propagate_nan, np.int32(r.columnwise == "in-place"),
            np.int32(stochastic), np.uint64(seed % 2**64), np.int32(swizzled),
        ]  # fmt: skip
    flags = (f"-DELEMENT={r.element.name}",)
    launch("quantize_mx", name, (grid,), (threads,), arguments, device=x.device, extra_flags=flags)


def _in_tiles(x: torch.Tensor, r: Recipe, column: _Half | None) -> bool:
    """Whether the kernel that takes whole tiles does for this."""
    return in_tiles(x, _TILE[0]) and r.rounding == "nearest-even" and (column is None or r.columnwise == "in-place")
