"""The assertion on the result of a kernel with a contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowgauge import adapt
from narrowgauge.contract import Contract, Program
from narrowgauge.harness.api.judging.judge_call import Judgement, assertion
from narrowgauge.harness.operations.contracts.judge import judge_contract
from narrowgauge.harness.operations.contracts.results import named_results, stored_results
from narrowgauge.reference.contracts.evaluate import check_tensors, parts_of
from narrowgauge.spec.kv_cache import Cache, logical_parts
from narrowgauge.spec.program import CODES, HALF
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe


@assertion
def assert_result(
    contract: Contract | Program | str, result: Any, *inputs: Any, diagnose: str = "quick", **arguments: Any
) -> Judgement:
    """Assert that `result` is a right result of a contract for `inputs`.

    contract: a function with `narrowgauge.contract.contract`, or its steps, also as the text of `Program.to_json`.
    result: a tensor, a tuple of the outputs in the order of the contract, or a mapping by name, which may leave out
    outputs. A quantization is a `Quantized`, or codes and scales, and the amax if the recipe has one.
    inputs: the tensors of the contract in the order of its parameters, or by name among `arguments`; a `Quantized` for
    an argument of the type Codes, and a `Cache` for one of the type Cache, as it was before the kernel. The result of a
    kernel with a changed cache is a `Cache` too.
    arguments: recipes and options of the contract by name. A dialect of the contract behind the name of the first
    recipe gives the options that are left out.
    diagnose: as of `assert_quantized`.

    Source of the rules: docs/contracts.md. Raises WrongResult for a wrong result, ContractError for a function that is
    no contract, ValueError and TypeError for arguments that do not fit together.
    """
    program, tensors = bound(contract, inputs, arguments)
    check_tensors(program, tensors)
    shown = named_results(program, tensors, logical_parts(result) if isinstance(result, Cache) else result)
    outcome = judge_contract(program, tensors, shown)
    first = next(iter(tensors.values()))
    label = f"{program.name} {'x'.join(map(str, first.shape))}"
    saved = {"contract": program.to_json(), "result": stored_results(program, shown), **tensors}
    return Judgement(outcome, label, first, diagnose, saved=saved)


def bound(
    contract: Contract | Program | str, inputs: tuple[Any, ...], arguments: Mapping[str, Any]
) -> tuple[Program, dict[str, torch.Tensor]]:
    """The steps for the dtypes of the tensors, and the tensors by name."""
    if not isinstance(contract, Contract | Program | str):
        raise TypeError(f"assert_result takes a contract, a function with @contract, not {type(contract).__name__}")
    program = Program.from_json(contract) if isinstance(contract, str) else contract
    if isinstance(program, Contract):
        names, optional = list(program.tensors), program.by_name
    else:  # a saved failure names the tensors of a quantized argument
        parts = any(argument.name in arguments for argument in program.arguments if argument.of_codes)
        names = list(dict.fromkeys(a.name if parts else a.of_codes or a.name for a in program.arguments))
        optional = ()
    given = dict(arguments)
    if len(inputs) > len(names):
        raise TypeError(f"{program.name} takes {len(names)} tensors, {', '.join(names)}, not {len(inputs)}")
    named = dict(zip(names, inputs, strict=False))
    twice = set(named) & set(given)
    if twice:
        raise TypeError(f"{', '.join(sorted(twice))} is given twice, by position and by name")
    named |= {name: given.pop(name) for name in names if name in given}
    missing = [name for name in names if name not in named and name not in optional]
    if missing:
        raise TypeError(f"{program.name} also takes {', '.join(missing)}")
    quantized = {name: value for name, value in named.items() if isinstance(value, Quantized)}
    caches = {name: value for name, value in named.items() if isinstance(value, Cache)}
    others = named.keys() - quantized.keys() - caches.keys()
    tensors = {name: adapt.tensor(value).detach() for name, value in named.items() if name in others}
    held = {f"{name}.{part}": t for name, value in caches.items() for part, t in logical_parts(value).items()}
    if isinstance(program, Program):
        if given:
            raise TypeError(f"the steps of {program.name} are fixed; {', '.join(given)} cannot be given")
        return program, tensors | parts_of(program, quantized)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    chosen = {name: str(given.pop(name)) for name in program.recipes if name in given}
    chosen |= {f"{name}_recipe": str(q.recipe) for name, q in quantized.items()}
    if caches:
        chosen["recipe"] = str(next(iter(caches.values())).recipe)
    known = {name: kind.dtypes[0] for name, (kind, _) in program.tensors.items() if name in optional}
    first = next(iter({**program.recipes, **chosen}.values()), "")
    of_dialect = program.dialects.get(find_recipe(first).dialect, {}) if first else {}
    program = program.trace(
        known | dtypes | dict.fromkeys(quantized, CODES) | dict.fromkeys(caches, HALF), chosen, {**of_dialect, **given}
    )
    for argument in program.arguments:  # tokens and heads are rows
        if argument.name in tensors and "*" in argument.axes[0] and tensors[argument.name].dim() > len(argument.axes):
            tensors[argument.name] = tensors[argument.name].flatten(0, 1)
    return program, tensors | held | parts_of(program, quantized)
