"""Quantize to MX: blocks of 32 elements, or of 32×32, with powers of two as scales."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.native.quantize.amax import in_tiles, strips
from narrowgauge.native.quantize.sections import check_sizes_of
from narrowgauge.native.quantize.variants import unit_flags
from narrowgauge.native.runtime.arguments import GENERAL_THREADS, STRIP, blocks_for, check_contiguous, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value
from narrowgauge.spec.arguments import (
    as_matrix,
    check_amax,
    check_random,
    check_random_of_sections,
    check_scale,
)
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_PARAMETERS = KernelStruct("quantize/quantize_mx.cu", "QuantizeMxParameters")
_THREADS = 128
_TILE = (32, 128)
"""Rows and columns of a tile of bfloat16."""
_TILE_THREADS = {"cuda": 64, "cpu": 16}
"""Threads of a tile; they follow from PIECE_ROWS of the kernel."""
_SCALE_ORDER = {"amax*(1/max)": "AMAX_TIMES_RECIPROCAL", "amax/max": "AMAX_OVER_MAX", "amax*2^-emax": "AMAX_OVER_POWER"}


def scale_order(recipe: Recipe) -> str:
    """Enumerator of the kernels' MxScaleOrder (mx.cuh)."""
    return _SCALE_ORDER[recipe.block_scale]


def up_from(recipe: Recipe) -> int:
    """Mantissa of 23 bits from which on the exponent of a scale is rounded up (e8m0_from_float of formats.cuh)."""
    return {
        "up": 1,
        "down": 1 << 23,
        "as-element": (1 << 23) - (1 << (22 - recipe.element.mantissa_bits)),  # half a step of the element below 2
        "up-from-1.75": 3 << 21,
        "nearest-log2": 0x3504F4,  # the first float32 above √2
    }[recipe.scale_rounding]


@dataclass
class Output:
    """An orientation of a result, in the buffers that the kernel writes."""

    codes: torch.Tensor
    scales: torch.Tensor
    random: object

    def fields(self) -> dict[str, Value]:
        """Fields of the kernel's struct Output."""
        words = self.random if isinstance(self.random, torch.Tensor) else None
        offset = self.random[1] % 2**64 if isinstance(self.random, tuple) else 0
        return {"wanted": 1, "codes": self.codes, "scales": self.scales, "random": words, "offset": offset}


