"""A run of mutants from the command line: progress while it goes, rows and `mutants.json` at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.result import Result, totals
from narrowgauge.harness.tools.mutants.run import TIMEOUT, run_mutants
from narrowgauge.harness.tools.mutants.table import WIDTH, print_results


def run_session(
    mutants: Sequence[Mutant], cases: Sequence[Case], directory: Path, *, workers: int, timeout: float = TIMEOUT
) -> bool:
    """Run the mutants, print a row each, write `mutants.json`. True where each is killed, or equivalent and not."""
    console = Console()
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("mutants", total=len(mutants))
        wrong: list[str] = []

        def on_result(result: Result) -> None:
            if not result.right:
                wrong.append(result.mutant.name)
                console.print(f"not as it should be: {result.mutant.name}", style="red")
            progress.update(task, advance=1, description=f"{len(wrong)} not as they should be")

        results = run_mutants(mutants, cases, workers=workers, on_result=on_result, timeout=timeout)
    if console.width < WIDTH:
        console = Console(width=WIDTH)
    print_results(results, console)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mutants.json"
    written = {"mutants": [result.to_dict() for result in results], "totals": asdict(totals(results))}
    path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"{len(results)} mutants in {time.monotonic() - started:.0f} s; {path}", markup=False)
    return totals(results).right
