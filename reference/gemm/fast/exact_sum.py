"""Exact sums of products of quantized operands, by a single float64 product for most operands."""

from __future__ import annotations

import torch

from narrowgauge.reference.gemm.fast.code_ranges import operand_span, row_ranges
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, ExactSum, Span, exact_rows, exact_sum
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized

_FEW = 0.25
"""Largest share of rows that are summed separately. For a larger share the whole matrix is split."""


def fast_exact_sum(a: Quantized, b: Quantized, left: torch.Tensor, right: torch.Tensor) -> ExactSum:
    """`exact_sum(left, right)` of the operands `left` (M, K) of `a` and `right` (N, K) of `b`, float64: (M, N).

    The sums of a row of `left` are exact in float64 if their magnitudes add up to less than 2^53 quanta. Upper bounds
    of this sum are K times the largest element of the row times the largest element of `right`, of the formats or of
    the codes, and the product of the two norms (Cauchy and Schwarz). If only few rows exceed both bounds, `exact_rows`
    sums these rows.
    """
    product = left @ right.T  # launched first, so that a GPU computes it during the checks below
    columns, limit = a.shape[1], FLOAT64_EXACT * (1 - 2.0**-20)
    if product.numel() == 0 or columns * operand_span(a.recipe) * operand_span(b.recipe) < limit:
        return ExactSum(product, None)
    for read_elements in (True,) if a.recipe.scale is FP32 else (False, True):
        (most_a, quantum_a), (most_b, quantum_b) = (row_ranges(q, read_elements=read_elements) for q in (a, b))
        most = (most_b / quantum_b).amax()
        quanta = most_a / quantum_a * (columns * most)
        if read_elements:
            norm = (torch.linalg.vector_norm(right, dim=1) / quantum_b).amax()
            quanta = torch.fmin(quanta, torch.linalg.vector_norm(left, dim=1) / quantum_a * norm)
        inexact = ~(quanta < limit)
        if (count := int(inexact.sum())) == 0:
            return ExactSum(product, None)
    if count > a.shape[0] * _FEW:
        return exact_sum(left, right)
    return exact_rows(inexact.nonzero().squeeze(1), left, right, product, Span(columns * most, norm, most))
