"""Running mutants from the command line: progress, rows, and `mutants.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.report.terminal import print_table
from narrowgauge.harness.tools.mutants import recorded
from narrowgauge.harness.tools.mutants.deviations import run_mistakes
from narrowgauge.harness.tools.mutants.mutant import Mutant, load_all
from narrowgauge.harness.tools.mutants.processes import TIMEOUT, run_mutants
from narrowgauge.harness.tools.mutants.result import MutantResult, totals

WIDTH = 170
"""Smallest width of the table in columns: folded rows are hard to read."""


def print_results(results: Sequence[MutantResult], console: Console) -> None:
    """Print a row for each mutant with its class and causes below, the totals, and the arguments of equivalent
    mutants."""
    ordered = sorted(results, key=lambda result_: bool(result_.mutant.equivalent))
    print_table(
        ("mutant", "killed by", "at stage", "failing", "named", "allclose", "bytes", "SQNR"),
        [_row(result) for result in ordered],
        console,
        styles=["" if result.right else "red" for result in ordered],
        notes=[
            ", ".join([result.mutant.kind, *(f"{cause} {count}" for cause, count in result.causes)])
            for result in ordered
        ],
    )
    console.print(totals(results).sentence, markup=False, highlight=False)
    for result in results:
        if result.problem:
            console.print(f"{result.mutant.name}: {result.problem}", style="red", markup=False)
        if result.timed_out:
            console.print(f"{result.mutant.name} timed out at {result.timed_out}", style="red", markup=False)
        if result.mutant.equivalent:
            console.print(f"{result.mutant.name} is equivalent: {result.mutant.equivalent}", markup=False)


def _row(result: MutantResult) -> list[str]:
    m, detections = result.mutant, result.detections
    survived = "timed out" if result.timed_out else "equivalent" if m.equivalent else "SURVIVED"
    ticks = ["✓" if seen else "–" for seen in (detections.allclose, detections.compare_bytes, detections.sqnr)]
    return [
        m.name, "no result" if result.problem else result.check or survived, result.stage,
        f"{len(result.failing)} of {result.ran}", "✓" if result.named else "–" if result.killed else "", *ticks,
    ]  # fmt: skip


def run_session(
    mutants: Sequence[Mutant],
    cases: Sequence[Case],
    directory: Path,
    *,
    workers: int,
    search: bool = False,
    timeout: float = TIMEOUT,
    known: Sequence[tuple[str, str]] = (),
) -> bool:
    """Run the mutants, print their rows, write `mutants.json`. True if each is killed, or equivalent and not killed.

    `search`: do not begin with the recorded cases; record the failing cases that are found. `known`: operation and
    cause of known mistakes of operations, which run too.
    """
    console = Console()
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("mutants", total=len(mutants) + len(known))
        wrong: list[str] = []

        def on_result(result: MutantResult) -> None:
            if not result.right:
                wrong.append(result.mutant.name)
                console.print(f"not as it should be: {result.mutant.name}", style="red")
            progress.update(task, advance=1, description=f"{len(wrong)} not as they should be")

        first = None if search else recorded.read()
        results = run_mistakes(known, cases, on_result)
        if mutants:
            results += run_mutants(
                mutants, cases, workers=workers, recorded=first, on_result=on_result, timeout=timeout
            )
    if search:
        recorded.write(results, [mutant.name for mutant in load_all()], cases)
    if console.width < WIDTH:
        console = Console(width=WIDTH)
    print_results(results, console)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mutants.json"
    written = {"mutants": [result.to_dict() for result in results], "totals": asdict(totals(results))}
    path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"{len(results)} mutants in {time.monotonic() - started:.0f} s; {path}", markup=False)
    return totals(results).right
