"""Quantize to FP8 with float32 scales: of 128 elements, of tiles of 128×128, or of the whole tensor or section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from narrowgauge.native.quantize.amax import amax as tensor_amax
from narrowgauge.native.quantize.amax import in_32_bits, in_tiles, oriented_amax
from narrowgauge.native.quantize.sections import check_sizes_of
from narrowgauge.native.runtime.arguments import ANY_THREADS, blocks_for, check_contiguous, suffix
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import (
    as_matrix,
    check_amax,
    check_random,
    check_random_of_sections,
    check_scale,
    check_swizzled,
)
from narrowgauge.spec.formats import E5M2
from narrowgauge.spec.quantized import GroupedQuantized, Quantized, amax_shape, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe

TILE = 128
"""Rows and columns that a block of threads quantizes."""
_TILE_THREADS = {"cuda": 256}
"""Of the kernel that takes whole tiles of bfloat16, by the devices on which it is the faster one."""
_LINES, _TILES, _WHOLE = 0, 1, 2


@dataclass
class _Half:
    """One orientation of a result, as the kernel writes it; amax and encode factors where the tensor has one scale."""

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    encode: torch.Tensor | None

    def arguments(self) -> list[Argument]:
        return [self.amax, self.codes, self.scales, self.encode]


def _kind(r: Recipe) -> int:
    return _WHOLE if r.whole else _TILES if r.block[0] > 1 else _LINES


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

    `amax`, float32 (1,), replaces the tensor's own where the recipe has one scale for it; `scale`, float32 (1,), is the
    encode scale of delayed scaling. Source: docs/numerics.md#fp8-with-float32-scales. Raises TypeError or ValueError
    for inputs that do not fit, random bits and swizzled scales among them, ToolchainError where kernels cannot be
    compiled.
    """
    row, _ = quantize_both(
        x, r, columnwise=False, amax=(amax, None), scale=scale, random=None if random is None else (random, None),
        swizzled=swizzled,
    )  # fmt: skip
    assert row is not None
    return row


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

    `amax` holds that of either half, `scale` is that of both. A half that is not wanted is None. Raises as `quantize`
    does.
    """
    x = as_matrix(x)
    shape, shape_t = (x.shape[0], x.shape[1]), (x.shape[1], x.shape[0])
    _check_options(r, shape, random, swizzled=swizzled)
    check_scale(scale, 1, r)
    check_contiguous(scale=scale)
    amaxes, found = _amaxes(x, r, (None, None) if amax is None else amax, rowwise=rowwise, columnwise=columnwise)
    halves = [
        _half(of, r, one, x.device) if side else None
        for side, of, one in zip((rowwise, columnwise), (shape, shape_t), amaxes, strict=True)
    ]
    # Either half of x is the other half of its transpose, which a view of a contiguous matrix is read along.
    along_rows = x.stride(1) == 1 or x.stride(0) != 1
    _launch(x if along_rows else x.T, r, halves if along_rows else halves[::-1], scale, found)
    row, column = (
        None if half is None else Quantized(half.codes, half.scales, half.amax, r, of, half.encode)
        for half, of in zip(halves, (shape, shape_t), strict=True)
    )
    return row, column


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
    checked; on a GPU, what is wrong in them is cut to the rows of x. `columnwise`: the transpose of each section.
    `amax` and `scale`: float32 (G,). Raises as `quantize` does.
    """
    x = as_matrix(x)
    rows, columns = x.shape
    check_sizes_of(sizes, rows)
    count = len(sizes)
    check_random_of_sections(random, r)
    check_scale(scale, count, r)
    check_amax(amax, (count,), r)
    check_contiguous(amax=amax, scale=scale)
    found = None
    if r.whole and amax is None:
        amax = found = _to_find(r, count, x.device)
    if r.whole and amax is None:
        amax, _ = oriented_amax(
            x, plain=True, rotated=False, along_rows=True, sizes=sizes, propagate_nan=r.nan == "propagate"
        )  # fmt: skip
    # Whatever the sizes are: a short block at the end of every section, whose sum is not known here.
    blocks = count if r.whole else rows // TILE + count
    across = 1 if r.whole else blocks_for(columns, TILE) if columns else 0
    height = rows if _kind(r) == _LINES and not columnwise else blocks
    lines = columns if _kind(r) == _LINES and columnwise else across
    scales = (lines * blocks,) if columnwise else (height, across)
    half = _Half(
        torch.empty((rows * columns,) if columnwise else (rows, columns), dtype=torch.uint8, device=x.device),
        torch.empty(scales, dtype=torch.float32, device=x.device),
        amax,
        torch.empty((count,), dtype=torch.float32, device=x.device) if r.whole else None,
    )
    _launch(x, r, [None, half] if columnwise else [half, None], scale, found, sizes)
    return GroupedQuantized(
        half.codes, half.scales, amax, r, (rows, columns), sizes, half.encode, columnwise=columnwise
    )  # fmt: skip


