"""A contract as an operation: the method of a backend has the name of the contract and its parameters."""

from __future__ import annotations

from typing import Any

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.inputs.inputs import Inputs, Maker, laid_out
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.judge import Shown, accepted_table, judge_contract
from narrowgauge.harness.operations.contracts.results import named_results, result_tensors
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.spec.recipes import find_recipe


def contract_operation(cls: type[ContractCase]) -> Operation[ContractCase]:
    """The operation of a contract."""
    return Operation(case=cls, inputs=_inputs, judge=_judge, show=accepted_table)


def _inputs(make: Maker[ContractCase]) -> Inputs:
    case = make.case
    return Inputs(contract_inputs(case.program.arguments, case.sizes, case.inputs, make.draw("contract")))


def _judge(case: ContractCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run the method with the name of the contract, and judge its results."""
    fields: Any = backend.declares.get(case.operation, {})
    shown, outcome = called(case, inputs, backend)
    return judge_contract(case.declared_program(fields), inputs.tensors, shown, outcome)


def called(case: ContractCase, inputs: Inputs, backend: Backend) -> tuple[Shown, Outcome]:
    """The results of the method with the name of the contract, and the stages of its repeated and guarded calls.

    Raises BackendError and Unsupported, as the backend does, and BackendError for results that do not fit.
    """
    program = case.program
    method = next(iter(case.all_methods()))
    recipes = dict(zip(case.declared.recipes, case.recipe_names, strict=True))

    def call(given: Tensors) -> Tensors:
        arguments: list[Any] = []
        for name in case.declared.parameters:
            if name in given:
                arguments.append(given[name])
            elif name in recipes:
                arguments.append(find_recipe(recipes[name]))
        result = backend.call(method, *arguments, **case.passed)
        try:
            return result_tensors(program, result)
        except (TypeError, ValueError) as error:
            raise BackendError(f"{method} gave a result that does not fit: {error}") from error

    given = {name: laid_out(tensor, case.view) for name, tensor in inputs.tensors.items()}
    outputs, protection, seconds = repeated(backend, inputs.x.device, given, call)
    try:
        shown = named_results(program, inputs.tensors, {name: dense(tensor) for name, tensor in outputs.items()})
    except (TypeError, ValueError) as error:
        raise BackendError(f"{method} gave a result that does not fit: {error}") from error
    return shown, Outcome(protection, outputs, seconds=seconds)
