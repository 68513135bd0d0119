"""Norms of rows: alone, and quantized with made or with given scales.

The fields say how libraries differ (`narrowgauge.contracts.dialects`). With rs = 1/√(mean z² + eps), w the weight and
R a rounding to the dtype of x:

- `order`: "rs-first" is (z·rs)·w, "weight-first" is (z·w)·rs;
- `rounded`: R of the "result", of "both" products, of the "first" product, or of "none";
- `zero_weight`: a weight −0 is "kept", or "free": a kernel that adds the offset 0 of its weights makes it 0;
- of the sum z of x and residual, `sum_of` and `product_of`: rs and the products take the "stored" R(z) or the
  "unrounded" z.
"""

from __future__ import annotations

import math
from typing import Literal

from narrowgauge import contract as c
from narrowgauge.contracts.dialects import NORMS

Rounded = Literal["result", "both", "first", "none"]
Order = Literal["rs-first", "weight-first"]
Sum = Literal["stored", "unrounded"]
Subnormals = Literal["kept", "flushed"]
ZeroWeight = Literal["kept", "free"]


@c.contract(rows="independent", dialects=NORMS)
def rmsnorm(
    x: c.Matrix, weight: c.Row, *, eps: float = 1e-6, zero_centered: c.Flag = False,
    rounded: Rounded = "result", order: Order = "rs-first", zero_weight: ZeroWeight = "kept",
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of x (M, K).

    torch.nn.functional.rms_norm of torch 2.11 (aten/src/ATen/native/cuda/layer_norm_kernel.cu). zero_centered:
    1 + weight for weight, as Gemma's norm (transformers at c4cdd1a, models/gemma/modeling_gemma.py). QK-norm is this
    norm of heads: a row for each head, K = head_dim (transformers at 9ee3f43, models/qwen3/modeling_qwen3.py).
    """
    z = c.float32(x)
    return c.cast(normalized(x, z, z, _factor(weight, zero_centered, zero_weight), eps, rounded, order), x.dtype)


@c.contract(rows="independent", dialects=NORMS)
def rmsnorm_quantize(
    x: c.Matrix, weight: c.Row, recipe: c.Recipe, *, eps: float = 1e-6, zero_centered: c.Flag = False,
    ub: float = math.inf, rounded: Rounded = "result", order: Order = "rs-first", zero_weight: ZeroWeight = "kept",
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of x (M, K), quantized: `rmsnorm`, then quantize. ub: upper bound of the amaxes that give
    the scales, scale_ub of vLLM 0.33 (csrc/quantization/fused_kernels/layernorm_utils.cuh).
    """
    z = c.float32(x)
    return bounded(normalized(x, z, z, _factor(weight, zero_centered, zero_weight), eps, rounded, order), recipe, ub)


@c.contract(rows="independent", dialects=NORMS)
def rmsnorm_quantize_static(
    x: c.Matrix, weight: c.Row, scale: c.Scale, recipe: c.Recipe = "fp8-static-e4m3@vllm-static", *,
    eps: float = 1e-6, zero_centered: c.Flag = False,
    rounded: Rounded = "result", order: Order = "rs-first", zero_weight: ZeroWeight = "kept",
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of x (M, K), quantized by a given scale.

    rms_norm_static_fp8_quant of vLLM 0.33 (csrc/layernorm_quant_kernels.cu).
    """
    z = c.float32(x)
    return c.quantize(
        normalized(x, z, z, _factor(weight, zero_centered, zero_weight), eps, rounded, order), recipe, scale
    )


@c.contract(rows="independent", dialects=NORMS)
def add_rmsnorm(
    x: c.Matrix, residual: c.Matrix, weight: c.Row, *, eps: float = 1e-6, zero_centered: c.Flag = False,
    rounded: Rounded = "result", order: Order = "rs-first", zero_weight: ZeroWeight = "kept",
    sum_of: Sum = "stored", product_of: Sum = "stored", subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of x + residual (M, K); the sum is the next residual.

    fused_add_rms_norm of vLLM 0.33 (csrc/layernorm_kernels.cu): the norm is that of the stored sum.
    """
    stored, squares, factor = _sum(x, residual, sum_of, product_of)
    y = normalized(x, squares, factor, _factor(weight, zero_centered, zero_weight), eps, rounded, order)
    return {"residual": stored, "output": c.cast(y, x.dtype)}


@c.contract(rows="independent", dialects=NORMS)
def add_rmsnorm_quantize(
    x: c.Matrix, residual: c.Matrix, weight: c.Row, recipe: c.Recipe, *,
    eps: float = 1e-6, zero_centered: c.Flag = False, ub: float = math.inf,
    rounded: Rounded = "result", order: Order = "rs-first", zero_weight: ZeroWeight = "kept",
    sum_of: Sum = "stored", product_of: Sum = "stored", subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of x + residual (M, K), quantized: `add_rmsnorm`, then quantize, with the ub of
    `rmsnorm_quantize`."""
    stored, squares, factor = _sum(x, residual, sum_of, product_of)
    y = normalized(x, squares, factor, _factor(weight, zero_centered, zero_weight), eps, rounded, order)
    return {"residual": stored, "quantized": bounded(y, recipe, ub)}


@c.contract(rows="independent", dialects=NORMS)
def add_rmsnorm_quantize_static(
    x: c.Matrix, residual: c.Matrix, weight: c.Row, scale: c.Scale,
    recipe: c.Recipe = "fp8-static-e4m3@vllm-static", *, eps: float = 1e-6, zero_centered: c.Flag = False,
    rounded: Rounded = "result", order: Order = "rs-first", zero_weight: ZeroWeight = "kept",
    sum_of: Sum = "stored", product_of: Sum = "stored", subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of x + residual (M, K), quantized by a given scale.

    fused_add_rms_norm_static_fp8_quant of vLLM 0.33 (csrc/layernorm_quant_kernels.cu).
    """
    stored, squares, factor = _sum(x, residual, sum_of, product_of)
    y = normalized(x, squares, factor, _factor(weight, zero_centered, zero_weight), eps, rounded, order)
    return {"residual": stored, "quantized": c.quantize(y, recipe, scale)}


@c.contract(rows="independent")
def layernorm_quantize(
    x: c.Matrix, weight: c.Row, bias: c.Row, recipe: c.Recipe, *, eps: float = 1e-5, zero_centered: c.Flag = False,
):  # fmt: skip
    """LayerNorm of the rows of x (M, K), rounded once to the dtype of x, quantized.

    torch.nn.functional.layer_norm of torch 2.11 (aten/src/ATen/native/cuda/layer_norm_kernel.cu), then quantize.
    zero_centered: 1 + weight for weight, as zero_centered_gamma of Transformer Engine 2.14.
    """
    y = c.layer_norm(c.float32(x), _factor(weight, zero_centered), bias, eps)
    return c.quantize(c.cast(y, x.dtype), recipe)


def bounded(y, recipe, ub):
    """`y` quantized with scales of amaxes up to ub."""
    if ub == math.inf:
        return c.quantize(y, recipe)
    return c.quantize(y, recipe, statistics=c.maximum(c.minimum(c.float32(y), ub), -ub))


def _sum(x, residual, sum_of, product_of):
    """The stored sum, and the numbers of the mean square and of the products."""
    z = c.float32(x) + c.float32(residual)
    stored = c.cast(z, x.dtype)
    numbers = {"stored": c.float32(stored), "unrounded": z}
    return stored, numbers[sum_of], numbers[product_of]


def normalized(x, squares, z, w, eps, rounded, order):
    """z·rs·w, with rs of `squares`, by the fields `rounded` and `order`."""
    rs = c.once(c.rsqrt(c.mean(c.square(squares)) + eps))
    first, second = (rs, w) if order == "rs-first" else (w, rs)
    y = z * first
    if rounded in ("both", "first"):
        y = c.float32(c.cast(y, x.dtype))
    y = y * second
    return c.cast(y, x.dtype) if rounded in ("result", "both") else y


def _factor(weight, offset, zero_weight="kept"):
    """The weight plus an offset, of which True is 1; a weight −0 plus 0 may be +0 if `zero_weight` is "free"."""
    w = c.float32(weight)
    if offset:
        return w + float(offset)
    return w if zero_weight == "kept" else c.any_of(w, w + 0.0)
