"""Programs with a replaced value. An edit is written with the functions of contracts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from narrowgauge.contract.values import Trace, Value
from narrowgauge.harness.operations.contracts.causes.formulas import formula
from narrowgauge.reference.contracts.changed_steps import OtherRow
from narrowgauge.spec.program import JOINED, QUANTIZE, READ, TRANSPOSED, Axes, Program, Step

OUTPUT = -1
"""The user of a shown result."""
KEEPING_DTYPE = (QUANTIZE, TRANSPOSED, JOINED)
"""Steps with the dtype of their first operand."""

Use = tuple[int, int]
"""A step that takes a value, and the place of the value among its operands; `OUTPUT` and the number of an output."""


def other_rows(axes: Axes) -> list[tuple[OtherRow, str, str]]:
    """Wrong rows for a number per row: `OtherRow`, name and phrase."""
    if "*" not in axes[0]:
        return [(1, "next", "the next row"), (-1, "previous", "the previous row"), ("first", "first", "row 0")]
    changes = ((1, "next", "the next {}"), (-1, "previous", "the previous {}"), ("first", "first", "{} 0"),
               ("reversed", "reversed", "the {}s in reverse order"))  # fmt: skip
    return [
        ((axis, row), f"{name}-{axis}", phrase.format(axis.removesuffix("s")))
        for axis in axes[0].split("*") for row, name, phrase in changes
    ]  # fmt: skip


class Editor(Trace):
    """The steps of a program, with further steps of an edit."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.file)
        self.program = program
        self.steps = list(program.steps)
        self.line = 0
        self._users: dict[int, list[Use]] = defaultdict(list)
        for number, step in enumerate(program.steps):
            for place, operand in enumerate(step.operands):
                self._users[operand].append((number, place))
        for place, number in enumerate(program.outputs.values()):
            self._users[number].append((OUTPUT, place))

    def add(self, function: str, operands: tuple[Value, ...], axes: Axes, dtype: str, **options: Any) -> Value:
        """Add a step; its value."""
        self.steps.append(Step(function, tuple(value.number for value in operands), options, axes, dtype, self.line))
        return Value(self, len(self.steps) - 1)

    def restart(self, line: int) -> None:
        """Forget added steps. Later steps are of this line."""
        del self.steps[len(self.program.steps) :]
        self.line = line

    def uses(self, number: int) -> list[Use]:
        """The uses of a value. The conversion of a narrow value to float32 is no use; the uses of its result are."""
        found: list[Use] = []
        for user, place in self._users[number]:
            function = "" if user == OUTPUT else self.program.steps[user].function
            if (function == QUANTIZE and place) or (function == READ and place == 2):
                continue  # a scale that the kernel is given
            converts = user != OUTPUT and self.program.steps[user].function == "float32"
            found += self.uses(user) if converts else [(user, place)]
        return found

    def with_uses(self, uses: Collection[Use], value: int) -> Program | None:
        """The program with a new value in these uses. None: a result would have a different dtype.

        If a formula among several alternatives contains the change, the kernel took this formula.
        """
        operands = {number: list(step.operands) for number, step in enumerate(self.steps)}
        outputs = list(self.program.outputs.values())
        for user, place in uses:
            if user == OUTPUT:
                outputs[place] = value
            else:
                right = self.steps[operands[user][place]].dtype
                operands[user][place] = self._in_float32(operands, value) if right == "float32" else value
        self._choose_formulas(operands, {user for user, _ in uses}, value)
        order: dict[int, int] = {}
        steps: list[Step] = []

        def visit(number: int) -> None:
            if number in order:
                return
            for operand in operands[number]:
                visit(operand)
            order[number] = len(steps)
            step, moved = self.steps[number], tuple(order[operand] for operand in operands[number])
            dtype = steps[moved[0]].dtype if step.function in KEEPING_DTYPE else step.dtype
            same = moved == step.operands and dtype == step.dtype
            # `replace` takes four times as long, and an edit takes it for most steps.
            steps.append(step if same else Step(step.function, moved, step.options, step.axes, dtype, step.line))

        for number, old in zip(outputs, self.program.outputs.values(), strict=True):
            visit(number)
            result = steps[order[number]]
            if result.recipe is None and result.dtype != self.program.steps[old].dtype:
                return None
        numbers = {name: order[number] for name, number in zip(self.program.outputs, outputs, strict=True)}
        return replace(self.program, steps=tuple(steps), outputs=numbers)

    def _in_float32(self, operands: dict[int, list[int]], value: int) -> int:
        """A value, taken as float32 by the steps."""
        if self.steps[value].dtype == "float32":
            return value
        converted = self.add("float32", (Value(self, value),), self.steps[value].axes, "float32").number
        operands[converted] = [value]
        return converted

    def _choose_formulas(self, operands: dict[int, list[int]], users: set[int], value: int) -> None:
        changed = users | {value} | set(range(len(self.program.steps), len(self.steps)))
        for number in range(len(self.program.steps)):
            if self.steps[number].function == "any_of":
                some = [operand for operand in operands[number] if operand in changed]
                operands[number] = some or operands[number]
            if not changed.isdisjoint(operands[number]):
                changed.add(number)


@dataclass(frozen=True)
class Scope:
    """Uses that take a wrong value."""

    name: str
    phrase: str
    uses: Sequence[Use]
    cast: int | None = None
    """A cast of the value, for these uses."""


