"""A run from the command line: progress bar, report and table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.checks.statistics.holm import count_chance_cases
from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
from narrowgauge.harness.gate.ledger import Ledger
from narrowgauge.harness.hosts.separation import NOT_SEPARATED
from narrowgauge.harness.machine.processors import load, other_work
from narrowgauge.harness.records import coverage
from narrowgauge.harness.records.history import path_beside, update
from narrowgauge.harness.records.journal import FAILURES, Journal, RecordedRun, new_run
from narrowgauge.harness.records.record import outcome, succeeded
from narrowgauge.harness.report import github
from narrowgauge.harness.report.failure_view import first_failure
from narrowgauge.harness.report.groups import group
from narrowgauge.harness.report.report import print_summary, write_journaled
from narrowgauge.harness.report.terminal import print_text
from narrowgauge.harness.report.text import duration, number, plural
from narrowgauge.harness.report.times import BUSY
from narrowgauge.harness.running.pool import Settings, run_cases
from narrowgauge.harness.running.shard import Part


def run_session(
    cases: Sequence[Case],
    settings: Settings,
    directory: Path,
    *,
    matrix: Sequence[Case] = (),
    resume: bool = False,
    part: Part | None = None,
    ledger: Ledger | None = None,
    link: str = "",
    strict: bool = False,
    details: bool = False,
    history: bool = True,
    command: str = "",
) -> bool:
    """Run the cases, write the report into `directory`, print the summary. True if it succeeded
    (`harness.records.record.succeeded`), by `strict` if given, and no case is missing.

    `matrix`: the cases of which the last lines state the coverage (`harness.records.coverage`); none if empty.
    `resume`: continue the run whose journal is in `directory`. `part`: the shard of a run that the cases are. `link`:
    address at the end of the report's summary. `details`: print more tables (`harness.report.terminal`).
    `command`: the command of the run, for its journal. `history`: append a complete run that is no shard to the
    history (`harness.records.history`).

    Raises BackendError if the backend cannot be loaded, JournalError if the journal cannot be written or belongs to
    another run, ReportError if the report cannot be written; its records are then in the journal.
    """
    console = Console()
    started, load_before = time.monotonic(), load()

    @cache
    def header() -> RecordedRun:
        run = new_run(
            [case.id for case in cases], backend=settings.backend, device=settings.device, seed=settings.seed,
            input_path=settings.input_path, shard=str(part.shard) if part else None,
            selection=part.selection if part else "", schedules=settings.schedules, sanitize=settings.sanitize,
            command=command,
        )  # fmt: skip
        # The journal keeps what is known at the start, for a merge of shards.
        busy = other_work(load_before, 0, settings.workers)
        return replace(run, environment=run.environment | {BUSY: busy}) if busy else run

    def clock() -> float:
        return time.monotonic() - started

    journal = Journal.resumed(directory, header(), clock=clock) if resume else Journal(directory, header, clock=clock)
    if journal.earlier_records:
        console.print(
            f"going on with {journal.path}: {len(journal.earlier_records)} of {len(cases)} cases are done", markup=False
        )
    settings = replace(settings, failures=str(directory / FAILURES), sharing=part.sharing if part else settings.sharing)
    link = link or github.run_link()
    with closing(journal), _unpacked(settings.input_path, cases) as input_path:
        header()  # for the journal, while the starter still imports torch
        records = _run(cases, replace(settings, input_path=input_path), ledger or Ledger(), journal, console)
        elapsed = journal.elapsed
        add_baseline_notes(records, header().environment)
        print_result(records, console, details=details)  # before the page, which takes a second
        missing = len(cases) - len(records)
        past: list[dict[str, Any]] = []
        if history and part is None:
            # A shard is appended by the merge, and an interrupted run by its continuation.
            complete = not missing and len(records) > len(journal.earlier_records)
            run = replace(header(), records=records, elapsed=elapsed)
            warning, past = update(run, path_beside(directory), complete=complete)
            if warning:
                print_text(warning, console, "yellow")
        if busy := other_work(load_before, load(), settings.workers):
            header().environment[BUSY] = busy
        page = write_journaled(records, header().environment, directory, elapsed=elapsed, link=link, past=past)
    if missing:
        message = f"interrupted: {missing} of {plural(len(cases), 'case')} did not run; --resume goes on with them"
        console.print(message, style="bold red")
    console.print(
        f"{plural(len(records), 'case')} in {duration(elapsed)}; report: {page}", markup=False, soft_wrap=True
    )
    notes = (note for record in records for note in record["notes"])
    for sentence in dict.fromkeys(note["sentence"] for note in notes if note["cause"] == NOT_SEPARATED):
        print_text(f"--untrusted: {sentence}", console, "yellow")
    for name, reason in journal.sources.unverified.items():
        print_text(f"not verified: {name}: {reason}", console, "yellow")
    if busy:
        print_text(f"{BUSY}: {busy}", console, "yellow")
    for line in coverage.lines(matrix, records):
        console.print(line, style="yellow" if line.startswith("warning") else None, markup=False, highlight=False)
    github.publish(records, header().environment, elapsed, link=link, print_line=print)
    return succeeded(records, strict=strict) and not missing


def print_result(records: list[dict[str, Any]], console: Console, *, details: bool = False) -> None:
    """Print the worst failure and the summary."""
    _print_failure(records, console)
    print_summary(records, console, details=details)


def progress_bar(console: Console) -> Progress:
    """Progress bar of cases: counts, done, elapsed time, remaining time. It fits into 80 columns."""
    columns = (
        TextColumn("{task.description}"), BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(), _TimeLeft(),
    )  # fmt: skip
    return Progress(*columns, console=console)


class _TimeLeft(TimeRemainingColumn):
    """The estimated remaining time as `0:00:12 left`; nothing at the end."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished else super().render(task).append(" left")


