"""Training kernels that compute a matrix while loading its operands: passes over rows, and quantize in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from narrowgauge.native.fused.rows import LONGEST_ROW, grid_of, has_whole_chunks
from narrowgauge.native.quantize import mx, nvfp4
from narrowgauge.native.quantize.variants import unit_flags, variant_flags
from narrowgauge.native.runtime.arguments import (
    GENERAL_THREADS,
    STRIP,
    THREADS,
    blocks_for,
    check_contiguous,
    element_type,
    suffix,
    supported,
)
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value
from narrowgauge.spec import arguments
from narrowgauge.spec.arguments import as_matrix, check_random, check_rotated
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import E4M3, E8M0
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_ROWS = KernelStruct("fused/produced_rows.cu", "ProducedRowsParameters")
_SUMS = KernelStruct("fused/produced_rows.cu", "ColumnSumsParameters")
_PRODUCER = KernelStruct("fused/producers.cuh", "ProducerParameters")
_VARIANT = KernelStruct("fused/producers.cuh", "ProducerVariant")
_AMAX = KernelStruct("fused/produced_nvfp4.cu", "ProducedAmaxParameters")
_RESIDENT_THREADS = 512
"""Threads of a multiprocessor in a pass over rows, which keeps the sums over its rows in registers."""
_CPU_BLOCKS = 16
"""Thread blocks of a pass over rows on a CPU, each with partial sums of its rows."""
_PER_ROW: dict[str, Value] = {"scope": "ROW", "lanes": 1}


@dataclass
class Produced:
    """A matrix (M, K) of the dtype of `x` that a kernel makes."""

    x: torch.Tensor
    """(M, K), or (M, 2·half) in halves."""
    half: int
    """Columns of dy and of the weight, and of each half of gated operands."""
    shape: tuple[int, int]
    fields: dict[str, Value]
    """Those of the kernels' struct ProducerParameters."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that compile a kernel for this producer."""
        variant = self.fields["variant"]
        assert isinstance(variant, dict)
        return variant_flags(_VARIANT, variant, self.x.device, "PRODUCER")


def produced(
    producer: str,
    x: torch.Tensor,
    *,
    dy: torch.Tensor | None = None,
    rs: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    zero_centered: bool = False,
) -> Produced:
    """The matrix of `producer`, an enumerator of the kernels' Producer. Operands: fused/producers.cuh.

    Raises TypeError or ValueError for operands of another dtype or shape, for an odd number of columns of halves, and
    for `rs` that is not contiguous.
    """
    x = as_matrix(x)
    rows, columns = x.shape
    gated = producer.startswith("SILU")
    if gated and columns % 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; gate and up are its halves")
    half = columns // 2 if gated else columns
    if dy is not None:
        arguments.check_tensor(dy, "dy", (x.dtype,), (rows, half))
        dy = dy.contiguous()
    if rs is not None:
        arguments.check_tensor(rs, "rs", (torch.float32,), (rows, 1))
        check_contiguous(rs=rs)
    if weight is not None:
        arguments.check_tensor(weight, "weight", INPUT_DTYPES, (half,))
    operands = [tensor for tensor in (x, dy, weight) if tensor is not None]
    variant: dict[str, Value] = {
        "producer": producer, "zero_centered": zero_centered,
        "weight_type": element_type(x.dtype if weight is None else weight.dtype),
        "whole_chunks": has_whole_chunks(half, operands),
    }  # fmt: skip
    fields: dict[str, Value] = {
        "x": x, "row_stride": x.stride(0), "column_stride": x.stride(1), "dy": dy, "rs": rs, "projection": None,
        "weight": weight, "weight_stride": 0 if weight is None else weight.stride(0), "half": half, "variant": variant,
    }  # fmt: skip
    return Produced(x, half, (rows, half if producer == "SILU_MUL" else columns), fields)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool) -> Produced:
    """RMSNorm as a matrix that a kernel makes; its numbers of the rows take a launch."""
    made = produced("RMSNORM", x, weight=weight, zero_centered=zero_centered)
    made.fields["rs"] = rs = torch.empty(made.shape[0], dtype=torch.float32, device=x.device)
    pass_over_rows(made, eps=eps, numbers=rs)
    return made


