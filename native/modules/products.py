"""Matrix products: of quantized operands by the kernels, of operands in high precision by torch."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm.gemm import gemm
from narrowgauge.native.modules.saved_operands import Operand
from narrowgauge.spec.quantized import Quantized


def product(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias): (M, K) and (N, K) to (M, N) in `out_dtype`. Raises as `gemm` does."""
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        return gemm(a, b, out_dtype=out_dtype, c=c, bias=bias)
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    y = torch.nn.functional.linear(a.to(out_dtype), b.to(out_dtype), bias)
    return y if c is None else c + y


def column_sums(dy: torch.Tensor) -> torch.Tensor:
    """Gradient of a bias: the sum of the rows of dy in float32, cast once."""
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)
