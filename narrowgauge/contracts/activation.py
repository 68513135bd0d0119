"""Gated activations: a function of the first half of the columns times the second half.

The field `rounded` says how libraries differ (`narrowgauge.contracts.dialects`): the "result", "both" the activation
and the result, or "none" is rounded to the dtype of x.
"""

from __future__ import annotations

import math
from typing import Literal

from narrowgauge import contract as c
from narrowgauge.contracts.dialects import ACTIVATIONS
from narrowgauge.contracts.norm import bounded
from narrowgauge.spec.recipes import find_recipe

Rounded = Literal["result", "both", "none"]
Subnormals = Literal["kept", "flushed"]
Approximate = c.Passed[Literal["tanh", "erf"]]


@c.contract(rows="independent", dialects=ACTIVATIONS)
def silu_mul(
    x: c.Matrix, *, rounded: Rounded = "result", fast_math: bool = False, subnormals: Subnormals = "kept"
):  # fmt: skip
    """SiLU of the first half of the columns of x (M, 2K) times the second half.

    silu_and_mul of FlashInfer 0.7.2 (include/flashinfer/activation.cuh).
    """
    return c.cast(_gated(x, _silu(fast_math), rounded), x.dtype)


@c.contract(rows="independent", dialects=ACTIVATIONS)
def silu_mul_quantize(
    x: c.Matrix, recipe: c.Recipe, *, scale_ub: float = math.inf, rounded: Rounded = "result", fast_math: bool = False,
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """SiLU of the first half of the columns of x (M, 2K) times the second half: `silu_mul`, then quantize.

    scale_ub: amaxes that give scales are at most scale_ub times the largest element, so FP8 scales are at most
    scale_ub. silu_and_mul_per_block_quant of vLLM 0.33 (csrc/quantization/fused_kernels).
    """
    ub = scale_ub if scale_ub == math.inf else scale_ub * find_recipe(recipe).element.max
    return bounded(_gated(x, _silu(fast_math), rounded), recipe, ub)


@c.contract(rows="independent", dialects=ACTIVATIONS)
def silu_mul_quantize_static(
    x: c.Matrix, scale: c.Scale, recipe: c.Recipe = "fp8-static-e4m3@vllm-silu-static", *,
    rounded: Rounded = "result", fast_math: bool = False, subnormals: Subnormals = "kept",
):  # fmt: skip
    """SiLU of the first half of the columns of x (M, 2K) times the second half, quantized by a given scale.

    silu_and_mul_quant of vLLM 0.33 (csrc/quantization/activation_kernels.cu).
    """
    return c.quantize(_gated(x, _silu(fast_math), rounded), recipe, scale)


@c.contract(rows="independent", dialects=ACTIVATIONS)
def gelu_mul(
    x: c.Matrix, *, approximate: Approximate = "tanh", rounded: Rounded = "result", fast_math: bool = False,
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """GELU of the first half of the columns of x (M, 2K) times the second half.

    gelu_tanh_and_mul and gelu_and_mul of FlashInfer 0.7.2 (include/flashinfer/activation.cuh).
    """
    return c.cast(_gated(x, _gelu(approximate, fast_math), rounded), x.dtype)


@c.contract(rows="independent", dialects=ACTIVATIONS)
def gelu_mul_quantize(
    x: c.Matrix, recipe: c.Recipe, *, approximate: Approximate = "tanh", rounded: Rounded = "result",
    fast_math: bool = False, subnormals: Subnormals = "kept",
):  # fmt: skip
    """GELU of the first half of the columns of x (M, 2K) times the second half: `gelu_mul`, then quantize."""
    return c.quantize(_gated(x, _gelu(approximate, fast_math), rounded), recipe)


@c.contract(rows="independent")
def swiglu_clamped_quantize(x: c.Matrix, recipe: c.Recipe, *, limit: float = 7.0, alpha: float = 1.702):
    """gate·sigmoid(alpha·gate)·(up + 1) of the halves (gate, up) of the columns of x (M, 2K), gate at most limit and up
    within ±limit, rounded once, quantized.

    swiglu of gpt-oss (openai/gpt-oss at a194b99, gpt_oss/torch/model.py), which interleaves gate and up.
    """
    gate, up = (c.float32(half) for half in c.halves(x))
    gate, up = c.minimum(gate, limit), c.maximum(c.minimum(up, limit), -limit)
    return c.quantize(c.cast(gate * c.sigmoid(gate * alpha) * (up + 1.0), x.dtype), recipe)


@c.contract(rows="independent")
def relu_squared_quantize(x: c.Matrix, recipe: c.Recipe):
    """max(x, 0)² of x (M, K), rounded once to the dtype of x, quantized.

    relu2 of transformers at d60525f (activations.py, ReLUSquaredActivation), in float32.
    """
    return c.quantize(c.cast(c.square(c.maximum(c.float32(x), 0.0)), x.dtype), recipe)


def _gated(x, activation, rounded):
    y = gated(*c.halves(x), activation, rounded)
    return y if rounded == "none" else c.cast(y, x.dtype)


def gated(gate, up, activation, rounded):
    """The activation of the gate times up, before the last rounding: float32."""
    y = activation(c.float32(gate))
    if rounded == "both":
        y = c.float32(c.cast(y, gate.dtype))
    return y * c.float32(up)


def _silu(fast_math):
    return lambda gate: c.silu(gate, "expf", "__expf") if fast_math else c.silu(gate)


def _gelu(approximate, fast_math):
    forms = ("tanhf", "sigmoid", "approximate") if fast_math and approximate == "tanh" else ()
    return lambda gate: c.gelu(gate, approximate, *forms)
