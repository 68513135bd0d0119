"""Quantize to FP8 with float32 scales for blocks of 128 elements, tiles of 128×128, or the whole tensor or section."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.native.quantize.amax import amax as tensor_amax
from narrowgauge.native.quantize.amax import in_32_bits, in_tiles, oriented_amax
from narrowgauge.native.quantize.sections import check_sizes_of
from narrowgauge.native.quantize.variants import unit_flags, variant_flags
from narrowgauge.native.runtime.arguments import GENERAL_THREADS, blocks_for, check_contiguous, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import (
    as_matrix,
    check_amax,
    check_random,
    check_random_of_sections,
    check_scale,
)
from narrowgauge.spec.formats import E5M2
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized, amax_shape, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import ScaleLayout

TILE = 128
"""Rows and columns of the tile of a thread block."""
_TILE_THREADS = {"cuda": 256}
"""Threads of the kernel for whole tiles of bfloat16, by the devices with a slower general kernel."""

_SCALES_BY_TILE = 2**26
"""Elements from which both outputs of 1x128 store their scales by a second kernel, with whole sectors of L2. On an H200
16384² takes 319 µs and not 341, 8192² 84 µs and not 86."""
_STORED_BLOCKS, _STORE_THREADS = 32, 256

_PARAMETERS = KernelStruct("quantize/quantize_fp8.cu", "QuantizeFp8Parameters")
_VARIANT = KernelStruct("quantize/quantize_fp8.cu", "QuantizeFp8Variant")
_NO_OUTPUT: dict[str, Value] = {"amax": None, "codes": None, "scales": None, "encode": None, "amaxes_by_tile": None}


@dataclass
class _Output:
    """An orientation of a result. `amax` and `encode` (the factors of elements) are None if the recipe has blocks."""

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    encode: torch.Tensor | None

    def fields(self, *, by_tile: bool) -> dict[str, Value]:
        """Fields of the kernel's struct Output. `by_tile`: the kernel stores amaxes by tile, for `store_scales`."""
        return {
            "amax": self.amax, "codes": self.codes, "scales": self.scales, "encode": self.encode,
            "amaxes_by_tile": torch.empty_like(self.scales, dtype=torch.bfloat16) if by_tile else None,
        }  # fmt: skip


def _scale_block(recipe: Recipe) -> str:
    """Enumerator of the kernel's ScaleBlock."""
    return "WHOLE" if recipe.whole else "TILES" if recipe.block[0] > 1 else "LINES"


def variant(recipe: Recipe) -> dict[str, Value]:
    """Fields of the kernel's struct QuantizeFp8Variant."""
    return {
        "scale_block": _scale_block(recipe), "e5m2": recipe.element is E5M2,
        "power_of_two": recipe.scale_rounding == "down", "propagate_nan": recipe.nan == "propagate",
    }  # fmt: skip


