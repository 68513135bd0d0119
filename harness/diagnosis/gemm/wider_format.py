"""GEMMs that multiply wider numbers than the codes that they claim to multiply: the inputs, or their FP8 values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    GemmParts,
    add_addends,
    cast_ends,
    correct_epilogue,
    fits,
    operand_values,
)
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.oracle import dequantize, quantize
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_NORMAL, UNIT

WIDER_FORMAT: Deviation[GemmParts] = Deviation(
    "computed-in-wider-format", "it multiplies {}, not the codes that it claims to multiply", "operands"
)
Matrices = Sequence[torch.Tensor]
"""A matrix (rows, K) for each product."""
_WIDER_RECIPES = {"mxfp8-e4m3": "MXFP8 E4M3", "fp8-current-e4m3": "FP8 E4M3 with one scale of the tensor"}
"""Recipes with elements of 8 bits, and their names in sentences."""
_OUTSIDE_SHARE, _OUTSIDE = 0.25, 8
"""Least share and least number of the outputs that no sum of the codes can give."""


def explain_wider_format(
    outcome: Outcome, wrong_stage: StageResult, products: Sequence[GemmParts]
) -> list[Explanation]:
    """The explanation `computed-in-wider-format`, if the outputs are products of wider operands.

    Two conditions exclude other causes. Every output lies in the interval of the product of the wider operands, summed
    in float32 in any order. A quarter of the outputs, and at least 8, lie outside the interval of the product of the
    codes, with the same formula of the error. So inputs that the codes hold exactly give no explanation, whatever else
    is wrong with the sums.
    """
    enough = max(_OUTSIDE, _OUTSIDE_SHARE * sum(parts.output.numel() for parts in products))
    decoded = any(parts.tensor_factors is not None for parts in products)
    if decoded or sum(int(parts.wrong.sum()) for parts in products) < enough:
        return []
    x, w = (_inputs_of(outcome, prefix, products) for prefix in ("x.", "w."))
    if not x or not w:
        return []
    of_codes = [outside_sums(parts, *map(operand_values, (parts.left, parts.right))) for parts in products]
    if any(outside is None for outside in of_codes) or _count(of_codes) < enough:
        return []
    for phrase, left, right in _wider_operands(x, w, products):
        wide = [replace(parts, factor=torch.ones_like(parts.factor)) for parts in products]
        of_wide = [outside_sums(*operands) for operands in zip(wide, left, right, strict=True)]
        if all(outside is not None for outside in of_wide) and not _count(of_wide):
            return [Explanation.of(WIDER_FORMAT.bound(phrase), wrong_stage.stage)]
    return []


def _inputs_of(outcome: Outcome, prefix: str, products: Sequence[GemmParts]) -> Matrices:
    """The matrices that the kernel quantized as x or as w; empty if it did not quantize them."""
    matrices = [judged.subject.matrix for judged in outcome.judged if judged.prefix == prefix]
    shapes = [(parts.left if prefix == "x." else parts.right).shape for parts in products]
    if len(matrices) != len(shapes):
        return []
    # Padded sections have further rows of zeros.
    matrices = [matrix[: shape[0]] for matrix, shape in zip(matrices, shapes, strict=True)]
    same = all(tuple(matrix.shape) == tuple(shape) for matrix, shape in zip(matrices, shapes, strict=True))
    return matrices if same else []


def _wider_operands(
    x: Matrices, w: Matrices, products: Sequence[GemmParts]
) -> Iterator[tuple[str, Matrices, Matrices]]:
    """Phrase for the sentence, and both operands: the inputs, inputs rounded to 16 bits, and wider codes of them."""
    yield "the inputs as they were before quantization", x, w
    dtypes = {matrix.dtype for matrix in (*x, *w)}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        left, right = ([m.to(dtype) for m in matrices] for matrices in (x, w))
        # Inputs that all become 0 fit every mistake that leaves 0, such as a flushed α.
        if dtypes != {dtype} and all(any(bool(m.any()) for m in matrices) for matrices in (left, right)):
            yield f"the inputs in {name}", left, right
    if all(q.recipe.element.bits < 8 for parts in products for q in (parts.left, parts.right)):
        for recipe, name in _WIDER_RECIPES.items():
            left, right = ([dequantize(quantize(m, recipe)) for m in matrices] for matrices in (x, w))
            yield f"the inputs quantized to {name}", left, right


def _count(masks: Sequence[torch.Tensor | None]) -> int:
    return sum(int(mask.sum()) for mask in masks if mask is not None)


def outside_sums(parts: GemmParts, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """bool mask of the outputs that no float32 sum of left @ right.T gives, with the factor and addends of a product.

    None if an operand is infinite or NaN, or if a sum can overflow: the interval would hold every output.
    """
    left, right = left.double(), right.double()
    total, size = left @ right.T, left.abs() @ right.abs().T
    if not bool((size * (1 + 2.0**-8) < FLT_MAX).all()):
        return None
    columns = left.shape[1]
    # 8 covers the rounding of a product and of its factors, and of the sum in float64, as in `loose_sums`.
    error = (columns + 8) * 2 * UNIT * size + columns * SMALLEST_NORMAL
    ends = (total - error).float(), (total + error).float()
    rounded_once = [cast_ends(y, parts.dtype) for y in add_addends(parts, ends, parts.factor)]
    return ~fits(parts.output, [*rounded_once, *correct_epilogue(parts, ends)], torch.zeros_like(parts.wrong))
