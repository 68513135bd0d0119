"""Gated activations: a function of the first half of the columns times the second half, quantized."""

from __future__ import annotations

from typing import Literal

from narrowgauge import contract as c


@c.contract(rows="independent")
def silu_mul_quantize(x: c.Matrix, recipe: c.Recipe):
    """SiLU of the first half of the columns of x (M, 2K) times the second half, rounded once, quantized.

    silu_and_mul of FlashInfer 0.7.2 (include/flashinfer/activation.cuh), then quantize.
    """
    gate, up = c.halves(x)
    return c.quantize(c.cast(c.silu(c.float32(gate)) * c.float32(up), x.dtype), recipe)


@c.contract(rows="independent")
def gelu_mul_quantize(x: c.Matrix, recipe: c.Recipe, *, approximate: Literal["tanh", "erf"] = "tanh"):
    """GELU of the first half of the columns of x (M, 2K) times the second half, rounded once, quantized.

    gelu_tanh_and_mul and gelu_and_mul of FlashInfer 0.7.2 (include/flashinfer/activation.cuh), then quantize.
    """
    gate, up = c.halves(x)
    return c.quantize(c.cast(c.gelu(c.float32(gate), approximate) * c.float32(up), x.dtype), recipe)
