"""Norms of rows, quantized."""

from __future__ import annotations

from narrowgauge import contract as c


@c.contract(rows="independent")
def rmsnorm_quantize(x: c.Matrix, weight: c.Row, recipe: c.Recipe, *, eps: float = 1e-6, zero_centered: c.Flag = False):
    """RMSNorm of the rows of x (M, K), rounded once to the dtype of x, quantized.

    torch.nn.functional.rms_norm of torch 2.11 (aten/src/ATen/native/cuda/layer_norm_kernel.cu), then quantize.
    zero_centered: 1 + weight for weight, as Gemma's norm (transformers 5.0, models/gemma/modeling_gemma.py).
    """
    return c.quantize(_rmsnorm(x, c.float32(x), weight, eps, zero_centered), recipe)


@c.contract(rows="independent")
def add_rmsnorm_quantize(
    x: c.Matrix,
    residual: c.Matrix,
    weight: c.Row,
    recipe: c.Recipe,
    *,
    eps: float = 1e-6,
    zero_centered: c.Flag = False,
):
    """RMSNorm of the rows of x + residual (M, K), quantized; the sum is the next residual.

    The norm is that of the stored sum: fused_add_rms_norm_kernel of vLLM 0.33 (csrc/layernorm_kernels.cu).
    """
    z = c.cast(c.float32(x) + c.float32(residual), x.dtype)
    return {"residual": z, "quantized": c.quantize(_rmsnorm(x, c.float32(z), weight, eps, zero_centered), recipe)}


@c.contract(rows="independent")
def layernorm_quantize(
    x: c.Matrix,
    weight: c.Row,
    bias: c.Row,
    recipe: c.Recipe,
    *,
    eps: float = 1e-5,
    zero_centered: c.Flag = False,
):
    """LayerNorm of the rows of x (M, K), rounded once to the dtype of x, quantized.

    torch.nn.functional.layer_norm of torch 2.11 (aten/src/ATen/native/cuda/layer_norm_kernel.cu), then quantize.
    zero_centered: 1 + weight for weight, as zero_centered_gamma of Transformer Engine 2.14.
    """
    y = c.layer_norm(c.float32(x), _factor(weight, zero_centered), bias, eps)
    return c.quantize(c.cast(y, x.dtype), recipe)


def _rmsnorm(x, z, weight, eps, zero_centered):
    """The norm of the rows of z, rounded to the dtype of x."""
    rs = c.once(c.rsqrt(c.mean(c.square(z)) + eps))
    return c.cast(z * rs * _factor(weight, zero_centered), x.dtype)


def _factor(weight, zero_centered):
    return c.float32(weight) + 1.0 if zero_centered else c.float32(weight)
