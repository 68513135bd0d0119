"""The ground of the stages of a step of a module: plan, reported tensors, outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.backends.module_driver import Plan, Step
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.gemm.product import Operands
from narrowgauge.harness.operations.stages.high_precision import bounded_stage
from narrowgauge.harness.operations.stages.outcome import CauseSearch, Formula, Outcome, QuantizedOperand
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation


@dataclass
class Ground:
    """One step of a module: its results, the facts for its stages, and the outcome with the stages."""

    plan: Plan
    step: Step
    outcome: Outcome
    order: Callable[[Operands, Operands], Summation]
    """Gives the declared order of the sums of a product."""
    free: bool = False
    """Whether the rotation of the backend may add in any order."""
    own: bool = False
    """Whether the backend rounds by random bits of its own."""
    unseen: dict[str, None] = field(default_factory=dict)
    """Names of results that the module did not report. They are not compared."""
    others: dict[str, Step] = field(default_factory=dict)
    """Further forwards of the module, by the cause of a wrong operand from them."""
    unknown: dict[str, tuple[list[Quantized], list[Quantized]]] = field(default_factory=dict)
    """Operands of weight gradients that several pending steps share, by name."""
    passes: int = -1
    """Number of backwards before that of the step. -1: as many as steps before it."""
    figures: bool = True
    """Whether figures that decide no verdict are measured."""
    known: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Functions that give unreported matrices of the step, such as decoded operands, by the words of a sentence."""
    quantized: dict[str, QuantizedOperand] = field(default_factory=dict)
    """Quantized operands of formulas, by name."""

    def stage(self, name: str) -> str:
        """The name of a stage: the title of the step and `name`."""
        return f"{self.step.title} {name}"

    def seen(self, name: str) -> Any:
        """The last report under `name`. None, and noted in `unseen`: the module did not report it."""
        found = self.step.last(name)
        if found is None:
            self.unseen[name] = None
        return found

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A reported tensor as a tensor of `shape`. Raises BackendError for another number of elements."""
        found = self.seen(name)
        if found is None:
            return None
        return self._shaped(name, found, shape)

    def tensors(self, name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """The tensors reported under a name, in order, each of `shape`. Raises as `tensor` does."""
        return [self._shaped(name, found, shape) for found in self.step.seen.get(name, [])]

    @staticmethod
    def _shaped(name: str, found: Any, shape: tuple[int, ...]) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or found.numel() != torch.Size(shape).numel():
            what = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise BackendError(f"the module reported {name} as {what}, not as a tensor of shape {shape}")
        return found.reshape(shape)

    def high_precision(
        self,
        name: str,
        shape: tuple[int, ...],
        compute: Callable[..., Bounded],
        operands: Mapping[str, torch.Tensor | None],
        formula: str = "",
        *,
        expected: Bounded | None = None,
        dtype: torch.dtype | None = None,
        **given: Any,
    ) -> torch.Tensor | None:
        """Judge a reported tensor in high precision and give it. None: the module did not report the tensor.

        `compute`: the formula of the `operands`, by name; an operand is None without a report.
        `expected`: the result of the formula, if it is known already. `dtype`: of the tensor; None: the dtype of the
        module. `formula` and `given`: name and arguments of the known wrong formulas
        (`harness.diagnosis.formulas.explain_formula`).
        """
        found = self.tensor(name, shape)
        known = {key: operand for key, operand in operands.items() if operand is not None}
        if len(known) < len(operands):
            self.unseen[name] = None
            return found
        if found is not None:
            result = compute(**known) if expected is None else expected
            self.judge_formula(name, found, result, compute, known, formula, given, dtype)
        return found

    def judge_formula(
        self,
        name: str,
        found: torch.Tensor,
        expected: Bounded,
        compute: Callable[..., Bounded],
        operands: dict[str, torch.Tensor],
        formula: str,
        given: dict[str, Any],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add the stage of a tensor in high precision, and keep the first wrong formula for a diagnosis."""
        stage = bounded_stage(self.stage(name), found, expected, dtype or self.plan.dtype, figures=self.figures)
        self.outcome.stages.append(stage)
        if self.outcome.formula is None and not stage.passed:
            others = {key: tensor for key, tensor in self.known_tensors() if key != name}
            self.outcome.formula = Formula(
                formula, stage.stage, given, found, expected, compute, operands, others, self.batches,
                self.quantized,
            )  # fmt: skip

    def note_causes(self, stage: str, search: CauseSearch) -> None:
        """Keep the known mistakes of the first wrong stage, for a diagnosis."""
        if not self.outcome.causes and all(one.passed for one in self.outcome.stages):
            self.outcome.causes[self.stage(stage)] = search

    def note_origin(self, name: str, found: Any, stages: Sequence[StageResult]) -> None:
        """Add the cause of an operand of another forward to the first wrong stage of a reported operand."""
        wrong = next((stage for stage in stages if not stage.passed), None)
        if wrong is not None:
            wrong.causes += [cause for cause, other in self.others.items() if _same(found, other.last(name))]

    @property
    def batches(self) -> int:
        """Batches of x. 1 for a grouped layer, whose sections have different numbers of rows."""
        return self.step.x.shape[0] if self.step.x.dim() > 2 else 1

    def known_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the step and of other steps with their names: inputs, parameters, reported results."""
        for step, where in ((self.step, ""), *((other, f" of {other.title}") for other in self.others.values())):
            yield f"x{where}", step.x.flatten(0, -2)
            if not step.probe:
                yield f"dy{where}", step.dy.flatten(0, -2)
            yield from ((f"{name}{where}", tensor) for name, tensor in step.parameters.items())
            for name, values in step.seen.items():
                yield from ((f"{name}{where}", value) for value in values if isinstance(value, torch.Tensor))
        yield from ((name, matrix()) for name, matrix in self.known.items())


def _same(one: Any, other: Any) -> bool:
    """Whether two reports of an operand are the same: tensors, and lists and mappings of them."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
