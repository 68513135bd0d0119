"""Quantize to NVFP4: one orientation, both in one launch, and sections with an amax each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import Struct

import numpy as np
import torch

from narrowgauge.native.quantize.amax import amax as tensor_amax
from narrowgauge.native.quantize.amax import deal, in_32_bits, in_tiles, oriented_amax, strips
from narrowgauge.native.quantize.hadamard import transform
from narrowgauge.native.quantize.sections import check_sizes_of
from narrowgauge.native.runtime.arguments import (
    ANY_THREADS,
    STRIP,
    THREADS,
    blocks_for,
    check_contiguous,
    check_tensor,
    suffix,
)
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import (
    as_matrix,
    check_random,
    check_random_of_sections,
    check_rotated,
    check_rotated_sections,
    check_scale,
    check_section_recipe,
    split_random,
)
from narrowgauge.spec.quantized import (
    GroupedQuantized,
    Quantized,
    amax_shape,
    codes_shape,
    scales_shape,
    swizzled_shape,
)
from narrowgauge.spec.recipes import Recipe

_SCALE_ORDER = {"amax*(enc*(1/6))": 0, "(amax/6)*enc": 1}
_CANDIDATES = {"6": 0, "4-or-6-mae": 1, "4-or-6-mse": 2}
_ROTATE_ROWS, _ROTATE_COLUMNS = 1, 2
_PLAIN_BLOCKS = 2
"""Blocks of 16 that a thread of the plain kernel makes."""
_DEEP = 8
"""Tiles, one below the other, that a block of threads takes, which begins with the factors of all scales, and stores
the scales of columns together: both halves of 16384² bf16 take an H200 0.253 ms of nvfp4-2d with 8, 0.256 with 4, 0.258
with 2, and 0.248 where the last 16 strips go in twos, as they do; of nvfp4-rht-sr so 0.290. With room for 16 that takes
0.285 with 16, but 4096x14336 82 µs for 70, and nvfp4, -2d and -rht take 5 to 9 % longer from 12 on."""
_KEY_STEPS = tuple((n * 0x9E3779B9, n * 0xBB67AE85) for n in range(10))
"""What is added to the key of Philox up to each round."""
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
"""Of Philox, by which a round multiplies words 0 and 2."""
_KEYS = Struct("20I")
_NO_KEYS = np.bytes_(bytes(_KEYS.size))
"""The kernel's PhiloxKeys, and those where nothing is random."""
_FUSED_GROUP = 16
"""Groups of other sizes are rotated by a launch of their own."""


@dataclass
class _Half:
    """One orientation of a result, (lines, length), as the kernel writes it."""

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor
    tensor_scale: torch.Tensor
    random: object

    @property
    def offset(self) -> int | None:
        """That of Philox, where it draws."""
        return self.random[1] % 2**64 if isinstance(self.random, tuple) else None

    def arguments(self) -> list[Argument]:
        words = self.random if isinstance(self.random, torch.Tensor) else None
        return [self.amax, self.codes, self.scales, self.tensor_scale, words, np.uint64(self.offset or 0)]


_NO_HALF: list[Argument] = [None, None, None, None, None, np.uint64(0)]


def _half(shape: tuple[int, int], r: Recipe, amax: torch.Tensor, random: object, *, swizzled: bool) -> _Half:
    device = amax.device
    # The padding of swizzled scales is 0, and no thread has it.
    scales = (
        torch.zeros(swizzled_shape(shape, r), dtype=torch.uint8, device=device)
        if swizzled
        else torch.empty(scales_shape(shape, r), dtype=torch.uint8, device=device)
    )
    codes = torch.empty(codes_shape(shape, r), dtype=torch.uint8, device=device)
    return _Half(codes, scales, amax, torch.empty_like(amax), random)


