"""The accepted bytes of a contract, of all results at once, and the comparison of a contract with a changed contract.

In a judgement, shown bytes of a kernel decide the accepted bytes of later results. In this module every result is
hidden: a set holds the possible bytes of all right kernels; the parts of a quantization alone are judged in their
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from narrowgauge.harness.operations.contracts.causes.replay import Keys
from narrowgauge.harness.operations.contracts.results import has_rows
from narrowgauge.reference.contracts.accepted import Ends, Part, different, is_nan_of, judge_range, order_of
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import Evaluation, bits_of, evaluated, judged_numbers, of_rows
from narrowgauge.reference.contracts.products import of_rotated
from narrowgauge.reference.contracts.quantized import judge_quantized
from narrowgauge.reference.contracts.scopes import divisions_of
from narrowgauge.reference.quantize.scaling import block_scales
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import Format
from narrowgauge.spec.program import Program
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

_HIDDEN = ("amax", "scales")
"""Parts of a quantization with an influence on the judgement of codes."""
_ALL = (torch.tensor(-(2**31), dtype=torch.int32), torch.tensor(2**31 - 1, dtype=torch.int32))
"""The least and the greatest number in an order of values."""


@dataclass(frozen=True)
class ByteSet:
    """The accepted bytes of the elements, as numbers in the order of their values."""

    low: torch.Tensor
    high: torch.Tensor
    nan: torch.Tensor
    """Bool: NaN is accepted."""
    only: torch.Tensor
    """Bool: only NaN is accepted."""

    @staticmethod
    def of_ends(ends: Ends) -> ByteSet:
        nan = torch.zeros_like(ends.low, dtype=torch.bool) if ends.nan is None else ends.nan
        return ByteSet.of(ends.low, ends.high, nan, None)

    @staticmethod
    def of(low: torch.Tensor, high: torch.Tensor, nan: torch.Tensor, fmt: Format | None) -> ByteSet:
        no_low, no_high = is_nan_of(low, fmt), is_nan_of(high, fmt)
        first, last = order_of(low, fmt), order_of(high, fmt)
        only = no_low & no_high
        return ByteSet(
            torch.where(no_low, last, first), torch.where(no_high, first, last), nan | no_low | no_high, only
        )

    def widened(self, free: torch.Tensor) -> ByteSet:
        """The set with every byte in free elements."""
        low, high = (torch.where(free, end, x) for end, x in zip(_ALL, (self.low, self.high), strict=True))
        return ByteSet(low, high, self.nan | free, self.only & ~free)

    def disjoint(self, other: ByteSet) -> torch.Tensor:
        """Bool: no byte is in both sets."""
        apart = self.only | other.only | (self.high < other.low) | (other.high < self.low)
        return apart & ~(self.nan & other.nan)

    def inside(self, other: ByteSet) -> torch.Tensor:
        """Bool: the second set holds this set."""
        numbers = self.only | (~other.only & (other.low <= self.low) & (self.high <= other.high))
        return numbers & (other.nan | ~self.nan)

    def single(self) -> torch.Tensor:
        """Bool: the set has a single byte."""
        return self.only | (~self.nan & (self.low == self.high))

    def meets_once(self, other: ByteSet) -> torch.Tensor:
        """Bool: at most a single byte is in both sets."""
        numbers = torch.minimum(self.high, other.high) <= torch.maximum(self.low, other.low)
        return (self.only & other.only) | (numbers & ~(self.nan & other.nan))


@dataclass(frozen=True)
class Sets:
    """A contract with inputs: the ends of every result, all of them hidden, and the values of its steps."""

    program: Program
    tensors: Mapping[str, torch.Tensor]
    keys: Keys
    values: Mapping[int, Any]
    """Values of the steps by their keys."""
    ends: Mapping[str, Ends]

    @staticmethod
    def of(program: Program, tensors: Mapping[str, torch.Tensor], other: Sets | None = None) -> Sets:
        """`other`: another contract with the same inputs; a step of both is evaluated once.

        Raises ValueError for sizes refused by a step, and for an undetermined hidden quantization.
        """
        keys, known = (Keys(), {}) if other is None else (other.keys, other.values)
        evaluation = Evaluation(program, of_rows(program, tensors, slice(None)), rows=slice(0, 0))
        names, values, ends = {n: name for name, n in program.outputs.items()}, dict[int, Any](), dict[str, Ends]()
        for number, (step, key) in enumerate(zip(program.steps, keys.of(program), strict=True)):
            if step.recipe is None:
                value = known[key] if key in known else evaluated(evaluation, step)
                values[key] = evaluation.values[number] = value
            if number in names:
                source = judged_numbers(program, number)[0]
                ends[names[number]] = Ends.of(evaluation.values[source], DTYPES[program.steps[source].dtype])
        return Sets(program, tensors, keys, values, ends)

    def example(self, name: str) -> torch.Tensor | Quantized:
        """A right result: that of the least numbers. Raises ValueError for numbers refused by the recipe."""
        low, step = self.ends[name].low, self.program.steps[self.program.outputs[name]]
        if step.recipe is None:
            return low
        return of_rotated(low, find_recipe(step.recipe), self._scale(name), self._random(name))

    @cached_property
    def of_kernels(self) -> dict[str, Any]:
        """Intervals of steps of sampled kernels (`Kernel.known`)."""
        return {}

    @cached_property
    def stackable(self) -> bool:
        """Whether calls can be judged as a single matrix: rows are independent, and independent of forms of the
        call."""
        sources = [judged_numbers(self.program, number)[0] for number in self.program.outputs.values()]
        return has_rows(self.program) and not any(any(divisions_of(self.program, number)) for number in sources)

    @cached_property
    def _stacks(self) -> dict[int, tuple[Mapping[str, torch.Tensor], Evaluation | None]]:
        return {}

    def stacked(self, calls: int) -> tuple[Mapping[str, torch.Tensor], Evaluation | None]:
        """The tensors of this many equal calls, joined along the rows, and the evaluation for judgements of a contract
        with a single result; None with several results."""
        if calls in self._stacks:
            return self._stacks[calls]
        axis = self.program.arguments[0].axes[:1]
        tall = {argument.name for argument in self.program.arguments if argument.axes[:1] == axis}
        tensors = {name: torch.cat([x] * calls) if name in tall else x for name, x in self.tensors.items()}
        alone = len(self.program.outputs) == 1
        known = Evaluation(self.program, of_rows(self.program, tensors, slice(None))) if alone else None
        return self._stacks.setdefault(calls, (tensors, known))

    @cached_property
    def numbers(self) -> Mapping[str, ByteSet]:
        """The numbers of every result, before a quantization."""
        return {name: ByteSet.of_ends(ends) for name, ends in self.ends.items()}

    @cached_property
    def free(self) -> Mapping[str, torch.Tensor]:
        """The blocks without an order of their scales, per quantization."""
        quantized = (name for name, number in self.program.outputs.items() if self.program.steps[number].recipe)
        return {name: _free_blocks(self.ends[name], recipe_of(self.program, name)) for name in quantized}

    def parts(self, name: str, shown: torch.Tensor | Quantized) -> Iterator[tuple[str, Part]]:
        """The parts of a result, judged given the parts before."""
        ends = self.ends[name]
        if isinstance(shown, Quantized):
            recipe, scale = recipe_of(self.program, name), self._scale(name)
            scales = shown.scales if scale is None else block_scales(scale.view(1, 1), scale, recipe, ends.low.dtype)
            random = self._random(name)
            yield from judge_quantized(ends, replace(shown, recipe=recipe, scales=scales), scale, random=random)
        else:
            yield name, judge_range(shown, ends.low, ends.high, ends.nan)

    def bytes_of(self, name: str, part: str, judged_as: Part) -> ByteSet:
        """The bytes of a judged part."""
        ends = self.ends[name]
        if part in _HIDDEN:
            free = self.free[name]
            free = free if free.shape == judged_as.lower.shape else free.any().expand_as(judged_as.lower)
            return ByteSet.of(judged_as.lower, judged_as.upper, free, judged_as.fmt).widened(free)
        free = (ends.low < 0) & (ends.high > 0)  # 0 times an infinite factor
        free = free if ends.nan is None else free | ends.nan
        return ByteSet.of(judged_as.lower, judged_as.upper, free, judged_as.fmt)

    def _scale(self, name: str) -> torch.Tensor | None:
        """The given scale of a quantization."""
        return self.program.scale_of(self.program.steps[self.program.outputs[name]], self.tensors)

    def _random(self, name: str) -> torch.Tensor | None:
        """The random bits of a quantization."""
        given = of_rows(self.program, self.tensors, slice(None))
        return bits_of(self.program, self.program.steps[self.program.outputs[name]], given)


def _free_blocks(ends: Ends, recipe: Recipe) -> torch.Tensor:
    """Blocks with a possible amax of 0, infinity or NaN among several: their scales have no order."""

    def of_blocks(mask: torch.Tensor) -> torch.Tensor:
        return block_amaxes(mask.float(), recipe) != 0

    nan = torch.zeros_like(ends.low, dtype=torch.bool) if ends.nan is None else ends.nan
    if ends.point:
        return of_blocks(nan)
    several = (ends.low != ends.high) & ~ends.never
    zero = ~of_blocks(((ends.low > 0) | (ends.high < 0)) & ~nan) & of_blocks(several | nan)
    return zero | of_blocks(((ends.low.isinf() | ends.high.isinf()) & several) | nan)


def recipe_of(program: Program, name: str) -> Recipe:
    """The recipe of a result that is a quantization."""
    return find_recipe(program.steps[program.outputs[name]].recipe or "")


def _of_elements(mask: torch.Tensor, recipe: Recipe, shape: torch.Size) -> torch.Tensor:
    """A mask of scales or of amaxes as a mask of elements (M, K)."""
    if mask.dim() == 1:
        return mask.unsqueeze(1).expand(shape)
    height = shape[0] if recipe.whole else recipe.stored_rows
    width = shape[1] if recipe.whole or recipe.spans_k else recipe.block[1]
    return mask.repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Result:
    """The comparison of the sets of a result under a contract and under its change."""

    apart: bool
    """Whether an element has no byte in common under both contracts."""
    inside: bool
    """Whether every set of the change lies inside the plain set."""
    determined: bool
    """Whether all kernels of the change give the same bytes, as far as it was looked at."""


def compared(plain: Sets, changed: Sets, name: str) -> Result:
    """Compare the sets of a result.

    A set that depends on an earlier part counts only if the part has a single right value under both contracts (apart),
    or under the change (inside). Raises ValueError if the parts under a contract are not known.
    """
    steps = [sets.program.steps[sets.program.outputs[name]] for sets in (plain, changed)]
    if (steps[0].recipe, steps[0].dtype) == (steps[1].recipe, steps[1].dtype):  # sets grow with the ends
        one, other = plain.numbers[name], changed.numbers[name]
        if bool(other.inside(one).all()):
            return Result(False, True, bool(other.single().all()))
        if steps[0].recipe is None:
            return Result(bool(one.disjoint(other).any()), False, bool(other.single().all()))
    shape = plain.ends[name].low.shape
    settled = determined = held = torch.ones(shape, dtype=torch.bool)
    shown = changed.example(name)
    for (part, right), (same, wrong) in zip(plain.parts(name, shown), changed.parts(name, shown), strict=True):

        def spread(mask: torch.Tensor, part: str = part) -> torch.Tensor:
            return _of_elements(mask, recipe_of(plain.program, name), shape) if part in _HIDDEN else mask

        if part != same or bool(different(right.actual, wrong.actual, right.fmt).any()):
            raise ValueError("the two contracts store their results in different places")
        one, other = plain.bytes_of(name, part, right), changed.bytes_of(name, part, wrong)
        if bool((spread(one.disjoint(other)) & settled).any()):
            return Result(True, False, False)
        held = held & determined & spread(other.inside(one) & (~one.nan | (one.only & other.only)))
        settled = settled & spread(one.meets_once(other) & ~right.wrong)
        determined = determined & spread(other.single())
    return Result(False, bool(held.all()), bool(determined.all()))
