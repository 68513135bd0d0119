"""A contract as an operation: the method of a backend has the name of the contract and its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.cases.axes import size_of
from narrowgauge.harness.cases.contracts.case import ContractCase, ProductCase
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.contracts.causes.batches import add_batch_causes
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.judge import accepted_table, judge_calls
from narrowgauge.harness.operations.contracts.ranks import judge_ranks
from narrowgauge.harness.operations.contracts.results import (
    fitting,
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
from narrowgauge.harness.operations.stages.rows import INVARIANT, Independent, add_rows, prefill_stage
from narrowgauge.reference.contracts.evaluate import Shown
from narrowgauge.reference.contracts.layout.pages import written_slots
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, Cache
from narrowgauge.spec.program import WRITTEN, ContractError
from narrowgauge.spec.recipes import find_recipe


def contract_operation(cls: type[ContractCase]) -> Operation[ContractCase]:
    """The operation of a contract."""
    return Operation(case=cls, inputs=_inputs, judge=_judge, show=accepted_table, run=_run, told_apart_by="fields")


def _run(case: ContractCase, inputs: Inputs, backend: Backend) -> tuple[Tensors, list[StageResult]]:
    """The results of all products of a batch, and the stages of repeated and guarded calls."""
    shown, outcome = called(case, inputs, backend)
    parts = [stored_results(case.program, one) for one in shown]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}, outcome.stages


def _inputs(make: Maker[ContractCase]) -> Inputs:
    case = make.case
    count = batch_of(case)
    if not count:
        return Inputs(contract_inputs(case.program, case.sizes, case.inputs, make.draw("contract")))
    draws = [make.draw(f"contract {number}") for number in range(count)]
    parts = [contract_inputs(case.program, case.sizes, case.inputs, draw, n) for n, draw in enumerate(draws)]
    return Inputs({name: torch.stack([part[name] for part in parts]) for name in parts[0]})


def _judge(case: ContractCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run the method with the name of the contract, and judge its results."""
    fields = case.declared_fields(backend.declares)
    program, others = case.declared_program(fields), list(_other_fields(case, fields))
    if case.declared.of_ranks:
        return judge_ranks(case, inputs, backend, program, others)
    shown, outcome = called(case, inputs, backend)
    add_rows(outcome, _rows(case, inputs, backend, shown[0]), backend)
    calls = list(zip(products_of(case, inputs.tensors), shown, strict=True))
    outcome = judge_calls(program, calls, outcome, others)
    if isinstance(case, ProductCase) and case.batch > 1:
        add_batch_causes(outcome, case, program, calls)
    stores = any(program.steps[number].function == WRITTEN for number in program.outputs.values())
    if stores and all(stage.passed for stage in outcome.stages):
        outcome.stages.append(_prefill(case, inputs, backend, shown[0]))
    return outcome


def _other_fields(case: ContractCase, fields: Mapping[str, Any]) -> Iterator[Change]:
    """The contract with a changed value of every field: a kernel may follow it without a declaration."""
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


def _rows(case: ContractCase, inputs: Inputs, backend: Backend, shown: Shown) -> Independent | None:
    """The rows of a contract, or its requests. None: rows may be dependent."""
    said = case.declared.rows or backend.declares.get("batch") == INVARIANT
    if not said or batch_of(case) or not (case.declared.sequences or has_rows(case.program)):
        return None
    first = case.program.arguments[0].axes[0]
    parts = [re.split(r"[*/]", a.axes[0]) for a in case.program.arguments if a.axes[0] != first]
    if any(first in names for names in parts):  # scales of several rows, or several rows for a row
        return None
    axes = {first} | ({"requests"} if case.declared.sequences else set())
    names = {a.name for a in case.program.arguments if a.axes[0] in axes}
    by_unit = {name: tensor for name, tensor in inputs.tensors.items() if name in names}
    shared = {name: tensor for name, tensor in inputs.tensors.items() if name not in names}
    judged = [name for name, tensor in stored_results(case.program, shown).items() if tensor.dim() > 1]

    def run(given: Tensors) -> Tensors:
        found = stored_results(case.program, named_results(case.program, given, call_contract(case, backend, given)))
        return {name: found[name] for name in judged}

    if case.declared.sequences:
        kinds = {name: kind for name, (kind, _, _) in case.declared.tensors.items()}
        sizes = next(by_unit[name].tolist() for name, kind in kinds.items() if kind == "QueryLengths")
        return Independent(len(sizes), by_unit, run, shared, sizes, noun="request")
    return Independent(len(next(iter(by_unit.values()))), by_unit, run, shared)


