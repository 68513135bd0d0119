"""Evaluation of a contract: every step in its order, on intervals, from the inputs of a kernel.

A result that the kernel shows is judged where it arises, and its own numbers replace the step that is shown. So each
output is judged given the outputs before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.reference.contracts import interval as i
from narrowgauge.reference.contracts import sums
from narrowgauge.reference.contracts.accepted import Ends, Part, judge_range
from narrowgauge.reference.contracts.casts import DTYPES, cast
from narrowgauge.reference.contracts.changed_steps import (
    CHANGED_STEPS,
    changed_quantize,
    divisor,
    other_row,
    some_columns,
)
from narrowgauge.reference.contracts.functions import FUNCTIONS, apply
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.quantized import judge_quantized
from narrowgauge.spec.program import Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import UNIT

Tensors = Mapping[str, torch.Tensor]
Shown = Mapping[str, torch.Tensor | Quantized]
"""Results of a kernel by the names of the outputs; absent: hidden."""


@dataclass
class Evaluation:
    """A contract with inputs: the values of the steps so far."""

    program: Program
    tensors: Tensors
    """Inputs by the names of the arguments."""
    values: dict[int, Any]
    """Interval of each step; a comparison has two masks."""

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return next(iter(self.tensors.values())).device


def judged(program: Program, tensors: Tensors, shown: Shown) -> Iterator[tuple[str, Part]]:
    """Each result that the kernel shows, in the order of the steps, with what is accepted of it.

    Raises ValueError for tensors that do not fit the arguments, and as `judge_quantized`.
    """
    check_tensors(program, tensors)
    names = {number: name for name, number in program.outputs.items()}
    ends: dict[int, list[list[Ends]]] = {number: [] for number, name in names.items() if name in shown}
    for rows in slabs_of_rows(program, tensors):
        evaluation = Evaluation(program, of_rows(program, tensors, rows), {})
        for number, step in enumerate(program.steps):
            dtype = DTYPES.get(step.dtype, torch.float32)
            if step.recipe is not None:
                if number in ends:
                    ends[number].append(ends_of_quantized(evaluation, step))
                continue
            value = STEPS[step.function](evaluation, step)
            if number in ends:
                ends[number].append([Ends.of(value, dtype)])
                result = shown[names[number]]
                assert isinstance(result, torch.Tensor)
                own = result[rows] if step.axes[:1] == program.arguments[0].axes[:1] else result
                value = handed_on(step, value, own)
            evaluation.values[number] = value
    for number, parts in ends.items():
        step, name = program.steps[number], names[number]
        some = parts if step.axes[:1] == program.arguments[0].axes[:1] else parts[:1]
        joined = [Ends.joined(operand) for operand in zip(*some, strict=True)]
        yield from judge_output(program, number, joined, shown[name], tensors)


def judge_output(
    program: Program, number: int, ends: Sequence[Ends], result: torch.Tensor | Quantized, tensors: Tensors
) -> Iterator[tuple[str, Part]]:
    """What is accepted of the result of step `number`, given the ends of what it shows or quantizes."""
    step = program.steps[number]
    name = next(name for name, shown in program.outputs.items() if shown == number)
    if not isinstance(result, Quantized):
        yield name, judge_range(result, ends[0].low, ends[0].high, ends[0].nan)
        return
    given = step.operands[len(ends) :]
    scale = tensors[program.steps[given[0]].options["name"]] if given else None
    rounding, view = changed_quantize(step.options)
    for part, judgement in judge_quantized(ends[0], view(result), scale, statistics=ends[-1], rounding=rounding):
        yield part if name == "quantized" else f"{name}.{part}", judgement


def ends_of_quantized(evaluation: Evaluation, step: Step) -> list[Ends]:
    """The ends of what is quantized, and of another matrix whose amaxes give the scales, if there is one."""
    matrices = step.operands if step.options.get("statistics") else step.operands[:1]
    return [Ends.of(evaluation.values[n], DTYPES[evaluation.program.steps[n].dtype]) for n in matrices]


def handed_on(step: Step, value: Interval, shown: torch.Tensor) -> Interval:
    """The numbers that a kernel that shows `shown` may go on with: after a cast this one, else every number of the step
    that rounds to it, since a kernel may keep a wider one. A number outside of the interval is the kernel's own."""
    number = i.exactly(shown)
    if step.function in ("cast", "argument", "float32") or value.point:
        return number
    beside = [torch.nextafter(shown, shown.new_tensor(end)).double() for end in (-torch.inf, torch.inf)]
    low, high = ((number.low + end) / 2 for end in beside)
    low, high = torch.maximum(low, value.low), torch.minimum(high, value.high)
    inside = (low <= high) & shown.isfinite()
    return Interval(torch.where(inside, low, number.low), torch.where(inside, high, number.low), shown.isnan())


_SLAB = 1 << 16
"""Elements that are evaluated at once: a float64 tensor of them stays in the cache of a core."""


