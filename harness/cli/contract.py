"""`narrowgauge contract`: which mistakes the inputs of a contract can show."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import divided, stop

if TYPE_CHECKING:
    from narrowgauge.harness.cases.contracts.case import ContractCase
    from narrowgauge.harness.operations.contracts.strength.summary import Summary


class Form(StrEnum):
    """Forms of the result."""

    TABLE = "table"
    JSON = "json"


def contract_strength(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of contracts.")],
    recipes: Annotated[
        list[str] | None,
        typer.Option("--recipe", callback=divided, help="Recipe of the contracts; may be given again, or with commas."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32: dtype of the tensors.")] = "bf16",
    form: Annotated[Form, typer.Option("--format", help="Form of the result.")] = Form.TABLE,
    details: Annotated[bool, typer.Option("--details", help="All mistakes and families.")] = False,
    search: Annotated[
        bool, typer.Option("--aim", help="Search inputs for the mistakes that no family shows; 10 s for each.")
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Report of a run: ask of its cases, and add the table to its page."),
    ] = None,
) -> None:
    """Print which mistakes the inputs of a contract would show.

    The mistakes are the changes of its steps that also explain wrong bytes. Exit status: 1 if kernels with a mistake
    may differ from right ones, and no input shows it; else 0.
    """
    from narrowgauge.harness.cases.keys import DTYPES, one_of
    from narrowgauge.harness.cases.operations import OperationError, contracts_in
    from narrowgauge.spec.program import ContractError

    if wrong := one_of(DTYPES)(dtype):
        stop(f"--dtype {wrong}")
    if run is not None and recipes:
        stop("--run takes the recipes of its cases; --recipe does not go with it")
    whole = details or form is Form.JSON
    try:
        contracts = contracts_in(file)
        if run is None:
            from narrowgauge.harness.cases.contracts.case import no_recipe_note, recipes_of
            from narrowgauge.harness.operations.contracts.strength.summary import of_families

            given = recipes_of(contracts, recipes or [])
            if note := no_recipe_note(contracts, recipes or []):
                typer.echo(note, err=True)
            chosen = [(cls, recipe) for cls, names in given.items() for recipe in cls.recipe_choices(names)]
            found = [of_families(cls, recipe, dtype, whole=whole, search=search) for cls, recipe in chosen]
        else:
            found = _of_run(run, file, contracts, whole=whole, search=search)
    except (OperationError, ContractError, ValueError) as error:
        stop(str(error))
    from narrowgauge.harness.operations.contracts.strength.table import strength_text

    for summary in found:
        if form is Form.JSON:
            typer.echo(json.dumps(summary.data))
        else:
            table = strength_text(summary.rows) if details else ""
            parts = (f"{summary.label}\n{summary.program.text()}\n\n{summary.count}", table, summary.text)
            typer.echo("\n".join(filter(None, parts)))
    raise typer.Exit(0 if all(summary.complete for summary in found) else 1)


def _of_run(
    directory: Path, file: Path, contracts: list[type[ContractCase]], *, whole: bool, search: bool
) -> list[Summary]:
    """What the cases of a run show; the report of the run is written again with it."""
    from narrowgauge.harness.cases.contracts.case import ContractCase
    from narrowgauge.harness.cases.operations import case_from_id
    from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
    from narrowgauge.harness.operations.contracts.strength.summary import of_cases
    from narrowgauge.harness.records.environment import CONTRACT
    from narrowgauge.harness.records.history import path_beside, update
    from narrowgauge.harness.records.journal import JournalError, read
    from narrowgauge.harness.report.report import write

    try:
        run = read(directory)
    except JournalError as error:
        stop(str(error))
    for cls in contracts:
        source = run.sources.get(f"{CONTRACT}{cls.operation}")
        if source is not None and source.partition(" in ")[0] != cls.declared.digest:
            stop(f"{directory}: contract {cls.operation} has changed since the run; run its cases again")
    every = map(case_from_id, run.cases)
    cases = [case for case in every if isinstance(case, ContractCase) and isinstance(case, tuple(contracts))]
    if not cases:
        names = ", ".join(cls.operation for cls in contracts)
        stop(f"{directory}: the run has no case of {names}; narrowgauge run --contract {file} runs them")
    found = of_cases(cases, run.seed, whole=whole, search=search)
    blocks = [{"contract": each.label, "sentence": each.count, "text": each.text} for each in found]
    add_baseline_notes(run.records, run.environment)
    _, past = update(run, path_beside(directory), complete=False)
    write(run.records, run.environment, directory, elapsed=run.elapsed, past=past, strength=blocks)
    return found
