"""Whether what was timed is right: the reference's bytes, or inside a product's bounds, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.checks.bound import bound
from narrowgauge.harness.checks.exact import exact_codes, exact_floats
from narrowgauge.harness.checks.finding import spaced
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.quantize.layout import unpack
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.arguments import split_random
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import Summation

PART = 1 << 26
"""Elements that are judged at once: what the reference needs for them fits into any GPU."""
_ALIGNED = 128
"""Parts begin at multiples of it: of every block, and of a tile of scales."""
_OUTPUTS = 1 << 23
"""Outputs of a product that are judged at once: a dozen float64 matrices of them."""
_WHOLE = 1 << 24
"""Multiply-adds up to which every output is judged by the declared order."""
_STRIP = 16
"""Rows of a larger product of which one is judged so."""
_CHEAP = 23
"""Bits behind the point from which on the model of a tensor core rarely cuts off a product: all of 8192x8192x8192 takes
an H200 2 to 6 s, and with FP8's 13 bits 17 s."""
BYTES, ORDER, BOUND = "bytes", "order", "bound"


@dataclass
class Verdict:
    """What was compared, and the first thing that is wrong."""

    compared: int = 0
    mismatches: int = 0
    sentence: str = ""
    by: str = BYTES
    """`bytes` that are the reference's; of a product what its declared `order`, or the `bound` of any, can give."""

    def add(self, stage: StageResult) -> None:
        """Count one more comparison."""
        self.compared += stage.compared
        self.mismatches += stage.mismatches
        self.sentence = self.sentence or (f"{stage.stage}: {stage.sentence}" if stage.sentence else "")

    def equal(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two tensors of numbers; other shapes or dtypes are wrong in every element."""
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            words = f"{_kind(actual)} where the reference has {_kind(expected)}"
            self.add(StageResult(name, "exact", expected.numel(), max(1, expected.numel()), sentence=words))
        else:
            self.add(exact_floats(name, actual, expected, noun=name, describe=_describe))

    def bytes(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two tensors of bytes whose meaning does not matter."""
        total = wrong = expected.numel()
        words = f"{_kind(actual)} where the reference has {_kind(expected)}"
        if actual.shape == expected.shape:
            wrong = 0 if torch.equal(actual, expected) else int((actual != expected).sum())
            words = f"{spaced(wrong)} of {spaced(total)} bytes differ" if wrong else ""
        self.add(StageResult(name, "exact", total, wrong, sentence=words))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _describe(row: int, column: int) -> dict[str, Any]:
    return {"row": row, "column": column}


def parts(extent: int, other: int) -> Iterator[slice]:
    """Slices of `extent` lines of `other` elements each, about `PART` elements a slice."""
    step = max(_ALIGNED, PART // max(1, other) // _ALIGNED * _ALIGNED)
    for start in range(0, extent, step):
        yield slice(start, min(extent, start + step))


@dataclass(frozen=True)
class Given:
    """With what a matrix was quantized."""

    amax: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Of either orientation, None where the quantizer finds it."""
    scale: torch.Tensor | None = None
    random: tuple[int, int] | None = None


def judge_halves(
    x: torch.Tensor, recipe: Recipe, given: Given, halves: tuple[Quantized | None, Quantized | None]
) -> Verdict:
    """Judge a rowwise and a columnwise half of `x` (M, K), those that there are."""
    verdict = Verdict()
    bits = split_random(given.random)
    for columnwise, (half, amax, random) in enumerate(zip(halves, given.amax, bits, strict=True)):
        if half is not None:
            _judge_half(verdict, x, recipe, half, amax, given.scale, random, columnwise=bool(columnwise))
    return verdict


def judge_quantized(x: torch.Tensor, recipe: Recipe, given: Given, q: Quantized) -> Verdict:
    """Judge `quantize` of `x` (M, K), which rotates rows where the recipe rotates."""
    verdict = Verdict()
    _judge_half(verdict, x, recipe, q, given.amax[0], given.scale, given.random, columnwise=False, alone=True)
    return verdict


def _judge_half(
    verdict: Verdict,
    x: torch.Tensor,
    r: Recipe,
    q: Quantized,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    random: Any,
    *,
    columnwise: bool,
    alone: bool = False,
) -> None:
    """One orientation, some lines at a time. `alone`: of `quantize`, which rotates rows; `quantize_both` does not."""
    lines, length = x.shape[::-1] if columnwise else x.shape
    recipe = r if columnwise or alone else r.rowwise
    whole = recipe.tensor_scale != "none" and recipe.granularity == "tensor"
    name = "columnwise" if columnwise else "rowwise"
    if whole and amax is None:
        amax = _largest(x, recipe, columnwise=columnwise)
    if whole:
        assert amax is not None
        verdict.equal(f"{name} amax", q.required_amax, amax)
    for at in parts(lines, length):
        words = None if random is None else _words(random, (lines, length), at, x.device, recipe)
        part = amax if whole or amax is None else amax[at]
        if columnwise:
            bits = None if words is None else (None, words)
            expected = reference.quantize_both(
                x[:, at].contiguous(), r, rowwise=False, amax=(None, part), scale=scale, random=bits
            )[1]
            assert expected is not None
        else:
            expected = reference.quantize(x[at], recipe, amax=part, scale=scale, random=words)
        _judge_part(verdict, name, q, expected, at, whole=whole)


def _judge_part(verdict: Verdict, name: str, q: Quantized, expected: Quantized, at: slice, *, whole: bool) -> None:
    recipe = expected.recipe
    height = recipe.stored_rows
    scaled = slice(None) if recipe.whole else slice(at.start // height, -(-at.stop // height))
    codes, scales = (q.codes[:, at], q.scales[:, scaled]) if q.transposed else (q.codes[at], q.scales[scaled])
    if not whole and expected.amax is not None and q.amax is not None:
        verdict.equal(f"{name} amax", q.amax[at], expected.amax)
    if recipe.scale is FP32:
        verdict.equal(f"{name} scales", scales, expected.scales)
    else:
        verdict.add(
            exact_codes(f"{name} scales", scales, expected.scales, recipe.scale, noun="scales", describe=_describe)
        )
    if torch.equal(codes, expected.codes):  # without a byte for every element
        verdict.compared += expected.shape[0] * expected.shape[1]
        return
    mine, theirs = (
        unpack(some, expected.shape[1]) if recipe.element.bits == 4 else some for some in (codes, expected.codes)
    )
    verdict.add(exact_codes(f"{name} codes", mine, theirs, recipe.element, noun="codes", describe=_describe))


def _largest(x: torch.Tensor, recipe: Recipe, *, columnwise: bool) -> torch.Tensor:
    """max|x| of a matrix without NaN, rotated where the recipe rotates, float32 (1,)."""
    lines, length = x.shape[::-1] if columnwise else x.shape
    found = []
    for at in parts(lines, length):
        cut = x[:, at].T.contiguous() if columnwise else x[at]
        cut = cut if recipe.transform is None else reference.transform(cut, recipe)
        found.append(cut.abs().amax().float())
    return torch.stack(found).amax().view(1)


def _words(random: Any, shape: tuple[int, int], at: slice, device: torch.device, recipe: Recipe) -> torch.Tensor:
    """The random words of some lines of a matrix, int32."""
    return random_bytes(random, shape, at, device, recipe.block[1]).contiguous().view(torch.int32)


def judge_values(actual: torch.Tensor, q: Quantized) -> Verdict:
    """Judge `dequantize` of a rowwise operand."""
    verdict = Verdict()
    for at in parts(*q.shape):
        verdict.equal("values", actual[at], reference.dequantize(_rows(q, at), actual.dtype))
    return verdict


def judge_rotated(actual: torch.Tensor, x: torch.Tensor, recipe: Recipe) -> Verdict:
    """Judge `transform` of `x`."""
    verdict = Verdict()
    for at in parts(*x.shape):
        verdict.equal("output", actual[at], reference.transform(x[at], recipe))
    return verdict


def judge_bytes(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Verdict:
    """Judge bytes that were moved."""
    verdict = Verdict()
    verdict.bytes(name, actual, expected)
    return verdict


def judge_product(actual: torch.Tensor, pairs: Sequence[tuple[Quantized, Quantized]], order: Summation) -> Verdict:
    """Judge products (M, N) of pairs of operands, one below the other, by what the declared order can give.

    Large ones so only in one row of `_STRIP`, each time another, where that order is dear; and whole by what any order
    can give, unless what is declared is a tensor core with coarser sums than those of any order in float32.
    """
    verdict = Verdict(by=BOUND if order.order is None else ORDER)
    cheap = order.order is None or (order.aligned is not None and order.aligned.fraction >= _CHEAP)
    start = 0
    for a, b in pairs:
        found = actual[start : start + a.shape[0]]
        start += a.shape[0]
        if cheap or a.shape[0] * a.shape[1] * b.shape[0] <= _WHOLE:
            _judge_product(verdict, found, a, b, order)
            continue
        strips = torch.arange(a.shape[0] // _STRIP, device=actual.device)
        chosen = strips * _STRIP + strips % _STRIP
        _judge_product(verdict, found[chosen], _rows(a, chosen), b, order)
        verdict.by = f"{ORDER} 1/{_STRIP}"
        if order.aligned is None:
            _judge_product(verdict, found, a, b, replace(order, order=None))
            verdict.by = f"{BOUND}, {verdict.by}"
    return verdict


def _judge_product(verdict: Verdict, found: torch.Tensor, a: Quantized, b: Quantized, order: Summation) -> None:
    step = max(16, _OUTPUTS // b.shape[0] // 16 * 16)
    for first in range(0, a.shape[0], step):
        at = slice(first, min(a.shape[0], first + step))
        limits = bounds(_rows(a, at), b, out_dtype=found.dtype, order=order)
        verdict.add(bound("output", found[at], limits, describe=_describe, figures=False))


def _rows(q: Quantized, at: slice | torch.Tensor) -> Quantized:
    """Rows of an operand that is stored rowwise; numbered ones of a recipe with scales for every row, or for all."""
    height = q.recipe.stored_rows
    scaled = at if isinstance(at, torch.Tensor) else slice(at.start // height, -(-at.stop // height))
    assert height == 1 or q.recipe.whole or isinstance(at, slice)
    scales = q.scales if q.recipe.whole else q.scales[scaled]
    each = q.recipe.granularity == "row"
    amax, encode = (t[at] if each and t is not None else t for t in (q.amax, q.tensor_scale))
    codes = q.codes[at]
    return replace(q, codes=codes, scales=scales, amax=amax, tensor_scale=encode, shape=(len(codes), q.shape[1]))
