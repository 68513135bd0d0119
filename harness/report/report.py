"""The report of a run: a page, tables, and a summary."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.machine.collection import paused_collection

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "index.html"


@paused_collection()
def write(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    directory: Path,
    *,
    elapsed: float | None,
    link: str = "",
    past: Sequence[dict[str, Any]] = (),
    strength: Sequence[Mapping[str, str]] = (),
) -> Path:
    """Write `index.html`, `records.parquet`, `records.csv` and `summary.md` into `directory`. Returns the page's path.

    `records` are results of `Record.to_dict`. `environment` is shown in its order. `elapsed` is the run's wall time in
    seconds, or None for a run in several places. `past`: rows of the history, which the page draws
    (`harness.records.history.update`). `strength`: for each contract a `sentence`, and a `text` of the mistakes that
    its inputs do not show (`harness.cli.contract`). The summary ends with `link`, or with a link to the
    page. An earlier report is replaced only when the new report is complete. Further files in the folder stay.
    """
    from narrowgauge.harness.report import markdown, tables, text
    from narrowgauge.harness.report.page import page
    from narrowgauge.harness.report.replace_files import replace_files

    if declared := sorted({record["declares"] for record in records} - {""}):
        environment = environment | {"declares": "; ".join(declared)}
    remarks = text.remarks(records)
    summary = markdown.render(records, environment, elapsed, remarks=remarks, link=link)
    html = page.render(records, environment, elapsed, past, strength, remarks)
    with replace_files(directory, last=PAGE) as new_files:
        tables.write(records, new_files)
        (new_files / "summary.md").write_text(summary, encoding="utf-8")
        (new_files / PAGE).write_text(html, encoding="utf-8")
    return directory / PAGE


class ReportError(Exception):
    """A report cannot be written. The message names the reason and the place of the records."""


def write_journaled(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    directory: Path,
    *,
    elapsed: float,
    link: str = "",
    past: Sequence[dict[str, Any]] = (),
) -> Path:
    """`write`, for a run with a journal in `directory`. Raises ReportError if the report cannot be written."""
    from narrowgauge.harness.records.folder_lock import FolderInUseError
    from narrowgauge.harness.records.journal import JOURNAL_NAME

    try:
        return write(records, environment, directory, elapsed=elapsed, link=link, past=past)
    except OSError as error:
        in_use = isinstance(error, FolderInUseError)
        reason = os.strerror(error.errno) if error.errno and not in_use else error.strerror or error
        raise ReportError(
            f"the report cannot be written into {directory}: {reason}. The {len(records)} records are "
            f"in {directory / JOURNAL_NAME}: mend that, and the same command with --resume writes the report"
        ) from error


@paused_collection()
def print_summary(records: list[dict[str, Any]], console: Console, *, details: bool = False) -> None:
    """Print counts and worst figures, the groups of failures, and the verdict of the run (`harness.report.terminal`).
    `details`: also a row for each recipe and dtype, accuracy and times."""
    from narrowgauge.harness.report import terminal

    terminal.print_summary(records, console, details=details)
