"""Many changed contracts on the same rows, evaluated together.

Changed contracts share most steps. Steps of the same function with operands of equal shapes are evaluated in a single
call: the rows of their operands are joined. Hundreds of changes take a few times as long as a single change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from narrowgauge.reference.contracts.evaluate import Chosen, Evaluation, evaluated, of_rows
from narrowgauge.reference.contracts.functions import FUNCTIONS
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.layout.changed_attention import CHANGED_ATTENTION
from narrowgauge.spec.program import (
    CODES,
    INDEX,
    OF_TOKENS,
    RESCALED,
    SCORES,
    SQUEEZED,
    TAKE,
    UNSQUEEZED,
    WEIGHTED,
    WEIGHTS,
    Program,
)

Tensors = Mapping[str, torch.Tensor]
_OF_TABLES = (SCORES, WEIGHTED, OF_TOKENS, TAKE)
"""Functions of rows with operands without rows: tokens, heads and lengths."""
_OF_ROWS = frozenset({
    "where", "any_of", "sum_of", "roundings", "cast", "float32", "add", "subtract", "multiply", "divide", "negative",
    "absolute", "square", "maximum", "minimum", "compare", "sum", "mean", "amax", "largest", RESCALED, WEIGHTS,
    SQUEEZED, UNSQUEEZED, *FUNCTIONS, *CHANGED_ATTENTION, *_OF_TABLES,
})  # fmt: skip
"""Functions that compute a row of the result from the same row of their operands."""
Value = Interval | tuple[torch.Tensor, torch.Tensor]
"""The value of a step; of a comparison two masks."""


def may_be_together(program: Program) -> bool:
    """Whether the results are tensors with the rows of the first argument, and no further step takes one."""
    taken = {operand for step in program.steps for operand in step.operands}
    whole = any(step.is_stored or step.function in (CODES, "amax_of_all") or step.across_rows for step in program.steps)
    axis, outputs = program.arguments[0].axes[:1], program.outputs.values()
    return not whole and all(n not in taken and program.steps[n].axes[:1] == axis for n in outputs)


class Member(NamedTuple):
    """A program, and its evaluation, which shares the values of equal steps with further programs."""

    program: Program
    keys: Sequence[int]
    """The numbers of the values of the steps: `replay.Keys`."""
    evaluation: Evaluation


def members_of(
    programs: Sequence[tuple[Program, Sequence[int]]], tensors: Tensors, rows: slice | torch.Tensor,
    chosen: Chosen | None, known: Mapping[int, Any],
) -> list[Member]:  # fmt: skip
    """Programs with the numbers of their steps' values, and evaluations whose values are known as far as possible.

    `known`: known values, by their numbers. A program that does not fit the tensors raises ValueError when a
    value is asked for.
    """
    shared, inputs, members = dict(known), None, list[Member]()
    for program, keys in programs:
        inputs = of_rows(program, tensors, rows, inputs)
        evaluation = Evaluation(program, inputs, rows=slice(0, 0), chosen=chosen, shared=(keys, shared))
        members.append(Member(program, keys, evaluation))
    count = len(inputs[members[0].program.arguments[0].name]) if inputs else 0
    levels: dict[int, dict[int, tuple[Member, int]]] = defaultdict(dict)
    for member in members:
        for number, level in _needed(member, shared):
            levels[level].setdefault(member.keys[number], (member, number))
    for level in sorted(levels, reverse=True):
        groups: dict[Any, list[tuple[Member, int]]] = defaultdict(list)
        for key, (member, number) in levels[level].items():
            if key not in shared and (signature := _signature(member, number, count)) is not None:
                groups[signature].append((member, number))
        for group in groups.values():
            if len(group) > 1:
                _evaluate(group, count, shared)
    return members


def _needed(member: Member, known: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
    """The steps of rows with unknown values, and the lengths of their longest ways to a result."""
    steps, level = member.program.steps, dict.fromkeys(member.program.outputs.values(), 0)
    for number in range(len(steps) - 1, -1, -1):
        if number not in level or member.keys[number] in known or steps[number].dtype == INDEX:
            continue
        if steps[number].function in _OF_ROWS and _of_rows(member.program, number):
            yield number, level[number]
        for operand in steps[number].operands:
            level[operand] = max(level.get(operand, 0), level[number] + 1)


def _of_rows(program: Program, number: int) -> bool:
    return program.steps[number].axes[:1] == program.arguments[0].axes[:1]


def _has_rows(member: Member, number: int, value: Value, count: int) -> bool:
    """Whether a value has its own numbers per row."""
    shape, axes = _tensors(value)[0].shape, member.program.steps[number].axes
    return _of_rows(member.program, number) and len(shape) == len(axes) and shape[0] == count


def _signature(member: Member, number: int, count: int) -> Any:
    """Equal for steps of the same call; None for a step evaluated alone."""
    step = member.program.steps[number]
    found: list[Any] = [step.function, repr(step.options), step.dtype, member.program.subnormals, len(step.axes)]
    for operand in step.operands:
        try:
            value: Value = member.evaluation.values[operand]
        except ValueError:  # the change does not fit the tensors
            return None
        has_rows = _has_rows(member, operand, value, count)
        if not has_rows and step.function in _OF_TABLES:
            found.append(member.keys[operand])
            continue
        shape = _tensors(value)[0].shape
        if not has_rows and len(shape) >= len(step.axes):
            return None
        kind = (value.point, value.nan is None, value.bits) if isinstance(value, Interval) else ()
        found.append((has_rows, shape, kind, step.operands.index(operand)))
    return tuple(found)


def _evaluate(group: Sequence[tuple[Member, int]], count: int, shared: dict[int, Any]) -> None:
    """Evaluate equal steps of several programs in a single call."""
    member, number = group[0]
    step = member.program.steps[number]
    evaluation = Evaluation(member.program, member.evaluation.tensors, rows=slice(0, 0))
    for place, operand in enumerate(step.operands):
        values = [one.evaluation.values[one.program.steps[at].operands[place]] for one, at in group]
        has_rows = _has_rows(member, operand, values[0], count)
        alike = not has_rows and all(value is values[0] for value in values)
        evaluation.values[operand] = values[0] if alike else _joined(values, count, 0 if has_rows else len(step.axes))
    try:
        found = evaluated(evaluation, step)
    except ValueError:  # a change does not fit the tensors: each is evaluated alone
        return
    for (one, at), value in zip(group, _apart(found, count), strict=True):
        shared[one.keys[at]] = value


def _tensors(value: Value) -> tuple[torch.Tensor, ...]:
    return (value.low, value.high) if isinstance(value, Interval) else value


def _joined(values: Sequence[Value], count: int, dims: int) -> Value:
    """Values of several programs, rows below rows. `dims`: 0, or dimensions of values without rows, repeated for the
    `count` rows of their programs."""

    def of_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(count, *(1,) * (dims - 1 - tensor.dim()), *tensor.shape) if dims else tensor

    if isinstance(values[0], Interval):
        return Interval.joined([value.arranged(of_rows) for value in values if isinstance(value, Interval)])
    masks = ([of_rows(value[at]) for value in values if isinstance(value, tuple)] for at in (0, 1))
    return torch.cat(next(masks)), torch.cat(next(masks))


def _apart(value: Value, count: int) -> Iterator[Value]:
    """The values of the programs. Ends that are equal bit by bit become a point, as they are in a program alone."""

    def split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.unflatten(0, (-1, count)).unbind()  # type: ignore[no-untyped-call,no-any-return]

    if not isinstance(value, Interval):
        yield from zip(*map(split, value), strict=True)
        return
    lows = split(value.low)
    highs = lows if value.point else split(value.high)
    nans = [None] * len(lows) if value.nan is None else split(value.nan)
    for low, high, nan in zip(lows, highs, nans, strict=True):
        equal = low is high or torch.equal(low.view(torch.int64), high.view(torch.int64))
        yield Interval(low, low if equal and (nan is None or not bool(nan.any())) else high, nan, value.bits)