_NO_OUTPUT: dict[str, Value] = {"wanted": 0, "codes": None, "scales": None, "random": None, "offset": 0}


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

    `recipe.columnwise` is the layout of the columnwise result. `bits`: of each half, random words, int32 (M, ⌈K/4⌉), or
    (seed, offset) of Philox. A half that is not among `halves` is None. Source: docs/numerics.md#mx. Raises TypeError
    or ValueError for inputs of another dtype or shape, and for an amax or an encode scale, which MX does not use;
    ToolchainError if kernels cannot be compiled.
    """
    x = as_matrix(x)
    for amax in amaxes:
        check_amax(amax, (1,), recipe)
    check_scale(scale, 1, recipe)
    forms = [(half.shape(x.shape), None, layout, half.transposed(recipe)) for half in Half]
    outputs = [
        new_output(form[0], recipe, half.pick(bits), x.device, layout, transposed=form[-1]) if half in halves else None
        for half, form in zip(Half, forms, strict=True)
    ]
    _launch(x, recipe, *outputs, layout=layout)
    row, column = (
        None if output is None else Quantized(output.codes, output.scales, None, recipe, *form)
        for output, form in zip(outputs, forms, strict=True)
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
    check_amax(amax, (1,), recipe)
    check_scale(scale, 1, recipe)
    check_random_of_sections(random, recipe)
    output = new_output((rows, columns), recipe, random, x.device, LINEAR)
    if half is Half.COLUMN:  # flat, with room for a half byte and a short block at the end of every section
        count = len(sizes)
        codes = columns * ((rows + count) // 2 + 1) if recipe.element.bits == 4 else columns * rows
        output.codes = torch.empty(codes, dtype=torch.uint8, device=x.device)
        output.scales = torch.empty(columns * (rows // recipe.block[1] + count), dtype=torch.uint8, device=x.device)
    _launch(x, recipe, *half.pick(((output, None), (None, output))), sizes=sizes)
    return GroupedQuantized(
        output.codes, output.scales, None, recipe, (rows, columns), sizes, columnwise=half is Half.COLUMN
    )  # fmt: skip


def new_output(
    shape: tuple[int, int],
    recipe: Recipe,
    random: object,
    device: torch.device,
    layout: ScaleLayout,
    *,
    transposed: bool = False,
) -> Output:
    check_random(random, shape, recipe)
    check_contiguous(random=random)
    # No thread writes the padding of a layout; torch sets the padding to 0.
    new = torch.empty if layout == LINEAR else torch.zeros
    scales = new(scales_shape(shape, recipe, transposed=transposed, layout=layout), dtype=torch.uint8, device=device)
    codes = torch.empty(codes_shape(shape, recipe, transposed=transposed), dtype=torch.uint8, device=device)
    return Output(codes, scales, random)


def _launch(
    x: torch.Tensor,
    recipe: Recipe,
    row: Output | None,
    column: Output | None,
    *,
    sizes: torch.Tensor | None = None,
    layout: ScaleLayout = LINEAR,
) -> None:
    rows, columns = x.shape
    stochastic, square_blocks = recipe.rounding == "stochastic", recipe.block[0] > 1
    plain = (
        column is None
        and sizes is None
        and x.is_contiguous()
        and layout == LINEAR
        and not (stochastic or square_blocks)
    )
    # If both kernels can quantize `x`, the plain kernel, which has no barrier, is faster on a CPU.
    tiled = sizes is None and _in_tiles(x, recipe, column)
    if tiled and not (plain and x.device.type == "cpu"):
        name, grid = "quantize_mx_tiles_bf16", x.numel() // (_TILE[0] * _TILE[1])
        threads = _TILE_THREADS.get(x.device.type, 1)
    elif plain and row is not None:
        name, grid, threads = f"quantize_mx_plain_{suffix(x.dtype)}", blocks_for(row.scales.numel(), _THREADS), _THREADS
    else:
        name, grid = f"quantize_mx_{suffix(x.dtype)}", max(1, strips(rows, sizes)) * blocks_for(columns, STRIP)
        threads = GENERAL_THREADS["quantize_mx"].get(x.device.type, 1)
    parameters = parameters_of(x.shape, recipe, row, column, x=x, sizes=sizes, layout=layout)
    flags = (f"-DELEMENT={recipe.element.name}", *unit_flags(name, x.device))
    launch("quantize_mx", name, (grid,), (threads,), (parameters,), device=x.device, extra_flags=flags)


def parameters_of(
    shape: Sequence[int],
    recipe: Recipe,
    row: Output | None,
    column: Output | None,
    *,
    x: torch.Tensor | None = None,
    sizes: torch.Tensor | None = None,
    layout: ScaleLayout = LINEAR,
) -> StructValue:
    """The kernels' struct QuantizeMxParameters for a matrix of `shape` (M, K). `x`: None if the kernel makes it."""
    seed = next((o.random[0] for o in (row, column) if o is not None and isinstance(o.random, tuple)), 0)
    variant: dict[str, Value] = {
        "scale_order": scale_order(recipe), "up_from": up_from(recipe), "square_blocks": recipe.block[0] > 1,
        "propagate_nan": recipe.nan == "propagate", "in_place": recipe.columnwise == "in-place",
        "stochastic": recipe.rounding == "stochastic", "swizzled": layout != LINEAR,
    }  # fmt: skip
    strides = (0, 0) if x is None else x.stride()
    return _PARAMETERS(
        x=x, row_stride=strides[0], column_stride=strides[1], rows=shape[0], columns=shape[1], sizes=sizes,
        sections=1 if sizes is None else len(sizes), row=_NO_OUTPUT if row is None else row.fields(),
        column=_NO_OUTPUT if column is None else column.fields(), variant=variant, seed=seed % 2**64,
    )  # fmt: skip


def _in_tiles(x: torch.Tensor, recipe: Recipe, column: Output | None) -> bool:
    """Whether the kernel for whole tiles can quantize `x`."""
    return (
        in_tiles(x, _TILE[0])
        and recipe.rounding == "nearest-even"
        and (column is None or recipe.columnwise == "in-place")
    )
