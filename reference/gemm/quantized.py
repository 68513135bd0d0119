"""GEMM with a quantized output."""

from __future__ import annotations

import torch

from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


def gemm_quantized(
    a: Quantized,
    b: Quantized,
    recipe: str | Recipe,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Quantized:
    """a @ b.T (+ c) (+ bias) in `out_dtype`, (M, N), quantized by `recipe` along N.

    `scale`: float32 (1,), the encode scale of a recipe with delayed scaling. Raises the errors of `gemm` and
    `quantize`.
    """
    return quantize(gemm(a, b, out_dtype=out_dtype, c=c, bias=bias), recipe, scale=scale)
