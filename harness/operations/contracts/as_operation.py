"""A contract as an operation: the method of a backend has the name of the contract and its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.judge import Shown, UndeterminedError, accepted_table, judge_batch
from narrowgauge.harness.operations.contracts.results import (
    has_rows,
    named_results,
    result_tensors,
    stored_results,
)
from narrowgauge.harness.operations.contracts.stored_operands import (
    batch_of,
    products_of,
    stored_inputs,
    stored_operand,
)
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.harness.operations.stages.rows import rows_stage
from narrowgauge.spec.program import ContractError
from narrowgauge.spec.recipes import find_recipe


def contract_operation(cls: type[ContractCase]) -> Operation[ContractCase]:
    """The operation of a contract."""
    return Operation(case=cls, inputs=_inputs, judge=_judge, show=accepted_table)


def _inputs(make: Maker[ContractCase]) -> Inputs:
    case = make.case
    count = batch_of(case)
    if not count:
        return Inputs(contract_inputs(case.program, case.sizes, case.inputs, make.draw("contract")))
    draws = [make.draw(f"contract {number}") for number in range(count)]
    parts = [contract_inputs(case.program, case.sizes, case.inputs, draw) for draw in draws]
    return Inputs({name: torch.stack([part[name] for part in parts]) for name in parts[0]})


def _judge(case: ContractCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run the method with the name of the contract, and judge its results."""
    fields = case.declared_fields(backend.declares)
    shown, outcome = called(case, inputs, backend)
    by_rows = case.declared.rows and has_rows(case.program) and not batch_of(case)
    if by_rows and len(next(iter(inputs.tensors.values()))) > 1:
        outcome.stages.append(_rows(case, inputs, backend, shown[0]))
    program, others = case.declared_program(fields), list(_other_fields(case, fields))
    try:
        calls = zip(products_of(case, inputs.tensors), shown, strict=True)
        return judge_batch(program, list(calls), outcome, others)
    except UndeterminedError as error:
        if any(stage.mismatches for stage in outcome.stages):
            return outcome
        raise Unsupported(f"the contract determines too little: {error}") from error


def _other_fields(case: ContractCase, fields: Mapping[str, Any]) -> Iterator[Change]:
    """The contract with another value of each field: a kernel may follow it without a declaration."""
    own = {name: case.request.options[name] for name in case.declared.fields} | dict(fields)
    for name in case.declared.fields:
        value = own[name]
        for other in case.declared.choices[name]:
            if other == value:
                continue
            with suppress(ContractError):  # of a saved failure, which has no other steps
                program = case.with_fields({**own, name: other})
                sentence = f"{name} is {other!r}, which the backend can declare (docs/contracts.md)"
                yield Change(f"field:{name}={other}", sentence, program)


def _rows(case: ContractCase, inputs: Inputs, backend: Backend, shown: Shown) -> StageResult:
    """The stage of rows by themselves."""
    axis = case.program.arguments[0].axes[:1]
    names = {a.name for a in case.program.arguments if a.axes[:1] == axis}
    by_row = {name: tensor for name, tensor in inputs.tensors.items() if name in names}
    others = {name: tensor for name, tensor in inputs.tensors.items() if name not in names}
    whole = {name: tensor for name, tensor in stored_results(case.program, shown).items() if tensor.dim() > 1}

    def run(given: Tensors) -> Tensors:
        found = named_results(case.program, given, _call(case, backend, given))
        return {name: t for name, t in stored_results(case.program, found).items() if name in whole}

    return rows_stage(backend, by_row, others, whole, run)


def called(case: ContractCase, inputs: Inputs, backend: Backend) -> tuple[list[Shown], Outcome]:
    """The results of the method with the name of the contract, of each product of a batch, and the stages of its
    repeated and guarded calls.

    Raises BackendError and Unsupported, as the backend does, and BackendError for results that do not fit.
    """
    given = stored_inputs(case, inputs.tensors)
    outputs, protection, seconds = repeated(backend, inputs.x.device, given, partial(_call, case, backend))
    dense_outputs = {name: dense(tensor) for name, tensor in outputs.items()}
    with _form_of(case):
        shown: list[Shown] = [
            named_results(case.program, tensors, part)
            for tensors, part in zip(
                products_of(case, inputs.tensors), products_of(case, dense_outputs), strict=True
            )
        ]  # fmt: skip
    return shown, Outcome(protection, outputs, seconds=seconds)


def _call(case: ContractCase, backend: Backend, given: Tensors) -> Tensors:
    """The tensors that the method gives for these tensors."""
    recipes = dict(zip(case.declared.recipes, map(find_recipe, case.recipe_names), strict=True))
    operands = {name: stored_operand(case, given, name) for name in case.declared.quantized}
    known: dict[str, Any] = {**given, **recipes, **operands}
    arguments = [known[name] for name in case.declared.parameters if name in known]
    result = backend.call(next(iter(case.all_methods())), *arguments, **case.passed)
    with _form_of(case):
        return result_tensors(case.program, result)


@contextmanager
def _form_of(case: ContractCase) -> Iterator[None]:
    """Raise BackendError for a result that does not fit."""
    try:
        yield
    except (TypeError, ValueError) as error:
        method = next(iter(case.all_methods()))
        raise BackendError(f"{method} gave a result that does not fit: {error}") from error
