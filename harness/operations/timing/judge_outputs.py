"""Judging timed outputs: equal bytes with the reference, or within the bounds of a product, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.exact import exact_floats
from narrowgauge.harness.checks.gemm_bound import check_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.quantize.quantize import quantize_half
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.arguments import split_random
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import Summation

SLICE_ELEMENTS = 1 << 26
"""Elements judged at once: the memory of the reference for them fits into any GPU."""
_ALIGNED = 128
"""Slices begin at multiples of it: a multiple of every block, and of a tile of scales."""
_OUTPUTS = 1 << 23
"""Outputs of a product judged at once: they need a dozen float64 matrices."""
_WHOLE = 1 << 24
"""Multiply-adds up to which every output is judged by the declared order."""
_STRIP = 16
"""In larger products one row of this many rows is judged by the declared order."""
_CHEAP = 23
"""Fraction bits from which the tensor core model rarely truncates a product: 8192x8192x8192 then takes 2 to 6 s on an
H200, and 17 s with the 13 bits of FP8."""
BYTES, ORDER, BOUND, CONTRACT = "bytes", "order", "bound", "contract"


@dataclass
class Verdict:
    """Number of compared elements, and the first error."""

    compared: int = 0
    mismatches: int = 0
    sentence: str = ""
    rule: str = BYTES
    """`bytes`: compared with the reference's bytes. For products `order` (sums in the declared order) or `bound` (sums
    in any order). `contract`: bytes that a contract allows."""

    def add(self, stage: StageResult) -> None:
        """Add the result of a comparison."""
        self.compared += stage.compared
        self.mismatches += stage.mismatches
        self.sentence = self.sentence or (f"{stage.stage}: {stage.sentence}" if stage.sentence else "")

    def equal(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two tensors of numbers. With another shape or dtype every element is wrong."""
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            sentence = f"{_kind(actual)} where the reference has {_kind(expected)}"
            self.add(StageResult(name, "exact", expected.numel(), max(1, expected.numel()), sentence=sentence))
        else:
            self.add(exact_floats(name, actual, expected, noun=name, describe=_describe))

    def bytes(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two tensors byte by byte."""
        total = wrong = expected.numel()
        sentence = f"{_kind(actual)} where the reference has {_kind(expected)}"
        if actual.shape == expected.shape:
            wrong = 0 if torch.equal(actual, expected) else int((actual != expected).sum())
            sentence = f"{format_count(wrong)} of {format_count(total)} bytes differ" if wrong else ""
        self.add(StageResult(name, "exact", total, wrong, sentence=sentence))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _describe(row: int, column: int) -> dict[str, Any]:
    return {"row": row, "column": column}


def row_slices(lines: int, line_elements: int) -> Iterator[slice]:
    """Slices of `lines` lines of `line_elements` elements, with about `SLICE_ELEMENTS` elements each."""
    step = max(_ALIGNED, SLICE_ELEMENTS // max(1, line_elements) // _ALIGNED * _ALIGNED)
    for start in range(0, lines, step):
        yield slice(start, min(lines, start + step))


@dataclass(frozen=True)
class QuantizeArguments:
    """Arguments of a quantize call."""

    amax: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Rowwise and columnwise amax, or None if computed by the quantizer."""
    scale: torch.Tensor | None = None
    random: tuple[int, int] | None = None


def judge_halves(
    x: torch.Tensor, recipe: Recipe, arguments: QuantizeArguments, halves: tuple[Quantized | None, Quantized | None]
) -> Verdict:
    """Judge a rowwise and a columnwise half of `x` (M, K). A half may be None."""
    verdict = Verdict()
    bits = split_random(arguments.random)
    for half, q, amax, random in zip(Half, halves, arguments.amax, bits, strict=True):
        if q is not None:
            _judge_half(verdict, x, half, half.recipe(recipe), q, amax, arguments.scale, random)
    return verdict


def judge_quantized(x: torch.Tensor, recipe: Recipe, arguments: QuantizeArguments, q: Quantized) -> Verdict:
    """Judge `quantize` of `x` (M, K). Rows are rotated if the recipe rotates."""
    verdict = Verdict()
    _judge_half(verdict, x, Half.ROW, recipe, q, arguments.amax[0], arguments.scale, arguments.random)
    return verdict


def _judge_half(
    verdict: Verdict,
    x: torch.Tensor,
    half: Half,
    recipe: Recipe,
    q: Quantized,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    random: Any,
) -> None:
    """Judge a half under its own recipe by the stages of a quantized matrix, slice by slice."""
    shape = half.shape(x.shape)
    per_tensor = recipe.tensor_scale != "none" and recipe.granularity == "tensor"
    if per_tensor and amax is None:
        amax = _largest(half.matrix(x), recipe)
    for rows in row_slices(*shape):
        words = None if random is None else _random_words(random, shape, rows, x.device, recipe)
        slice_amax = amax if per_tensor or amax is None else amax[rows]
        part = half.matrix(half.matrix(x)[rows]).contiguous()
        expected = quantize_half(half, part, recipe, slice_amax, scale, words)
        subject = Subject.of_half(half, part, recipe, words, amax_given=True)
        for stage in quantize_stages(subject, _rows(q, rows), expected, f"{half} ")[0]:
            verdict.add(stage)


def _largest(matrix: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """max|x| of a matrix without NaN, rotated along its rows if the recipe rotates, float32 (1,)."""
    maxima = []
    for rows in row_slices(*matrix.shape):
        part = matrix[rows].contiguous()
        part = part if recipe.transform is None else reference.transform(part, recipe)
        maxima.append(part.abs().amax().float())
    return torch.stack(maxima).amax().view(1)


def _random_words(
    random: Any, shape: tuple[int, int], rows: slice, device: torch.device, recipe: Recipe
) -> torch.Tensor:
    """Random words of some lines of a matrix, int32."""
    return random_bytes(random, shape, rows, device, recipe.block[1]).contiguous().view(torch.int32)


def judge_values(actual: torch.Tensor, q: Quantized) -> Verdict:
    """Judge `dequantize` of a rowwise operand."""
    verdict = Verdict()
    for rows in row_slices(*q.shape):
        verdict.equal("values", actual[rows], reference.dequantize(_rows(q, rows), actual.dtype))
    return verdict


def judge_rotated(actual: torch.Tensor, x: torch.Tensor, recipe: Recipe) -> Verdict:
    """Judge `transform` of `x`."""
    verdict = Verdict()
    for rows in row_slices(*x.shape):
        verdict.equal("output", actual[rows], reference.transform(x[rows], recipe))
    return verdict


def judge_bytes(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Verdict:
    """Judge bytes that were moved without a change."""
    verdict = Verdict()
    verdict.bytes(name, actual, expected)
    return verdict


def judge_product(actual: torch.Tensor, pairs: Sequence[tuple[Quantized, Quantized]], order: Summation) -> Verdict:
    """Judge products (M, N) of pairs of operands, joined along the rows, by the possible sums of the declared order.

    If the declared order is expensive, only a row of every `_STRIP` rows of a large product is judged by it, at
    changing positions, and the whole product is judged by the sums of any order. The second check is omitted for tensor
    cores, whose sums can be coarser than float32 sums in any order.
    """
    verdict = Verdict(rule=BOUND if order.order is None else ORDER)
    cheap = (
        order.order is None
        or order.fraction is not None
        or (order.aligned is not None and order.aligned.fraction >= _CHEAP)
    )
    start = 0
    for a, b in pairs:
        output = actual[start : start + a.shape[0]]
        start += a.shape[0]
        if cheap or a.shape[0] * a.shape[1] * b.shape[0] <= _WHOLE:
            _judge_product(verdict, output, a, b, order)
            continue
        strips = torch.arange(a.shape[0] // _STRIP, device=actual.device)
        chosen = strips * _STRIP + strips % _STRIP
        _judge_product(verdict, output[chosen], _rows(a, chosen), b, order)
        verdict.rule = f"{ORDER} 1/{_STRIP}"
        if order.aligned is None:
            _judge_product(verdict, output, a, b, replace(order, order=None))
            verdict.rule = f"{BOUND}, {verdict.rule}"
    return verdict


def _judge_product(verdict: Verdict, output: torch.Tensor, a: Quantized, b: Quantized, order: Summation) -> None:
    step = max(16, _OUTPUTS // b.shape[0] // 16 * 16)
    for first in range(0, a.shape[0], step):
        rows = slice(first, min(a.shape[0], first + step))
        limits = bounds(_rows(a, rows), b, out_dtype=output.dtype, order=order)
        verdict.add(check_bounds("output", output[rows], limits, describe=_describe, figures=False))


def _rows(q: Quantized, rows: slice | torch.Tensor) -> Quantized:
    """A part of the quantized rows of an operand. An index tensor requires a scale for every row, or a single
    scale."""
    height = q.recipe.stored_rows
    scaled = rows if isinstance(rows, torch.Tensor) else slice(rows.start // height, -(-rows.stop // height))
    assert height == 1 or q.recipe.whole or isinstance(rows, slice)
    codes, scales = (q.codes[:, rows], q.scales[:, scaled]) if q.transposed else (q.codes[rows], q.scales[scaled])
    per_row = q.recipe.granularity == "row"
    amax, encode = (t[rows] if per_row and t is not None else t for t in (q.amax, q.tensor_scale))
    shape = codes.shape[1 if q.transposed else 0], q.shape[1]
    scales = q.scales if q.recipe.whole else scales
    return replace(q, codes=codes, scales=scales, amax=amax, tensor_scale=encode, shape=shape)
