"""Forms of training: both orientations of one pass, stochastic rounding, and the backward of norms and activations.

The orientations are "rowwise" (M, K), and "columnwise", the transpose (K, M), which alone is rotated by a recipe with a
Hadamard transform. Sums over rows have any order.
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.contracts.activation import _gated, _silu
from narrowgauge.contracts.norm import _factor, normalized

HalfMatrix = Annotated[c.Matrix, ("M", "K/2")]
ColumnBits = Annotated[c.Bits, ("K", "M/4")]
SumOf = Literal["unrounded", "rounded"]
Division = Literal["quotient", "any"]
"""The division of a sigmoid: in any form, s is off by some ulps, and 1 − s of a large gate by any factor."""


@c.contract
def rmsnorm_quantize_both(
    x: c.Matrix, weight: c.Row, recipe: c.Recipe, *, eps: float = 1e-6, zero_centered: c.Flag = False
):
    """RMSNorm of the rows of x (M, K), rounded once to the dtype of x, quantized in both orientations.

    The norm of `rmsnorm`, then both halves of `quantize_both`: the transpose alone is rotated by a recipe with `-rht`
    (docs/numerics.md#hadamard-transform).
    """
    z = c.float32(x)
    return c.quantize_both(normalized(x, z, z, _factor(weight, zero_centered), eps, "result", "rs-first"), recipe)


@c.contract(rows="independent")
def rmsnorm_quantize_stochastic(
    x: c.Matrix, weight: c.Row, random: c.Bits, recipe: c.Recipe = "nvfp4-sr", *,
    eps: float = 1e-6, zero_centered: c.Flag = False,
):  # fmt: skip
    """RMSNorm of the rows of x (M, K), rounded once to the dtype of x, quantized with stochastic rounding by given
    bits."""
    z = c.float32(x)
    return c.quantize(
        normalized(x, z, z, _factor(weight, zero_centered), eps, "result", "rs-first"), recipe, random=random
    )


@c.contract
def rmsnorm_quantize_both_stochastic(
    x: c.Matrix, weight: c.Row, random: c.Bits, random_columnwise: ColumnBits, recipe: c.Recipe = "nvfp4-rht-sr", *,
    eps: float = 1e-6, zero_centered: c.Flag = False,
):  # fmt: skip
    """RMSNorm of the rows of x (M, K), rounded once to the dtype of x, quantized in both orientations with stochastic
    rounding by given bits."""
    z = c.float32(x)
    y = normalized(x, z, z, _factor(weight, zero_centered), eps, "result", "rs-first")
    return c.quantize_both(y, recipe, random=(random, random_columnwise))


@c.contract
def silu_mul_quantize_both(x: c.Matrix, recipe: c.Recipe):
    """SiLU of the first half of the columns of x (M, 2K) times the second half, rounded once to the dtype of x,
    quantized in both orientations.

    NVIDIA/TransformerEngine at 0358355, transformer_engine/common/cast/mxfp8/gated_mxfp8.cuh.
    """
    return c.quantize_both(_gated(x, _silu(fast_math=False), "result"), recipe)


@c.contract
def rmsnorm_backward(
    dy: c.Matrix, x: c.Matrix, rs: c.Column, weight: c.Row, *, zero_centered: c.Flag = False
):  # fmt: skip
    """Gradients of RMSNorm: dx (M, K) = rs·(g − mean(g·n)·n), g = dy·weight, n = x·rs, and dweight (K) = Σ dy·n over
    the rows. rs (M, 1): 1/√(mean x² + eps) of the forward pass.

    NVIDIA/TransformerEngine at 165f3fb, transformer_engine/common/normalization/rmsnorm/rmsnorm_bwd_kernels.cuh.
    """
    dx, dweight = _rmsnorm_backward(dy, x, rs, weight, zero_centered)
    return {"dx": dx, "dweight": dweight}


@c.contract
def rmsnorm_backward_quantize_both(
    dy: c.Matrix, x: c.Matrix, rs: c.Column, weight: c.Row, recipe: c.Recipe, *, zero_centered: c.Flag = False
):  # fmt: skip
    """Gradients of RMSNorm: dweight (K), and dx (M, K) quantized in both orientations: `rmsnorm_backward`."""
    dx, dweight = _rmsnorm_backward(dy, x, rs, weight, zero_centered)
    return {"dweight": dweight, **c.quantize_both(dx, recipe)}


@c.contract
def silu_mul_backward(dy: HalfMatrix, x: c.Matrix, *, division: Division = "quotient"):
    """Gradient (M, 2K) of `silu_mul`: for the halves (gate, up) of x (M, 2K), and s = sigmoid(gate),
    (dy·up·(s + gate·s·(1 − s)), dy·gate·s).

    NVIDIA/TransformerEngine at 0358355, transformer_engine/common/cast/mxfp8/gated_mxfp8.cuh.
    """
    return {"dx": c.joined(*(c.cast(half, x.dtype) for half in _silu_mul_backward(dy, x, division)))}


@c.contract
def silu_mul_backward_quantize_both(
    dy: HalfMatrix, x: c.Matrix, recipe: c.Recipe, *, division: Division = "quotient", sum_of: SumOf = "unrounded"
):
    """Gradient (M, 2K) of `silu_mul`, quantized in both orientations, and its sum over the rows, dbias (2K).

    NVIDIA/TransformerEngine at 0358355, transformer_engine/common/cast/mxfp8/gated_mxfp8.cuh; for dbias, the sum of the
    numbers before they are rounded to the dtype of x, quantize_mxfp8.cuh beside it at 4a05df0.
    """
    halves = _silu_mul_backward(dy, x, division)
    stored = [c.cast(half, x.dtype) for half in halves]
    summed = {"unrounded": halves, "rounded": [c.float32(half) for half in stored]}[sum_of]
    dbias = c.cast(c.sum(c.joined(*summed), axis=0), x.dtype)
    return {"dbias": dbias, **c.quantize_both(c.joined(*stored), recipe)}


@c.contract
def silu_mul_backward_quantize_stochastic(
    dy: HalfMatrix, x: c.Matrix, random: c.Bits, random_columnwise: ColumnBits, recipe: c.Recipe = "nvfp4-rht-sr", *,
    division: Division = "quotient",
):  # fmt: skip
    """Gradient (M, 2K) of `silu_mul`, quantized in both orientations with stochastic rounding by given bits.

    The gradient of `silu_mul_backward`, by docs/numerics.md#stochastic-rounding and, of the transpose, its rotation.
    """
    dx = c.joined(*(c.cast(half, x.dtype) for half in _silu_mul_backward(dy, x, division)))
    return c.quantize_both(dx, recipe, random=(random, random_columnwise))


def _rmsnorm_backward(dy, x, rs, weight, zero_centered):
    n = c.float32(x) * rs
    g = c.float32(dy) * _factor(weight, zero_centered)
    projection = c.once(c.mean(g * n))
    dx = rs * (g - projection * n)
    return c.cast(dx, x.dtype), c.cast(c.sum(c.float32(dy) * n, axis=0), weight.dtype)


def _silu_mul_backward(dy, x, division):
    """The gradients of the gate and of up, before they are rounded: the products in any order."""
    gate, up = (c.float32(half) for half in c.halves(x))
    dy = c.float32(dy)
    s = c.sigmoid(gate) if division == "any" else c.divide(1.0, c.exp(-gate) + 1.0, division)
    slope = c.any_of(s + gate * s * (1.0 - s), s * (gate * (1.0 - s) + 1.0))
    dgate = c.any_of(slope * dy * up, slope * (dy * up))
    return c.roundings(dgate, 1), c.any_of(gate * s * dy, gate * dy * s)
