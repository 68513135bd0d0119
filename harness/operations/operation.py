"""An operation as one object: its functions for the rest of the harness, with defaults.

The case class answers all questions that need no tensor (`harness.cases.case.Case`): families, cost, axes, methods. An
operation with a `reference` needs no more than this function and the forms of its results: inputs, the guarded call of
the backend, the stages, what `show` prints and the causes of wrong bytes follow. The fields can be filled from data: a
function of a field may be a `partial` of a function and a list of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.cases.axes import size_of
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.harness.checks.exact import exact_floats, exact_integers
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import CaseT, Inputs, Maker, default_inputs, laid_out
from narrowgauge.harness.machine.timing import count_seconds
from narrowgauge.harness.operations.stages.outcome import Limit, Outcome
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.harness.operations.stages.quantized import float_views
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.harness.operations.stages.table import Place, Table, compared_table
from narrowgauge.spec.dtypes import TORCH_DTYPES

_GENERIC = (
    "recipe",
    "w_recipe",
    "out_recipe",
    "training",
    "shape",
    "dtype",
    "inputs",
    "view",
    "autograd",
    "repeats",
    "concurrency",
)
"""Keys of a case that are no options of a method."""


@dataclass(frozen=True)
class Result:
    """A tensor that an operation gives: its axes by the names of `Case.extents`, and its dtype."""

    axes: tuple[str, ...]
    dtype: torch.dtype | None = None
    """None: the dtype of the field `dtype` of the case."""

    def form(self, case: Any) -> TensorForm:
        """The shape and dtype of the result of a case."""
        shape = tuple(size_of(axis, case.sizes) for axis in self.axes)
        return TensorForm(shape, TORCH_DTYPES[case.dtype] if self.dtype is None else self.dtype)


@dataclass(frozen=True)
class Deviation(Generic[CaseT]):
    """A known mistake: results under the mistake, for the inputs of a case."""

    sentence: str
    results: Callable[[CaseT, Tensors], Tensors]


@dataclass(frozen=True, kw_only=True)
class Operation(Generic[CaseT]):
    """An operation. `judge` of an operation with stages of its own; else `reference` and `results`."""

    case: type[CaseT]
    inputs: Callable[[Maker[CaseT]], Inputs] = default_inputs
    """The inputs of a case. By default all named tensors of the case are drawn from the family."""
    judge: Callable[[CaseT, Inputs, Backend], Outcome] | None = None
    """Runs and judges a backend. None: `judge_results` with the fields below."""
    reference: Callable[[CaseT, Tensors], Tensors] | None = None
    """Expected results by name, for the inputs by name."""
    results: Mapping[str, Result] = field(default_factory=dict)
    """The tensors that the method gives, in order. Each is a stage."""
    arguments: Callable[[CaseT, Tensors], tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None
    """Positional arguments and keywords of the method. None: the inputs in order, the recipe if the case has one, and
    the keys of the case that are its own and differ from their defaults."""
    compare: Callable[[CaseT, str, torch.Tensor, torch.Tensor], StageResult] | None = None
    """The stage of a result: case, name, result and expected result. None: equal bits."""
    run: Callable[[CaseT, Inputs, Backend], tuple[Tensors, list[StageResult]]] | None = None
    """Results of a backend by name, and the stages of its repeated and guarded calls, without a judge. None: those of
    the outcome."""
    told_apart_by: Literal["", "rule", "fields", "order"] = ""
    """What tells two kernels apart: the rule of a recipe, the fields of a contract, the order of a sum; empty: nothing
    known."""
    deviations: Mapping[str, Deviation[CaseT]] = field(default_factory=dict)
    """Known mistakes by the name of their cause. Deviations explain wrong bytes, and `narrowgauge mutants` runs
    them."""
    show: Callable[[Inputs, Outcome, Place | None], Table | None] = compared_table
    """What `narrowgauge show` prints of an outcome around a place. None: the result is empty."""

    def __call__(self, case: CaseT, inputs: Inputs, backend: Backend) -> Outcome:
        """Run and judge a backend. Raises TypeError for a case of another operation."""
        if not isinstance(case, self.case):
            raise TypeError(f"{self.case.__name__} takes no {type(case).__name__}")
        return (self.judge or partial(judge_results, self))(case, inputs, backend)

    @property
    def method(self) -> str:
        """The method of a backend that `judge_results` calls."""
        return next(iter(self.case.all_methods()))

    def passed(self, case: CaseT, given: Tensors) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Positional arguments and keywords of the method."""
        if self.arguments is not None:
            return self.arguments(case, given)
        own = (key for key in keys_of(self.case) if key.field not in _GENERIC)
        options = {key.field: value for key in own if (value := getattr(case, key.field)) != key.default}
        return (*(given[name] for name in case.tensors if name in given), *case.recipes), options


