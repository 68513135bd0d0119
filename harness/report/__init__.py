"""The report of a run: a page for people, tables for programs, a summary for both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "index.html"
FAILURES = "failures"
"""The folder of saved failures (`harness.keep`) in that of a report. They stay where a new report replaces an old."""


def write(records: list[dict[str, Any]], environment: dict[str, str], directory: Path, *, elapsed: float) -> Path:
    """Write `index.html`, `records.parquet`, `records.csv` and `summary.md` into `directory`; return the page's path.

    `records` are `Record.to_dict()`s; `environment` is shown in its order; `elapsed` is the run's wall time in seconds.
    An earlier report is replaced only once the new one is complete; other files of the folder stay.
    """
    from harness.report import markdown, page, tables
    from harness.report.swap import replacing

    with replacing(directory, last=PAGE) as fresh:
        tables.write(records, fresh)
        (fresh / "summary.md").write_text(markdown.render(records, environment, elapsed), encoding="utf-8")
        (fresh / PAGE).write_text(page.render(records, environment, elapsed), encoding="utf-8")
    return directory / PAGE


def print_summary(records: list[dict[str, Any]], console: Console) -> None:
    """Print the counts and worst figures per operation, recipe and dtype, and the verdict of the whole."""
    from harness.report import terminal

    terminal.print_summary(records, console)
