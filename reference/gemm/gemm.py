"""GEMM of quantized operands with exact sums: the reference for every order of accumulation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowgauge.reference.gemm.fast.exact_sum import fast_exact_sum
from narrowgauge.reference.gemm.fast.promoted_sum import fast_promoted_sum
from narrowgauge.reference.gemm.operands import operand, promotes
from narrowgauge.reference.numbers.exact import ExactSum
from narrowgauge.reference.quantize.scaling import divide, used_tensor_scale
from narrowgauge.spec.arguments import check_columns, check_epilogue, check_pair, check_sections_of_product
from narrowgauge.spec.quantized import GroupedQuantized, Quantized


def exact_product(a: Quantized, b: Quantized) -> ExactSum:
    """The exact sum Σ_k of the products of the elements of two `operand`s: (M, K) and (N, K) to (M, N)."""
    return fast_exact_sum(a, b, operand(a), operand(b))


def check_operands(a: Quantized, b: Quantized) -> None:
    """Raises ValueError if two operands cannot be multiplied."""
    check_columns(a, b)
    check_pair(a.recipe, b.recipe)


def alpha(a: Quantized, b: Quantized) -> torch.Tensor:
    """The factor of the exact sums, float32, computed in the order of operations of the recipe.

    Shape (1, 1); (M, 1), (1, N) or (M, N) if a, b or both have an amax or a scale per row. The factor is 1 for recipes
    without tensor scales. d is the product of the `max_product` of the two recipes: 36·448·448 for plain NVFP4.
    1/(a_enc*b_enc) is 0 if the product is 0; the tensor scale of an operand without a tensor scale is 1. Raises the
    errors of `used_tensor_scale`.
    """
    if a.recipe.alpha == "1":
        return torch.ones(1, 1, device=a.codes.device)
    if a.recipe.alpha in ("1/(a_enc*b_enc)", "a_dec*b_dec"):
        product = used_tensor_scale(a).unsqueeze(1) * used_tensor_scale(b).unsqueeze(0)
        return product if a.recipe.alpha == "a_dec*b_dec" else torch.where(product == 0, 0.0, divide(1.0, product))
    if a.recipe.alpha == "s_a*s_b":
        return a.scales.reshape(-1, 1) * b.scales.reshape(1, -1)
    constant = a.recipe.max_product * b.recipe.max_product
    left, right = a.required_amax.unsqueeze(1), b.required_amax.unsqueeze(0)
    if a.recipe.alpha == "(a*b)/d":
        product = left * right
        return product / torch.full_like(product, constant)
    return (right * left) * (1.0 / constant)


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias): (M, K) and (N, K) to (M, N) in float32, bfloat16 or float16.

    1. The exact sum is rounded once to float32.
    2. α multiplies the sum. `c` (M, N) is added, then `bias` (N,). Each step rounds to float32.
    3. The result is cast to `out_dtype`.

    FP8 with block scales: `promoted_sum`, bias, cast, c, cast. Source: docs/numerics.md#nvfp4-gemm,
    docs/numerics.md#mx, docs/numerics.md#fp8-with-float32-scales.

    Raises ValueError for shapes or recipes that do not fit together, TypeError for another dtype of the output.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    if promotes(a.recipe):
        y = fast_promoted_sum(a, b)
        if bias is not None:
            y = y + bias.float()
        y = y.to(out_dtype)
        return y if c is None else (y.float() + c.float()).to(out_dtype)
    y = alpha(a, b) * exact_product(a, b).to_float32()
    if c is not None:
        y = y + c.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


def gemm_grouped(
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm` of each section of `a` (M, K), quantized rowwise, by its own matrix (N, K) of `b`: (M, N).

    `c` is (M, N); `bias` is (G, N), a row per section. Raises the errors of `gemm`, and ValueError if the numbers of
    sections and matrices differ, or if the matrices differ in N.
    """
    check_sections_of_product(a, b)
    check_epilogue((a.shape[0], b[0].shape[0]), out_dtype, c, bias, len(b))
    sections = a.sections()
    parts = []
    start = 0
    for number, (section, matrix) in enumerate(zip(sections, b, strict=True)):
        rows = slice(start, start + section.shape[0])
        start = rows.stop
        section_c, section_bias = None if c is None else c[rows], None if bias is None else bias[number]
        parts.append(gemm(section, matrix, out_dtype=out_dtype, c=section_c, bias=section_bias))
    return torch.cat(parts)
