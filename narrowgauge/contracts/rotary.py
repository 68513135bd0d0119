"""Rotary embedding of the heads of queries or keys, quantized."""

from __future__ import annotations

from typing import Annotated

from narrowgauge import contract as c

Angles = Annotated[c.Matrix, ("M", "K/2")]


@c.contract(rows="independent")
def rope_quantize(x: c.Matrix, cos: Angles, sin: Angles, recipe: c.Recipe):
    """Rotary embedding of the rows of x (M, K), a head each, by the angles of cos and sin (M, K/2), quantized.

    Halves of a row are the pairs, and float32 numbers are rounded once to the dtype of x: BatchQKApplyRotary of
    FlashInfer 0.7.2 (include/flashinfer/pos_enc.cuh), interleave=False.
    """
    z = c.float32(x)
    y = z * c.repeat_half(c.float32(cos)) + c.rotate_half(z) * c.repeat_half(c.float32(sin))
    return c.quantize(c.cast(y, x.dtype), recipe)
