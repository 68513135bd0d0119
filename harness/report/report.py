"""The report of a run: a page for people, tables for programs, a summary for both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "index.html"


def write(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    directory: Path,
    *,
    elapsed: float | None,
    link: str = "",
) -> Path:
    """Write `index.html`, `records.parquet`, `records.csv` and `summary.md` into `directory`; return the page's path.

    `records` are `Record.to_dict()`s; `environment` is shown in its order; `elapsed` is the run's wall time in seconds,
    None where it went on in several places. `link` is the address that the summary ends with, in place of the page
    beside it. An earlier report is replaced only once the new one is complete; other files of the folder stay.
    """
    from narrowgauge.harness.report import markdown, tables
    from narrowgauge.harness.report.page import page
    from narrowgauge.harness.report.replace_files import replacing

    with replacing(directory, last=PAGE) as fresh:
        tables.write(records, fresh)
        (fresh / "summary.md").write_text(markdown.render(records, environment, elapsed, link=link), encoding="utf-8")
        (fresh / PAGE).write_text(page.render(records, environment, elapsed), encoding="utf-8")
    return directory / PAGE


class ReportError(Exception):
    """A report that cannot be written: why, and where the records are."""


def write_kept(
    records: list[dict[str, Any]], environment: dict[str, str], directory: Path, *, elapsed: float, link: str = ""
) -> Path:
    """`write` of a run whose records are in a journal in `directory`. Raises ReportError where it cannot be written."""
    from narrowgauge.harness.records.journal import NAME

    try:
        return write(records, environment, directory, elapsed=elapsed, link=link)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ReportError(
            f"the report cannot be written into {directory}: {why}. The {len(records)} records are "
            f"in {directory / NAME}: mend that, and the same command with --resume writes the report"
        ) from error


def print_summary(records: list[dict[str, Any]], console: Console) -> None:
    """Print the counts and worst figures per operation, recipe and dtype, and the verdict of the whole."""
    from narrowgauge.harness.report import terminal

    terminal.print_summary(records, console)
