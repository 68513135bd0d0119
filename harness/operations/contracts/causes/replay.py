"""A changed contract on a part of the rows of a kernel's inputs and results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowgauge.harness.operations.contracts.causes.together import Member, may_be_together, members_of
from narrowgauge.reference.contracts.accepted import Ends, Part, is_nan_of, judge_range, order_of
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import (
    Chosen,
    Evaluation,
    Shown,
    decoded_format,
    evaluated,
    handed_on,
    judge_output,
    judged_numbers,
    of_rows,
)
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.program import HALF, INDEX, SCORES, Program
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import LINEAR

Tensors = Mapping[str, torch.Tensor]
WRONG, SCOPES = 10, 8
"""Numbers of elements, and of rows with these elements, that exclude a change: docs/contracts.md#reading-a-verdict."""
_TOGETHER = 1 << 18
"""Largest number of elements of a step of programs evaluated together: more elements exceed the cache of a core."""
_NARROW = 4
"""Steps from end to end of a result of 16 bits that still tells changes apart: the sum of a product in any order."""
_COMMUTE = frozenset({"add", "multiply", "maximum", "minimum"})


class Keys:
    """Numbers of values: values with the same computation have the same number in all programs."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._programs: dict[int, tuple[Program, list[int]]] = {}
        self._options: dict[int, tuple[Mapping[str, Any], str]] = {}

    def of(self, program: Program) -> list[int]:
        """The numbers of the steps of a program."""
        known = self._programs.get(id(program))
        if known is None:
            known = self._programs[id(program)] = program, self._of(program)
        return known[1]

    def forget(self) -> None:
        """Forget programs, but not the numbers of their values."""
        self._programs.clear()

    def _of(self, program: Program) -> list[int]:
        names = {number: name for name, number in program.outputs.items()}
        found: list[int] = []
        for number, step in enumerate(program.steps):
            if step.function == "float32" and number not in names:  # the same numbers
                found.append(found[step.operands[0]])
                continue
            operands = [found[operand] for operand in step.operands]
            rounds = step.function == "cast" and not step.options and number not in names
            if rounds and program.steps[step.operands[0]].dtype == step.dtype:
                found.append(operands[0])
                continue
            if step.function in _COMMUTE:
                operands.sort()
            # Changed contracts share the options of equal steps.
            if id(step.options) not in self._options:
                self._options[id(step.options)] = step.options, repr(step.options)
            options = self._options[id(step.options)][1]
            key = (step.function, *operands, options, step.dtype, names.get(number), program.subnormals)
            found.append(self._numbers.setdefault(key, len(self._numbers)))
        return found

    def of_outputs(self, program: Program) -> tuple[int, ...]:
        """The numbers of the results: programs with equal numbers are equal."""
        found = self.of(program)
        return tuple(found[number] for number in program.outputs.values())


@dataclass
class Evidence:
    """Wrong elements of results under a contract."""

    wrong: int = 0
    """Number of elements not accepted by the contract."""
    strong: int = 0
    """Number of these elements farther from the accepted range than the range is wide: all wrong determined bytes."""
    rows: frozenset[int] = frozenset()
    """Number of rows with these elements."""
    share: float = 0.0
    """Sum over the results of the share of wrong elements."""
    distance: float = 0.0
    """Sum over the results of the mean of log2(1 + distance in codes)."""
    determined: float = 0.0
    """Sum over the results of the share of elements with a single accepted byte."""
    telling: int = 0
    """Number of wrong elements that are not 0, NaN or the largest code: many mistakes give these everywhere."""
    judged: bool = True
    """Whether the contract determines enough to be a cause: at least half of the codes, and no result is free."""

    @property
    def fits(self) -> bool:
        """Whether all results are accepted."""
        return self.wrong == 0

    @property
    def excluded(self) -> bool:
        """Whether the wrong elements exclude the contract."""
        return self.strong >= WRONG and len(self.rows) >= SCOPES

    def include(self, other: Evidence) -> None:
        """Add the evidence of a further result."""
        self.wrong += other.wrong
        self.strong += other.strong
        self.rows |= other.rows
        self.share += other.share
        self.distance += other.distance
        self.determined += other.determined
        self.telling += other.telling
        self.judged &= other.judged

    def add(self, part: Part) -> None:
        """Add the elements of a result."""
        self.include(evidence_of(part)[0])


def evidence_of(part: Part, count: int = 1) -> list[Evidence]:
    """The evidence of a result, or of `count` results of equal shapes, joined along the rows. Parts of several have
    masks."""
    fmt, shape = None if part.fmt is FP32 else part.fmt, part.actual.shape
    size = part.actual.numel() // count

    def apart(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(count, size)

    if count == 1:
        determined, undetermined = [part.determined], [part.undetermined]
    elif part.masks is None:
        determined, undetermined = [size] * count, [0] * count
    else:
        determined, undetermined = (apart(mask).count_nonzero(1).tolist() for mask in part.masks)
    order, low, high = (apart(order_of(x, fmt)).long() for x in (part.actual, part.lower, part.upper))
    known = [number * 2 >= size or part.actual.dtype == torch.float32 for number in determined]
    if not all(known) and part.actual.is_floating_point():
        narrow = (high - low <= _NARROW).count_nonzero(1).tolist()
        known = [told or number * 2 >= size for told, number in zip(known, narrow, strict=True)]
    found = [
        Evidence(determined=one / max(1, size), judged=told and free <= 0.01 * size)
        for one, told, free in zip(determined, known, undetermined, strict=True)
    ]
    wrong = apart(part.wrong)
    counts = wrong.count_nonzero(1)
    if not bool(counts.any()):
        return found
    magnitude = torch.maximum(order, -1 - order)
    largest = torch.iinfo(torch.int32).max if fmt is None else fmt.max_code
    nan = apart(is_nan_of(part.actual, fmt))
    told = wrong & (magnitude > 0) & (magnitude < largest) & ~nan
    distance = torch.maximum(low - order, order - high).clamp_(min=1).masked_fill_(~wrong, 0)
    strong = wrong & ((distance > high - low) | nan)
    rows = shape[:-1].numel() // count if len(shape) > 2 else shape[:1].numel() // count if shape else 1
    by_row = strong.reshape(count, rows, -1).any(2) if size else strong.new_zeros(count, 0)
    figures = zip(
        counts.tolist(), strong.count_nonzero(1).tolist(), told.count_nonzero(1).tolist(),
        distance.double().add_(1).log2_().mean(1).tolist(), by_row.tolist(), strict=True,
    )  # fmt: skip
    for evidence, (number, far, telling, mean, with_rows) in zip(found, figures, strict=True):
        if number:
            evidence.wrong, evidence.strong, evidence.telling = number, far, telling
            evidence.share, evidence.distance = number / size, mean
            evidence.rows = frozenset(row for row, one in enumerate(with_rows) if one)
    return found


@dataclass
class Replay:
    """Rows of a kernel's inputs and results, and known values of steps by their numbers."""

    tensors: Tensors
    """Inputs, of all rows."""
    shown: Shown
    """Results of the rows."""
    rows: slice | torch.Tensor
    keys: Keys
    whole: bool
    """Whether the rows are all rows: then their amax is the amax of the tensor."""
    known: dict[int, Any] = field(default_factory=dict)
    inputs: Tensors | None = None
    """Inputs of the rows."""
    judged: dict[int, Evidence] = field(default_factory=dict)
    """Evidence of results, by the numbers of their steps."""

    def __post_init__(self) -> None:
        first = next(iter(self.tensors.values()))
        self._chosen = Chosen(self.rows, len(first)) if isinstance(self.rows, torch.Tensor) else None

    def remember(self, program: Program) -> None:
        """Keep the values of a program."""
        for _ in self.results(program, keep=True):
            pass

    def work(self, program: Program) -> int:
        """Largest number of elements times steps of a judgement."""
        return len(program.steps) * self.elements(program)

    def elements(self, program: Program) -> int:
        """Elements of the largest step of a judgement."""
        elements = sum(result_elements(result) for result in self.shown.values())
        if any(step.function == SCORES for step in program.steps):  # a logit for each row, head and token
            q, lengths = (next(a.name for a in program.arguments if a.kind == kind) for kind in ("Heads", "Lengths"))
            elements = max(elements, self.tensors[q][self.rows, ..., 0].numel() * int(self.tensors[lengths].max()))
        return elements

    def evidence(self, program: Program, *, whole: bool = False, first: bool = False) -> Evidence:
        """The evidence of the results about a program; unless `whole`, only until they exclude the program, or until
        the `first` wrong result. A result with the same computation in an earlier program is not judged again."""
        found, keys = Evidence(), self.keys.of(program)
        known = {name: self.judged.get(keys[number]) for name, number in program.outputs.items()}

        def decided() -> bool:
            return (found.excluded and not whole) or (first and found.wrong > 0)

        for evidence in known.values():
            if evidence is not None and not decided():
                found.include(evidence)
        if decided() or all(evidence is not None for evidence in known.values()):
            return found
        try:
            for name, parts in self.results(program, skipped={name for name, one in known.items() if one is not None}):
                own = Evidence()
                for part_name, part in parts:
                    if not self.whole and part_name.endswith("amax"):
                        continue
                    of_part = Evidence()
                    of_part.add(part)
                    own.include(of_part)
                    found.include(of_part)
                    if decided():
                        return found
                self.judged[keys[program.outputs[name]]] = own
        except ValueError:  # the change hides the amax of the tensor, or its recipe cannot be judged
            return Evidence(wrong=1, strong=WRONG, rows=frozenset(range(SCOPES)), share=9.0, distance=99.0)
        return found

    def at_once(self, program: Program) -> int:
        """Similar programs for `judge_together`."""
        return max(1, _TOGETHER // max(1, self.elements(program))) if may_be_together(program) else 1

    def judge_together(self, programs: Sequence[Program]) -> None:
        """Judge the results under several programs in a few calls, and keep the evidence for `evidence`."""
        together = [(program, self.keys.of(program)) for program in programs if may_be_together(program)]
        if len(together) > 1:
            self._judge(members_of(together, self.tensors, self.rows, self._chosen, self.known))

    def _judge(self, members: Sequence[Member]) -> None:
        """Judge the results of programs, results of equal shape in a single call."""
        for name, shown in self.shown.items():
            assert isinstance(shown, torch.Tensor)
            values: dict[int, tuple[Interval, Format | None]] = {}
            for program, keys, evaluation in members:
                number = program.outputs[name]
                if keys[number] in self.judged or keys[number] in values:
                    continue
                with suppress(ValueError):  # the change does not fit the tensors
                    value = evaluation.values[number]
                    if value.shape == shown.shape:
                        values[keys[number]] = value, decoded_format(program, number)
            for fmt in {fmt for _, fmt in values.values()}:
                self._judge_equal({key: value for key, (value, one) in values.items() if one is fmt}, shown, fmt)

    def _judge_equal(self, values: Mapping[int, Interval], shown: torch.Tensor, fmt: Format | None) -> None:
        whole = shown.dim() < 2 or shown.shape[-1] == 1  # `judge_range` takes all rows together
        for some in [[one] for one in values.items()] if whole else [list(values.items())]:
            ends = Ends.of(Interval.joined([value for _, value in some]), shown.dtype)
            actual = shown.repeat(len(some), *(1,) * (shown.dim() - 1))
            part = judge_range(actual, ends.low, ends.high, ends.nan, decoded=fmt, masks=True)
            self.judged.update(zip((key for key, _ in some), evidence_of(part, len(some)), strict=True))

    def results(
        self, program: Program, *, keep: bool = False, skipped: Collection[str] = ()
    ) -> Iterator[tuple[str, Iterator[tuple[str, Part]]]]:
        """The results and their accepted parts, the result with the fewest steps first.

        `keep`: keep the values of the program. `skipped`: results without a judgement.
        """
        keys, names = self.keys.of(program), {number: name for name, number in program.outputs.items()}
        shown = as_shown(program, self.shown)
        self.inputs = of_rows(program, self.tensors, self.rows, self.inputs)
        evaluation = Evaluation(program, self.inputs, rows=slice(0, 0), chosen=self._chosen)
        for number in _steps_of(program, [name for name in names.values() if name not in skipped]):
            step, name = program.steps[number], names.get(number, "")
            if step.is_stored or step.function == HALF or step.dtype == INDEX:
                if name in shown:
                    if name not in skipped:
                        numbers = judged_numbers(program, number)
                        ends = [Ends.of(evaluation.values[n], DTYPES[program.steps[n].dtype]) for n in numbers]
                        yield name, judge_output(program, number, ends, shown[name], self.inputs)
                    evaluation.values[number] = shown[name]
                continue
            value = self.known.get(keys[number])
            if value is None or name in shown:
                value = evaluated(evaluation, step)
            if name in shown:
                result = shown[name]
                assert isinstance(result, torch.Tensor)
                if name not in skipped:
                    ends = [Ends.of(value, DTYPES.get(step.dtype, torch.float32))]
                    yield name, judge_output(program, number, ends, result, self.inputs)
                value = handed_on(program, step, value, result)
            elif keep:
                self.known[keys[number]] = value
            evaluation.values[number] = value


def _steps_of(program: Program, outputs: Iterable[str]) -> Iterator[int]:
    """The steps of the outputs, operands first: the output with the fewest steps begins."""
    needed: dict[str, set[int]] = {}
    for name in outputs:
        reached, left = set[int](), [program.outputs[name]]
        while left:
            number = left.pop()
            if number not in reached:
                reached.add(number)
                left.extend(program.steps[number].operands)
        needed[name] = reached
    done = set[int]()
    for reached in sorted(needed.values(), key=len):
        yield from sorted(reached - done)
        done |= reached


def as_shown(program: Program, shown: Shown) -> Shown:
    """The results with the recipes of a changed contract."""
    found = dict(shown)
    for name, number in program.outputs.items():
        result = found.get(name)
        if isinstance(result, Quantized):
            found[name] = replace(result, recipe=find_recipe(program.steps[number].recipe or ""))
    return found


def result_elements(result: torch.Tensor | Quantized | Stored) -> int:
    """Elements of a result."""
    if isinstance(result, Stored):
        return sum(part.numel() for part in result.parts.values())
    return result.numel() if isinstance(result, torch.Tensor) else math.prod(result.shape)


def has_rows(result: torch.Tensor | Quantized | Stored) -> bool:
    """Whether rows of a result are the result of rows, given its amax."""
    if not isinstance(result, Quantized):
        return isinstance(result, torch.Tensor)
    alone = result.recipe.whole or result.recipe.block[0] == 1
    scaled = result.recipe.tensor_scale in ("none", "given") or result.amax is not None
    return alone and scaled and not result.transposed and result.scale_layout == LINEAR


def rows_of(result: torch.Tensor | Quantized | Stored, rows: torch.Tensor) -> torch.Tensor | Quantized:
    """A part of the rows of a result with rows."""
    assert not isinstance(result, Stored)
    if isinstance(result, torch.Tensor):
        return result[rows]
    scales = result.scales if result.recipe.whole else result.scales[rows]
    amax = result.amax if result.amax is None or result.recipe.granularity == "tensor" else result.amax[rows]
    return replace(result, codes=result.codes[rows], scales=scales, amax=amax, shape=(len(rows), result.shape[1]))
