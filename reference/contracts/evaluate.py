"""Evaluation of a contract: every step in its order, on intervals, from the inputs of a kernel.

A shown result of the kernel is judged at its step, and the numbers of the kernel replace the step. Every output is
therefore judged given the outputs before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from narrowgauge.reference.contracts import interval as i
from narrowgauge.reference.contracts import products, sums
from narrowgauge.reference.contracts.accepted import Ends, Part, judge_range
from narrowgauge.reference.contracts.casts import DTYPES, cast
from narrowgauge.reference.contracts.changed_steps import (
    CHANGED_CODES,
    CHANGED_MATRICES,
    CHANGED_STEPS,
    OTHER_BITS,
    changed_quantize,
    divisor,
    other_row,
    partial_sums,
    some_columns,
)
from narrowgauge.reference.contracts.estimates import Estimator, Unknown
from narrowgauge.reference.contracts.functions import FUNCTIONS, apply
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.layout import attention, routed
from narrowgauge.reference.contracts.layout.changed_attention import CHANGED_ATTENTION
from narrowgauge.reference.contracts.layout.columns import arranged, arranged_tensor, joined, transposed
from narrowgauge.reference.contracts.layout.pages import (
    Stored,
    check_slots,
    given_scale,
    judge_stored,
    read_rows,
    slots,
)
from narrowgauge.reference.contracts.quantized import hidden_values, judge_quantized
from narrowgauge.reference.contracts.scopes import (
    Scope,
    dependent,
    divisions_of,
    judge_scope,
    scopes_of,
    with_form,
)
from narrowgauge.reference.gemm.operands import promotes
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.scaling import block_scales, used_tensor_scale
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.program import (
    ACCUMULATED,
    BEHIND,
    CHOSEN,
    CODES,
    COLUMNS,
    DECODE,
    DEQUANTIZE,
    DIVISIONS,
    EXPERTS,
    FACTOR,
    GEMM,
    HEADS,
    JOINED,
    OF_EXPERT,
    OF_HEADS,
    OF_TOKENS,
    ONCE,
    PLACES,
    READ,
    RENUMBERED,
    RESCALED,
    ROTATED,
    ROUTED,
    ROWS_OF_CHOICES,
    SCORES,
    SEGMENTS,
    SQUEEZED,
    TAKE,
    TRANSPOSED,
    UNSQUEEZED,
    WEIGHTED,
    WEIGHTS,
    WRITTEN,
    Program,
    Step,
)
from narrowgauge.spec.quantized import PARTS, Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import SMALLEST_NORMAL, UNIT

Tensors = Mapping[str, torch.Tensor]
Shown = Mapping[str, torch.Tensor | Quantized | Stored]
"""Results of a kernel by the names of the outputs; absent: hidden."""


class Chosen(NamedTuple):
    """Some rows of an argument."""

    places: torch.Tensor
    height: int
    """Rows of the whole argument."""


@dataclass
class Evaluation:
    """A contract with inputs. A step is evaluated when its value is asked for: a matrix in slabs of rows."""

    program: Program
    tensors: Tensors
    """Inputs by the names of the arguments."""
    known: dict[int, torch.Tensor] = field(default_factory=dict)
    """Shown results of casts."""
    whole: Evaluation | None = None
    """The evaluation of all rows; None: this evaluation has all rows, or single elements."""
    rows: slice | None = None
    """Rows of the tensors; None: all rows, evaluated in slabs."""
    chosen: Chosen | None = None
    """The rows of the first argument that the tensors hold; None: all, or those of `rows`."""
    shared: tuple[Sequence[int], dict[int, Any]] | None = None
    """The number of the value of each step, and the values that evaluations share, by their numbers."""

    def __post_init__(self) -> None:
        self.values = _Values(self)
        """Intervals of the steps; a comparison has two masks."""
        self.replaced: set[int] = set()
        """Steps with the values of shown results."""
        self.ends: list[Ends] = []
        """The ends of the single result, for a further judgement: `judged`."""

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return next(iter(self.tensors.values())).device

    def slabs(self) -> Iterator[Evaluation]:
        """An evaluation per slab of rows."""
        if self.single:
            yield self
            return
        for rows in slabs_of_rows(self.program, self.tensors):
            known = {n: x[rows] if self.has_rows(n) else x for n, x in self.known.items()}
            slab = Evaluation(self.program, of_rows(self.program, self.tensors, rows), known, self, rows)
            slab.replaced = self.replaced
            yield slab

    @cached_property
    def single(self) -> bool:
        """Whether all rows are a single slab."""
        return self.rows is not None or len(slabs_of_rows(self.program, self.tensors)) == 1

    def has_rows(self, number: int) -> bool:
        """Whether a step has numbers per row of the first argument."""
        return self.program.steps[number].axes[:1] == self.program.arguments[0].axes[:1]

    def show(self, number: int, own: torch.Tensor) -> None:
        """Go on with the shown result of a step."""
        step = self.program.steps[number]
        if step.function == "cast":
            self.known[number] = own
            self.values.pop(number, None)
        else:
            self.values[number] = handed_on(self.program, step, self.values[number], own)
        self.replaced.add(number)

    def with_program(self, program: Program, changed: Set[int]) -> Evaluation:
        """The evaluation of all rows of a program with the first steps of this program, but for `changed` steps."""
        found = Evaluation(program, self.tensors, self.known)
        found.values.update({number: value for number, value in self.values.items() if number not in changed})
        found.replaced = self.replaced
        return found

    def leaf(self, number: int) -> torch.Tensor | Interval | None:
        """Start of the estimate of a step: a known tensor, or the interval of a number per row or column. None: the
        step is estimated from its operands."""
        step = self.program.steps[number]
        tensor = self._tensor(number)
        if tensor is not None and tensor.dim() > 0:
            return tensor
        if step.dtype != "bool" and (len(step.axes) < 2 or step.axes[-1] == "1"):
            value: Interval = self.values[number]
            return value
        if number in self.replaced:
            raise Unknown
        return None

    def _tensor(self, number: int) -> torch.Tensor | None:
        """The numbers of an argument, of columns of an argument, or of a shown cast."""
        step = self.program.steps[number]
        if number in self.known:
            return self.known[number]
        if step.function == "argument":
            return self.tensors[_key(step)]
        if number in self.replaced or step.function not in ("float32", "part", COLUMNS, TAKE, TRANSPOSED):
            return None
        tensor = self._tensor(step.operands[0])
        if tensor is None or step.function == "float32":
            return tensor
        if step.function == TRANSPOSED:
            return tensor.mT.contiguous()
        if step.function == COLUMNS:
            return arranged_tensor(tensor, **step.options)
        return _taken(self, step, tensor) if step.function == TAKE else _part_of(tensor, step)


class _Values(dict[int, Any]):
    """The values of an evaluation by step."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def __missing__(self, number: int) -> Any:
        if self._evaluation.shared is None:
            value = self[number] = self._value(number)
            return value
        numbers, shared = self._evaluation.shared
        if numbers[number] not in shared:
            shared[numbers[number]] = self._value(number)
        return shared[numbers[number]]

    def _value(self, number: int) -> Any:
        here = self._evaluation
        step = here.program.steps[number]
        if number in here.known:
            return closed(here.program, i.exactly(here.known[number]))
        if step.recipe is not None:
            return here.whole.values[number] if here.whole is not None else _quantized(here, step)
        if step.function in (CODES, READ):
            return evaluated(here, step)
        matrix = len(step.axes) > 1 and step.axes[-1] != "1"
        if here.whole is not None and step.dtype != "bool" and (not matrix or number in here.replaced):
            value: Interval = here.whole.values[number]
            return value.arranged(lambda t: t[here.rows]) if here.has_rows(number) else value
        if not here.single and here.has_rows(number) and (matrix or step.function in _REDUCTIONS):
            return Interval.joined([evaluated(slab, step) for slab in here.slabs()])
        return evaluated(here, step)


