"""Kernels of a contract, also with a changed step: samples of right and of wrong kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.operations.contracts.causes.changes import Change, changes
from narrowgauge.harness.operations.contracts.causes.replay import Keys
from narrowgauge.harness.operations.contracts.results import stored_results
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import STEPS, Evaluation, bits_of, of_rows
from narrowgauge.reference.contracts.functions import FUNCTIONS
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.reference.contracts.layout.pages import Stored, given_scale, store
from narrowgauge.reference.contracts.products import of_rotated, of_statistics
from narrowgauge.reference.contracts.quantized import problem
from narrowgauge.spec.program import GEMM, HALF, INDEX, ONCE, TAKE, WRITTEN, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

_RELATIONS = {">": torch.gt, ">=": torch.ge, "<": torch.lt, "<=": torch.le}
_FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div, "square": torch.square,
    "negative": torch.neg, "absolute": torch.abs, "maximum": torch.maximum, "minimum": torch.minimum,
    "where": torch.where, TAKE: lambda table, index: table[index.long()],
    **{name: function.evaluate for name, function in FUNCTIONS.items()},
}  # fmt: skip
"""Steps that torch has, in float64. The middle of the interval stands for every other step."""


Known = list[tuple[list[torch.Tensor], Any]]
"""Operands of a step and its interval."""
_KNOWN = 4
"""Operands of a step that are kept."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that computes the steps of a contract with torch, called with the tensors by name."""

    program: Program
    seed: int | None = None
    """None: every number is in float32. Else each step draws whether its numbers round to float32 or stay in float64,
    sums are off by a random error of the size of another order, and one of several formulas is taken."""
    known: dict[str, Known] | None = field(default=None, compare=False)
    """Intervals of steps for kernels with the same tensors: a sum that no change concerns is evaluated once for all."""

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The results by the names of `narrowgauge.harness.operations.contracts.results.named_results`.

        `tensors`: the arguments of the contract, with their dtypes and axes. Raises ValueError for sizes that a step
        does not take.
        """
        return stored_results(self.program, self.results(tensors))

    def results(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Quantized | Stored]:
        """The results by the names of the outputs; a quantization is a `Quantized` by the recipe of its step."""
        draw = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        given = of_rows(self.program, tensors, slice(None))
        values: list[Any] = []
        for step in self.program.steps:
            if step.function == HALF or step.dtype == INDEX:  # the steps that store and read take them from the tensors
                values.append(None)
                continue
            if step.function == WRITTEN:
                values.append(store(self.program, step, values[step.operands[0]], given))
                continue
            if step.recipe is None:
                values.append(self._value(step, values, given, draw))
                continue
            scale, random = given_scale(self.program, step, tensors), bits_of(self.program, step, given)
            y, recipe = _in(values[step.operands[0]], step.dtype), find_recipe(step.recipe)
            if step.options.get("statistics"):
                other = step.operands[1]
                statistics = _in(values[other], self.program.steps[other].dtype)
                values.append(of_statistics(y, statistics, recipe, random))
            else:
                values.append(of_rotated(y, recipe, scale, random))
        found: dict[str, torch.Tensor | Quantized | Stored] = {}
        for name, number in self.program.outputs.items():
            value = values[number]
            stored = isinstance(value, Quantized | Stored)
            found[name] = value if stored else _in(value, self.program.steps[number].dtype)
        return found

    def _value(
        self, step: Step, values: list[Any], tensors: Mapping[str, torch.Tensor], draw: torch.Generator | None
    ) -> Any:
        """The numbers of a step, float64; of a comparison bool; of a quantized argument a `Quantized`."""
        operands: list[Any] = [values[number] for number in step.operands]
        name, options = step.function, dict(step.options)
        if name in ("float32", ONCE):
            return operands[0]
        if name == "compare":
            return _RELATIONS[options["relation"]](*operands)
        if name == "cast" and not options:
            return _in(operands[0], step.dtype).double()
        if name == "any_of":
            of = 0 if draw is None else int(torch.randint(len(operands), (), generator=draw))
            return torch.broadcast_tensors(*operands)[of]  # type: ignore[no-untyped-call]
        if name in _FUNCTIONS and (name == "divide" or not options):
            value = _FUNCTIONS[name](*operands)
        else:
            found = self._evaluated(step, operands, tensors)
            if isinstance(found, Quantized):
                return found
            value = _inside(found, step, operands, draw)
        if draw is not None and bool(torch.randint(2, (), generator=draw)):
            return value
        return value.float().double()

    def _evaluated(self, step: Step, operands: list[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
        """The interval of a step, or its `Quantized`."""
        kept = None
        if self.known is not None and operands and all(isinstance(x, torch.Tensor) for x in operands):
            kept = self.known.setdefault(
                f"{self.program.subnormals} {step.function} {step.dtype} {dict(step.options)}", []
            )
            for before, found in kept:
                if all(map(torch.equal, before, operands)):
                    return found
        evaluation = Evaluation(self.program, tensors, rows=slice(0, 0))
        for number, x in zip(step.operands, operands, strict=True):
            evaluation.values[number] = x if isinstance(x, Quantized) else Interval(x, x)
        found = STEPS[step.function](evaluation, step)
        if kept is not None:
            kept[:] = [*kept[1 - _KNOWN :], (operands, found)]
        return found


def _in(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers of a hidden step in a dtype, from float32."""
    return x.float().to(DTYPES[dtype])


def _inside(x: Interval, step: Step, operands: list[Any], draw: torch.Generator | None) -> torch.Tensor:
    """Numbers of an interval: the middle, and of a sum of n terms a number within its n^-½ part, as rounding errors add
    up in a sum of another order."""
    if x.point or draw is None:
        return x.low if x.point else _middle(x)
    many = len(operands) == 1 and isinstance(operands[0], torch.Tensor)
    terms = operands[0].numel() // max(1, x.low.numel()) if many else len(operands)
    if step.function == GEMM:
        terms = operands[0].shape[1]
    noise = torch.rand(x.shape, generator=draw, dtype=torch.float64) - 0.5
    error = (x.high - x.low) * noise / max(1, terms) ** 0.5
    return _middle(x) + torch.where(error.isfinite(), error, 0.0)


def _middle(x: Interval) -> torch.Tensor:
    """The middle of finite ends, else an end, which is NaN only if both are."""
    low, high = torch.where(x.low.isnan(), x.high, x.low), torch.where(x.high.isnan(), x.low, x.high)
    middle = low + (high - low) / 2
    return torch.where(middle.isfinite(), middle, torch.where(low.isfinite(), high, low))


# ---- changes as kernels ----------------------------------------------------------------------------------------------


def wrong_programs(program: Program) -> list[Change]:
    """The changes that a kernel of this module can have: all but those of the rounding and of the storing inside of a
    quantization, and of recipes that no contract takes. Of changes with the same computation, the first change."""

    own = {option for step in program.steps for option in step.options}

    def can_run(step: Step) -> bool:
        plain = not ({"rounding", "view", "statistics"} - own) & set(step.options)
        return step.recipe is None or (plain and problem(find_recipe(step.recipe)) is None)

    keys, found = Keys(), list[Change]()
    known = {keys.of_outputs(program)}
    for change in changes(program):
        key = keys.of_outputs(change.program)
        if key not in known and all(map(can_run, change.program.steps)):
            known.add(key)
            found.append(change)
    return found


def mutants(program: Program) -> Iterator[tuple[str, Kernel]]:
    """A wrong kernel for each change of a contract, by the name of the change, for tests of a test suite."""
    return ((change.name, Kernel(change.program)) for change in wrong_programs(program))
