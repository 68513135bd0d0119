"""An operation on inputs: the right result, and the results of kernels with known mistakes.

The mistakes come from the diagnosis: deviations of quantize, changes of the steps of a contract, and rows and columns
that a kernel leaves out or takes from a wrong place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.diagnosis.explain_memory import SAME_RESULT
from narrowgauge.harness.diagnosis.formulas.matrix_changes import LEFT_OUT, MATRIX_CHANGES, changed_matrices
from narrowgauge.harness.diagnosis.gemm.wider_format import WIDER_FORMAT
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.deviation_list import list_deviations
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import STAGES, KernelMatrix, kernel_matrix
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.strength.kernel import Kernel
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.quantized import Judged, Subject, quantize_stages
from narrowgauge.harness.power.result import Key
from narrowgauge.reference import ops
from narrowgauge.reference.contracts.evaluate import Evaluation, judged, of_rows
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.program import QUANTIZE, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

SAMPLES = 8
"""Number of sampled right kernels of a contract: orders of sums, roundings of steps and formulas differ."""
Results = Mapping[str, torch.Tensor | Quantized | Stored]
"""Results of a kernel by the names of the outputs. A tensor in place of a Quantized has values without codes."""


@dataclass(frozen=True)
class Mistake:
    """A known mistake, and the results of a kernel with this mistake."""

    name: str
    """The cause in reports, without the value behind a colon; of a contract the change of a step."""
    sentence: str
    results: Callable[[], Results]
    """Raises ValueError if these inputs cannot have the mistake."""


class Trial(ABC):
    """An operation on inputs."""

    label: str
    """The inputs: the id of a case, or the number of the call."""

    @property
    @abstractmethod
    def right(self) -> Results:
        """The results of a right kernel."""

    @property
    @abstractmethod
    def others(self) -> Sequence[Results]:
        """Results of further right kernels. The bytes may differ."""

    @abstractmethod
    def mistakes(self) -> Iterator[Mistake]:
        """The known mistakes of the operation."""

    @abstractmethod
    def accepts(self, results: Results) -> bool:
        """The verdict of narrowgauge."""


class QuantizeTrial(Trial):
    """A quantization of a matrix."""

    def __init__(
        self,
        label: str,
        x: torch.Tensor,
        recipe: Recipe,
        scale: torch.Tensor | None = None,
        random: Random | None = None,
        earlier: Results | None = None,
    ) -> None:
        """`x`, `scale`, `random`: arguments of the reference's quantize. `earlier`: results for further inputs of
        this shape."""
        self.label, self._earlier = label, earlier
        self._oracle = ops.quantize(x, recipe, scale=scale, random=random)
        self._subject = Subject(x.reshape(-1, x.shape[-1]), recipe, random, free=recipe.transform is not None)
        self._exact = recipe.transform is None and bool(x.isfinite().all())
        """Whether a single result is right. A NaN may have any bits, and a rotation may add in any order."""

    @property
    def right(self) -> Results:
        return {"quantized": _shown(self._oracle)}

    @property
    def others(self) -> Sequence[Results]:
        return ()

    def mistakes(self) -> Iterator[Mistake]:
        yield from changed_quantizations(self._subject, self._oracle, lambda q: {"quantized": q})
        yield from _of_any_kernel(self.right, {"quantized": self._subject.matrix}, self._earlier)

    def accepts(self, results: Results) -> bool:
        found = results["quantized"]
        if not isinstance(found, Quantized):
            return False
        if self._exact:  # the first stage that differs is wrong, since the stages before are the reference's
            return same_results(results, self.right)
        stages, _ = quantize_stages(self._subject, found, self._oracle)
        return all(stage.passed for stage in stages)


class ContractTrial(Trial):
    """A contract on its tensors."""

    def __init__(
        self,
        label: str,
        program: Program,
        tensors: Mapping[str, torch.Tensor],
        changes: Sequence[Change],
        earlier: Results | None = None,
    ) -> None:
        """`changes`: the `wrong_programs` of the program. `earlier`: results for further inputs of the same shapes."""
        self.label, self._program, self._tensors = label, program, tensors
        self._changes, self._earlier = changes, earlier

    @cached_property
    def right(self) -> Results:
        return Kernel(self._program).results(self._tensors)

    @cached_property
    def others(self) -> Sequence[Results]:
        every = (Kernel(self._program, seed).results(self._tensors) for seed in range(SAMPLES))
        return [results for results in every if self.accepts(results)]

    def mistakes(self) -> Iterator[Mistake]:
        for change in self._changes:
            yield Mistake(change.name, change.sentence, partial(Kernel(change.program).results, self._tensors))
        before: dict[str, torch.Tensor] = {}
        for name, number in self._program.outputs.items():
            step = self._program.steps[number]
            if step.function != QUANTIZE or {"rounding", "view", "statistics"} & set(step.options):
                continue
            y = before[name] = self._operand(step)
            scale = self._program.scale_of(step, self._tensors)
            recipe = find_recipe(step.recipe or "")
            oracle = ops.quantize(y, recipe, scale=scale)
            yield from changed_quantizations(Subject(y, recipe), oracle, partial(self._with, name))
        yield from _of_any_kernel(self.right, before, self._earlier)

    @cached_property
    def _known(self) -> Evaluation | None:
        """The evaluation for all judgements of a contract with a single result; None for several results."""
        if len(self._program.outputs) > 1:
            return None
        return Evaluation(self._program, of_rows(self._program, self._tensors, slice(None)))

    def _operand(self, step: Step) -> torch.Tensor:
        """The matrix that a step quantizes."""
        (y,) = Kernel(replace(self._program, outputs={"y": step.operands[0]})).results(self._tensors).values()
        assert isinstance(y, torch.Tensor)
        return y

    def _with(self, name: str, q: Quantized) -> Results:
        return {**self.right, name: q}

    def accepts(self, results: Results) -> bool:
        for name, number in self._program.outputs.items():
            if self._program.steps[number].recipe is not None and isinstance(results[name], torch.Tensor):
                return False
        return not any(bool(part.wrong.any()) for _, part in judged(self._program, self._tensors, results, self._known))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def changed_quantizations(
    subject: Subject, oracle: Quantized, results: Callable[[Quantized], Results]
) -> Iterator[Mistake]:
    """The known mistakes of quantize, without the rules of libraries and without mistakes that only describe a result.

    `oracle`: the right quantization of the subject. `results`: all results of a kernel with a wrong quantization.
    """
    matrix = kernel_matrix(Judged("", subject, oracle, oracle, oracle))
    masks = {stage: [torch.zeros_like(found).bool()] for stage, found in matrix.kernel_stages.items()}
    if not matrix.element_count:
        return
    for deviation in list_deviations([matrix], masks, SearchHistory(), dialects=False):
        if deviation.exact and not deviation.of_case and deviation.change is not None:
            yield Mistake(_kind(deviation), deviation.sentence, partial(_replayed, matrix, deviation, results))
    for row, changed in changed_matrices(LEFT_OUT, oracle.codes, "the matrix of codes"):
        yield Mistake(_kind(row), row.sentence, partial(results, replace(_shown(oracle), codes=changed)))


def _replayed(matrix: KernelMatrix, deviation: QuantizeDeviation, results: Callable[[Quantized], Results]) -> Results:
    """The results of a kernel with a deviation. Every stage is computed from the kernel's results of earlier stages."""
    stages = dict(matrix.kernel_stages)
    for stage in STAGES:
        if stage in stages:
            given = replace(matrix, kernel_stages=dict(stages))
            stages[stage] = Replay(given, deviation).compute_stage(stage)
    codes, scales, amax = stages["codes"], stages["scales"], stages.get("amax")
    return results(_shown(replace(matrix.result, codes=codes, scales=scales, amax=amax)))