def evaluated(evaluation: Evaluation, step: Step) -> Any:
    """The value of a step: the interval of the numbers of its kernels; a comparison has two masks."""
    value = STEPS[step.function](evaluation, step)
    return closed(evaluation.program, value) if isinstance(value, Interval) else value


def closed(program: Program, value: Interval) -> Interval:
    """The numbers of a step, and those of them that a kernel may flush as zeros too.

    A value holds its own flushed numbers, so a step needs no rule for operands that it flushes.
    """
    return i.flushed(value) if program.flushes else value


def judged(
    program: Program, tensors: Tensors, shown: Shown, known: Evaluation | None = None
) -> Iterator[tuple[str, Part]]:
    """The shown results of the kernel with their accepted results, in the order of the steps.

    `known`: an earlier evaluation of a program with a single result on these tensors; its values are used again. Raises
    ValueError for tensors that do not fit the arguments, and as `judge_quantized`.
    """
    check_tensors(program, tensors)
    evaluation = known or Evaluation(program, of_rows(program, tensors, slice(None)))
    for number, name in sorted((number, name) for name, number in program.outputs.items() if name in shown):
        own, sources = shown[name], judged_numbers(program, number)
        scopes = [partial(_scope, evaluation, once) for once in scopes_of(program, sources[0])]
        scopes += [partial(_division, evaluation, division) for division in divisions_of(program, sources[0])]
        if isinstance(own, Stored):  # its rows are those of some tokens
            scopes = []
        ends = evaluation.ends if known is not None and evaluation.ends else _ends(evaluation, number, sources)
        if known is not None:
            evaluation.ends = ends
        judgement = None
        for part, judgement in judge_output(program, number, ends, own, evaluation.tensors):
            yield part, judgement
        for judge in [] if program.hidden else scopes:
            assert judgement is not None
            scope = judge(sources[0], ends[0], judgement)
            line = f"-{scope.line}" if len(scopes) > 1 else ""
            yield f"scope{line}" if len(program.outputs) == 1 else f"{name}.scope{line}", scope
        if known is not None:
            continue
        if isinstance(own, torch.Tensor):
            evaluation.show(number, own)
        else:
            evaluation.values[number] = own


def _ends(evaluation: Evaluation, number: int, sources: Sequence[int]) -> list[Ends]:
    """The ends for the judgement of an output, of its rows in slabs."""
    results = [_Result(evaluation.program, source) for source in sources]
    for slab in evaluation.slabs():
        for result in results:
            result.add(slab)
        if not evaluation.has_rows(number):
            break
    return [result.ends() for result in results]


_ELEMENTS_OF_SCOPES = 1 << 18
"""Largest number of elements tested for a scope. Fewer elements excuse more numbers."""


