"""`narrowgauge check`: one function against all cases of a recipe or a contract, for programs that write kernels."""

from __future__ import annotations

import ast
import json
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowgauge.harness.cli.options import Device, Functions, Seed, Workers, divided, sizes_of, stop
from narrowgauge.harness.cli.selection import default_workers, require_backend, require_device

if TYPE_CHECKING:
    from narrowgauge.harness.cases.case import Case


class Form(StrEnum):
    """Forms of the result."""

    TEXT = "text"
    JSON = "json"


_MEASURED = 4
"""Number of cases for the strength: of different families, the smallest first."""


def check_function(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="folder/file.py:function.")],
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe of the cases; of a contract its recipe.")] = "",
    contract: Annotated[str, typer.Option("--contract", help="A contract: its name, or a file of one contract.")] = "",
    functions: Functions = None,
    operation: Annotated[str, typer.Option("--operation", help="Operation of a recipe (default: quantize).")] = "",
    families: Annotated[
        list[str] | None, typer.Option("--family", callback=divided, help="Input family (default: all).")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", callback=divided, help="Shape, such as 64x256 (default: several).")
    ] = None,
    device: Device = "cpu",
    seed: Seed = 0,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds that all cases may take together.")] = 600.0,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one case may take.")] = 300.0,
    workers: Workers = 0,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Drawn cases, and no reference in the process of the function.")
    ] = False,
    secret: Annotated[int | None, typer.Option("--secret", min=0, help="Of --untrusted: of an earlier check.")] = None,
    strength: Annotated[
        bool, typer.Option("--strength", help="Also measure which known mistakes the inputs show.")
    ] = False,
    form: Annotated[Form, typer.Option("--format", help="Form of the result.")] = Form.TEXT,
) -> None:
    """Check one function on all cases of a recipe or a contract.

    Exit status: 0 if every case was tried and none failed; 2 for a wrong option; else 1.
    """
    started = time.monotonic()
    if secret is not None and not untrusted:
        stop("--secret belongs to --untrusted; add --untrusted")
    require_device(device)
    from narrowgauge.harness.api.check_document.document import check_document, with_refusals
    from narrowgauge.harness.backends.backend import BackendError
    from narrowgauge.harness.running.pool import Settings, run_cases

    chosen: dict[str, Any] = {"families": families, "shapes": sizes_of(shapes)}
    named, chosen_cases = selected(function, recipe, contract, operation, chosen)
    cases, optional = [case for case, _ in chosen_cases], [may_refuse for _, may_refuse in chosen_cases]
    method = cases[0].called
    backend = f"{function.replace('::', ':')}@{method}"
    require_backend(backend)
    if untrusted:
        from narrowgauge.harness.inputs.drawn_cases import drawn_cases, input_seed, new_secret

        secret = new_secret() if secret is None else secret
        cases, seed = drawn_cases(cases, secret), input_seed(secret)
    settings = Settings(
        backend, device, seed, workers=workers or default_workers(device), timeout=timeout, untrusted=untrusted
    )
    try:
        found = run_cases(cases, settings, lambda record: None, seconds=limit)
    except BackendError as error:
        stop(str(error))
    records = with_refusals(found, dict(zip([case.id for case in cases], optional, strict=True)), method)
    recipes = list(dict.fromkeys(name for case in cases for name in case.recipe_names))
    subject = {
        "function": function, "operation": named, "recipes": recipes, "device": device, "seed": seed,
        "untrusted": untrusted, "secret": secret,
    }  # fmt: skip
    measured = _strength(cases, records, seed) if strength else None
    document = check_document(subject, cases, records, seconds=round(time.monotonic() - started, 3), strength=measured)
    typer.echo(json.dumps(document, indent=2) if form is Form.JSON else _text(document))
    raise typer.Exit(0 if document["verdict"] == "pass" else 1)


def selected(
    function: str, recipe: str, contract: str, operation: str, chosen: dict[str, Any]
) -> tuple[str, list[tuple[Case, bool]]]:
    """The operation and the cases of a check, with whether a function may refuse them."""
    import torch

    from narrowgauge.harness.api.check import selected_cases
    from narrowgauge.harness.cases.case_file import CaseFileError
    from narrowgauge.harness.cases.operations import OperationError, contracts_in
    from narrowgauge.spec.program import ContractError

    chosen = {"dtypes": (torch.bfloat16,), "keys": {}} | chosen
    try:
        if contract.endswith(".py"):
            return _of_file(contracts_in(Path(contract)), contract, recipe, chosen)
        known = _parameters(function)
        subject = contract or None
        return selected_cases(subject, recipe or None, operation or None, chosen, parameters=known)[1:]
    except (CaseFileError, OperationError, ContractError, ValueError, TypeError) as error:
        stop(str(error))


def _of_file(
    contracts: list[Any], file: str, recipe: str, chosen: dict[str, Any]
) -> tuple[str, list[tuple[Case, bool]]]:
    """The cases of the contract of a file."""
    if len(contracts) != 1:
        names = ", ".join(cls.operation for cls in contracts)
        raise ValueError(f"{file} has {len(contracts)} contracts: {names}; --contract takes a file with one")
    from narrowgauge.harness.api.inputs import name_of

    (cls,) = contracts
    more = {name: chosen[name] for name in ("families", "shapes", "keys")}
    dtypes = [name_of(dtype) for dtype in chosen["dtypes"]]
    return cls.operation, cls.usual([recipe] if recipe else [], dtypes=dtypes, file=file, **more)


def _parameters(function: str) -> frozenset[str]:
    """Names of the parameters of a function in a file. The file is read, not run. Empty without the function."""
    file, _, name = function.replace("::", ":").rpartition(":")
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()  # the import of the function says why
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            given = node.args
            return frozenset(argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    return frozenset()


def _strength(cases: list[Case], records: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The field `strength`: known mistakes that the inputs of tried cases show."""
    from narrowgauge.harness.power.strength import shown_mistakes

    tried = {record["case"] for record in records if record["verdict"] != "unsupported"}
    first: dict[str, Case] = {}
    for case in sorted((case for case in cases if case.id in tried), key=lambda case: case.work):
        if 0 not in case.shape:
            first.setdefault(case.inputs, case)
    return shown_mistakes(list(first.values())[:_MEASURED], seed)


def _text(document: dict[str, Any]) -> str:
    """The verdict, the counts and the failures, for people."""
    from narrowgauge.harness.report.text import plural

    counts, subject = document["cases"], document["subject"]
    lines = [
        f"{document['verdict']}: {subject['function']}, {subject['operation']} {'+'.join(subject['recipes'])}: "
        f"{counts['passed']} of {counts['selected']} cases passed, {counts['failed']} failed, "
        f"{counts['unsupported']} unsupported, {counts['selected'] - counts['tried']} not tried"
    ]
    for failure in document["failures"]:
        causes = " or ".join(cause["sentence"] for cause in failure["causes"])
        lines += ["", f"{failure['verdict']}: {failure['sentence']}"]
        lines += [f"cause ({failure['certainty']}): {causes}"] if causes else []
        lines += [f"wrong elements: {place}" for place in failure["places"]]
        lines += [f"{plural(failure['cases'], 'case')}: {failure['case']}", f"reproduce: {failure['reproduce']}"]
    lines += [f"cheat: {finding['cause']}: {finding['sentence']}" for finding in document["cheats"]]
    if document["strength"]:
        lines += ["", f"inputs show {document['strength']['shown']} of {document['strength']['known']} known mistakes"]
    if subject["secret"] is not None:
        lines += ["", f"--untrusted --secret {subject['secret']} runs these cases again"]
    return "\n".join(lines)
