"""`narrowgauge contract`: which mistakes the inputs of a contract can show."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.harness.cli.options import divided, stop

if TYPE_CHECKING:
    from narrowgauge.harness.cases.contracts.case import ContractCase
    from narrowgauge.spec.program import Program


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
    try:
        chosen = [(cls, recipe) for cls in contracts_in(file) for recipe in cls.recipe_choices(recipes or [])]
        programs = [(cls, recipe, cls.example(recipe, dtype).program) for cls, recipe in chosen]
    except (OperationError, ContractError, ValueError) as error:
        stop(str(error))
    shown = [
        _shown(cls, recipe, dtype, program, form, details=details, search=search) for cls, recipe, program in programs
    ]
    raise typer.Exit(0 if all(shown) else 1)


def _shown(
    cls: type[ContractCase], recipe: str | None, dtype: str, program: Program, form: Form, *, details: bool,
    search: bool,
) -> bool:  # fmt: skip
    """Print the table of a contract. Whether every mistake that can be seen is seen."""
    import json

    import torch

    from narrowgauge.harness.operations.contracts.strength.aim import aim
    from narrowgauge.harness.operations.contracts.strength.kernel import wrong_programs
    from narrowgauge.harness.operations.contracts.strength.table import (
        SHAPES,
        strength_json,
        strength_table,
        strength_text,
        unseen,
    )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices
    try:
        rows = strength_table(program, whole=details or form is Form.JSON)
        hidden = unseen(rows)
        missed = [change for change in wrong_programs(program) if hidden.get(change.name) is False]
        aimed = {change.name: aim(program, change, SHAPES[0]) if search else None for change in missed}
    finally:
        torch.set_num_threads(threads)
    label = " ".join(filter(None, (cls.operation, recipe, dtype)))
    if form is Form.JSON:
        families = {name: None if found is None else found.family for name, found in aimed.items()}
        data = {"contract": cls.operation, "recipe": recipe, "dtype": dtype, "digest": program.digest}
        typer.echo(json.dumps({**data, "rows": json.loads(strength_json(rows)), "aimed": families}))
        return None not in aimed.values()
    names = list(dict.fromkeys(row.name for row in rows))
    seen = len(names) - len(hidden)
    typer.echo(f"{label}\n{program.text()}\n")
    typer.echo(f"{seen} of {len(names)} mistakes are shown by a family of inputs")
    some = [row for row in rows if details or row.name in hidden]
    if some:
        typer.echo(strength_text(some))
    for change in missed:
        found = aimed[change.name]
        words = "no inputs were found that show it" if search else "no family shows it; --aim searches inputs"
        typer.echo(f"{change.sentence}: {words if found is None else f'inputs that show it: {found.family}'}")
    return None not in aimed.values()