def _half(shape: tuple[int, int], r: Recipe, amax: torch.Tensor | None, device: torch.device) -> _Half:
    return _Half(
        torch.empty(codes_shape(shape, r), dtype=torch.uint8, device=device),
        torch.empty(scales_shape(shape, r), dtype=torch.float32, device=device),
        amax,
        torch.empty((1,), dtype=torch.float32, device=device) if r.whole else None,
    )


def _launch(
    x: torch.Tensor,
    r: Recipe,
    halves: Sequence[_Half | None],
    scale: torch.Tensor | None,
    found: torch.Tensor | None,
    sizes: torch.Tensor | None = None,
) -> None:
    rows, columns = x.shape
    sections = 1 if sizes is None else len(sizes)
    strips = blocks_for(rows, TILE) if sizes is None else max(1, rows // TILE + sections)
    largest = torch.finfo(x.dtype if r.largest_scale == "input" else torch.float32).max
    row, column = ([None] * 4 if half is None else half.arguments() for half in halves)
    variant = _kind(r) | (r.element is E5M2) << 2 | (r.scale_rounding == "down") << 3 | (r.nan == "propagate") << 4
    # One compilation for each costs a GPU's driver a second, once, and a CPU's compiler many.
    flags = (f"-DVARIANT={variant}",) if x.device.type == "cuda" else ()
    halves_and_rule = (
        np.int32(variant), scale, found, *row, *column, np.float32(r.element.max), np.float32(r.smallest_amax),
        np.float32(largest),
    )  # fmt: skip
    if sizes is None and _in_tiles(x):
        name, threads = "quantize_fp8_tiles_bf16", _TILE_THREADS
        matrix: tuple[Argument, ...] = (x, np.int64(rows), np.int64(columns))
    else:
        name, threads = f"quantize_fp8_{suffix(x.dtype)}", ANY_THREADS["quantize_fp8"]
        strides = np.int64(x.stride(0)), np.int64(x.stride(1))
        matrix = (x, *strides, np.int64(rows), np.int64(columns), sizes, np.int32(sections))
    launch(
        "quantize_fp8",
        name,
        (strips * blocks_for(columns, TILE),),
        (threads.get(x.device.type, 1),),
        (*matrix, *halves_and_rule),
        device=x.device,
        extra_flags=flags,
    )


def _in_tiles(x: torch.Tensor) -> bool:
    """Whether the kernel that takes whole tiles does for this."""
    return x.device.type in _TILE_THREADS and in_tiles(x, TILE) and in_32_bits(x)


def _amaxes(
    x: torch.Tensor,
    r: Recipe,
    given: Sequence[torch.Tensor | None],
    *,
    rowwise: bool,
    columnwise: bool,
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """The amax of either half where the tensor has one scale: what is given, or the tensor's own.

    That is found once: here where scales are made of it, else by the kernel that quantizes, and is then the second
    result, too.
    """
    wanted = (rowwise, columnwise)
    names = ("amax", "amax") if not columnwise else ("rowwise amax", "columnwise amax")
    for side, one, name in zip(wanted, given, names, strict=True):
        if side:
            check_amax(one, amax_shape((0, 0), r), r, name)
            check_contiguous(**{name: one})
    if not r.whole:
        return [None, None], None
    missing = any(side and one is None for side, one in zip(wanted, given, strict=True))
    found = _to_find(r, 1, x.device) if missing else None
    own = _tensor_amax(x, propagate_nan=r.nan == "propagate") if missing and found is None else found
    return [own if one is None else one for one in given], found


def _to_find(r: Recipe, count: int, device: torch.device) -> torch.Tensor | None:
    """Where the kernel that quantizes leaves the amaxes of which later scales are made, if the recipe has such."""
    return torch.zeros(count, dtype=torch.float32, device=device) if r.tensor_scale == "given" else None


def _tensor_amax(x: torch.Tensor, *, propagate_nan: bool) -> torch.Tensor | None:
    for view in (x, x.T):
        if view.is_contiguous():
            return tensor_amax(view, propagate_nan=propagate_nan)
    return oriented_amax(x, plain=True, rotated=False, along_rows=True, propagate_nan=propagate_nan)[0]


def _check_options(r: Recipe, shape: tuple[int, int], random: object, *, swizzled: bool) -> None:
    check_random(random, shape, r)
    check_swizzled(r, swizzled=swizzled)