def _launch(
    x: torch.Tensor,
    r: Recipe,
    row: _Half | None,
    column: _Half | None,
    *,
    rotation: int,
    sizes: torch.Tensor | None = None,
    swizzled: bool = False,
) -> None:
    rows, columns = x.shape
    words = any(half is not None and isinstance(half.random, torch.Tensor) for half in (row, column))
    variant = _variant_bits(r, rotation=rotation, swizzled=swizzled, words=words)
    # One compilation for each costs a GPU's driver a second, once, and a CPU's compiler many.
    flags = (f"-DVARIANT={variant}",) if x.device.type == "cuda" else ()
    if row is not None and column is None and sizes is None and not swizzled and x.is_contiguous() and not _variant(r):
        launch(
            "quantize_nvfp4",
            f"quantize_nvfp4_plain_{suffix(x.dtype)}",
            (blocks_for(row.scales.numel(), THREADS * _PLAIN_BLOCKS),),
            (THREADS,),
            (x, np.int64(rows), np.int64(columns), *row.arguments()[:4], np.float32(r.max_product),
             np.int32(_SCALE_ORDER[r.block_scale]), np.int32(r.nan == "propagate")),
            device=x.device,
            extra_flags=flags,
        )  # fmt: skip
        return
    sections = 1 if sizes is None else len(sizes)
    seed = next((h.random[0] for h in (row, column) if h is not None and isinstance(h.random, tuple)), 0)
    halves = [*(_NO_HALF if row is None else row.arguments()), *(_NO_HALF if column is None else column.arguments())]
    rule = (np.float32(r.max_product), np.int32(variant), np.uint64(seed % 2**64))
    grid: tuple[int, ...]
    if sizes is None and _in_tiles(x, r, row, column):
        name, threads = "quantize_nvfp4_tiles_bf16", THREADS
        grid, dealt = deal(x, _DEEP)
        keys = [
            _NO_KEYS if half is None or half.offset is None else philox_keys(seed, half.offset)
            for half in (row, column)
        ]
        arguments = [x, np.int64(rows), np.int64(columns), *dealt, *halves, *rule, *keys]
    else:
        grid = (max(1, strips(rows, sizes)) * blocks_for(columns, STRIP),)
        name, threads = f"quantize_nvfp4_{suffix(x.dtype)}", ANY_THREADS["quantize_nvfp4"].get(x.device.type, 1)
        strides = [np.int64(x.stride(0)), np.int64(x.stride(1))]
        arguments = [x, *strides, np.int64(rows), np.int64(columns), sizes, np.int32(sections), *halves, *rule]
    launch("quantize_nvfp4", name, grid, (threads,), arguments, device=x.device, extra_flags=flags)


def philox_keys(seed: int, offset: int) -> np.bytes_:
    """The PhiloxKeys of `philox_with_offset`: those of all rounds, the first three with what rounds 0 and 1 make of the
    offset. Source: Salmon et al., SC 2011; philox.cuh has the rounds."""
    low, high = seed % 2**32, seed % 2**64 >> 32
    keys = [key for a, b in _KEY_STEPS for key in ((low + a) % 2**32, (high + b) % 2**32)]
    first = _MULTIPLIERS[0] * (offset % 2**32)
    second = _MULTIPLIERS[1] * (first >> 32 ^ keys[1])
    for n, word in (0, offset >> 32), (2, second >> 32), (3, first % 2**32), (4, second % 2**32):
        keys[n] ^= word
    return np.bytes_(_KEYS.pack(*keys))


def _in_tiles(x: torch.Tensor, r: Recipe, *halves: _Half | None) -> bool:
    """Whether the kernel that takes whole tiles does for this."""
    turned = r.block[0] > 1 and r.transform is not None
    plain = r.granularity == "tensor" and r.candidates == "6" and not turned
    aligned = all(half.codes.data_ptr() % 8 == half.scales.data_ptr() % 4 == 0 for half in halves if half is not None)
    return plain and aligned and in_tiles(x) and in_32_bits(x)


def _variant_bits(r: Recipe, *, rotation: int, swizzled: bool, words: bool) -> int:
    """What the kernel's `rule_of` reads."""
    fields = (
        (_CANDIDATES[r.candidates], 2), (r.block[0] > 1, 1), (r.granularity == "row", 1), (r.nan == "propagate", 1),
        (rotation, 2), (r.rounding == "stochastic", 1), (swizzled, 1),
        (0 if r.transform is None else r.transform.signs, 16), (_SCALE_ORDER[r.block_scale], 1), (words, 1),
    )  # fmt: skip
    bits = shift = 0
    for value, width in fields:
        bits |= int(value) << shift
        shift += width
    return bits


def _variant(r: Recipe) -> bool:
    """Whether a recipe asks for more than steps 1 to 8 of docs/numerics.md#nvfp4."""
    plain = (r.block[0], r.granularity, r.transform, r.candidates, r.rounding)
    return plain != (1, "tensor", None, "6", "nearest-even")


