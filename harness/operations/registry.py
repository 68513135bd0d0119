"""The objects of the operations by name, inputs of a case, and the judgement of a case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import OPERATIONS, OperationError, main_module
from narrowgauge.harness.inputs.generators import GENERATORS
from narrowgauge.harness.inputs.inputs import Inputs, Maker, default_inputs
from narrowgauge.harness.operations.contracts.as_operation import contract_operation
from narrowgauge.harness.operations.operation import Operation

if TYPE_CHECKING:
    from narrowgauge.harness.inputs.capture import Captured


def operation_of(case: Case | type[Case]) -> Operation[Any]:
    """The operation of a case. Raises OperationError if it cannot be loaded."""
    return operation_called(case.operation)


def operation_called(name: str) -> Operation[Any]:
    """The operation with this name. Raises OperationError if it cannot be loaded."""
    if (contract := OPERATIONS.places[name].contract) is not None:
        return contract_operation(contract)
    operation = main_module(name).OPERATION
    if not isinstance(operation, Operation):
        raise OperationError(f"operation {name}: OPERATION is {type(operation).__name__}, not an Operation")
    if operation.judge is None and (operation.reference is None or not operation.results):
        raise OperationError(f"operation {name}: OPERATION has no judge; give it one, or `reference` and `results`")
    if operation.judge is not None and operation.deviations:
        raise OperationError(
            f"operation {name}: `deviations` belong to `reference` and `results`; OPERATION has a judge"
        )
    unknown = operation.case.families().keys() - GENERATORS.keys() if operation.inputs is default_inputs else ()
    if unknown:
        raise OperationError(f"operation {name}: OPERATION has no `inputs`, which make the family {min(unknown)!r}")
    return operation


def make_inputs(case: Case, *, seed: int = 0, captured: Captured | None = None) -> Inputs:
    """The inputs of `case`: the same bytes for the same case id and seed, on every machine.

    If `case.inputs` names a captured tensor, `captured` holds it: x of a quantize and w of a gemm. Raises ValueError if
    it does not, or if the tensor has another shape or dtype than the case.
    """
    return operation_of(case).inputs(Maker(case, seed, captured))
