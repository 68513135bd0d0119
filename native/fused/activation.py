"""An activation of a gate times the other half of the columns, quantized in the same kernel."""

from __future__ import annotations

import math

import torch

from narrowgauge.native.fused.prepared import PREPARED, form_of
from narrowgauge.native.fused.produced import produced, quantize_rowwise
from narrowgauge.native.fused.rows import needs_tiles, quantize_rows, row_recipe, static_recipe
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import as_matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_PARAMETERS = KernelStruct("fused/activation_quantize.cu", "ActivationQuantizeParameters")
_STATIC = {"te": "SILU", "vllm-silu-static": "SILU_ROUNDED"}
"""Dialect of a given scale to the kernel's activation."""


def silu_mul_quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    scale_ub: float = math.inf,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """SiLU of the first half of the columns of `x` (M, 2K), times the second half, quantized: (M, K).

    `x`: float32, bfloat16 or float16, any strides. The product is rounded to the dtype of `x` once. `scale`, float32
    (1,): the encode scale, for a recipe whose scale is given. `amax`, float32 (1,), replaces the amax of the result,
    which takes a launch. `scale_ub`: amaxes that give the scales of groups and rows are at most `scale_ub` times the
    largest element. `scales`: layout of the scales. Raises TypeError or ValueError for tensors of another dtype or
    shape, NotImplementedError for a recipe that neither `row_recipe` nor `quantize_produced` has and for rows longer
    than `rows.LONGEST_ROW`, ToolchainError if kernels cannot be compiled.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    if needs_tiles(recipe) and amax is None and scale is None and scale_ub == math.inf:
        return quantize_rowwise(produced("SILU_MUL", x), recipe, scales=scales)
    return _launch(x, recipe, scale, "SILU", amax, scales, ub=scale_ub * recipe.element.max)


def silu_mul_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, recipe: str | Recipe = "fp8-static-e4m3@vllm-silu-static"
) -> torch.Tensor:
    """The codes, uint8 (M, K), of `silu_mul_quantize` by a given `scale`, float32 (1,).

    It is the decode scale, and SiLU is rounded to the dtype of `x` too; without a dialect it is the encode scale, and
    the product alone is rounded. Raises as `silu_mul_quantize`, and NotImplementedError for another dialect.
    """
    recipe = static_recipe(recipe, tuple(_STATIC))
    return _launch(x, recipe, scale, _STATIC[recipe.dialect], None, LINEAR).codes


def gelu_mul_quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """As `silu_mul_quantize`, with GELU. `approximate`: "tanh", or "erf" for the error function."""
    return _launch(x, recipe, scale, {"tanh": "GELU_TANH", "erf": "GELU_ERF"}[approximate], amax, scales)


def swiglu_clamped_quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """As `silu_mul_quantize`, with gate·sigmoid(alpha·gate)·(up + 1), gate at most `limit` and up within ±`limit`."""
    return _launch(x, recipe, scale, "SWIGLU_CLAMPED", amax, scales, limit=limit, alpha=alpha)


def relu_squared_quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """max(x, 0)² of `x` (M, K), quantized. Raises as `silu_mul_quantize`."""
    return _launch(x, recipe, scale, "RELU_SQUARED", amax, scales)


def _launch(
    x: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None,
    activation: str,
    amax: torch.Tensor | None,
    scales: ScaleLayout,
    *,
    limit: float = 0.0,
    alpha: float = 0.0,
    ub: float = math.inf,
) -> Quantized:
    operands = (x, amax, scale)
    form = form_of(operands, activation, recipe, scales, limit, alpha, ub)
    if form in PREPARED:
        return PREPARED[form](operands)
    recipe = row_recipe(recipe)
    x = as_matrix(x)
    columns = x.shape[1]
    halves = 1 if activation == "RELU_SQUARED" else 2
    if columns % halves:
        raise ValueError(f"x of shape {tuple(x.shape)} has an odd number of columns; gate and up are its halves")
    fields: dict[str, Value] = {
        "x": x, "row_stride": x.stride(0), "column_stride": x.stride(1), "activation": activation,
        "limit": limit, "alpha": alpha,
    }  # fmt: skip
    flags = (f"-DACTIVATION={activation}",) if x.device.type == "cuda" else ()
    return quantize_rows(
        "activation_quantize", _PARAMETERS, fields, x, columns // halves, recipe,
        operands=operands, form=form, ub=ub, amax=amax, scale=scale, scales=scales, extra_flags=flags,
    )  # fmt: skip
