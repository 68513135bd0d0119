"""Rotary embedding of the heads of queries or keys, quantized."""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c

Angles = Annotated[c.Matrix, ("M", "K/2")]
HalfAngles = Annotated[c.Matrix, ("M", "K/2/2")]
Pairs = Literal["halves", "neighbours"]
DIALECTS = {
    # FlashInfer 0.7.2.post1, include/flashinfer/pos_enc.cuh: float32, interleave=False and True.
    "flashinfer-rope": {"arithmetic": "float32"},
    "flashinfer-rope-interleaved": {"arithmetic": "float32", "pairs": "neighbours"},
    # transformers at 5dd4a63, models/llama/modeling_llama.py, apply_rotary_pos_emb: products and the sum are tensors.
    "transformers-rope": {"arithmetic": "input"},
}


@c.contract(rows="independent", dialects=DIALECTS)
def rope_quantize(
    x: c.Matrix, cos: Angles, sin: Angles, recipe: c.Recipe, *,
    pairs: Pairs = "halves", arithmetic: Literal["float32", "input"] = "float32",
):  # fmt: skip
    """Rotary embedding of the rows of x (M, K), a head each, by the angles of cos and sin (M, K/2), quantized.

    Pairs of columns are the halves of a row, or neighbours. Numbers are float32, rounded once to the dtype of x, or
    each product and sum is rounded to it. BatchQKApplyRotary of FlashInfer 0.7.2 (include/flashinfer/pos_enc.cuh).
    """
    return c.quantize(_rotated(x, cos, sin, pairs, arithmetic), recipe)


@c.contract(rows="independent", dialects=DIALECTS)
def rope_partial_quantize(
    x: c.Matrix, cos: HalfAngles, sin: HalfAngles, recipe: c.Recipe, *,
    pairs: Pairs = "halves", arithmetic: Literal["float32", "input"] = "float32",
):  # fmt: skip
    """Rotary embedding of the first half of the columns of x (M, K), by the angles of cos and sin (M, K/4); the second
    half stays. Quantized.

    apply_rotary_pos_emb of GLM (transformers at b39782d, models/glm/modeling_glm.py), with pairs of neighbours.
    """
    first, rest = c.halves(x)
    return c.quantize(c.joined(_rotated(first, cos, sin, pairs, arithmetic), rest), recipe)


def _rotated(x, cos, sin, pairs, arithmetic):
    z = c.float32(x)
    products = z * c.repeat_half(c.float32(cos), pairs), c.rotate_half(z, pairs) * c.repeat_half(c.float32(sin), pairs)
    if arithmetic == "input":
        products = tuple(c.float32(c.cast(product, x.dtype)) for product in products)
    return c.cast(products[0] + products[1], x.dtype)