def quantize_both(
    x: torch.Tensor,
    recipe: Recipe,
    halves: Collection[Half],
    *,
    amaxes: Sequence[torch.Tensor | None],
    scale: torch.Tensor | None,
    bits: Sequence[object],
    layout: ScaleLayout,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K), any strides, in one read: rowwise (M, K), and its transpose, columnwise (K, M).

    `amaxes`: of each half, float32 (1,), in place of the tensor's own amax if the recipe has one scale for the tensor.
    `scale`, float32 (1,): the encode scale of both halves, of delayed scaling. A half that is not among `halves` is
    None. Source: docs/numerics.md#fp8-with-float32-scales. Raises TypeError or ValueError for inputs of another dtype
    or shape and for random bits; ToolchainError if kernels cannot be compiled.
    """
    x = as_matrix(x)
    for half in halves:
        check_random(half.pick(bits), half.shape(x.shape), recipe)
    check_scale(scale, 1, recipe)
    check_contiguous(scale=scale)
    amaxes, amax_out = _amaxes(x, recipe, amaxes, halves)
    outputs = [
        _output(half.shape(x.shape), recipe, half.pick(amaxes), x.device) if half in halves else None for half in Half
    ]
    # A transposed view of a contiguous matrix is quantized as the matrix, with the outputs exchanged, so that reads are
    # coalesced.
    along_rows = x.stride(1) == 1 or x.stride(0) != 1
    _launch(x if along_rows else x.T, recipe, outputs if along_rows else outputs[::-1], scale, amax_out)
    row, column = (
        None
        if output is None
        else Quantized(output.codes, output.scales, output.amax, recipe, half.shape(x.shape), output.encode, layout)
        for half, output in zip(Half, outputs, strict=True)
    )
    return row, column


def quantize_grouped(
    x: torch.Tensor,
    sizes: torch.Tensor,
    recipe: Recipe,
    half: Half,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: object = None,
) -> GroupedQuantized:
    """The half of sections of `x` (M, K), as `native.ops.quantize_grouped` describes it."""
    x = as_matrix(x)
    rows, columns = x.shape
    check_sizes_of(sizes, rows)
    count = len(sizes)
    check_random_of_sections(random, recipe)
    check_scale(scale, count, recipe)
    check_amax(amax, (count,), recipe)
    check_contiguous(amax=amax, scale=scale)
    amax_out = None
    if recipe.whole and amax is None:
        amax = amax_out = _amax_output(recipe, count, x.device)
    if recipe.whole and amax is None:
        amax, _ = oriented_amax(
            x, plain=True, rotated=False, along_rows=True, sizes=sizes, propagate_nan=recipe.nan == "propagate"
        )  # fmt: skip
    # Upper bound of the blocks for any sizes: every section may end with a short block, and the host does not know the
    # sizes.
    blocks = count if recipe.whole else rows // TILE + count
    across = 1 if recipe.whole else blocks_for(columns, TILE) if columns else 0
    of_lines = _scale_block(recipe) == "LINES"
    height, lines = (rows, columns) if of_lines else (blocks, across)
    codes, scales = half.pick((((rows, columns), (height, across)), ((rows * columns,), (lines * blocks,))))
    output = _Output(
        torch.empty(codes, dtype=torch.uint8, device=x.device),
        torch.empty(scales, dtype=torch.float32, device=x.device),
        amax,
        torch.empty((count,), dtype=torch.float32, device=x.device) if recipe.whole else None,
    )
    _launch(x, recipe, half.pick(((output, None), (None, output))), scale, amax_out, sizes)
    return GroupedQuantized(
        output.codes, output.scales, amax, recipe, (rows, columns), sizes, output.encode, half is Half.COLUMN
    )


def _output(shape: tuple[int, int], recipe: Recipe, amax: torch.Tensor | None, device: torch.device) -> _Output:
    return _Output(
        torch.empty(codes_shape(shape, recipe), dtype=torch.uint8, device=device),
        torch.empty(scales_shape(shape, recipe), dtype=torch.float32, device=device),
        amax,
        torch.empty((1,), dtype=torch.float32, device=device) if recipe.whole else None,
    )


def _launch(
    x: torch.Tensor,
    recipe: Recipe,
    outputs: Sequence[_Output | None],
    scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    sizes: torch.Tensor | None = None,
) -> None:
    rows, columns = x.shape
    sections = 1 if sizes is None else len(sizes)
    strips = blocks_for(rows, TILE) if sizes is None else max(1, rows // TILE + sections)
    choices = variant(recipe)
    tiled = sizes is None and _in_tiles(x)
    by_tile = tiled and _scale_block(recipe) == "LINES" and None not in outputs and x.numel() >= _SCALES_BY_TILE
    row, column = (_NO_OUTPUT if output is None else output.fields(by_tile=by_tile) for output in outputs)
    parameters = _PARAMETERS(
        x=x, row_stride=x.stride(0), column_stride=x.stride(1), rows=rows, columns=columns, sizes=sizes,
        sections=sections, variant=choices, given_scales=scale, amax_out=amax_out, row=row, column=column,
        largest_element=recipe.element.max, smallest_amax=recipe.smallest_amax,
        largest_scale=torch.finfo(x.dtype if recipe.largest_scale == "input" else torch.float32).max,
    )  # fmt: skip
    if tiled:
        name, threads = "quantize_fp8_tiles_bf16", _TILE_THREADS
    else:
        name, threads = f"quantize_fp8_{suffix(x.dtype)}", GENERAL_THREADS["quantize_fp8"]
    flags = variant_flags(_VARIANT, choices, x.device) + unit_flags(name, x.device)
    grid, block = (strips * blocks_for(columns, TILE),), (threads.get(x.device.type, 1),)
    launch("quantize_fp8", name, grid, block, (parameters,), device=x.device, extra_flags=flags)
    if by_tile:
        lines = max(rows, columns) // TILE
        by_line = (blocks_for(lines, _STORED_BLOCKS), lines, 2)
        launch(
            "quantize_fp8", "store_scales", by_line, (_STORE_THREADS,), (parameters,), device=x.device,
            extra_flags=flags, early=True,
        )  # fmt: skip


def _in_tiles(x: torch.Tensor) -> bool:
    """Whether the kernel for whole tiles can quantize `x` and is the faster one."""
    return x.device.type in _TILE_THREADS and in_tiles(x, TILE) and in_32_bits(x)


def _amaxes(
    x: torch.Tensor,
    recipe: Recipe,
    given: Sequence[torch.Tensor | None],
    halves: Collection[Half],
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Amaxes of the rowwise and the columnwise result, if the recipe has one scale for the tensor: given, or computed.

    If scales depend on the tensor's own amax, it is computed here, once. With delayed scaling the kernel that quantizes
    computes it: then the tensor that receives it is the second result, too.
    """
    for half in halves:
        name, amax = f"{half} amax" if Half.COLUMN in halves else "amax", half.pick(given)
        check_amax(amax, amax_shape((0, 0), recipe), recipe, name)
        check_contiguous(**{name: amax})
    if not recipe.whole:
        return [None, None], None
    missing = any(half.pick(given) is None for half in halves)
    amax_out = _amax_output(recipe, 1, x.device) if missing else None
    own = _tensor_amax(x, propagate_nan=recipe.nan == "propagate") if missing and amax_out is None else amax_out
    return [own if amax is None else amax for amax in given], amax_out


def _amax_output(recipe: Recipe, count: int, device: torch.device) -> torch.Tensor | None:
    """Zeros that receive the amaxes of delayed scaling from the kernel that quantizes; None for other recipes."""
    return torch.zeros(count, dtype=torch.float32, device=device) if recipe.tensor_scale == "given" else None


def _tensor_amax(x: torch.Tensor, *, propagate_nan: bool) -> torch.Tensor | None:
    for view in (x, x.T):
        if view.is_contiguous():
            return tensor_amax(view, propagate_nan=propagate_nan)
    return oriented_amax(x, plain=True, rotated=False, along_rows=True, propagate_nan=propagate_nan)[0]
