"""Values of a contract while it is traced: an operation on a value adds a step. This module does not import torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.spec.program import (
    BEHIND,
    BITS,
    CODES,
    HALF,
    INDEX,
    QUANTIZE,
    READ,
    ROUTED,
    SEQUENCES,
    SLOTS,
    TAKE,
    WRITTEN,
    Axes,
    ContractError,
    Step,
)

_FOLDER = str(Path(__file__).parent / "_")[:-1]
"""Beginning of the paths of this package, with the separator: a folder beside it may begin with its name."""


class Trace:
    """The steps of a contract that is being traced."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.steps: list[Step] = []
        self._numbers: dict[str, int] = {}
        """Numbers of the steps by everything but their lines, as text: −0 is not 0."""

    def add(self, function: str, operands: tuple[Value, ...], axes: Axes, dtype: str, **options: Any) -> Value:
        """Add a step; its value. An equal step is not added twice: both values are the same number."""
        for operand in operands:
            if operand.trace is not self:
                self.fail("a value of another contract is an operand; a contract uses its own arguments alone")
            if operand.dtype == INDEX and function not in (TAKE, WRITTEN, READ, SLOTS, *ROUTED, *SEQUENCES):
                self.fail("an index has no arithmetic; it takes rows of another argument: table[index]")
            if operand.dtype == HALF and function not in (WRITTEN, READ):
                self.fail("a cache has no arithmetic; c.write stores a quantization in it, and c.read reads rows")
            if operand.dtype == CODES and function not in BEHIND:
                self.fail("codes have no arithmetic; c.decode and c.dequantize give the numbers that they stand for")
            if operand.dtype == BITS and function != QUANTIZE:
                self.fail("random bits have no arithmetic; they round: c.quantize(y, recipe, random=bits)")
        numbers = tuple(operand.number for operand in operands)
        number = self._numbers.setdefault(repr((function, numbers, options, axes, dtype)), len(self.steps))
        if number == len(self.steps):
            self.steps.append(Step(function, numbers, options, axes, dtype, line_of_user()))
        return Value(self, number)

    def fail(self, problem: str) -> NoReturn:
        """Raise ContractError with the file and the line of the user."""
        raise ContractError(f"{self.file}:{line_of_user()}: {problem}")


def line_of_user() -> int:
    """The line of the innermost frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return frame.f_lineno


class Value:
    """A tensor of a contract."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number

    @property
    def step(self) -> Step:
        """The step of this value."""
        return self.trace.steps[self.number]

    @property
    def axes(self) -> Axes:
        """Names of the sizes."""
        return self.step.axes

    @property
    def dtype(self) -> str:
        """float32, bfloat16 or float16."""
        return self.step.dtype

    def __add__(self, other: Value | float) -> Value:
        return combined("add", self, other)

    def __radd__(self, other: float) -> Value:
        return combined("add", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return combined("subtract", self, other)

    def __rsub__(self, other: float) -> Value:
        return combined("subtract", other, self)

    def __mul__(self, other: Value | float) -> Value:
        if isinstance(other, Value) and other.number == self.number:
            return self.trace.add("square", (in_float32(self),), self.axes, "float32")
        return combined("multiply", self, other)

    def __rmul__(self, other: float) -> Value:
        return combined("multiply", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return combined("divide", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return combined("divide", other, self)

    def __neg__(self) -> Value:
        return self.trace.add("negative", (self,), self.axes, self.dtype)

    def __abs__(self) -> Value:
        return self.trace.add("absolute", (self,), self.axes, self.dtype)

    def __gt__(self, other: Value | float) -> Value:
        return combined("compare", self, other, relation=">")

    def __ge__(self, other: Value | float) -> Value:
        return combined("compare", self, other, relation=">=")

    def __lt__(self, other: Value | float) -> Value:
        return combined("compare", self, other, relation="<")

    def __le__(self, other: Value | float) -> Value:
        return combined("compare", self, other, relation="<=")

    def __getitem__(self, index: Value) -> Value:
        if not isinstance(index, Value) or index.dtype != INDEX:
            self.trace.fail("a tensor is indexed by an argument of the type Index, which takes its rows: table[index]")
        if self.step.function == "argument" and self.dtype == INDEX and len(self.axes) == 1:
            return self.trace.add(TAKE, (self, index), index.axes, "float32")
        rows, first = self.axes[:1], self.trace.steps[0].axes[:1]
        if self.step.function != "argument" or len(self.axes) != 2 or rows in (index.axes, first):
            self.trace.fail(
                f"an index takes rows of an argument with rows of its own, not of ({', '.join(self.axes)}): declare "
                'table: Annotated[c.Matrix, ("N", "K")], behind the matrix with the rows of the results'
            )
        return self.trace.add(TAKE, (self, index), (*index.axes, *self.axes[1:]), self.dtype)

    __iter__ = None

    def __bool__(self) -> bool:  # noqa: PLE0304  # it raises
        self.trace.fail("a contract cannot branch on a tensor; c.where(condition, a, b) takes one of two values")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.trace.fail(f"a tensor of a contract has no {name}; a contract uses the functions of narrowgauge.contract")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        value = next(value for value in args if isinstance(value, Value))
        name = getattr(function, "__name__", str(function))
        value.trace.fail(f"torch.{name} is no step of a contract; use a function of narrowgauge.contract")


@dataclass(frozen=True)
class CachedHalves:
    """A cache of a contract."""

    keys: Value
    values: Value


def in_float32(value: Value) -> Value:
    """The float32 value. Raises ContractError for a different dtype."""
    if value.dtype != "float32":
        value.trace.fail(
            f"arithmetic is in float32, and an operand is {value.dtype}: convert it by c.float32, and round the result "
            "by c.cast if the kernel does"
        )
    return value


def combined(function: str, a: Value | float, b: Value | float, **options: Any) -> Value:
    """A step of two operands, also of an operand and a number. Raises ContractError for shapes that do not fit."""
    trace = a.trace if isinstance(a, Value) else b.trace  # type: ignore[union-attr]
    one, other = (in_float32(v) if isinstance(v, Value) else number(trace, v) for v in (a, b))
    axes = broadcast(trace, one.axes, other.axes)
    dtype = "bool" if function == "compare" else "float32"
    return trace.add(function, (one, other), axes, dtype, **options)


def number(trace: Trace, value: Any) -> Value:
    """A constant. Raises ContractError for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        trace.fail(f"an operand is {value!r}; operands are tensors of the contract and numbers")
    return trace.add("constant", (), (), "float32", value=float(value))


def broadcast(trace: Trace, a: Axes, b: Axes) -> Axes:
    """Axes of a result. Raises ContractError for axes that do not fit together."""
    size = max(len(a), len(b))
    padded = [("1",) * (size - len(axes)) + axes for axes in (a, b)]
    for one, other in zip(*padded, strict=True):
        if one != other and "1" not in (one, other):
            trace.fail(f"operands of the axes ({', '.join(a)}) and ({', '.join(b)}) do not fit together")
    return tuple(other if one == "1" else one for one, other in zip(*padded, strict=True))
