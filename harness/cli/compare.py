"""`narrowgauge compare`: two finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import stop


def compare_runs(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run: the --report-dir that it wrote.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write the comparison as a page too.")] = None,
) -> None:
    """Say what differs between two runs. Exit status 0 only if B is nowhere worse than A."""
    from rich.console import Console

    from narrowgauge.harness.gate.compare import compare, show
    from narrowgauge.harness.gate.difference import page_of
    from narrowgauge.harness.gate.trust import read_trusted
    from narrowgauge.harness.records.journal import JournalError

    try:
        comparison = compare(read_trusted(a), read_trusted(b))
    except JournalError as error:
        stop(str(error))
    if html is not None:
        from narrowgauge.harness.gate.compare import render

        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(render(comparison, str(a), str(b)), encoding="utf-8")
        except OSError as error:
            stop(f"{html}: cannot be written: {error.strerror}")
    show(comparison, Console(), page_of(b))
    raise typer.Exit(0 if comparison.no_worse else 1)