def _unpacked(path: str, cases: Sequence[Case]) -> AbstractContextManager[str]:
    """`harness.inputs.capture.unpacked`, which imports torch. A run of case files imports no torch in this process."""
    if not path:
        return nullcontext(path)
    from narrowgauge.harness.inputs.capture import unpacked

    return unpacked(path, cases)


def _run(
    cases: Sequence[Case], settings: Settings, ledger: Ledger, journal: Journal, console: Console
) -> list[dict[str, Any]]:
    """Records of the journal, of the cases that are not launched, and of the cases that run."""
    records = list(journal.earlier_records)
    counts = Counter(map(outcome, records))
    finished = {record["case"] for record in records}
    remaining = [case for case in cases if case.id not in finished]
    context = {"backend": settings.backend, "device": settings.device}
    stand_ins = {case.id: ledger.stand_in(case, **context, seed=settings.seed) for case in remaining}
    progress = progress_bar(console)
    task = progress.add_task("running", total=len(cases), completed=len(finished))

    def on_record(record: dict[str, Any]) -> None:
        progress.start()  # with the first record: a backend that cannot be loaded has no bar
        ledger.mark(record)
        journal.add(record)
        records.append(record)
        counts[outcome(record)] += 1
        progress.update(task, advance=1, description=_counts(counts))

    try:
        for stand_in in filter(None, stand_ins.values()):
            on_record(stand_in)
        # Finished cases also share the false alarms of the run.
        launched = [case for case in remaining if stand_ins[case.id] is None]
        settings = replace(settings, sharing=settings.sharing or count_chance_cases(cases))
        run_cases(launched, settings, on_record, journal.sources.add)
    finally:
        if progress.live.is_started:
            progress.stop()
    return records


def _counts(counts: Counter[str]) -> str:
    """`12 pass, 3 failed, 4 others`, where others are unsupported cases and known failures."""
    quiet = counts["unsupported"] + counts["known"]
    failed = counts.total() - counts["pass"] - quiet
    named = {"pass": counts["pass"], "failed": failed, "others": quiet}
    return ", ".join(f"{count} {name}" for name, count in named.items() if count)


def _print_failure(records: list[dict[str, Any]], console: Console) -> None:
    """The first-failure view of the worst record. The summary lists all groups of failures."""
    failed = [r for r in records if outcome(r) not in ("pass", "unsupported", "known")]
    for failure_group in group(failed)[:1]:
        record = failure_group.records[0]
        title = f"\nThe worst of {number(len(failed))} failures:" if len(failed) > 1 else ""
        console.print(title, style="dim", highlight=False)
        console.print(record["case"], style="bold red", markup=False, highlight=False, soft_wrap=True)
        for line in first_failure(record).splitlines():
            # Elements stay in columns, and commands on one line. In a file all lines stay whole, to be searched.
            words = line.lstrip()
            command = words.startswith(("reproduce:", "tensors:")) or " narrowgauge show " in line
            if command or "  " in words or not console.is_terminal:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print_text(words, console, indent=len(line) - len(words), hanging=2)
        console.print()