def _fused(r: Recipe) -> bool:
    return r.transform is None or r.transform.group == _FUSED_GROUP


def quantize(
    x: torch.Tensor,
    r: Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
    swizzled: bool = False,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, any strides, along K; a recipe with a transform rotates it.

    Any M and K (but whole groups of a transform); more dimensions are taken as rows. `amax`, float32 (1,), or (M,)
    where every row has one, replaces the tensor's own. `random`: words, int32 (M, ⌈K/4⌉), or (seed, offset) of Philox.
    Source: docs/numerics.md#nvfp4. Raises TypeError or ValueError for inputs that do not fit, an encode scale among
    them, ToolchainError where kernels cannot be compiled.
    """
    check_scale(scale, 1, r)
    x = as_matrix(x)
    shape = (x.shape[0], x.shape[1])
    check_rotated(x, shape[1], r)
    check_random(random, shape, r)
    check_contiguous(random=random)
    if not _fused(r):
        rotated = quantize(transform(x, r), replace(r, transform=None), amax=amax, random=random, swizzled=swizzled)
        return replace(rotated, recipe=r)
    if amax is None:
        amax = _amax(x, r)
    check_tensor(amax, "amax", (torch.float32,), amax_shape(shape, r))
    half = _half(shape, r, amax, random, swizzled=swizzled)
    _launch(x, r, half, None, rotation=0 if r.transform is None else _ROTATE_ROWS, swizzled=swizzled)
    return _quantized(half, r, shape, swizzled=swizzled)


def _quantized(half: _Half, r: Recipe, shape: tuple[int, int], *, swizzled: bool) -> Quantized:
    return Quantized(half.codes, half.scales, half.amax, r, shape, half.tensor_scale, swizzled)


def _amax(x: torch.Tensor, r: Recipe, *, along_rows: bool = True) -> torch.Tensor:
    """The amax of `x`, rotated where the recipe rotates: of the tensor, or of every row or column."""
    propagate_nan = r.nan == "propagate"
    each, rotated = r.granularity == "row", r.transform is not None
    if not each and not rotated and x.is_contiguous():
        return tensor_amax(x, propagate_nan=propagate_nan)
    found = oriented_amax(
        x, plain=not rotated, rotated=rotated, along_rows=along_rows, each=each,
        signs=0 if r.transform is None else r.transform.signs, propagate_nan=propagate_nan,
    )  # fmt: skip
    amax = found[1] if rotated else found[0]
    assert amax is not None
    return amax


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

    A transform rotates the columnwise half alone; groups other than 16 cost a launch of their own. `amax` holds that of
    either half, `random` the words of either half, or seed and offset, of which the columnwise half uses offset + 1. A
    half that is not wanted is None. Raises as `quantize` does.
    """
    check_scale(scale, 1, r)
    x = as_matrix(x)
    shape, shape_t = (x.shape[0], x.shape[1]), (x.shape[1], x.shape[0])
    bits, bits_t = split_random(random)
    if columnwise:
        check_rotated(x, x.shape[0], r)
        check_random(bits_t, shape_t, r)
        check_contiguous(random=bits_t)
    if rowwise:
        check_random(bits, shape, r)
        check_contiguous(random=bits)
    given = (None, None) if amax is None else amax
    one_by_one = r.candidates != "6" and r.block[0] > 1 and amax is not None  # a tile's choice is made by one amax
    if rowwise and columnwise and (one_by_one or not _fused(r)):
        row = quantize(x, r.rowwise, amax=given[0], random=bits, swizzled=swizzled)
        column = quantize_both(x, r, rowwise=False, amax=amax, random=random, swizzled=swizzled)[1]
        return row, column
    if not _fused(r) and columnwise:
        return None, quantize(x.T, r, amax=given[1], random=bits_t, swizzled=swizzled)
    amaxes = _both_amaxes(x, r, given, rowwise=rowwise, columnwise=columnwise)
    halves = [
        _half(of, r, found, some, swizzled=swizzled) if found is not None else None
        for of, found, some in zip((shape, shape_t), amaxes, (bits, bits_t), strict=True)
    ]
    rotation = 0 if r.transform is None else _ROTATE_COLUMNS
    _launch(x, r, halves[0], halves[1], rotation=rotation, swizzled=swizzled)
    row_half, column_half = halves
    return (
        None if row_half is None else _quantized(row_half, r.rowwise, shape, swizzled=swizzled),
        None if column_half is None else _quantized(column_half, r, shape_t, swizzled=swizzled),
    )


def _both_amaxes(
    x: torch.Tensor,
    r: Recipe,
    given: Sequence[torch.Tensor | None],
    *,
    rowwise: bool,
    columnwise: bool,
) -> list[torch.Tensor | None]:
    """The amax of either half, None for one that is not wanted. Before and after a rotation they cost one read."""
    wanted = (rowwise, columnwise)
    for amax, side, name, extent in zip(given, wanted, ("rowwise", "columnwise"), x.shape, strict=True):
        if side and amax is not None:
            check_tensor(amax, f"{name} amax", (torch.float32,), amax_shape((extent, 0), r))
    missing = [side and amax is None for side, amax in zip(wanted, given, strict=True)]
    own = _own_amaxes(x, r, rowwise=missing[0], columnwise=missing[1]) if any(missing) else (None, None)
    found = [amax if amax is not None else mine for amax, mine in zip(given, own, strict=True)]
    return [amax if side else None for side, amax in zip(wanted, found, strict=True)]


def _own_amaxes(
    x: torch.Tensor, r: Recipe, *, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if r.transform is not None:
        return oriented_amax(
            x, plain=rowwise, rotated=columnwise, along_rows=False, signs=r.transform.signs,
            propagate_nan=r.nan == "propagate",
        )  # fmt: skip
    if r.granularity == "row":
        return (_amax(x, r) if rowwise else None), (_amax(x, r, along_rows=False) if columnwise else None)
    amax = _amax(x, r)
    return amax, amax


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
    """Quantize `x` (M, K) in sections of `sizes` rows, int64 (G,), each with its own amax, some perhaps empty.

    One launch for all, which reads the sizes where they lie: the host does not wait for a GPU. Sizes on a CPU are
    checked; on a GPU, what is wrong in them is cut to the rows of x. `columnwise`: of the transpose of each section,
    rotated where the recipe rotates. `amax`: float32 (G,). Raises as `quantize` does.
    """
    check_scale(scale, 1, r)
    x = as_matrix(x)
    rows, columns = x.shape
    _check_sizes(sizes, rows, r, rotated=columnwise)
    # The extents of columnwise sections, a group at least each, are checked with their sizes.
    check_rotated(x, 0 if columnwise else columns, r)
    check_random_of_sections(random, r)
    if not _fused(r):  # no group crosses the border of two sections, so that all are rotated at once
        y = transform(x.T, r).T if columnwise else transform(x, r)
        plain = replace(r, transform=None)
        return replace(quantize_grouped(y, sizes, plain, columnwise=columnwise, amax=amax, random=random), recipe=r)
    count = len(sizes)
    rotated = r.transform is not None
    if amax is None:
        found = oriented_amax(
            x, plain=not rotated, rotated=rotated, along_rows=not columnwise, sizes=sizes,
            signs=0 if r.transform is None else r.transform.signs, propagate_nan=r.nan == "propagate",
        )  # fmt: skip
        amax = found[1] if rotated else found[0]
        assert amax is not None
    check_tensor(amax, "amax", (torch.float32,), (count,))
    half = _half((rows, columns), r, amax, random, swizzled=False)
    if columnwise:  # flat, with room for a half byte and a short block of every section
        half.codes = torch.empty(columns * ((rows + count) // 2 + 1), dtype=torch.uint8, device=x.device)
        half.scales = torch.empty(columns * (rows // 16 + count), dtype=torch.uint8, device=x.device)
    rotation = 0 if not rotated else _ROTATE_COLUMNS if columnwise else _ROTATE_ROWS
    _launch(x, r, None if columnwise else half, half if columnwise else None, rotation=rotation, sizes=sizes)
    return GroupedQuantized(
        half.codes, half.scales, amax, r, (rows, columns), sizes, half.tensor_scale, columnwise=columnwise
    )


def _check_sizes(sizes: torch.Tensor, rows: int, r: Recipe, *, rotated: bool) -> None:
    check_section_recipe(r)
    check_sizes_of(sizes, rows)
    if sizes.device.type != "cpu" or not rotated or r.transform is None:
        return
    check_rotated_sections(sizes.tolist(), r)