def judge_results(operation: Operation[CaseT], case: CaseT, inputs: Inputs, backend: Backend) -> Outcome:
    """Run the method of an operation, and compare each result with the reference.

    Raises ValueError for a reference whose results have other names, shapes or dtypes than the operation declares.
    """
    assert operation.reference is not None, f"{operation.case.operation} has neither judge nor reference"
    check_inputs(case, inputs)
    forms = {name: result.form(case) for name, result in operation.results.items()}
    view = getattr(case, "view", "contiguous")

    def call(given: Tensors) -> Tensors:
        arguments, options = operation.passed(case, given)
        return backend.results(operation.method, forms, *arguments, **options)

    given = {name: laid_out(tensor, view) for name, tensor in inputs.tensors.items()}
    outputs, protection, seconds = repeated(backend, inputs.x.device, given, call)
    with count_seconds("reference"):
        expected = operation.reference(case, {name: tensor.clone() for name, tensor in inputs.tensors.items()})
    check_expected(operation, case, expected)
    outcome = Outcome(protection, outputs, seconds=seconds)
    compare = operation.compare or compare_bits
    found = {name: dense(tensor) for name, tensor in outputs.items()}
    search = partial(deviating_causes, operation, case, inputs.tensors, found)
    for name in operation.results:
        stage = compare(case, name, found[name], expected[name])
        if stage.mismatches and not stage.sentence:
            stage.sentence = f"{stage.mismatches} of {stage.compared} elements of {name} are wrong"
        outcome.stages.append(stage)
        outcome.causes[stage.stage] = search
    first = next((stage.stage for stage in outcome.stages if not stage.passed), "")
    shown = first if first in forms else next(iter(operation.results))
    outcome.actual, outcome.expected = found[shown], expected[shown]
    return outcome


def check_inputs(case: CaseT, inputs: Inputs) -> None:
    """Raise ValueError unless the inputs are the tensors that the case names, in the shapes of their axes."""
    if inputs.tensors.keys() != case.tensors.keys():
        raise ValueError(f"the inputs are {', '.join(inputs.tensors)}; tensors names {', '.join(case.tensors)}")
    for name, tensor in inputs.tensors.items():
        shape = tuple(size_of(axis, case.sizes) for axis in case.tensors[name])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"the input {name} has shape {tuple(tensor.shape)}; tensors says {shape}")


def check_expected(operation: Operation[CaseT], case: CaseT, expected: Tensors) -> None:
    """Raise ValueError unless results of a reference have the declared names, shapes and dtypes."""
    if list(expected) != list(operation.results):
        raise ValueError(f"the reference gave {', '.join(expected)}; results names {', '.join(operation.results)}")
    for name, result in operation.results.items():
        form = result.form(case)
        if (tuple(expected[name].shape), expected[name].dtype) != (form.shape, form.dtype):
            is_ = f"{tuple(expected[name].shape)} {expected[name].dtype}"
            raise ValueError(f"the reference gave {name} as {is_}; results says {form.shape} {form.dtype}")


def compare_bits(case: CaseT, name: str, actual: torch.Tensor, expected: torch.Tensor) -> StageResult:
    """Compare the bits of a result (…, K), or (M,), which is a column. Every NaN counts as the same one."""
    columns = actual.shape[-1] if actual.dim() > 1 else 1
    rows = actual.numel() // max(1, columns)
    one, other = (tensor.reshape(rows, columns) for tensor in (actual, expected))

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        return {"row": row, "column": column, **float_views(other[here], one[here])}

    check = exact_floats if one.is_floating_point() and one.element_size() > 1 else exact_integers
    one, other = (_codes(tensor) if tensor.element_size() == 1 else tensor for tensor in (one, other))
    return check(name, one, other, noun=f"elements of {name}", describe=describe)


def _codes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of one-byte elements. Every NaN of an FP8 dtype is 255."""
    codes = tensor.contiguous().view(torch.uint8)
    return codes.masked_fill(tensor.float().isnan(), 255) if tensor.is_floating_point() else codes


def deviating_causes(
    operation: Operation[CaseT], case: CaseT, given: Tensors, found: Tensors, stage: StageResult, limit: Limit
) -> Iterable[Cause]:
    """Known mistakes under which all results of the kernel are right."""
    compare = operation.compare or compare_bits
    for cause, deviation in operation.deviations.items():
        if limit.may_try(sum(tensor.numel() for tensor in given.values())):
            results = deviation.results(case, given)
            if all(not compare(case, name, found[name], results[name]).mismatches for name in operation.results):
                yield cause, deviation.sentence
