"""`narrowgauge doctor`: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import stop


def doctor(
    functions: Annotated[
        bool,
        typer.Option("--functions", help="Measure exp, rcp, rsqrt, tanh and others on all float32 numbers of the GPU."),
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Of --functions: write the errors into this JSON file.")
    ] = None,
) -> None:
    """Say what this machine can do, and what to install."""
    if functions:
        _functions(save)
        return
    if save is not None:
        stop("--save is the file of --functions; give --functions too")
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.harness.records.environment import facts
    from narrowgauge.harness.tools.doctor.facts import tool_facts

    table = Table(show_header=False, box=None)
    for fact in [*facts(), *tool_facts()]:
        table.add_row(
            "✓" if fact.ok else "–", fact.name, fact.value + (f"\n{fact.remedy}" if fact.remedy and not fact.ok else "")
        )
    Console().print(table, markup=False)


def _functions(save: Path | None) -> None:
    """Measure the functions of the GPU, and print or write them."""
    import json

    from narrowgauge.harness.tools.doctor.functions import FunctionsError, measure

    try:
        measured = measure(lambda errors: typer.echo(json.dumps(errors), err=True))
    except FunctionsError as error:
        stop(str(error))
    text = json.dumps(measured, indent=1)
    typer.echo(text)
    if save is not None:
        try:
            save.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            stop(f"--save {save}: cannot be written: {error.strerror}")