def _kind(row: Deviation[Any]) -> str:
    return row.cause.partition(":")[0]


def _shown(q: Quantized) -> Quantized:
    """The result as a kernel returns it: with the amax, without the tensor scale."""
    return replace(q, tensor_scale=None) if q.amax is not None and q.recipe.tensor_scale != "given" else q


def _of_any_kernel(right: Results, before: Mapping[str, torch.Tensor], earlier: Results | None) -> Iterator[Mistake]:
    """Mistakes of every kernel: parts of a result are left out or taken from a wrong place, a buffer has the result of
    an earlier call, numbers are not quantized. `before`: the quantized matrix by output."""
    for name, found in right.items():
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            for row, changed in changed_matrices(MATRIX_CHANGES, found, f"the result {name}"):
                yield Mistake(_kind(row), row.sentence, partial(dict, {**right, name: changed}))
    if earlier is not None:
        yield Mistake(SAME_RESULT.cause, SAME_RESULT.sentence.format("the result is"), partial(dict, earlier))
    for name, x in before.items():
        yield Mistake(WIDER_FORMAT.cause, f"{name} is not quantized", partial(dict, {**right, name: x.float()}))


def numbered(mistakes: Iterable[Mistake]) -> Iterator[tuple[Key, Mistake]]:
    """Mistakes with the keys of their kernels."""
    before: Counter[tuple[str, str]] = Counter()
    for mistake in mistakes:
        name = mistake.name, mistake.sentence
        yield (*name, before[name]), mistake
        before[name] += 1


def same_results(one: Results, other: Results) -> bool:
    """Whether two results have the same bytes."""
    return all(
        type(one[name]) is type(found)
        and all(equal_bits(a, b) for a, b in zip(tensors_of(one[name]), tensors_of(found), strict=True))
        for name, found in other.items()
    )


def tensors_of(result: torch.Tensor | Quantized | Stored) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(result, Quantized):
        return [part for part in (result.codes, result.scales, result.amax) if part is not None]
    return list(result.parts.values()) if isinstance(result, Stored) else [result]
