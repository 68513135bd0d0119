"""One run from the command line: progress while it goes, report and table at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.checks.statistics.holm import sharing
from narrowgauge.harness.gate.accepted import say_baseline
from narrowgauge.harness.gate.ledger import Ledger
from narrowgauge.harness.records.journal import FAILURES, Journal, beginning
from narrowgauge.harness.records.record import outcome, succeeded
from narrowgauge.harness.report import github
from narrowgauge.harness.report.groups import group
from narrowgauge.harness.report.report import print_summary, write_kept
from narrowgauge.harness.report.view import first_failure
from narrowgauge.harness.running.pool import Settings, run_cases
from narrowgauge.harness.running.shard import Part

SHOWN = 3
"""First-failure views printed in full, of groups that fail in different ways; the report has them all."""


def run_session(
    cases: Sequence[Case],
    settings: Settings,
    directory: Path,
    *,
    resume: bool = False,
    part: Part | None = None,
    ledger: Ledger | None = None,
    link: str = "",
) -> bool:
    """Run the cases, write the report into `directory`, print the summary. True where every case passed, or failed as
    `ledger` expects.

    `resume`: go on with the run whose journal is in `directory`. `part`: of which run they are a shard. `link`:
    the address that the summary of the report ends with. Raises BackendError where the backend cannot be loaded,
    JournalError where the journal cannot be written or is of another run, ReportError where the report cannot be
    written; the records are in the journal then.
    """
    console = Console()
    started = time.monotonic()
    header = cache(
        lambda: beginning(
            [case.id for case in cases], backend=settings.backend, device=settings.device, seed=settings.seed,
            input_path=settings.input_path, shard=str(part.shard) if part else None,
            selection=part.selection if part else "", schedules=settings.schedules, sanitize=settings.sanitize,
        )
    )  # fmt: skip

    def clock() -> float:
        return time.monotonic() - started

    journal = Journal.resumed(directory, header(), clock=clock) if resume else Journal(directory, header, clock=clock)
    if journal.kept:
        console.print(f"going on with {journal.path}: {len(journal.kept)} of {len(cases)} cases are done", markup=False)
    settings = replace(settings, failures=str(directory / FAILURES), sharing=part.sharing if part else settings.sharing)
    records = _run(cases, settings, ledger or Ledger(), journal, console)
    elapsed = journal.elapsed
    link = link or github.run_link()
    say_baseline(records, header().environment)
    page = write_kept(records, header().environment, directory, elapsed=elapsed, link=link)
    print_result(records, console)
    if missing := len(cases) - len(records):
        words = f"interrupted: {missing} of {len(cases)} cases did not run; --resume goes on with them"
        console.print(words, style="bold red")
    console.print(f"{len(records)} cases in {elapsed:.1f} s; report: {page}", markup=False, soft_wrap=True)
    github.publish(records, header().environment, elapsed, link=link, say=print)
    return succeeded(records) and not missing


def print_result(records: list[dict[str, Any]], console: Console) -> None:
    """Print the first failures and the summary."""
    _print_failures(records, console)
    print_summary(records, console)


def progress_bar(console: Console) -> Progress:
    """What is shown while cases run: done, total, time, time left."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    return Progress(*columns, console=console)


def _run(
    cases: Sequence[Case], settings: Settings, ledger: Ledger, journal: Journal, console: Console
) -> list[dict[str, Any]]:
    """The records that the journal has already, those of cases that are not launched, and those of the others."""
    records = list(journal.kept)
    seen = Counter(map(outcome, records))
    done = {record["case"] for record in records}
    left = [case for case in cases if case.id not in done]
    where = {"backend": settings.backend, "device": settings.device}
    known = {case.id: ledger.stand_in(case, **where, seed=settings.seed) for case in left}
    with progress_bar(console) as progress, closing(journal):
        task = progress.add_task("running", total=len(cases), completed=len(done))

        def on_record(record: dict[str, Any]) -> None:
            ledger.mark(record)
            journal.add(record)
            records.append(record)
            seen[outcome(record)] += 1
            progress.update(task, advance=1, description=", ".join(f"{n} {verdict}" for verdict, n in seen.items()))

        for stand_in in filter(None, known.values()):
            on_record(stand_in)
        # Those that are done share the run's false alarms too.
        launched = [case for case in left if known[case.id] is None]
        run_cases(launched, replace(settings, sharing=settings.sharing or sharing(cases)), on_record)
    return records


def _print_failures(records: list[dict[str, Any]], console: Console) -> None:
    bad = [r for r in records if outcome(r) not in ("pass", "unsupported", "known")]
    groups = group(bad)
    for one in groups[:SHOWN]:
        record = next(r for r in bad if r in one.records)
        console.rule(record["case"], style="red")
        console.print(first_failure(record), markup=False, highlight=False, soft_wrap=True)
    if left := len(bad) - min(len(groups), SHOWN):
        console.print(f"\n{left} more cases did not pass; the report has them all", style="red")
