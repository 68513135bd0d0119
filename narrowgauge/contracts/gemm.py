"""Products of matrices that are quantized by different rules, or of which one is not quantized."""

from __future__ import annotations

from typing import Annotated

from narrowgauge import contract as c


@c.contract
def weight_only_gemm(a: c.Matrix, b: Annotated[c.Codes, ("N", "K")]):
    """a·bᵀ of a (M, K), bfloat16 or float16, and quantized weights b (N, K), rounded once to the dtype of a: (M, N).

    An element of b times the scale of its block is rounded to the dtype of a, which is exact for E2M1 under E4M3, and
    for scales that are powers of two. The scale of the tensor, or of a row of b, multiplies the sum:
    R(g·Σ a·w). humming 0.1.19 (NVFP4), vLLM 0.33 (csrc/quantization/marlin).
    """
    y = c.gemm(a, c.decode(b, a.dtype))
    return c.cast(y * c.factor(b, axis=1), a.dtype)
