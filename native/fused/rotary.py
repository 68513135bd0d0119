"""Rotary embedding of rows, quantized in the same kernel."""

from __future__ import annotations

import torch

from narrowgauge.native.fused.prepared import PREPARED, form_of
from narrowgauge.native.fused.rows import has_whole_chunks, quantize_rows, row_recipe
from narrowgauge.native.runtime.arguments import check_taken, element_type
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import as_matrix
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_PARAMETERS = KernelStruct("fused/rope_quantize.cu", "RopeQuantizeParameters")


def rope_quantize(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """Rotary embedding of the rows of `x` (M, K), by the angles of `cos` and `sin` (M, K/2) of one dtype, quantized.

    Halves of a row are the pairs. `x`, `cos`: float32, bfloat16 or float16. The result is rounded to the dtype of `x`
    once. `scale`, float32 (1,): the encode scale, for a recipe whose scale is given. `amax`, float32 (1,), replaces the
    amax of the result, which takes a launch. `scales`: layout of the scales. Raises TypeError for another dtype of
    `x`, ValueError for another shape, NotImplementedError for another dtype of `cos` or `sin`, for a recipe that
    `row_recipe` does not have and for rows longer than `rows.LONGEST_ROW`, ToolchainError if kernels cannot be
    compiled.
    """
    return _launch(x, cos, sin, recipe, scale, amax, scales, parts=1)


def rope_partial_quantize(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """`rope_quantize` of the first half of the columns of `x` (M, K) alone, by `cos` and `sin` (M, K/4); the second
    half stays. Raises as `rope_quantize`."""
    return _launch(x, cos, sin, recipe, scale, amax, scales, parts=2)


def _launch(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    scales: ScaleLayout,
    *,
    parts: int,
) -> Quantized:
    """The first of `parts` equal parts of the columns turns."""
    operands = (x, cos, sin, amax, scale)
    form = form_of(operands, "rope", recipe, scales, parts)
    if form in PREPARED:
        return PREPARED[form](operands)
    recipe = row_recipe(recipe)
    x = as_matrix(x)
    rows, columns = x.shape
    if columns % (2 * parts):
        wrong = "an odd number of columns" if parts == 1 else "columns that 4 does not divide"
        raise ValueError(f"x of shape {tuple(x.shape)} has {wrong}; its halves are the pairs")
    pairs = columns // (2 * parts)
    check_taken(cos, "cos", INPUT_DTYPES, (rows, pairs))
    check_taken(sin, "sin", (cos.dtype,), (rows, pairs))
    cos, sin = cos.contiguous(), sin.contiguous()
    whole_halves = has_whole_chunks(pairs, (x, cos, sin))
    fields: dict[str, Value] = {
        "x": x, "row_stride": x.stride(0), "column_stride": x.stride(1),
        "rotated": 2 * pairs, "cos": cos, "sin": sin,
        "angle_type": element_type(cos.dtype), "whole_halves": whole_halves,
    }  # fmt: skip
    return quantize_rows(
        "rope_quantize", _PARAMETERS, fields, x, columns, recipe, (cos, sin), paired=whole_halves and parts == 1,
        operands=operands, form=form, amax=amax, scale=scale, scales=scales,
    )  # fmt: skip
