"""RMSNorm and LayerNorm of rows, also of a sum with a residual, quantized in the same kernel."""

from __future__ import annotations

import math

import torch

from narrowgauge.native.fused.prepared import PREPARED, form_of
from narrowgauge.native.fused.produced import quantize_rowwise, rmsnorm
from narrowgauge.native.fused.rows import needs_tiles, quantize_rows, row_recipe, static_recipe
from narrowgauge.native.quantize.variants import variant_flags
from narrowgauge.native.runtime.arguments import check_taken, element_type
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.arguments import as_matrix
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_PARAMETERS = KernelStruct("fused/norm_quantize.cu", "NormQuantizeParameters")
_VARIANT = KernelStruct("fused/norm_quantize.cu", "NormVariant")
_STATIC = "te", "vllm-static"
_THREADS, _FEWER_THREADS, _WHOLE_WARPS = 768, 512, 1024
"""Resident threads of a multiprocessor; of LayerNorm for rows with an idle part of a warp; columns of a warp."""


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    ub: float = math.inf,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """RMSNorm of the rows of `x` (M, K), float32, bfloat16 or float16, times `weight` (K,), quantized.

    `weight`: any of these dtypes; `zero_centered`: times 1 + weight. The product is rounded to the dtype of `x` once.
    `ub`: upper bound of the amaxes that give the scales of groups and rows.
    `scale`, float32 (1,): the encode scale, for a recipe whose scale is given. `amax`, float32 (1,), replaces the amax
    of the result, which takes a launch. `scales`: layout of the scales. Raises TypeError for another dtype of `x`,
    ValueError for another shape, NotImplementedError for another dtype of a vector or of a residual, for a recipe that
    neither `row_recipe` nor `quantize_produced` has and for rows longer than `rows.LONGEST_ROW`, ToolchainError if
    kernels cannot be compiled.
    """
    if needs_tiles(recipe) and amax is None and scale is None and ub == math.inf:
        return quantize_rowwise(rmsnorm(x, weight, eps, zero_centered=zero_centered), recipe, scales=scales)
    return _launch(x, weight, recipe, scale, eps=eps, zero_centered=zero_centered, ub=ub, amax=amax, scales=scales)


def add_rmsnorm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    ub: float = math.inf,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> dict[str, torch.Tensor | Quantized]:
    """`rmsnorm_quantize` of x + residual, both (M, K) of one dtype.

    Returns `residual`, the sum rounded to the dtype of `x`, and `quantized`. The norm is that of the rounded sum.
    Raises as `rmsnorm_quantize`.
    """
    check_taken(residual, "residual", (x.dtype,), tuple(x.shape))
    residual = as_matrix(residual).contiguous()
    total = torch.empty_like(residual)
    quantized = _launch(
        x,
        weight,
        recipe,
        scale,
        eps=eps,
        zero_centered=zero_centered,
        ub=ub,
        amax=amax,
        scales=scales,
        residual=residual,
        total=total,
    )
    return {"residual": total, "quantized": quantized}


def rmsnorm_quantize_static(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    recipe: str | Recipe = "fp8-static-e4m3@vllm-static",
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> torch.Tensor:
    """The codes, uint8 (M, K), of `rmsnorm_quantize` by a given `scale`, float32 (1,).

    It is the decode scale, or the encode scale if the recipe has no dialect. Raises as `rmsnorm_quantize`, and
    NotImplementedError for a dialect with another formula.
    """
    recipe = static_recipe(recipe, _STATIC)
    return _launch(
        x, weight, recipe, scale, eps=eps, zero_centered=zero_centered, amax=None, scales=LINEAR
    ).codes  # fmt: skip


def add_rmsnorm_quantize_static(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    recipe: str | Recipe = "fp8-static-e4m3@vllm-static",
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> dict[str, torch.Tensor]:
    """`residual` and `codes` of `add_rmsnorm_quantize` by a given `scale`, as `rmsnorm_quantize_static` has it."""
    recipe = static_recipe(recipe, _STATIC)
    found = add_rmsnorm_quantize(x, residual, weight, recipe, scale, eps=eps, zero_centered=zero_centered)
    quantized, total = found["quantized"], found["residual"]
    assert isinstance(quantized, Quantized)
    assert isinstance(total, torch.Tensor)
    return {"residual": total, "codes": quantized.codes}


def layernorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
    amax: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> Quantized:
    """LayerNorm of the rows of `x` (M, K), times `weight` (K,) plus `bias` (K,) of the dtype of the weight, quantized.

    The result is rounded to the dtype of `x` once. Raises as `rmsnorm_quantize`.
    """
    return _launch(x, weight, recipe, scale, eps=eps, zero_centered=zero_centered, amax=amax, scales=scales, bias=bias)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    recipe: str | Recipe,
    scale: torch.Tensor | None,
    *,
    eps: float,
    amax: torch.Tensor | None,
    scales: ScaleLayout,
    zero_centered: bool,
    ub: float = math.inf,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> Quantized:
    operands = (x, weight, bias, residual, total, amax, scale)
    form = form_of(operands, "norm", recipe, scales, eps, zero_centered, ub)
    if form in PREPARED:
        return PREPARED[form](operands)
    recipe = row_recipe(recipe)
    x = as_matrix(x)
    columns = x.shape[1]
    check_taken(weight, "weight", INPUT_DTYPES, (columns,))
    if bias is not None:
        check_taken(bias, "bias", (weight.dtype,), (columns,))
    variant: dict[str, Value] = {
        "layer_norm": bias is not None, "zero_centered": zero_centered, "has_residual": residual is not None,
        "weight_type": element_type(weight.dtype),
    }  # fmt: skip
    fields: dict[str, Value] = {
        "x": x, "row_stride": x.stride(0), "column_stride": x.stride(1), "residual": residual, "residual_out": total,
        "weight": weight, "weight_stride": weight.stride(0), "bias": bias,
        "bias_stride": 0 if bias is None else bias.stride(0), "eps": eps,
        "per_column": 1.0 / columns if columns else 0.0, "variant": variant,
    }  # fmt: skip
    inputs = [tensor for tensor in (weight, bias, residual, total) if tensor is not None]
    flags = variant_flags(_VARIANT, variant, x.device, "NORM")
    if x.is_cuda and residual is None:  # the next row of two operands takes too many registers
        flags = *flags, "-DPIPELINED=1"
    return quantize_rows(
        "norm_quantize", _PARAMETERS, fields, x, columns, recipe, inputs, operands=operands, form=form, ub=ub,
        amax=amax, scale=scale, scales=scales, extra_flags=flags,
        resident_threads=_FEWER_THREADS if bias is not None and columns % _WHOLE_WARPS else _THREADS,
        kept=1 if bias is None else 2,
    )  # fmt: skip
