"""Products of two quantized matrices, also of different recipes, alone or in batches."""

from __future__ import annotations

import torch

from narrowgauge.native.gemm import int8, wgmma_fp8
from narrowgauge.native.gemm.gemm import gemm, multiply_portable, path_for
from narrowgauge.native.gemm.operands import (
    Fields,
    Product,
    alpha_fields,
    epilogue_fields,
    layout_of,
    mixed_fields,
    product_family,
)
from narrowgauge.native.gemm.paths import FP8, SKINNY, path_of
from narrowgauge.native.runtime.arguments import check_operand
from narrowgauge.spec.arguments import check_columns
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import BatchedQuantized, Quantized
from narrowgauge.spec.recipe import mismatch

Operand = Quantized | BatchedQuantized


def scaled_gemm(a: Operand, b: Operand, *, out_dtype: str = "bfloat16") -> torch.Tensor:
    """a @ b.T of quantized (M, K) and (N, K), rounded once to out_dtype: "bfloat16", "float16" or "float32". (M, N).

    Operands as `gemm` takes them, such as FP8 with scales of rows by FP8 with scales of rows; FP8 by MX, such as 1×128
    blocks by mxfp4; and 8-bit whole numbers with scales of rows, also with zero points, whose sums are exact. Two
    `BatchedQuantized` of one batch give (B, M, N). Raises NotImplementedError for other pairs of recipes, TypeError and
    ValueError as `gemm`.
    """
    return _product(a, b, None, out_dtype)


def scaled_gemm_bias(a: Operand, b: Operand, bias: torch.Tensor, *, out_dtype: str = "bfloat16") -> torch.Tensor:
    """`scaled_gemm` and a bias (N,), or (B, N) of a batch, added in float32 before the rounding."""
    return _product(a, b, bias, out_dtype)


def _product(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: str) -> torch.Tensor:
    dtype = getattr(torch, out_dtype)
    if len(a.shape) != len(b.shape) or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"scaled_gemm multiplies (M, K) by (N, K), or batches of one size; a is {a} and b is {b}")
    if int8.takes(a.recipe) and int8.takes(b.recipe):
        return int8.multiply(a, b, dtype, bias)
    mixed = {a.recipe.scale, b.recipe.scale} == {E8M0, FP32} and not (a.recipe.integer or b.recipe.integer)
    if not mixed and (reason := mismatch(a.recipe, b.recipe)):
        raise NotImplementedError(f"scaled_gemm multiplies the pairs of recipes of gemm: {reason}")
    multiply = _mixed if mixed else gemm
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        return multiply(a, b, out_dtype=dtype, bias=bias)
    assert isinstance(a, BatchedQuantized)
    assert isinstance(b, BatchedQuantized)
    if multiply is gemm and (product := _one_launch(a, b, dtype, bias)) is not None:
        return product
    biases = [None] * a.shape[0] if bias is None else bias.unbind()
    pairs = zip(a.matrices(), b.matrices(), biases, strict=True)
    return torch.stack([multiply(left, right, out_dtype=dtype, bias=added) for left, right, added in pairs])


def _one_launch(
    a: BatchedQuantized, b: BatchedQuantized, out_dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The products of a batch of FP8 with scales of rows or of matrices, if Hopper's tensor cores take all at once."""
    family = product_family(a.recipe, b.recipe)
    (batch, m, k), n = a.shape, b.shape[1]
    if family != "fp8_tensor" or batch == 0 or a.transposed or b.transposed:
        return None
    pairs = list(zip(a.matrices(), b.matrices(), strict=True))
    device, codes = a.codes.device, [q.codes.contiguous() for q in (a, b)]
    fits = k > 0 and wgmma_fp8.takes_codes(*(part.view(-1, k) for part in codes))
    if not fits or path_of(batch * m, n, k, family, device, fp8=True) != FP8 or path_for(*pairs[0], family) == SKINNY:
        return None
    for left, right in pairs:
        check_operand(left, "a")
        check_operand(right, "b")
    scales = a.scales.contiguous(), b.scales.contiguous()
    fields: list[Fields] = [
        {"codes": part, "scales": scale, "element": q.recipe.element.name, "layout": layout_of(q.recipe)}
        for q, part, scale in zip((a, b), codes, scales, strict=True)
    ]
    factors = alpha_fields(a.recipe, b.recipe, family, scales, (None, None))
    factors |= {"a_per_row": not a.recipe.whole, "b_per_row": not b.recipe.whole}
    terms = Product(
        family, m, n, k, fields[0], fields[1], epilogue_fields((m, n), out_dtype, None, bias, batch), factors
    )
    out = torch.empty(batch, m, n, dtype=out_dtype, device=device)
    wgmma_fp8.multiply_batch(terms, out, batch)
    return out


def _mixed(a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """a @ b.T (+ bias) of FP8 with float32 scales and MX, whose scales multiply its elements first."""
    check_columns(a, b)
    of_fp8 = a.recipe if a.recipe.scale is FP32 else b.recipe
    family = "fp8_tensor" if of_fp8.spans_k else "fp8_block"
    (m, k), n = a.shape, b.shape[0]
    left, right = mixed_fields(a, "a"), mixed_fields(b, "b")
    terms = Product(family, m, n, k, left, right, epilogue_fields((m, n), out_dtype, None, bias), {})
    out = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    multiply_portable(terms, out, f"gemm_{family}")
    return out