@dataclass(frozen=True)
class Site:
    """A step changed by a row of the table."""

    editor: Editor
    number: int

    @property
    def step(self) -> Step:
        """The step."""
        return self.editor.program.steps[self.number]

    @cached_property
    def line(self) -> int:
        """The line of the step; of an argument, the line of its first user."""
        users = [user for user, _ in self.editor.uses(self.number) if user != OUTPUT]
        number = min(users) if self.step.function == "argument" and users else self.number
        return self.editor.program.steps[number].line

    @cached_property
    def names(self) -> dict[str, str]:
        """Formulas of the step and of its first operands."""
        numbers = zip(("self", "a", "b"), (self.number, *self.step.operands), strict=False)
        return {name: formula(self.editor.program, number) for name, number in numbers}

    @property
    def old(self) -> Value:
        """The right value."""
        return Value(self.editor, self.number)

    @cached_property
    def operands(self) -> list[Value]:
        """The operands."""
        return [Value(self.editor, operand) for operand in self.step.operands]

    @property
    def a(self) -> Value:
        """The first operand."""
        return self.operands[0]

    @property
    def b(self) -> Value:
        """The second operand."""
        return self.operands[1]

    @property
    def dtype(self) -> str:
        """The dtype of the step."""
        return self.step.dtype

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the step."""
        return self.step.options.get(name, default)

    def made(self, function: str, *operands: Value, dtype: str = "", axes: Axes | None = None, **options: Any) -> Value:
        """A step unknown to contracts."""
        shape = axes if axes is not None else max((value.axes for value in operands), key=len)
        return self.editor.add(function, operands, shape, dtype or operands[0].dtype, **options)

    def changed(self, **options: Any) -> Value:
        """The step with changed options. An option of None is left out."""
        given = {name: value for name, value in {**self.step.options, **options}.items() if value is not None}
        return self.editor.add(self.step.function, tuple(self.operands), self.step.axes, self.dtype, **given)

    def as_function(self, function: str, *operands: Value) -> Value:
        """The step with a changed function, without options but the axis."""
        axis = {"axis": 0} if self.step.across_rows else {}
        return self.editor.add(function, operands or tuple(self.operands), self.step.axes, self.dtype, **axis)

    def alone(self, operand: Value) -> Value:
        """An operand in the shape of the step."""
        others = [v for v in self.operands if v.number != operand.number and v.dtype != "bool"]
        if operand.axes == self.step.axes:
            return operand
        return self.editor.add("expanded", (operand, *others), self.step.axes, operand.dtype)

    def source(self, number: int) -> Step:
        """The step behind conversions to float32."""
        step = self.editor.steps[number]
        return self.source(step.operands[0]) if step.function == "float32" else step

    def changed_operand(self, value: Value) -> Value:
        """The step with a changed first operand."""
        operands = (value, *self.operands[1:])
        return self.editor.add(self.step.function, operands, self.step.axes, self.dtype, **self.step.options)

    def changed_second(self, value: Value) -> Value:
        """The step with a changed second operand."""
        operands = (self.operands[0], value, *self.operands[2:])
        return self.editor.add(self.step.function, operands, self.step.axes, self.dtype, **self.step.options)

    def in_row(self, row: OtherRow) -> Value:
        """The value computed from wrong rows of the arguments: `reference.contracts.changed_steps.other_row`."""
        axis, known = self.step.axes[0], dict[int, Value]()

        def copy(number: int) -> Value:
            if number not in known:
                step = self.editor.program.steps[number]
                operands, options = tuple(map(copy, step.operands)), dict(step.options)
                if step.function == "argument" and step.axes[:1] == (axis,):
                    options["row"] = row
                known[number] = self.editor.add(step.function, operands, step.axes, step.dtype, **options)
            return known[number]

        return copy(self.number)

    @cached_property
    def inner(self) -> tuple[Value, set[str]] | None:
        """The matrix that the step is a function of alone, beside constants, and the functions between."""
        steps = self.editor.program.steps
        for number in sorted(self.editor.program.cone(self.number) - {self.number}, reverse=True):
            if steps[number].axes != self.step.axes or steps[number].dtype != "float32":
                continue
            between, waiting = set[int](), [self.number]
            while waiting:
                step = waiting.pop()
                if step != number and step not in between:
                    between.add(step)
                    waiting += steps[step].operands
            if not any(steps[step].function == "argument" for step in between):
                return Value(self.editor, number), {steps[step].function for step in between}
        return None

    def scopes(self, *, apart: bool) -> Iterator[Scope]:
        """The places where a wrong value may be taken: everywhere, or by single users."""
        uses = self.editor.uses(self.number)
        if uses:
            yield Scope("", "", uses)
        yield from self._some_uses(uses, None, apart=apart)
        user = uses[0][0] if len(uses) == 1 else OUTPUT
        if apart and user != OUTPUT and self.editor.program.steps[user].function == "cast":
            yield from self._some_uses(self.editor.uses(user), user, apart=apart)

    def _some_uses(self, uses: Sequence[Use], cast: int | None, *, apart: bool) -> Iterator[Scope]:
        shown = [use for use in uses if use[0] == OUTPUT]
        hidden = [use for use in uses if use[0] != OUTPUT]
        if shown and hidden:
            yield Scope(":shown-alone", ", in the result that is shown alone", shown, cast)
            yield Scope(":not-shown", ", behind the result that is shown", hidden, cast)
        if apart and len({user for user, _ in hidden}) > 1:
            for user, place in hidden:
                name = formula(self.editor.program, user)
                yield Scope(f":in-{user}", f", in {name} alone", [(user, place)], cast)
