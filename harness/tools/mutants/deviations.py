"""Known mistakes of operations, run as kernels: every deviation must fail a case, and the report must name the
deviation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case, matching
from narrowgauge.harness.operations.operation import Deviation, Operation
from narrowgauge.harness.operations.registry import operation_called
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.tools.mutants.conventional_tests import SQNR_DB, Detections
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.result import MutantResult

ENOUGH = 6
"""Failing cases after which a mistake needs no more."""
KIND = "known mistake"
"""Class of these mutants."""


def mistakes(names: Iterable[str], keyword: str) -> list[tuple[str, str]]:
    """Operation and cause of the known mistakes of operations whose `operation/cause` matches a keyword expression."""
    pairs = [(name, cause) for name in names for cause in operation_called(name).deviations]
    return [pair for pair in pairs if matching(keyword)("/".join(pair))]


def run_mistakes(
    chosen: Iterable[tuple[str, str]], cases: Sequence[Case], on_result: Callable[[MutantResult], None]
) -> list[MutantResult]:
    """Run known mistakes, each in place of the backend's method, on the cases of the operation, in this process."""
    results = []
    for name, cause in chosen:
        of_operation = sorted((case for case in cases if case.operation == name), key=_normal_first)
        operation = operation_called(name)
        results.append(_run(operation, cause, operation.deviations[cause], of_operation))
        on_result(results[-1])
    return results


def _normal_first(case: Case) -> tuple[bool, int]:
    return case.inputs != "normal", case.work


def _run(operation: Operation[Any], cause: str, deviation: Deviation[Any], cases: Sequence[Case]) -> MutantResult:
    started = time.monotonic()
    name = f"{operation.case.operation}/{cause}"
    result = MutantResult(Mutant(name, KIND, "", "", "", deviation.sentence, (cause,), ""))
    records = []
    for case in cases:
        record = run_case(case, _backend(operation, case, deviation)).to_dict()
        records.append(record)
        if record["verdict"] == "fail":
            result.failing.append(record)
        elif record["verdict"] != "pass":
            result.problem = record["message"]
            return result
        if len(result.failing) == ENOUGH:
            break
    result.ran = len(records)
    result.problem = "" if records else f"no case of {operation.case.operation} is selected"
    normal = [record for record in records if record["inputs"] == "normal"]
    result.detections = Detections(
        allclose=any(record["allclose"] is False for record in normal),
        compare_bytes=any(record["verdict"] == "fail" for record in normal),
        sqnr=any(record["sqnr_db"] is not None and record["sqnr_db"] <= SQNR_DB for record in normal),
    )
    result.seconds = time.monotonic() - started
    return result


def _backend(operation: Operation[Any], case: Case, deviation: Deviation[Any]) -> Backend:
    """A backend whose method has the mistake, for this case."""

    def method(*arguments: Any, **options: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        found = deviation.results(case, dict(zip(case.tensors, tensors, strict=False)))
        results = [found[name] for name in operation.results]
        return results[0] if len(results) == 1 else results

    return Backend.local(f"{operation.case.operation} with a mistake", SimpleNamespace(**{operation.method: method}))