class _Doubtful:
    """The elements of a result with more than one right number, and their judgement under further knowledge."""

    def __init__(self, evaluation: Evaluation, source: int, ends: Ends, part: Part, through: Set[int]) -> None:
        """`through`: steps evaluated per element."""
        places = torch.zeros(0, dtype=torch.int64, device=ends.low.device) if ends.uncertain is None else ends.uncertain
        self.places = places[:: 1 + len(places) // _ELEMENTS_OF_SCOPES]
        self._program, self._source, self._part = evaluation.program, source, part
        self._operands = _operands_of(evaluation, source, self.places, part.actual.shape, through)

    def ends(self, some: torch.Tensor, known: Mapping[int, Interval]) -> Ends:
        """The ends of the elements `some`, with known values of steps."""
        single = Evaluation(self._program, {"": self.places}, rows=slice(0, 0))
        for number, value in self._operands.items():
            single.values[number] = value.arranged(lambda t: t if t.dim() == 0 else t[some])
        single.values.update(known)
        return Ends.of(single.values[self._source], DTYPES[self._program.steps[self._source].dtype])

    def judge(self, some: torch.Tensor, ends: Ends) -> Part:
        """The accepted results of the elements `some`."""
        if self._part.again is not None:
            return self._part.again(self.places[some], ends)
        return judge_range(self._part.actual.flatten()[self.places[some]], ends.low, ends.high, ends.nan)


def _scope(evaluation: Evaluation, once: int, source: int, ends: Ends, part: Part) -> Scope:
    """Whether a single number of the step `once` explains the elements of a row with several results."""
    program = evaluation.program
    doubtful = _Doubtful(evaluation, source, ends, part, dependent(program, once))
    rows, wrong = _rows_of(doubtful.places, evaluation.values[once], part, turned=once in _turned(program, source))
    scope = judge_scope(
        evaluation.values[once], rows, lambda h, some: doubtful.ends(some, {once: Interval(h, h.clone())}),
        doubtful.judge, wrong,
    )  # fmt: skip
    function = program.steps[program.steps[once].operands[0]].function
    return replace(scope, line=program.steps[once].line, function=function)


def _rows_of(places: torch.Tensor, numbers: Interval, part: Part, *, turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of an element among `numbers` of the rows or of the call; bool: the place holds elements outside of
    their own intervals. `turned`: whether a number belongs to a column of the result."""
    wrong = part.wrong.flatten(1).any(0 if turned else 1)
    if numbers.low.numel() == len(wrong):
        width = part.actual.shape[1]
        return places % width if turned else places // width, wrong
    return torch.zeros_like(places), wrong.any().view(1)


def _division(evaluation: Evaluation, division: int, source: int, ends: Ends, part: Part) -> Scope:
    """Whether one form of a division explains all elements of the call with more than one result.

    The forms are tried in their order until one does. If none does, the rows are wrong that the best form leaves.
    """
    program, best = evaluation.program, None
    divisor: Interval = evaluation.values[program.steps[division].operands[1]]
    for form in DIVISIONS:
        changed = with_form(program, division, form)
        other = evaluation.with_program(changed, dependent(program, division))
        if form == "approximate":
            failed = _scope(other, len(changed.steps) - 1, source, ends, part).wrong
        else:
            doubtful = _Doubtful(other, source, ends, part, dependent(changed, division))
            every = torch.arange(len(doubtful.places), device=doubtful.places.device)
            turned = division in _turned(program, source)
            rows, wrong = _rows_of(doubtful.places, divisor, part, turned=turned)
            outside = doubtful.judge(every, doubtful.ends(every, {})).wrong
            failed = (torch.zeros_like(wrong).index_fill_(0, rows[outside], True) & ~wrong).view(-1, 1)
        if best is None or int(failed.count_nonzero()) < int(best.wrong.count_nonzero()):
            lower, upper = (end.float().view(-1, 1) for end in (divisor.low, divisor.high))
            explains = not bool(failed.any())
            best = Scope(
                lower, lower, upper, failed, int((~failed).count_nonzero()), 0, line=program.steps[division].line,
                function="divide", form=form if explains else "",
            )  # fmt: skip
        if best.form:
            break
    assert best is not None
    return best


_DOUBTFUL = 3
"""A slab is evaluated as a whole if more than one in this many elements is in doubt."""


class _Result:
    """The ends of a step, slab by slab. Elements in doubt wait, and are evaluated together."""

    def __init__(self, program: Program, number: int) -> None:
        self._program = program
        self._number = number
        self._dtype = DTYPES.get(program.steps[number].dtype, torch.float32)
        self._parts: list[Ends] = []
        self._places: list[torch.Tensor] = []
        self._operands: list[dict[int, Interval]] = []
        self._count = 0

    def add(self, evaluation: Evaluation) -> None:
        """The next rows."""
        ends = self._estimated(evaluation)
        if ends is None:
            ends = Ends.of(evaluation.values[self._number], self._dtype)
        self._parts.append(ends)
        self._count += ends.low.numel()

    def _estimated(self, evaluation: Evaluation) -> Ends | None:
        """The ends of the rows but for elements in doubt; None if most steps need all elements."""
        if not all(tensor.numel() for tensor in evaluation.tensors.values()):
            return None
        try:
            result, places = Estimator(self._program, evaluation.leaf).cast(self._number)
        except Unknown:
            return None
        if places.numel() * _DOUBTFUL > result.numel():
            return None
        if places.numel():
            self._places.append(places + self._count)
            self._operands.append(_operands_of(evaluation, self._number, places, result.shape))
        return Ends(result, result)

    def ends(self) -> Ends:
        """The ends of all rows."""
        found = Ends.joined(self._parts)
        if not self._places:
            return found
        evaluation = Evaluation(self._program, {"": found.low}, rows=slice(0, 0))  # constants have its device
        for number in self._operands[0]:
            parts = [operands[number] for operands in self._operands]
            evaluation.values[number] = Interval.joined(parts) if parts[0].low.dim() else parts[0]
        return found.with_elements(torch.cat(self._places), Ends.of(evaluation.values[self._number], self._dtype))


def _operands_of(
    evaluation: Evaluation, number: int, places: torch.Tensor, shape: torch.Size, through: Set[int] = frozenset()
) -> dict[int, Interval]:
    """The operands of the elements of a step, per element: numbers of the steps without operands, and of the steps with
    a number per row or column, unless in `through`."""
    program, found = evaluation.program, dict[int, Interval]()
    row, column = places // shape[1], places % shape[1]
    turned = _turned(program, number)

    def chosen(x: torch.Tensor, operand: int) -> torch.Tensor:
        if x.dim() == 0:
            return x
        at, extent = ((column, row), shape[::-1]) if operand in turned else ((row, column), shape)
        return x[at[1]] if x.dim() == 1 and len(x) > 1 else x.expand(extent)[at]

    waiting = [number]
    while waiting:
        number = waiting.pop()
        if number in through and program.steps[number].function == ONCE:
            continue
        leaf = None if number in through else evaluation.leaf(number)
        if isinstance(leaf, torch.Tensor):
            found[number] = closed(program, i.exactly(chosen(leaf, number)))
        elif leaf is not None:
            found[number] = leaf.arranged(partial(chosen, operand=number))
        else:
            waiting += [operand for operand in program.steps[number].operands if operand not in found]
    return found


def _turned(program: Program, number: int) -> set[int]:
    """The steps before step `number` with the columns of the step as rows. No step of a matrix has both
    orientations."""
    found, waiting = set[int](), [(number, False)]
    seen = set[int]()
    while waiting:
        at, turned = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if turned:
            found.add(at)
        step = program.steps[at]
        waiting += [(operand, turned ^ (step.function == TRANSPOSED)) for operand in step.operands]
    return found


def judge_output(
    program: Program, number: int, ends: Sequence[Ends], result: torch.Tensor | Quantized | Stored, tensors: Tensors
) -> Iterator[tuple[str, Part]]:
    """The accepted results of step `number`, given the ends of its numbers, or of the quantized numbers.

    `tensors`: the tensors of `of_rows`, for the rows of the result.
    """
    step = program.steps[number]
    name = next(name for name, shown in program.outputs.items() if shown == number)
    if isinstance(result, torch.Tensor):
        if ends[0].low.shape != result.shape:
            raise ValueError(f"{name} has the shape {tuple(result.shape)}, not {tuple(ends[0].low.shape)}")
        yield (
            name,
            judge_range(result, ends[0].low, ends[0].high, ends[0].nan, decoded=decoded_format(program, number)),
        )
        return
    quantization = program.steps[step.operands[0]] if step.function == WRITTEN else step
    scale = given_scale(program, quantization, tensors)
    rounding, view = changed_quantize(quantization.options)
    random = bits_of(program, quantization, tensors)

    def judge(ends: Sequence[Ends], q: Quantized, scale: torch.Tensor | None) -> Iterator[tuple[str, Part]]:
        if scale is not None and "given" in quantization.options and q.recipe.scale is FP32:
            q = replace(q, scales=block_scales(scale.view(1, 1), scale, q.recipe, ends[0].low.dtype))
        return judge_quantized(
            ends[0], view(q), scale, statistics=ends[1] if len(ends) > 1 else ends[0], rounding=rounding,
            flushes=program.flushes, random=random,
        )  # fmt: skip

    parts = judge(ends, result, scale) if isinstance(result, Quantized) else judge_stored(
        program, step, ends, result, tensors, judge
    )  # fmt: skip
    for part, judgement in parts:
        yield part if name == "quantized" else f"{name}.{part}", judgement


def decoded_format(program: Program, number: int) -> Format | None:
    """Format of the codes, if a result has the rounded values of a quantization; None of further results."""
    step = program.steps[number]
    while step.function in ("cast", "float32"):
        step = program.steps[step.operands[0]]
    of = program.steps[step.operands[0]] if step.function == DEQUANTIZE else step
    return find_recipe(of.recipe).element if of.recipe is not None and step is not of else None


def judged_numbers(program: Program, number: int) -> tuple[int, ...]:
    """The steps for the judgement of an output: its own step, or the quantized step, and the second matrix behind the
    scales, if any."""
    step = program.steps[number]
    if step.function == WRITTEN:
        return judged_numbers(program, step.operands[0])
    if step.recipe is None:
        return (number,)
    return step.operands[: 2 if step.options.get("statistics") else 1]


def bits_of(program: Program, step: Step, tensors: Tensors) -> torch.Tensor | None:
    """The random words of a quantization, int32 (M, K/4), of the tensors of `of_rows`; None without random bits."""
    if step.random is None:
        return None
    words, other = tensors[_key(program.steps[step.random])], step.options.get("bits")
    return words if other is None else OTHER_BITS[other][1](words)


def handed_on(program: Program, step: Step, value: Interval, shown: torch.Tensor) -> Interval:
    """The numbers with which a kernel may go on after it shows `shown`: after a cast `shown` itself, else every number
    of the step with `shown` as its rounding, since a kernel may keep a wider number. A number outside of the interval
    is the kernel's own."""
    number = i.exactly(shown)
    if step.function in ("cast", "argument", "float32") or value.point:
        return closed(program, number)
    beside = [torch.nextafter(shown, shown.new_tensor(end)).double() for end in (-torch.inf, torch.inf)]
    low, high = ((number.low + end) / 2 for end in beside)
    low, high = torch.maximum(low, value.low), torch.minimum(high, value.high)
    inside = (low <= high) & shown.isfinite()
    low, high = torch.where(inside, low, number.low), torch.where(inside, high, number.low)
    return closed(program, Interval(low, high, shown.isnan()))


_SLAB = 1 << 18
"""Number of elements evaluated at once: tensors of them stay in the cache of a core, and calls take a small part of the
time."""


def slabs_of_rows(program: Program, tensors: Tensors) -> list[slice]:
    """Ranges of rows for separate evaluations: every step keeps the rows, and sums run along them."""
    first = program.arguments[0]
    axis, rows = first.axes[0] if len(first.axes) > 1 else "", tensors[first.name].shape[0]
    together = any(axis in step.axes[1:] or step.function in (*BEHIND, *ROUTED, WRITTEN) for step in program.steps)
    if not axis or tensors[first.name].is_cuda or together:
        return [slice(0, rows)]
    height = max(1, _SLAB // max(1, tensors[first.name][:1].numel()))
    return [slice(start, min(rows, start + height)) for start in range(0, rows, height)] or [slice(0, 0)]


def of_rows(program: Program, tensors: Tensors, rows: slice | torch.Tensor, known: Tensors | None = None) -> Tensors:
    """The inputs of some rows of the results, with arguments of the rows read by a changed contract.

    `known`: inputs with these rows already.
    """
    axis, found = program.arguments[0].axes[:1], dict(known or {})
    for argument in program.arguments if known is None else ():
        tensor = tensors[argument.name]
        found[argument.name] = tensor[rows] if argument.axes[:1] == axis else tensor
    for step in program.steps:
        if step.function == "argument" and "row" in step.options and _key(step) not in found:
            sizes = program.sizes(tensors) if "*" in step.axes[0] else {}
            shape = {part: sizes[part] for part in step.axes[0].split("*")} if sizes else {}
            other = other_row(tensors[step.options["name"]], step.options["row"], shape)
            found[_key(step)] = other[rows] if step.axes[:1] == axis else other
    return found


def _key(step: Step) -> str:
    """The name of an argument in `Evaluation.tensors`."""
    name, row = step.options["name"], step.options.get("row")
    return f"{name}" if row is None else f"{name} of row {row}"


def check_tensors(program: Program, tensors: Tensors) -> None:
    """Raise ValueError unless the tensors are the arguments of a contract, with dtypes and sizes that fit together."""
    names = [argument.name for argument in program.arguments]
    if set(tensors) != set(names):
        raise ValueError(f"{program.name} takes {', '.join(names)}, not {', '.join(tensors) or 'nothing'}")
    sizes: dict[str, tuple[int, str]] = {"1": (1, "the contract")}
    for argument in program.arguments:
        tensor = tensors[argument.name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != argument.dtype or tensor.dim() != len(argument.axes):
            raise ValueError(
                f"{argument.name} is {argument.dtype} ({', '.join(argument.axes)}), not {dtype} {tuple(tensor.shape)}"
            )
        for axis, size in zip(argument.axes, tensor.shape, strict=True):
            known, owner = sizes.setdefault(axis, (size, argument.name))
            if known != size:
                raise ValueError(f"the axis {axis} has {known} elements in {owner} and {size} in {argument.name}")
    rounded_up = {axis for argument in program.arguments if argument.of_codes for axis in argument.axes}
    for axis, (size, owner) in sizes.items():
        name, *divisors = axis.split("/")
        divisor = math.prod(map(int, divisors))
        fits = not divisors or name not in sizes or size * divisor == sizes[name][0]
        if not fits and axis in rounded_up:
            fits = size == -(-sizes[name][0] // divisor)
        if not fits:
            raise ValueError(f"the axis {axis} has {size} elements in {owner}, and {name} has {sizes[name][0]}")
    for axis in [axis for axis in sizes if "*" in axis]:
        parts, (size, owner), every = axis.split("*"), sizes[axis], program.sizes(tensors)
        counts = {part: int(part) if part.isdecimal() else every.get(part, 0) for part in parts}
        if all(counts.values()) and math.prod(counts.values()) != size:
            each = " and ".join(f"{part} has {counts[part]}" for part in parts if not part.isdecimal())
            raise ValueError(f"the axis {axis} has {size} elements in {owner}, and {each}")
    check_slots(program, tensors)
    for name, axis in program.tables.items():
        index, count = tensors[name], program.sizes(tensors)[axis]
        may_be_none = any(a.name == name and a.kind == "Positions" for a in program.arguments)
        wrong = index[((index < 0) & (not may_be_none)) | (index >= count)]
        if wrong.numel():
            raise ValueError(f"{name} holds {int(wrong[0])}; it names rows from 0 to {count - 1}, those of {axis}")


def _common_shape(values: Sequence[torch.Tensor | Interval]) -> torch.Size:
    """The shape of the values together."""
    return torch.Size(np.broadcast_shapes(*(tuple(value.shape) for value in values)))  # torch's imports sympy


def _quantized(evaluation: Evaluation, step: Step) -> Quantized:
    """A hidden quantization."""
    operand = step.operands[0]
    if step.options.get("statistics") or changed_quantize(step.options)[0] is not None:
        raise ValueError("a changed quantization is judged where it is shown")
    scale = given_scale(evaluation.program, step, evaluation.tensors)
    ends = Ends.of(evaluation.values[operand], DTYPES[step.dtype])
    random = bits_of(evaluation.program, step, evaluation.tensors)
    return products.quantized(ends, step.recipe or "", scale, step.line, random)


def _dequantized(evaluation: Evaluation, step: Step) -> Interval:
    """The values of a quantization. A second operand: the quantization with the scales of a wrong kernel."""
    program, (number, *others) = evaluation.program, step.operands
    of, dtype, flushes = program.steps[number], DTYPES[step.dtype], program.flushes
    fused = bool(step.options.get("fused"))
    if of.recipe is not None and number not in evaluation.values:
        x, recipe = evaluation.values[of.operands[0]], find_recipe(of.recipe)
        ends = Ends.of(x, DTYPES[of.dtype])
        by = of.operands[1] if of.options.get("statistics") else None
        if by is not None or recipe.approximate or ends.uncertain is not None:
            if others or "view" in step.options or changed_quantize(of.options)[0] is not None:
                raise ValueError("a changed quantization is judged where every element is one number")
            statistics = None if by is None else Ends.of(evaluation.values[by], torch.float32)
            scale = given_scale(program, of, evaluation.tensors)
            values = hidden_values(ends, recipe, scale, of.line, statistics=statistics, flushes=flushes)
            rounded = products.rounded_values(values, dtype)
            return i.hull([values, rounded]) if fused else rounded
    q: Quantized = evaluation.values[number]
    if others:
        q = replace(q, scales=evaluation.values[others[0]].scales)
    q = CHANGED_CODES[step.options["view"]][1](q) if "view" in step.options else q
    values = products.values_of(q, dtype, flushes=flushes)
    if not fused:
        return values
    exact = products.exact_values(q)
    return values if i.same(values, exact) else i.hull([values, exact])


def _codes(evaluation: Evaluation, step: Step) -> Quantized:
    """A quantized argument."""
    q = quantized_argument(evaluation.program, evaluation.tensors, step.options["name"], step.options["recipe"])
    view = step.options.get("view")
    if view is None:
        return q
    if view in CHANGED_MATRICES:
        return CHANGED_MATRICES[view][1](q, evaluation.program.sizes(evaluation.tensors)[EXPERTS])
    return CHANGED_CODES[view][1](q)


def quantized_argument(program: Program, tensors: Tensors, name: str, recipe: str) -> Quantized:
    """The quantized argument `name` of its tensors: (rows, columns)."""
    sizes = program.sizes(tensors)
    parts: dict[str, Any] = {part: tensors.get(f"{name}.{part}") for part in (*PARTS, "zeros")}
    rows, columns = next(s.axes for s in program.steps if s.function == CODES and s.options["name"] == name)
    shape = sizes[rows], sizes[columns]
    return Quantized(**parts, recipe=find_recipe(recipe), shape=shape)


def parts_of(program: Program, quantized: Mapping[str, Quantized]) -> dict[str, torch.Tensor]:
    """The tensors of quantized arguments by the names of the arguments of a program.

    Raises ValueError for a matrix of a wrong recipe, and without an amax needed by the recipe.
    """
    found = {}
    recipes = {s.options["name"]: s.options["recipe"] for s in program.steps if s.function == CODES}
    for name, q in quantized.items():
        if name not in recipes or q.recipe != find_recipe(recipes[name]):
            raise ValueError(f"{name} is quantized by {q.recipe}; {program.name} takes {recipes.get(name, 'a tensor')}")
        parts = {"codes": rowwise_codes(q), "scales": linear_scales(q), "amax": q.amax, "zeros": q.zeros}
        if q.amax is not None:
            parts["tensor_scale"] = used_tensor_scale(q)
        for argument in program.arguments:
            if argument.of_codes == name:
                part = parts[argument.name.removeprefix(f"{name}.")]
                if part is None and argument.name.endswith(".zeros"):
                    raise ValueError(f"{name}.zeros is None; {q.recipe} has a zero point for each scale: set zeros")
                found[argument.name] = q.required_amax if part is None else part
    return found


def _decoded(evaluation: Evaluation, step: Step) -> Interval:
    scale, apart = step.options.get("scale"), step.options.get("zero") == "rounded"
    q = evaluation.values[step.operands[0]]
    return products.decoded(q, DTYPES.get(step.dtype), None if scale is None else DTYPES[scale], apart=apart)


def _factor(evaluation: Evaluation, step: Step) -> Interval:
    q: Quantized = evaluation.values[step.operands[0]]
    return products.factor(q, tuple(1 if axis == "1" else q.shape[0] for axis in step.axes))


def _product(evaluation: Evaluation, step: Step) -> Interval:
    values = [evaluation.values[number] for number in step.operands]
    if all(isinstance(value, Quantized) for value in values):
        return products.product(*values, **step.options)
    steps = [evaluation.program.steps[number] for number in step.operands]
    exact = [_codes_of(evaluation, of) for of in steps]
    operands = [products.factors(x, of.dtype, q) for x, of, q in zip(values, steps, exact, strict=True)]
    fewest = products.fewest_bits(exact)
    if any(q is not None and promotes(q.recipe) for q in exact):
        pairs = [x if q is None else q for x, q in zip(values, exact, strict=True)]
        return products.promoted((pairs[0], pairs[1]), (operands[0], operands[1]), fewest=fewest, **step.options)
    pair = (values[0], values[1]), (operands[0], operands[1])
    return products.product_of_numbers(*pair, step.options["order"], fewest=fewest)


def _codes_of(evaluation: Evaluation, step: Step) -> Quantized | None:
    """The quantization of elements decoded without rounding; None of further numbers."""
    unrounded = step.function == DECODE and step.dtype not in DTYPES
    return evaluation.values[step.operands[0]] if unrounded else None


def _argument(evaluation: Evaluation, step: Step) -> Interval:
    return i.exactly(evaluation.tensors[_key(step)])


def _taken(evaluation: Evaluation, step: Step, table: torch.Tensor) -> torch.Tensor:
    """The rows of a table, selected by an index."""
    return table[_index(evaluation, step.operands[1])]


def _index(evaluation: Evaluation, number: int) -> torch.Tensor:
    """The numbers of an index, int64."""
    step = evaluation.program.steps[number]
    index: torch.Tensor = (
        evaluation.values[number].low if step.function != "argument" else evaluation.tensors[_key(step)]
    )
    return index.long()


def _segments(evaluation: Evaluation, step: Step) -> Interval:
    lengths, rows = step.operands
    chosen = evaluation.chosen
    count = evaluation.values[rows].shape[0] if chosen is None else chosen.height
    found = attention.segments(_index(evaluation, lengths), count, **step.options)
    return found if chosen is None else found.arranged(lambda t: t[chosen.places])


def _renumbered(evaluation: Evaluation, step: Step) -> Interval:
    steps = evaluation.program.steps
    number = steps.index(step)
    users = (other.function for other in steps if number in other.operands)
    if (user := next((user for user in users if user in routed.RENUMBERINGS), None)) is not None:
        name = steps[step.operands[0]].options["name"]
        rows = evaluation.program.sizes(evaluation.tensors)[evaluation.program.tables[name]]
        _, renumber = routed.RENUMBERINGS[user][step.options["to"]]
        return i.exactly(renumber(_index(evaluation, step.operands[0]), rows))
    return i.exactly(slots(evaluation.program, evaluation.tensors, number))


def _shared_heads(evaluation: Evaluation, step: Step) -> Interval:
    q, lengths, k = step.operands
    rows = evaluation.values[k].shape[0]
    return attention.shared_heads(evaluation.values[q], _index(evaluation, lengths), rows, **step.options)


def _of_requests(function: Callable[..., Interval]) -> Callable[[Evaluation, Step], Interval]:
    """A step of the numbers of a row and the tokens of its request."""

    def found(evaluation: Evaluation, step: Step) -> Interval:
        rows, tokens = (evaluation.values[number] for number in step.operands[:2])
        return function(rows, tokens, *(_index(evaluation, n).flatten() for n in step.operands[2:]), **step.options)

    return found


def _taken_values(evaluation: Evaluation, step: Step) -> Interval:
    value: Interval = evaluation.values[step.operands[0]]
    return value.arranged(lambda t: _taken(evaluation, step, t))


def _chosen(evaluation: Evaluation, step: Step) -> Interval:
    value: Interval = evaluation.values[step.operands[0]]
    return routed.chosen(value, _index(evaluation, step.operands[1]))


def _of_expert(evaluation: Evaluation, step: Step) -> Interval:
    value, experts = evaluation.values[step.operands[0]], _index(evaluation, step.operands[1])
    return routed.of_expert(value, experts, evaluation.program.sizes(evaluation.tensors)[EXPERTS], **step.options)


def _accumulated(evaluation: Evaluation, step: Step) -> Interval:
    value, positions = evaluation.values[step.operands[0]], _index(evaluation, step.operands[1])
    return routed.accumulated(value, positions, **step.options, flushes=evaluation.program.flushes)


def _of_heads(evaluation: Evaluation, step: Step) -> Interval:
    """A number per row, of a number per head or of a single number."""
    value: Interval = evaluation.values[step.operands[0]]
    sizes = evaluation.program.sizes(evaluation.tensors)
    tokens, heads = (sizes[part] for part in step.axes[0].split("*"))
    return value.arranged(lambda t: t.expand(heads).repeat(tokens).unsqueeze(1))


def _constant(evaluation: Evaluation, step: Step) -> Interval:
    return i.constant(step.options["value"], evaluation.device)


def _where(evaluation: Evaluation, step: Step) -> Interval:
    condition, one, other = (evaluation.values[number] for number in step.operands)
    shape = _common_shape([condition[0], one, other])
    a, b = (value.arranged(lambda t: t.expand(shape)) for value in (one, other))
    return i.choose((condition[0].expand(shape), condition[1].expand(shape)), a, b)


def _sum_of(evaluation: Evaluation, step: Step) -> Interval:
    values = [evaluation.values[number] for number in step.operands]
    shape = _common_shape(values)
    ends = [torch.stack([end.expand(shape) for end in ends], -1)
            for ends in ([v.low for v in values], [v.high for v in values])]  # fmt: skip
    if all(value.point for value in values):
        ends[1] = ends[0]
    nan = torch.stack([value.may_be_nan.expand(shape) for value in values], -1)
    terms = Interval(ends[0], ends[1], None if ends[0] is ends[1] else nan)
    flushes = evaluation.program.flushes
    return sums.total(terms, **step.options, flushes=flushes).arranged(lambda t: t.squeeze(-1))


def _any_of(evaluation: Evaluation, step: Step) -> Interval:
    values = [evaluation.values[number] for number in step.operands]
    shape = _common_shape(values)
    return i.hull([value.arranged(lambda t: t.expand(shape)) for value in values])


def _part(evaluation: Evaluation, step: Step) -> Interval:
    value: Interval = evaluation.values[step.operands[0]]
    return value.arranged(lambda t: _part_of(t, step))


def _part_of(x: torch.Tensor, step: Step) -> torch.Tensor:
    parts, part, size = step.options["parts"], step.options["part"], x.shape[-1]
    if size % parts:
        raise ValueError(f"the last axis has {size} elements, which are not {parts} equal parts")
    return x[..., part * (size // parts) : (part + 1) * (size // parts)]


def _roundings(evaluation: Evaluation, step: Step) -> Interval:
    """The numbers after further roundings, and the float32 of each, which a cast behind may round."""
    value: Interval = evaluation.values[step.operands[0]]
    count = step.options["count"]
    absolute = SMALLEST_NORMAL if evaluation.program.flushes else 2.0**-150
    if len(step.operands) > 1:  # errors relative to a second operand
        of = i.absolute(evaluation.values[step.operands[1]])
        error = of.high * (((1 + UNIT) ** count - 1) * (1 + 2.0**-40)) + count * absolute
        error = torch.where(of.high == 0, 0.0, error)
        nan = value.may_be_nan | of.may_be_nan
        low, high = (
            torch.where(error.isfinite(), end, value_end)
            for end, value_end in ((value.low - error, value.low), (value.high + error, value.high))
        )
        return i.rounded(low, high, nan)
    zero = (value.low == 0) & (value.high == 0)
    ends = i.widened(value.low, value.high, (1 + UNIT) ** count - 1, count * absolute)
    low, high = (torch.where(zero, old, new) for old, new in zip((value.low, value.high), ends, strict=True))
    return i.rounded(low, high, value.may_be_nan)


def _reduced(function: Callable[..., Interval]) -> Callable[[Evaluation, Step], Interval]:
    """A reduction of the columns in the options."""

    def reduce(evaluation: Evaluation, step: Step) -> Interval:
        value: Interval = evaluation.values[step.operands[0]]
        options, size = dict(step.options), value.shape[-1]
        columns, rule = options.pop("columns", None), options.pop("divisor", None)
        if options.pop("axis", -1) == 0:
            value, size = value.arranged(lambda t: t.T), value.shape[0]
        if step.function == "mean":
            options["count"] = size if rule is None else divisor(rule, size)
        if step.function in ("sum", "mean"):
            options["flushes"] = evaluation.program.flushes
        if columns is not None:
            some = some_columns(columns, size)
            value = value.arranged(lambda t: t[..., some])
        to = options.pop("to", None)
        found = function(value, **options) if to is None else partial_sums(value, to)
        return found.arranged(lambda t: t.squeeze(-1)) if step.across_rows else found

    return reduce


_REDUCTIONS = ("sum", "mean", "amax", "largest", "merged")


def _plain(function: Callable[..., Any]) -> Callable[[Evaluation, Step], Any]:
    """A step of intervals and options."""
    return lambda evaluation, step: function(*(evaluation.values[n] for n in step.operands), **step.options)


def _divide(evaluation: Evaluation, step: Step) -> Interval:
    a, b = (evaluation.values[number] for number in step.operands)
    return i.divide(a, b, **step.options, flushes=evaluation.program.flushes)


def _rotated(evaluation: Evaluation, step: Step) -> Interval:
    value: Interval = evaluation.values[step.operands[0]]
    group, mask = step.options["group"], step.options["signs"]
    return sums.rotated(value, group, mask, flushes=evaluation.program.flushes)


def _function(name: str) -> Callable[[Evaluation, Step], Interval]:
    def function(evaluation: Evaluation, step: Step) -> Interval:
        x, forms = evaluation.values[step.operands[0]], step.options.get("forms", ())
        return apply(name, x, forms, flushes=evaluation.program.flushes)

    return function


STEPS: dict[str, Callable[[Evaluation, Step], Any]] = {
    "argument": _argument, "constant": _constant, "where": _where, "sum_of": _sum_of, "any_of": _any_of,
    TAKE: _taken_values,
    "part": _part, COLUMNS: _plain(arranged), JOINED: _plain(joined), TRANSPOSED: _plain(transposed),
    ROTATED: _rotated, "roundings": _roundings,
    CHOSEN: _chosen, ACCUMULATED: _accumulated, OF_EXPERT: _of_expert,
    ROWS_OF_CHOICES: lambda evaluation, step: evaluation.values[step.operands[0]].arranged(lambda t: t.flatten(0, 1)),
    SEGMENTS: _segments, HEADS: _shared_heads, PLACES: _plain(attention.places),
    SCORES: _of_requests(attention.scores), WEIGHTED: _of_requests(attention.weighted_sum),
    OF_TOKENS: _of_requests(attention.of_tokens),
    RESCALED: _plain(attention.rescaled), WEIGHTS: _plain(attention.weights),
    SQUEEZED: lambda evaluation, step: evaluation.values[step.operands[0]].arranged(lambda t: t.squeeze(-1)),
    UNSQUEEZED: lambda evaluation, step: evaluation.values[step.operands[0]].arranged(lambda t: t.unsqueeze(-1)),
    DEQUANTIZE: _dequantized,
    OF_HEADS: _of_heads, CODES: _codes,
    READ: lambda evaluation, step: read_rows(evaluation.program, evaluation.tensors, step),
    DECODE: _decoded, FACTOR: _factor, GEMM: _product,
    **dict.fromkeys(("float32", ONCE), lambda evaluation, step: evaluation.values[step.operands[0]]),
    "cast": lambda evaluation, step: cast(evaluation.values[step.operands[0]], step.dtype, **step.options),
    "add": _plain(i.add), "subtract": _plain(i.subtract), "multiply": _plain(i.multiply), "divide": _divide,
    "negative": _plain(i.negative), "absolute": _plain(i.absolute), "square": _plain(i.square),
    "maximum": _plain(i.maximum), "minimum": _plain(i.minimum), "compare": _plain(i.compare),
    "sum": _reduced(sums.total), "mean": _reduced(sums.mean), "amax": _reduced(sums.amax),
    "largest": _reduced(sums.largest), "merged": _plain(sums.merged),
    **{name: _plain(function) for name, function in {**CHANGED_STEPS, **CHANGED_ATTENTION}.items()},
    RENUMBERED: _renumbered,
    **{name: _function(name) for name in FUNCTIONS},
}  # fmt: skip
"""The steps of contracts by name. `quantize` is judged, not evaluated."""