def slabs_of_rows(program: Program, tensors: Tensors) -> list[slice]:
    """Ranges of rows that can be evaluated apart: every step keeps the rows, and sums run along them."""
    first = program.arguments[0]
    axis, rows = first.axes[0] if len(first.axes) > 1 else "", tensors[first.name].shape[0]
    if not axis or tensors[first.name].is_cuda or any(axis in step.axes[1:] for step in program.steps):
        return [slice(0, rows)]
    height = max(1, _SLAB // max(1, tensors[first.name][:1].numel()))
    return [slice(start, min(rows, start + height)) for start in range(0, rows, height)] or [slice(0, 0)]


def of_rows(program: Program, tensors: Tensors, rows: slice | torch.Tensor, known: Tensors | None = None) -> Tensors:
    """The inputs of some rows of the results, with the arguments of other rows that a changed contract reads.

    `known`: such inputs, which are not taken again.
    """
    axis, found = program.arguments[0].axes[:1], dict(known or {})
    for argument in program.arguments if known is None else ():
        tensor = tensors[argument.name]
        found[argument.name] = tensor[rows] if argument.axes[:1] == axis else tensor
    for step in program.steps:
        if "row" in step.options and _key(step) not in found:
            found[_key(step)] = other_row(tensors[step.options["name"]], step.options["row"])[rows]
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


def _common_shape(values: Sequence[torch.Tensor | Interval]) -> torch.Size:
    """The shape of the values together."""
    return torch.Size(torch.broadcast_shapes(*(value.shape for value in values)))  # type: ignore[no-untyped-call]


def _argument(evaluation: Evaluation, step: Step) -> Interval:
    return i.exactly(evaluation.tensors[_key(step)])


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
    return sums.total(terms, **step.options).arranged(lambda t: t.squeeze(-1))


def _any_of(evaluation: Evaluation, step: Step) -> Interval:
    values = [evaluation.values[number] for number in step.operands]
    shape = _common_shape(values)
    return i.hull([value.arranged(lambda t: t.expand(shape)) for value in values])


def _part(evaluation: Evaluation, step: Step) -> Interval:
    parts, part = step.options["parts"], step.options["part"]
    value: Interval = evaluation.values[step.operands[0]]
    size = value.shape[-1]
    if size % parts:
        raise ValueError(f"the last axis has {size} elements, which are not {parts} equal parts")
    return value.arranged(lambda t: t[..., part * (size // parts) : (part + 1) * (size // parts)])


def _roundings(evaluation: Evaluation, step: Step) -> Interval:
    value: Interval = evaluation.values[step.operands[0]]
    count = step.options["count"]
    low, high = i.widened(value.low, value.high, (1 + UNIT) ** count - 1, count * 2.0**-150)
    return replace(value, low=low, high=high, nan=value.may_be_nan)


def _reduced(function: Callable[..., Interval]) -> Callable[[Evaluation, Step], Interval]:
    """A reduction, of the columns that the options name."""

    def reduce(evaluation: Evaluation, step: Step) -> Interval:
        value: Interval = evaluation.values[step.operands[0]]
        options, size = dict(step.options), value.shape[-1]
        columns, rule = options.pop("columns", None), options.pop("divisor", None)
        if step.function == "mean":
            options["count"] = size if rule is None else divisor(rule, size)
        if columns is not None:
            some = some_columns(columns, size)
            value = value.arranged(lambda t: t[..., some])
        return function(value, **options)

    return reduce


def _plain(function: Callable[..., Any]) -> Callable[[Evaluation, Step], Any]:
    """A step of intervals and options."""
    return lambda evaluation, step: function(*(evaluation.values[n] for n in step.operands), **step.options)


def _function(name: str) -> Callable[[Evaluation, Step], Interval]:
    return lambda evaluation, step: apply(name, evaluation.values[step.operands[0]], step.options.get("forms", ()))


STEPS: dict[str, Callable[[Evaluation, Step], Any]] = {
    "argument": _argument, "constant": _constant, "where": _where, "sum_of": _sum_of, "any_of": _any_of,
    "part": _part, "roundings": _roundings,
    "float32": lambda evaluation, step: evaluation.values[step.operands[0]],
    "cast": lambda evaluation, step: cast(evaluation.values[step.operands[0]], step.dtype, **step.options),
    "add": _plain(i.add), "subtract": _plain(i.subtract), "multiply": _plain(i.multiply), "divide": _plain(i.divide),
    "negative": _plain(i.negative), "absolute": _plain(i.absolute), "square": _plain(i.square),
    "maximum": _plain(i.maximum), "minimum": _plain(i.minimum), "compare": _plain(i.compare),
    "sum": _reduced(sums.total), "mean": _reduced(sums.mean), "amax": _reduced(sums.amax),
    **{name: _plain(function) for name, function in CHANGED_STEPS.items()},
    **{name: _function(name) for name in FUNCTIONS},
}  # fmt: skip
"""The steps of contracts by name. `quantize` is judged, not evaluated."""
