"""One run from the command line: progress while it goes, report and table at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness.case import Case
from harness.environment import describe_run
from harness.pool import Settings, run_cases
from harness.record import succeeded
from harness.report import FAILURES, print_summary, write
from harness.report.groups import group
from harness.view import first_failure

SHOWN = 3
"""First-failure views printed in full, of groups that fail in different ways; the report has them all."""


def run_session(cases: Sequence[Case], settings: Settings, directory: Path) -> bool:
    """Run the cases, write the report into `directory`, print the summary. True where every case passed."""
    console = Console()
    started = time.monotonic()
    records = _run(cases, replace(settings, failures=str(directory / FAILURES)), console)
    elapsed = time.monotonic() - started
    environment = describe_run(backend=settings.backend, device=settings.device, seed=settings.seed)
    page = write(records, environment, directory, elapsed=elapsed)
    _print_failures(records, console)
    print_summary(records, console)
    if missing := len(cases) - len(records):
        console.print(f"interrupted: {missing} of {len(cases)} cases did not run", style="bold red")
    console.print(f"{len(records)} cases in {elapsed:.1f} s; report: {page}", markup=False, soft_wrap=True)
    return succeeded(records) and not missing


def progress_bar(console: Console) -> Progress:
    """What is shown while cases run: done, total, time, time left."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    return Progress(*columns, console=console)


def _run(cases: Sequence[Case], settings: Settings, console: Console) -> list[dict[str, Any]]:
    seen: Counter[str] = Counter()
    with progress_bar(console) as progress:
        task = progress.add_task("running", total=len(cases))

        def on_record(record: dict[str, Any]) -> None:
            seen[record["verdict"]] += 1
            progress.update(task, advance=1, description=", ".join(f"{n} {verdict}" for verdict, n in seen.items()))

        return run_cases(cases, settings, on_record)


def _print_failures(records: list[dict[str, Any]], console: Console) -> None:
    bad = [r for r in records if r["verdict"] not in ("pass", "unsupported")]
    groups = group(bad)
    for one in groups[:SHOWN]:
        record = next(r for r in bad if r in one.records)
        console.rule(record["case"], style="red")
        console.print(first_failure(record), markup=False, highlight=False, soft_wrap=True)
    if left := len(bad) - min(len(groups), SHOWN):
        console.print(f"\n{left} more cases did not pass; the report has them all", style="red")
