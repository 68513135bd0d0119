"""A stand-in for contracts: the object of an operation filled from a list of steps, which is plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from functools import partial
from typing import Annotated, Any

import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import Dtype, Shape, dims
from narrowgauge.harness.operations.operation import Deviation, Operation, Result

Step = tuple[str, str, tuple[str, ...]]
"""Result, function, and the names of its arguments: tensors, earlier results, or keys of the case."""
Tensors = dict[str, torch.Tensor]

FUNCTIONS = {
    "float32": lambda case, x: x.float(),
    "square": lambda case, x: x * x,
    "mean": lambda case, x: x.double().mean(-1, keepdim=True).float(),
    "plus": lambda case, x, y: x + y,
    "rsqrt": lambda case, x: x.double().rsqrt().float(),
    "times": lambda case, x, y: x * y,
    "cast": lambda case, x: x.to(torch.bfloat16).float(),
    "to-output": lambda case, x: x.to(torch.bfloat16),
}


def evaluate(steps: Sequence[Step], result: str, case: Any, given: Tensors) -> Tensors:
    """The result of the steps for the inputs and the keys of a case."""
    values: dict[str, Any] = dict(given)
    for name, function, arguments in steps:
        values[name] = FUNCTIONS[function](
            case, *(values[word] if word in values else getattr(case, word) for word in arguments)
        )
    return {result: values[result]}


def without(steps: Sequence[Step], left_out: int) -> list[Step]:
    """The steps with a step left out: its result is its first argument."""
    name, _, arguments = steps[left_out]
    later = [(n, f, tuple(arguments[0] if word == name else word for word in words)) for n, f, words in steps]
    return [step for number, step in enumerate(later) if number != left_out]


def operation_of_steps(
    name: str, tensors: Mapping[str, tuple[str, ...]], keys: Mapping[str, float], steps: Sequence[Step]
) -> Operation[Any]:
    """The operation of a list of steps: the last one gives `y` (M, K). Each cast left out is a known mistake."""
    namespace = {
        "operation": name, "kinds": (Kind.ROTATED,), "tensors": tensors,
    }  # fmt: skip
    fields = [
        ("shape", Annotated[Shape, dims("[M, K]", 2, 2)]), ("dtype", Dtype),
        *((key, type(default), default) for key, default in keys.items()),
    ]  # fmt: skip
    case = make_dataclass("StepsCase", fields, bases=(Case,), namespace=namespace, frozen=True, kw_only=True)
    casts = [number for number, (_, function, _) in enumerate(steps) if function == "cast"]
    return Operation(
        case=case,
        reference=partial(evaluate, steps, "y"),
        results={"y": Result(("M", "K"), torch.bfloat16)},
        deviations={
            f"cast-{number}-left-out": Deviation(
                f"the cast of step {number} is left out", partial(evaluate, without(steps, number), "y")
            )
            for number in casts
        },
    )
