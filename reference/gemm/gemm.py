"""GEMM of quantized operands with the exact sum: what every accumulation order is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowgauge.reference.gemm.operands import (
    element_values,
    multiply_blocks,
    promotes,
    row_ends,
    scale_values,
    widest_span,
)
from narrowgauge.reference.gemm.promoted import promoted_sum
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, ExactSum, Span, exact_rows, exact_sum
from narrowgauge.reference.quantize.scaling import divide, used_tensor_scale
from narrowgauge.spec.arguments import check_columns, check_epilogue, check_pair, check_sections_of_product
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import GroupedQuantized, Quantized

_FEW = 0.25
"""Of all rows, those that are summed by themselves; of more the whole matrix is split."""


def operand(q: Quantized) -> torch.Tensor:
    """code·scale of every element, float64 (M, K), exact; the tensor's factor, and float32 scales, are left out."""
    out = element_values(q)
    return out if q.recipe.scale is FP32 else multiply_blocks(out, scale_values(q), q.recipe.block[1])


def code_sum(a: Quantized, b: Quantized) -> ExactSum:
    """Σ_k of the products of two `operand`s, exactly: (M, N)."""
    return product_sum(a, b, operand(a), operand(b))


def product_sum(a: Quantized, b: Quantized, left: torch.Tensor, right: torch.Tensor) -> ExactSum:
    """`code_sum` of operands that are numbers already.

    The sums of a row of `a` are exact in float64 where those of magnitudes are below 2^53 units. At most they are K
    times the row's largest and the largest of any row of `b`, of the formats or of the codes at hand, and the product
    of the two norms (Cauchy and Schwarz). Few rows where none of that is enough take `exact_rows`.
    """
    product = left @ right.T  # first, so that a GPU has work while it is asked whether that is exact
    columns, limit = a.shape[1], FLOAT64_EXACT * (1 - 2.0**-20)
    if product.numel() == 0 or columns * widest_span(a.recipe) * widest_span(b.recipe) < limit:
        return ExactSum(product, None)
    for look in (True,) if a.recipe.scale is FP32 else (False, True):
        (most_a, unit_a), (most_b, unit_b) = (row_ends(q, look=look) for q in (a, b))
        most = (most_b / unit_b).amax()
        units = most_a / unit_a * (columns * most)
        if look:
            norm = (torch.linalg.vector_norm(right, dim=1) / unit_b).amax()
            units = torch.fmin(units, torch.linalg.vector_norm(left, dim=1) / unit_a * norm)
        beyond = ~(units < limit)
        if (count := int(beyond.sum())) == 0:
            return ExactSum(product, None)
    if count > a.shape[0] * _FEW:
        return exact_sum(left, right)
    return exact_rows(beyond.nonzero().squeeze(1), left, right, product, Span(columns * most, norm, most))


def check_operands(a: Quantized, b: Quantized) -> None:
    """Raises ValueError where two operands cannot be multiplied."""
    check_columns(a, b)
    check_pair(a.recipe, b.recipe)


def alpha(a: Quantized, b: Quantized) -> torch.Tensor:
    """The factor of a product of the two operands, float32, in the order that the recipe names.

    (1, 1); (M, 1), (1, N) or (M, N) where a, b or both have an amax for each row; 1 where no tensor has a factor. d is
    the product of the two recipes' max_product: 36·448·448 for plain NVFP4. Of two tensor scales, 1/(a_enc*b_enc) is 0
    where the product is 0, and 1 stands for operands without. Raises as `used_tensor_scale` does.
    """
    if a.recipe.alpha == "1":
        return torch.ones(1, 1, device=a.codes.device)
    if a.recipe.alpha in ("1/(a_enc*b_enc)", "a_dec*b_dec"):
        product = used_tensor_scale(a).unsqueeze(1) * used_tensor_scale(b).unsqueeze(0)
        return product if a.recipe.alpha == "a_dec*b_dec" else torch.where(product == 0, 0.0, divide(1.0, product))
    if a.recipe.alpha == "s_a*s_b":
        return a.scales * b.scales
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

    The sum is exact, then rounded once to float32; α multiplies it, `c` (M, N) and then `bias` (N,) are added, each
    step rounding to float32, and one cast ends it. FP8 with scales of blocks: `promoted_sum`, then the bias and a cast,
    and only then c, and another cast. Source: docs/numerics.md#nvfp4-gemm, docs/numerics.md#mx,
    docs/numerics.md#fp8-with-float32-scales.

    Raises ValueError for shapes or recipes that do not fit, TypeError for the output's dtype.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    if promotes(a.recipe):
        y = promoted_sum(a, b)
        if bias is not None:
            y = y + bias.float()
        y = y.to(out_dtype)
        return y if c is None else (y.float() + c.float()).to(out_dtype)
    y = alpha(a, b) * code_sum(a, b).to_float32()
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
    """Each section of `a` (M, K), quantized rowwise, times its own matrix of `b` (N, K), one below the other: (M, N).

    `c` is (M, N); `bias` (G, N), a row for each section. As `gemm` for every section; raises as it does, and ValueError
    where sections and matrices are not as many, or matrices have not the same N.
    """
    check_sections_of_product(a, b)
    check_epilogue((a.shape[0], b[0].shape[0]), out_dtype, c, bias, len(b))
    sections = a.sections()
    parts = []
    start = 0
    for number, (section, matrix) in enumerate(zip(sections, b, strict=True)):
        rows = slice(start, start + section.shape[0])
        start = rows.stop
        added = None if c is None else c[rows]
        parts.append(gemm(section, matrix, out_dtype=out_dtype, c=added, bias=None if bias is None else bias[number]))
    return torch.cat(parts)
