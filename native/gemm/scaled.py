"""Products of two quantized matrices, alone or in batches, by the kernels of `native.gemm.gemm`."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm.gemm import gemm
from narrowgauge.spec.quantized import BatchedQuantized, Quantized
from narrowgauge.spec.recipe import mismatch

Operand = Quantized | BatchedQuantized


def scaled_gemm(a: Operand, b: Operand, *, out_dtype: str = "bfloat16") -> torch.Tensor:
    """a @ b.T of quantized (M, K) and (N, K), rounded once to out_dtype: "bfloat16", "float16" or "float32". (M, N).

    Operands as `gemm` takes them, such as FP8 with scales of rows by FP8 with scales of rows. Two `BatchedQuantized` of
    one batch give (B, M, N). Raises NotImplementedError for other pairs of recipes, TypeError and ValueError as `gemm`.
    """
    return _product(a, b, None, out_dtype)


def scaled_gemm_bias(a: Operand, b: Operand, bias: torch.Tensor, *, out_dtype: str = "bfloat16") -> torch.Tensor:
    """`scaled_gemm` and a bias (N,), or (B, N) of a batch, added in float32 before the rounding."""
    return _product(a, b, bias, out_dtype)


def _product(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: str) -> torch.Tensor:
    if reason := mismatch(a.recipe, b.recipe):
        raise NotImplementedError(f"scaled_gemm multiplies the pairs of recipes of gemm: {reason}")
    dtype = getattr(torch, out_dtype)
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        return gemm(a, b, out_dtype=dtype, bias=bias)
    if isinstance(a, Quantized) or isinstance(b, Quantized) or a.shape[0] != b.shape[0]:
        raise ValueError(f"scaled_gemm multiplies batches of one size; a is {a} and b is {b}")
    biases = [None] * a.shape[0] if bias is None else bias.unbind()
    pairs = zip(a.matrices(), b.matrices(), biases, strict=True)
    return torch.stack([gemm(left, right, out_dtype=dtype, bias=added) for left, right, added in pairs])