def _prefill(case: ContractCase, inputs: Inputs, backend: Backend, shown: Shown) -> StageResult:
    """The stage of a second run, with different bytes in the cache before."""
    cache = {a.name for a in case.program.arguments if a.of_cache}
    before = {name: inputs.tensors[name] for name in cache}
    others = {name: tensor for name, tensor in inputs.tensors.items() if name not in cache}
    first = stored_results(case.program, shown)
    written = dict.fromkeys(first, written_slots(case.program, inputs.tensors))

    def run(given: Tensors) -> Tensors:
        return stored_results(case.program, named_results(case.program, given, call_contract(case, backend, given)))

    return prefill_stage(backend, before, others, first, written, run)


def called(case: ContractCase, inputs: Inputs, backend: Backend) -> tuple[list[Shown], Outcome]:
    """The results of the method with the name of the contract, of each product of a batch, and the stages of its
    repeated and guarded calls.

    Raises BackendError and Unsupported, as the backend does, and BackendError for results that do not fit.
    """
    given = stored_inputs(case, inputs.tensors)
    outputs, protection, seconds = repeated(backend, inputs.x.device, given, partial(call_contract, case, backend))
    dense_outputs = {name: dense(tensor) for name, tensor in outputs.items()}
    with fitting(next(iter(case.all_methods()))):
        shown: list[Shown] = [
            named_results(case.program, tensors, part)
            for tensors, part in zip(
                products_of(case, inputs.tensors), products_of(case, dense_outputs), strict=True
            )
        ]  # fmt: skip
    return shown, Outcome(protection, outputs, seconds=seconds)


def call_contract(case: ContractCase, backend: Backend, given: Tensors) -> Tensors:
    """The results of the method for these tensors."""
    recipes = dict(zip(case.declared.recipes, map(find_recipe, case.recipe_names), strict=True))
    known: dict[str, Any] = {**given, **recipes}
    for argument in case.program.arguments:
        if "*" in argument.axes[0]:
            rows = tuple(size_of(part, case.sizes) for part in argument.axes[0].split("*"))
            known[argument.name] = torch.unflatten(given[argument.name], 0, rows)
    for name in case.declared.quantized:
        known[name] = stored_operand(case, given, name)
    for name in case.declared.caches:
        known[name] = _cache(case, name, given)
    by_name = case.declared.by_name
    arguments = [known[name] for name in case.declared.parameters if name in known and name not in by_name]
    named = {name: known[name] for name in by_name if name in known}
    method = next(iter(case.all_methods()))
    result = backend.call(method, *arguments, **named, **case.passed)
    with fitting(method):
        found = result_tensors(case.program, result)
        layout = PAGE_LAYOUTS[case.page_layout]
        return {n: layout.logical(t, n) if n in _STORED and case.declared.caches else t for n, t in found.items()}


_STORED = ("keys", "values", "key_scales", "value_scales")


def _cache(case: ContractCase, name: str, given: Tensors) -> Cache:
    """The cache of a kernel, in the page layout of the case."""
    layout = PAGE_LAYOUTS[case.page_layout]
    parts = {part: layout.stored(given[f"{name}.{part}"], part) for part in _STORED if f"{name}.{part}" in given}
    scales = parts.get("key_scales"), parts.get("value_scales")
    recipe, page = find_recipe(case.recipe_names[0]), given[f"{name}.keys"].shape[1]
    return Cache(parts["keys"], parts["values"], *scales, recipe, layout.name, page)