def pass_over_rows(
    made: Produced,
    *,
    eps: float = 0.0,
    numbers: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> None:
    """Fill the wanted results: `numbers` of the rows, float32 (M,) or (M, 1); `y` (M, K), the gradient of the dtype of
    x; `sums` (K,), any dtype of INPUT_DTYPES, of the terms of a gradient over the rows (fused/produced_rows.cu).

    Raises NotImplementedError for rows that are longer than the registers of a thread block hold.
    """
    (rows, columns), device = made.shape, made.x.device
    if made.half > LONGEST_ROW:
        raise NotImplementedError(f"a pass over rows has up to {LONGEST_ROW} columns, and these are {made.half}")
    grid = grid_of(rows, made.half, device, _RESIDENT_THREADS, _PER_ROW)
    blocks = grid.blocks if device.type == "cuda" else min(grid.blocks, _CPU_BLOCKS)
    parts = blocks * grid.rows
    partial = None if sums is None else torch.empty(parts, columns, dtype=torch.float32, device=device)
    parameters = _ROWS(
        rows=rows, columns=made.half, segments=1, eps=eps, per_column=1.0 / columns if columns else 0.0,
        numbers=numbers, y=y, sums=partial, producer=made.fields,
    )  # fmt: skip
    kernel = f"produced_rows_{suffix(made.x.dtype)}"
    flags = (*unit_flags(kernel, device), *grid.flags, *made.flags)
    launch("produced_rows", kernel, (blocks,), (grid.threads,), (parameters,), device=device, extra_flags=flags)
    if sums is None:
        return
    kernel = f"column_sums_{suffix(sums.dtype)}"
    launch(
        "produced_rows", kernel, (blocks_for(columns, THREADS),), (THREADS,),
        (_SUMS(sums=partial, parts=parts, columns=columns, out=sums),), device=device,
        extra_flags=unit_flags(kernel, device),
    )  # fmt: skip


def quantize_produced(
    made: Produced,
    recipe: str | Recipe,
    halves: Sequence[Half] = (Half.ROW,),
    *,
    random: Sequence[object] = (None, None),
    scales: ScaleLayout = LINEAR,
) -> tuple[Quantized | None, Quantized | None]:
    """`native.ops.quantize`, or with the half COLUMN `native.ops.quantize_both`, of the matrix, made twice if the
    recipe has an amax of the tensor. A recipe with a transform rotates the rows of a matrix quantized in a single
    orientation, and else the transpose alone.

    `random`: words of random bits of each half, int32 (M, ⌈K/4⌉) and (K, ⌈M/4⌉). Raises as `quantize_both`, and
    NotImplementedError for a recipe other than NVFP4 and MX, with an amax of each row, or with a rotation of other
    groups than 16.
    """
    both = Half.COLUMN in halves
    recipe = supported(recipe)
    if recipe.scale not in (E4M3, E8M0) or recipe.granularity != "tensor" or not nvfp4.has_fused_rotation(recipe):
        raise NotImplementedError(
            f"native kernels quantize this matrix by NVFP4 with one amax and rotated groups of 16, and by MX, "
            f"not by {recipe}; make the matrix first and call quantize_both"
        )
    recipes = [half.recipe(recipe) if both else recipe for half in Half]
    for half, own, words in zip(Half, recipes, random, strict=True):
        if half not in halves:
            continue
        shape = half.shape(made.shape)
        if own.transform is not None:
            check_rotated(made.x, shape[1], own)
        check_random(words, shape, own)
        check_contiguous(random=words)
    if recipe.scale is E8M0:
        return _quantize_mx(made, recipe, halves, random, scales)
    return _quantize_nvfp4(made, recipe, recipes, halves, random, scales)


def quantize_rowwise(
    made: Produced, recipe: str | Recipe, random: object = None, scales: ScaleLayout = LINEAR
) -> Quantized:
    """The rowwise half of `quantize_produced`."""
    result = quantize_produced(made, recipe, random=(random, None), scales=scales)[0]
    assert result is not None
    return result


def _quantize_mx(
    made: Produced, recipe: Recipe, halves: Sequence[Half], random: Sequence[object], layout: ScaleLayout
) -> tuple[Quantized | None, Quantized | None]:
    device = made.x.device
    forms = [(half.shape(made.shape), None, layout, half.transposed(recipe)) for half in Half]
    outputs = [
        mx.new_output(form[0], recipe, words, device, layout, transposed=form[-1]) if half in halves else None
        for half, form, words in zip(Half, forms, random, strict=True)
    ]
    parameters = mx.parameters_of(made.shape, recipe, *outputs, layout=layout)
    _launch(made, "quantize_mx", "produced_mx", "produced_mx", (parameters,), (f"-DELEMENT={recipe.element.name}",))
    row, column = (
        None if output is None else Quantized(output.codes, output.scales, None, recipe, *form)
        for output, form in zip(outputs, forms, strict=True)
    )
    return row, column


def _quantize_nvfp4(
    made: Produced,
    recipe: Recipe,
    recipes: Sequence[Recipe],
    halves: Sequence[Half],
    random: Sequence[object],
    layout: ScaleLayout,
) -> tuple[Quantized | None, Quantized | None]:
    device = made.x.device
    both, rotates = Half.COLUMN in halves, recipe.transform is not None
    wants_plain, wants_rotated = Half.ROW in halves and (both or not rotates), rotates
    plain, rotated = (
        torch.zeros(1, dtype=torch.float32, device=device) if wanted else None
        for wanted in (wants_plain, wants_rotated)
    )
    parameters = _AMAX(
        rows=made.shape[0], columns=made.shape[1], plain=plain, rotated=rotated, along_rows=not both,
        signs=0 if recipe.transform is None else recipe.transform.signs, propagate_nan=recipe.nan == "propagate",
    )  # fmt: skip
    _launch(made, "quantize_nvfp4", "produced_nvfp4", "produced_amax", (parameters,))
    amaxes = [plain if both else rotated or plain, rotated if rotates else plain]
    outputs = [
        None
        if amax is None or half not in halves
        else nvfp4.new_output(half.shape(made.shape), own, amax, words, layout)
        for half, own, amax, words in zip(Half, recipes, amaxes, random, strict=True)
    ]
    rotation = "NO_ROTATION" if not rotates else "ROTATE_COLUMNS" if both else "ROTATE_ROWS"
    structs, choices = nvfp4.arguments_of(made.shape, recipe, *outputs, rotation=rotation, layout=layout)
    flags = nvfp4.flags_of(choices, device)
    _launch(made, "quantize_nvfp4", "produced_nvfp4", "produced_nvfp4", structs, flags)
    row, column = (
        None if output is None else nvfp4.quantized(output, own, half.shape(made.shape), layout)
        for half, own, output in zip(Half, recipes, outputs, strict=True)
    )
    return row, column


def _launch(
    made: Produced,
    general: str,
    source: str,
    kernel: str,
    structs: Sequence[StructValue],
    flags: tuple[str, ...] = (),
) -> None:
    """Launch a kernel over tiles. `general`: the source of the same kernel for a matrix in memory."""
    (rows, columns), device = made.shape, made.x.device
    kernel = f"{kernel}_{suffix(made.x.dtype)}"
    grid = blocks_for(rows, STRIP) * blocks_for(columns, STRIP)
    threads = GENERAL_THREADS[general].get(device.type, 1)
    launch(
        source, kernel, (grid,), (threads,), (*structs, _PRODUCER(**made.fields)), device=device,
        extra_flags=(*flags, *unit_flags(kernel, device), *made.flags),
    )  # fmt: skip
