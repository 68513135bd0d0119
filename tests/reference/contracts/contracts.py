"""Contracts of the tests: kernels of serving, each in about ten lines."""

from __future__ import annotations

from typing import Literal

from narrowgauge import contract as c


@c.contract
def rmsnorm_quantize(x: c.Matrix, weight: c.Row, recipe: c.Recipe, *, eps: float = 1e-6, rounded: bool = True):
    """RMSNorm of the rows of x (M, K), times weight (K), quantized."""
    z = c.float32(x)
    rs = c.rsqrt(c.mean(c.square(z)) + eps)
    y = z * rs
    if rounded:
        y = c.float32(c.cast(y, x.dtype))
    y = c.cast(y * c.float32(weight), x.dtype)
    return c.quantize(y, recipe)


@c.contract
def add_rmsnorm(x: c.Matrix, residual: c.Matrix, weight: c.Row, *, eps: float = 1e-6):
    """RMSNorm of x + residual; the sum is shown, and the norm is that of the shown sum."""
    z = c.cast(c.float32(x) + c.float32(residual), x.dtype)
    h = c.float32(z)
    y = h * c.rsqrt(c.mean(c.square(h)) + eps) * c.float32(weight)
    return {"residual": z, "output": c.cast(y, x.dtype)}


@c.contract
def silu_mul_quantize(x: c.Matrix, recipe: c.Recipe):
    """SiLU of the first half of the columns times the second half, quantized."""
    gate, up = c.halves(x)
    return c.quantize(c.cast(c.silu(c.float32(gate)) * c.float32(up), x.dtype), recipe)


@c.contract
def gelu_mul(x: c.Matrix, *, form: Literal["tanh", "erf"] = "tanh"):
    """GELU of the first half times the second half."""
    gate, up = c.halves(x)
    return c.cast(c.gelu(c.float32(gate), form) * c.float32(up), x.dtype)


@c.contract
def clamped_swiglu(x: c.Matrix):
    """gate·sigmoid(1.702·gate)·(up + 1), gate at most 7, up within ±7."""
    gate, up = c.halves(x)
    gate = c.minimum(c.float32(gate), 7.0)
    up = c.maximum(c.minimum(c.float32(up), 7.0), -7.0)
    return c.cast(gate * c.sigmoid(gate * 1.702) * (up + 1.0), x.dtype)


@c.contract
def layernorm(x: c.Matrix, weight: c.Row, bias: c.Row, *, eps: float = 1e-5):
    """LayerNorm in two passes."""
    z = c.float32(x)
    d = z - c.mean(z)
    y = d * c.rsqrt(c.mean(c.square(d)) + eps)
    return c.cast(y * c.float32(weight) + c.float32(bias), x.dtype)


@c.contract
def relu_squared(x: c.Matrix):
    """max(x, 0)²."""
    z = c.float32(x)
    return c.cast(c.square(c.where(z > 0, z, 0.0)), x.dtype)


@c.contract
def scaled_rows(x: c.Matrix):
    """Each row divided by its amax, or by 1e-10."""
    z = c.float32(x)
    return c.cast(z / c.maximum(c.amax(z), 1e-10), x.dtype)


@c.contract
def layer_norm(x: c.Matrix, weight: c.Row, bias: c.Row):
    """LayerNorm by any algorithm."""
    return c.cast(c.layer_norm(c.float32(x), weight, bias), x.dtype)


@c.contract
def rms_norm(x: c.Matrix, weight: c.Row):
    """RMSNorm with 1 + weight."""
    return c.cast(c.rms_norm(c.float32(x), c.float32(weight) + 1.0), x.dtype)


@c.contract
def softmax(x: c.Matrix):
    """Softmax of rows."""
    return c.cast(c.softmax(c.float32(x)), x.dtype)


@c.contract
def columns(x: c.Matrix):
    """Statistics of columns, and the rows without them."""
    z = c.float32(x)
    total, mean = c.sum(z, axis=0), c.mean(z, axis=0)
    parts = {"total": total, "mean": mean, "amax": c.amax(z, axis=0), "largest": c.largest(z, axis=0)}
    return {**{name: c.cast(part, x.dtype) for name, part in parts.items()}, "rest": c.cast(z - mean, x.dtype)}


COMPOSED = (layer_norm, rms_norm, softmax, columns)
CONTRACTS = (
    rmsnorm_quantize, add_rmsnorm, silu_mul_quantize, gelu_mul, clamped_swiglu, layernorm, relu_squared, scaled_rows,
)  # fmt: skip
