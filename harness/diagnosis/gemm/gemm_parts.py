"""A product taken apart, so that one thing of it can be changed: operands, factor, addends, epilogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.operations.stages.outcome import Product
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.gemm import alpha, operand
from narrowgauge.reference.gemm.operands import element_values, promotes, scale_values
from narrowgauge.reference.numbers.exact import fma
from narrowgauge.reference.quantize.layout import rowwise_codes
from narrowgauge.reference.quantize.scaling import over_elements
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe
from narrowgauge.spec.summation import FLT_MAX, TINY, UNIT, Summation, summation

Ends = tuple[torch.Tensor, torch.Tensor]
"""The least and the greatest that each number can be: equal where it is known."""


@dataclass
class Sums:
    """What an accumulator holds at the end, float32 (M, N), before α; of FP8 with scales of blocks y."""

    lower: torch.Tensor
    upper: torch.Tensor
    undetermined: torch.Tensor
    """bool: may be infinite or NaN in some order."""

    @property
    def ends(self) -> Ends:
        return self.lower, self.upper


@dataclass(frozen=True)
class GemmParts:
    """A product as its parts, each of which can be another one."""

    left: Quantized
    right: Quantized
    """Operands (M, K) and (N, K) without a tensor factor: codes along rows, low nibble first, a scale for each row."""
    factor: torch.Tensor
    """α, float32, for (M, N) to broadcast."""
    c: torch.Tensor | None
    bias: torch.Tensor | None
    """(1, N); (M, 1) or (M, N) of a wrong one."""
    output: torch.Tensor
    """What the kernel gave, (M, N)."""
    wrong: torch.Tensor
    """bool (M, N)."""
    rows: torch.Tensor
    columns: torch.Tensor
    """Their numbers in the product, int64 (M,) and (N,)."""
    order: Summation
    """What the kernel declares of its sums."""
    source: Product
    """The whole product."""
    all: Sequence[GemmParts] = field(default=(), repr=False)
    """Those of every section, in order; of which this is the `number`-th."""
    number: int = 0

    @property
    def promotes(self) -> bool:
        """Whether scales of blocks are float32 numbers, so that y is what an accumulator holds."""
        return promotes(self.left.recipe)

    @property
    def dtype(self) -> torch.dtype:
        """Of the output."""
        return self.output.dtype

    def sums(self) -> Sums:
        """Where the accumulators can lie."""
        limits = bounds(self.left, self.right, out_dtype=torch.float32, order=self.order)
        lower = torch.where(limits.exact, limits.expected, limits.lower)
        upper = torch.where(limits.exact, limits.expected, limits.upper)
        return Sums(lower, upper, limits.undetermined)

    def loose_sums(self) -> Sums:
        """Ends that hold those of `sums` and are found sooner: S ± (K + 8)·2u·A, unless a tensor core is simulated.

        8 for the factors of a term and the rounding of S in float64; 2^-126 a term for what underflows.
        """
        if self.order.aligned:
            return self.sums()
        left, right = (_numbers(q) for q in (self.left, self.right))
        total, size = left @ right.T, left.abs() @ right.abs().T
        columns = left.shape[1]
        error = (columns + 8) * 2 * UNIT * size + columns * TINY
        undetermined = ~(size * (1 + 2.0**-8) < FLT_MAX)
        lower, upper = (total - error).float(), (total + error).float()
        lower, upper = lower.masked_fill_(undetermined, -torch.inf), upper.masked_fill_(undetermined, torch.inf)
        return Sums(lower, upper, undetermined)

    @property
    def any_order(self) -> GemmParts:
        """The same in any order, where that holds what the declared one can give."""
        return self if self.order.aligned else replace(self, order=replace(self.order, order=None))

    def part(self, rows: torch.Tensor, columns: torch.Tensor) -> GemmParts:
        """The product of some rows and columns, by number."""
        factor = _cut(self.factor, rows, columns)
        c, bias = (None if t is None else _cut(t, rows, columns) for t in (self.c, self.bias))
        return replace(
            self, left=rows_of(self.left, rows), right=rows_of(self.right, columns), factor=factor, c=c, bias=bias,
            output=self.output[rows][:, columns], wrong=self.wrong[rows][:, columns], rows=self.rows[rows],
            columns=self.columns[columns],
        )  # fmt: skip


Finish = Callable[[GemmParts, Ends], list[Ends]]
"""An epilogue: from what the accumulators hold to what the outputs can be, in any of several ways that are right."""


def terms_of(products: Sequence[Product], wrong: torch.Tensor | None) -> list[GemmParts]:
    """The terms of every product; `wrong`, bool, those of all, one below the other."""
    found: list[GemmParts] = []
    start = 0
    for number, one in enumerate(products):
        rows = slice(start, start + one.output.shape[0])
        start = rows.stop
        here = torch.zeros_like(one.output, dtype=torch.bool) if wrong is None else wrong[rows]
        bias = None if one.bias is None else one.bias.view(1, -1)
        down, across = (torch.arange(extent, device=here.device) for extent in here.shape)
        found.append(
            GemmParts(
                plain(one.a), plain(one.b), alpha(one.a, one.b), one.c, bias, one.output, here, down, across,
                summation(one.order), one, found, number,
            )
        )  # fmt: skip
    return found


def plain(q: Quantized) -> Quantized:
    """The operand without its tensor's factor: codes along rows, low nibble first, scales linear, one for each row."""
    scales = scale_values(q).float() if q.recipe.scale is FP32 else None
    if q.recipe.whole:
        scales = torch.ones(1, 1, device=q.codes.device)
    return Quantized(rowwise_codes(q), _linear(q) if scales is None else scales, None, _carrier(q.recipe), q.shape)


