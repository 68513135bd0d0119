"""A changed contract on some rows of a kernel's inputs and results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowgauge.reference.contracts.accepted import Ends, Part, is_nan_of, order_of
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import (
    Evaluation,
    Shown,
    evaluated,
    handed_on,
    judge_output,
    judged_numbers,
    of_rows,
)
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.program import GEMM, HALF, INDEX, SCORES, WEIGHTED, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import LINEAR

Tensors = Mapping[str, torch.Tensor]
WRONG, SCOPES = 10, 8
"""Elements, and rows with such elements, that exclude a change: docs/contracts.md#reading-a-verdict."""
_NARROW = 4
"""Steps from end to end of a result of 16 bits that still tells changes apart: the sum of a product in any order."""
_STEP, _JUDGED = 1 << 13, 4
"""Work of a step beside its elements, and of an element of a result."""
_SUMMED = frozenset({GEMM, SCORES, WEIGHTED})
_COMMUTE = frozenset({"add", "multiply", "maximum", "minimum"})


class Keys:
    """Numbers of values: values that are computed in the same way have one number in all programs."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, program: Program) -> list[int]:
        """The number of each step of a program."""
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
            options = repr(step.options) if step.options else ""
            key = (step.function, *operands, options, step.dtype, names.get(number), program.subnormals)
            found.append(self._numbers.setdefault(key, len(self._numbers)))
        return found

    def of_outputs(self, program: Program) -> tuple[int, ...]:
        """The numbers of the results: programs with equal numbers are one."""
        found = self.of(program)
        return tuple(found[number] for number in program.outputs.values())


@dataclass
class Evidence:
    """Wrong elements of results under a contract."""

    wrong: int = 0
    """Elements that the contract does not accept."""
    strong: int = 0
    """Those of them that lie farther from the accepted range than the range is wide: all wrong determined bytes."""
    rows: frozenset[int] = frozenset()
    """Rows with such elements."""
    share: float = 0.0
    """Sum over the results of the share of wrong elements."""
    distance: float = 0.0
    """Sum over the results of the mean of log2(1 + distance in codes)."""
    determined: float = 0.0
    """Sum over the results of the share of elements with a single accepted byte."""
    telling: int = 0
    """Wrong elements that are not 0, NaN or the largest code: many mistakes give these everywhere."""
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
        """Add what is known of another result."""
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
        free = part.undetermined > 0.01 * part.actual.numel()
        self.determined += part.determined / max(1, part.actual.numel())
        fmt = None if part.fmt is FP32 else part.fmt
        order, low, high = (order_of(x, fmt).long() for x in (part.actual, part.lower, part.upper))
        known = part.determined * 2 >= part.actual.numel() or part.actual.dtype == torch.float32
        if not known and part.actual.is_floating_point():
            known = int((high - low <= _NARROW).count_nonzero()) * 2 >= part.actual.numel()
        self.judged &= known and not free
        if not bool(part.wrong.any()):
            return
        size = order[part.wrong]
        size = torch.maximum(size, -1 - size)
        largest = torch.iinfo(torch.int32).max if fmt is None else fmt.max_code
        told = (size > 0) & (size < largest) & ~is_nan_of(part.actual[part.wrong], fmt)
        self.telling += int(told.count_nonzero())
        distance = torch.maximum(low - order, order - high).clamp_(min=1).masked_fill_(~part.wrong, 0)
        far = (distance > high - low) | is_nan_of(part.actual, fmt)
        strong = part.wrong & far
        self.wrong += int(part.wrong.count_nonzero())
        self.strong += int(strong.count_nonzero())
        rows = strong.shape[:-1].numel() if strong.dim() > 2 else strong.shape[:1].numel()
        by_row = strong.reshape(rows, -1).any(1) if strong.dim() else strong.reshape(1)
        self.rows |= frozenset(by_row.nonzero()[:, 0].tolist())
        self.share += float(part.wrong.float().mean())
        self.distance += float(distance.double().add_(1).log2_().mean())


@dataclass
class Replay:
    """Rows of a kernel's inputs and results, and values that are known of them by their numbers."""

    tensors: Tensors
    """Inputs, of all rows."""
    shown: Shown
    """Results of the rows."""
    rows: slice | torch.Tensor
    keys: Keys
    whole: bool
    """Whether the rows are all rows, so that the amax of the tensor is theirs."""
    known: dict[int, Any] = field(default_factory=dict)
    inputs: Tensors | None = None
    """Inputs of the rows."""
    judged: dict[int, Evidence] = field(default_factory=dict)
    """What is known of results, by the numbers of their steps."""
    work: float = 0.0
    """Work of all judgements so far, in the unit of `harness.diagnosis.search.work_limit`."""

    def remember(self, program: Program) -> None:
        """Keep the values of a program."""
        for _ in self.results(program, keep=True):
            pass

    def evidence(self, program: Program, *, whole: bool = False, first: bool = False) -> Evidence:
        """What the results say about a program; unless `whole`, only until they exclude it, or until the `first` result
        that is wrong. A result that another program computes in the same way is not judged again."""
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

    def results(
        self, program: Program, *, keep: bool = False, skipped: Collection[str] = ()
    ) -> Iterator[tuple[str, Iterator[tuple[str, Part]]]]:
        """Each result and the parts that the program accepts, the result of the fewest steps first.

        `keep`: keep the values of the program. `skipped`: results that are not judged.
        """
        keys, names = self.keys.of(program), {number: name for name, number in program.outputs.items()}
        shown = as_shown(program, self.shown)
        self.inputs = of_rows(program, self.tensors, self.rows, self.inputs)
        evaluation = Evaluation(program, self.inputs, rows=slice(0, 0))
        for number in _steps_of(program, [name for name in names.values() if name not in skipped]):
            step, name = program.steps[number], names.get(number, "")
            if step.is_stored or step.function == HALF or step.dtype == INDEX:
                if name in shown:
                    if name not in skipped:
                        self.work += _STEP + _JUDGED * result_elements(shown[name])
                        numbers = judged_numbers(program, number)
                        ends = [Ends.of(evaluation.values[n], DTYPES[program.steps[n].dtype]) for n in numbers]
                        yield name, judge_output(program, number, ends, shown[name], self.inputs)
                    evaluation.values[number] = shown[name]
                continue
            value = self.known.get(keys[number])
            if value is None or name in shown:
                value = evaluated(evaluation, step)
                self.work += _STEP + _size(value, evaluation.values, step)
            if name in shown:
                result = shown[name]
                assert isinstance(result, torch.Tensor)
                if name not in skipped:
                    self.work += _STEP + _JUDGED * result_elements(result)
                    ends = [Ends.of(value, DTYPES.get(step.dtype, torch.float32))]
                    yield name, judge_output(program, number, ends, result, self.inputs)
                value = handed_on(program, step, value, result)
            elif keep:
                self.known[keys[number]] = value
            evaluation.values[number] = value


def _size(value: Any, values: Mapping[int, Any], step: Step) -> int:
    """Elements of a value, of a product times the elements of each sum."""
    shape = getattr(value, "shape", ())
    summed = getattr(values.get(step.operands[0]), "shape", (1,))[-1] if step.function in _SUMMED else 1
    return math.prod(shape) * int(summed)


def _steps_of(program: Program, outputs: Iterable[str]) -> Iterator[int]:
    """The steps that outputs need, each behind its operands: those of the output of the fewest steps first."""
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
    """Some rows of a result that has rows."""
    assert not isinstance(result, Stored)
    if isinstance(result, torch.Tensor):
        return result[rows]
    scales = result.scales if result.recipe.whole else result.scales[rows]
    amax = result.amax if result.amax is None or result.recipe.granularity == "tensor" else result.amax[rows]
    return replace(result, codes=result.codes[rows], scales=scales, amax=amax, shape=(len(rows), result.shape[1]))
