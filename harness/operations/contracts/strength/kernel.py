"""Kernels that compute a contract, also one with a changed step: samples of right and of wrong kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.operations.contracts.causes.changes import Change, changes
from narrowgauge.harness.operations.contracts.results import stored_results
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import STEPS, Evaluation
from narrowgauge.reference.contracts.functions import FUNCTIONS
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.quantized import problem
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.program import Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

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
        found: dict[str, torch.Tensor | Quantized] = {}
        for name, number in self.program.outputs.items():
            value = values[number]
            found[name] = value if isinstance(value, Quantized) else _in(value, self.program.steps[number].dtype)
        return found

    def _value(
        self, step: Step, values: list[Any], tensors: Mapping[str, torch.Tensor], draw: torch.Generator | None
    ) -> torch.Tensor:
        """The numbers of a step, float64; of a comparison bool."""
        operands: list[torch.Tensor] = [values[number] for number in step.operands]
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
            return torch.broadcast_tensors(*operands)[of]  # type: ignore[no-untyped-call,no-any-return]
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


# ---- changes as kernels ----------------------------------------------------------------------------------------------


def formulas(program: Program) -> list[str]:
    """A text for each step that is equal for steps with the same formula of the arguments."""
    found: list[str] = []
    for step in program.steps:
        operands = [found[operand] for operand in step.operands]
        formula = f"{step.function} {operands} {step.options} {step.dtype}"
        found.append(hashlib.sha256(formula.encode()).hexdigest())
    return found


def wrong_programs(program: Program) -> list[Change]:
    """The changes that a kernel can have. Of several admitted formulas, the changed ones are the only ones left."""
    known, found = set(formulas(program)), []
    for change in changes(program):
        steps = list(change.program.steps)
        texts = formulas(change.program)
        for number, step in enumerate(steps):
            new = tuple(operand for operand in step.operands if texts[operand] not in known)
            if step.function == "any_of" and new:
                steps[number] = replace(step, operands=new)
        if all(step.recipe is None or problem(find_recipe(step.recipe)) is None for step in steps):
            found.append(replace(change, program=replace(change.program, steps=tuple(steps))))
    return found


def mutants(program: Program) -> Iterator[tuple[str, Kernel]]:
    """A wrong kernel for each change of a contract, by the name of the change, for tests of a test suite."""
    return ((change.name, Kernel(change.program)) for change in wrong_programs(program))
