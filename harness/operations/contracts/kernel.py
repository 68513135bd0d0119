"""Kernels that compute a contract, also one with a changed step: samples of right and of wrong kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.harness.operations.contracts.changes import changes
from narrowgauge.harness.operations.contracts.results import stored_results
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import STEPS, Evaluation
from narrowgauge.reference.contracts.functions import FUNCTIONS
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.program import Program, Step
from narrowgauge.spec.quantized import Quantized

_RELATIONS = {">": torch.gt, ">=": torch.ge, "<": torch.lt, "<=": torch.le}
_FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div, "square": torch.square,
    "negative": torch.neg, "absolute": torch.abs, "maximum": torch.maximum, "minimum": torch.minimum,
    "where": torch.where, **{name: function.evaluate for name, function in FUNCTIONS.items()},
}  # fmt: skip
"""Steps that torch has, in float64. The middle of the interval stands for every other step."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that computes the steps of a contract with torch, called with the tensors by name."""

    program: Program
    seed: int | None = None
    """None: every number is in float32. Else each step draws whether its numbers round to float32 or stay in float64,
    sums are off by a random error of the size of another order, and one of several formulas is taken."""

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The results by the names of `narrowgauge.harness.operations.contracts.results.named_results`.

        `tensors`: the arguments of the contract, with their dtypes and axes. Raises ValueError for sizes that a step
        does not take.
        """
        return stored_results(self.program, self.results(tensors))

    def results(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Quantized]:
        """The results by the names of the outputs; a quantization is a `Quantized` by the recipe of its step."""
        draw = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        values: list[Any] = []
        for step in self.program.steps:
            if step.recipe is None:
                values.append(self._value(step, values, tensors, draw))
                continue
            scale = tensors[self.program.steps[step.operands[1]].options["name"]] if step.operands[1:] else None
            values.append(quantize(_in(values[step.operands[0]], step.dtype), step.recipe, scale=scale))
        outputs = {name: values[number] for name, number in self.program.outputs.items()}
        return {
            name: value if isinstance(value, Quantized) else _in(value, self.program.steps[number].dtype)
            for (name, number), value in zip(self.program.outputs.items(), outputs.values(), strict=True)
        }

    def _value(
        self, step: Step, values: list[Any], tensors: Mapping[str, torch.Tensor], draw: torch.Generator | None
    ) -> torch.Tensor:
        """The numbers of a step, float64; of a comparison bool."""
        operands = [values[number] for number in step.operands]
        name, options = step.function, dict(step.options)
        if name == "argument":
            return tensors[options["name"]].double()
        if name == "float32":
            return operands[0]
        if name == "compare":
            return _RELATIONS[options["relation"]](*operands)
        if name == "cast" and not options:
            return _in(operands[0], step.dtype).double()
        if name == "any_of":
            of = 0 if draw is None else int(torch.randint(len(operands), (), generator=draw))
            return operands[of].expand(torch.broadcast_shapes(*(x.shape for x in operands)))
        if name in _FUNCTIONS and (name == "divide" or not options):
            value = _FUNCTIONS[name](*operands)
        else:
            points = {number: Interval(values[number], values[number]) for number in step.operands}
            value = _inside(STEPS[name](Evaluation(self.program, tensors, points), step), step, operands, draw)
        if draw is not None and bool(torch.randint(2, (), generator=draw)):
            return value
        return value.float().double()


def _in(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers of a hidden step in a dtype, from float32."""
    return x.float().to(DTYPES[dtype])


def _inside(x: Interval, step: Step, operands: list[torch.Tensor], draw: torch.Generator | None) -> torch.Tensor:
    """Numbers of an interval: the middle, and of a sum of n terms a number within its n^-½ part, as rounding errors add
    up in a sum of another order."""
    if x.point or draw is None:
        return x.low if x.point else _middle(x)
    terms = len(operands) if len(operands) != 1 else operands[0].numel() // max(1, x.low.numel())
    noise = torch.rand(x.shape, generator=draw, dtype=torch.float64) - 0.5
    error = (x.high - x.low) * noise / max(1, terms) ** 0.5
    return _middle(x) + torch.where(error.isfinite(), error, 0.0)


def _middle(x: Interval) -> torch.Tensor:
    """The middle of finite ends, else an end."""
    finite = x.low.isfinite() & x.high.isfinite()
    return torch.where(finite, x.low + (x.high - x.low) / 2, torch.where(x.low.isfinite(), x.high, x.low))


def mutants(program: Program) -> Iterator[tuple[str, Kernel]]:
    """A wrong kernel for each change of a contract, by the name of the change, for tests of a test suite."""
    return ((change.name, Kernel(change.program)) for change in changes(program))