def _linear(q: Quantized) -> torch.Tensor:
    return q.scales.T.contiguous() if q.transposed else q.scales


@lru_cache(maxsize=64)
def _carrier(recipe: Recipe) -> Recipe:
    """A recipe of the same elements and scales, its blocks of one row, without a tensor's factor."""
    if recipe.whole:
        return replace(recipe, block=(WHOLE, WHOLE), packing="low-first")
    if recipe.alpha == "1":
        return replace(recipe, block=(1, recipe.block[1]), packing="low-first", transform=None)
    return replace(find_recipe("nvfp4@qwix"), block=(1, recipe.block[1]), packing="low-first")


def rows_of(q: Quantized, rows: torch.Tensor) -> Quantized:
    """Some rows of a `plain` operand, by number."""
    scales = q.scales if q.recipe.whole else q.scales[rows]
    return replace(q, codes=q.codes[rows], scales=scales, shape=(len(rows), q.shape[1]))


def _cut(t: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    some = t[rows] if t.shape[0] > 1 else t
    return some[:, columns] if t.shape[1] > 1 else some


def _numbers(q: Quantized) -> torch.Tensor:
    """code·scale of a `plain` operand, float64 (M, K)."""
    if not promotes(q.recipe):
        return operand(q)
    return over_elements(element_values(q), scale_values(q), q.recipe, torch.mul).contiguous()


def ordered(one: torch.Tensor, other: torch.Tensor) -> Ends:
    """Two ends, the smaller first; NaN stays."""
    return torch.minimum(one, other), torch.maximum(one, other)


def finish(t: GemmParts, ends: Ends) -> list[Ends]:
    """The right epilogue: α·acc (+ c) (+ bias), the first addition fused or not, cast; or that of FP8 blocks."""
    if t.promotes:
        y = plus(ends, t.bias)
        return [cast(plus(cast(y, t.dtype), t.c), t.dtype)]
    return [cast(y, t.dtype) for y in added(t, ends, t.factor)]


def added(t: GemmParts, ends: Ends, factor: torch.Tensor) -> list[Ends]:
    """factor·acc (+ c) (+ bias) in float32: every step rounds, or the first addition is fused with the product."""
    addends = [x for x in (t.c, t.bias) if x is not None]
    ways = [scaled(ends, factor)]
    for number, addend in enumerate(addends):
        fused = [_fused(ends, factor, addend)] if number == 0 else []
        ways = [plus(way, addend) for way in ways] + fused
    return ways


def scaled(ends: Ends, factor: torch.Tensor) -> Ends:
    """fl(factor·x): rounding is monotone, so that it maps ends."""
    return ordered(ends[0] * factor, ends[1] * factor)


def plus(ends: Ends, addend: torch.Tensor | None) -> Ends:
    """fl(x + addend), x where there is none."""
    return ends if addend is None else (ends[0] + addend.float(), ends[1] + addend.float())


def cast(ends: Ends, dtype: torch.dtype) -> Ends:
    """Rounded to a dtype, and float32 again: only `fits` looks at them."""
    return ends[0].to(dtype).float(), ends[1].to(dtype).float()


def _fused(ends: Ends, factor: torch.Tensor, addend: torch.Tensor) -> Ends:
    shape = ends[0].shape
    wide, more = (x.float().expand(shape).contiguous() for x in (factor, addend))
    low, high = ordered(*(fma(end.contiguous(), wide, more) for end in ends))
    return low, high


def fits(output: torch.Tensor, ways: Sequence[Ends], undetermined: torch.Tensor) -> torch.Tensor:
    """bool, like `output`: whether it lies where one of the `ways` says; a zero's sign is free, as is NaN's payload."""
    at = ordinal.of_floats(output.float())
    found = undetermined & ~output.isfinite()
    for low, high in ways:
        nan = low.isnan() | high.isnan()
        inside = (at >= ordinal.of_floats(low)) & (at <= ordinal.of_floats(high)) & ~output.isnan() & ~nan
        found = found | inside | (nan & output.isnan())
    return found


def _same(terms: GemmParts) -> GemmParts:
    return terms


@dataclass(frozen=True)
class GemmDeviation:
    """A wrong product: other terms than the right ones, another epilogue, or both."""

    cause: str
    sentence: str
    change: Callable[[GemmParts], GemmParts | None] = _same
    """The terms that it multiplies; None where a product is such that the deviation means nothing."""
    finish: Finish = finish
