"""`narrowgauge compare`: two finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.harness.cli.options import stop


def compare_runs(
    a: Annotated[Path | None, typer.Argument(metavar="RUN_A", help="A run: the --report-dir that it wrote.")] = None,
    b: Annotated[Path | None, typer.Argument(metavar="RUN_B", help="Another.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the comparison as a page too.")] = None,
    history: Annotated[
        bool, typer.Option("--history", help="In place of two runs: figures of all runs beside RUN_A, over commits.")
    ] = False,
    keyword: Annotated[
        str, typer.Option("-k", help="Of --history: keyword expression on operation/recipe/dtype: 'gemm and nvfp4'.")
    ] = "",
) -> None:
    """Say what differs between two runs. Exit status 0 only if B is nowhere worse than A."""
    if history:
        if b is not None or html is not None:
            stop("--history takes at most one report folder, and no --html")
        _print_history(a or Path("reports/latest"), keyword)
        return
    if a is None or b is None:
        stop("compare takes two runs, RUN_A and RUN_B, or --history")
    if keyword:
        stop("-k belongs to --history; add --history")
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
    show(comparison, Console(), page_of(b), page_of(a))
    raise typer.Exit(0 if comparison.no_worse else 1)


def _print_history(run: Path, keyword: str) -> None:
    """Print the history beside the report folder `run`, or the history file `run`."""
    from rich.console import Console

    from narrowgauge.harness.cases.case import matching
    from narrowgauge.harness.gate.history_table import print_history
    from narrowgauge.harness.records.history import HistoryError, history_rows, path_beside

    try:
        matches = matching(keyword)
        rows = history_rows(run if run.is_file() else path_beside(run))
    except (HistoryError, ValueError) as error:
        stop(str(error))
    print_history(rows, Console(highlight=False), matches)
