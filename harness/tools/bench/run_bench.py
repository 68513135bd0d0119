"""A bench from the command line: progress bar, table, page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.harness.machine.processors import load, other_work
from narrowgauge.harness.operations.timing.operation_bench import BenchTask
from narrowgauge.harness.records.environment import describe_run
from narrowgauge.harness.report.times import BUSY
from narrowgauge.harness.tools.bench.bench import Bench, measure
from narrowgauge.harness.tools.bench.cost_growth import FIRST, LAST, STEP, CostCurve, measure_growth
from narrowgauge.harness.tools.bench.report import report, table

if TYPE_CHECKING:
    from rich.console import Console


def run_rates(
    tasks: Sequence[BenchTask],
    device: str,
    directory: Path,
    *,
    quick: bool = False,
    compiling: bool = False,
    launches: bool = True,
    console: Console | None = None,
) -> bool:
    """Time the tasks, print and write the report. Returns whether every output is correct. Raises OSError if the report
    cannot be written."""
    console, started = _console(console), Start()
    with _Bar(console, len(tasks) + launches) as bar:
        bench = measure(tasks, device, quick=quick, compiling=compiling, launches=launches, on_task=bar.next)
    table.print_bench(bench, console)
    return _end(bench, [], device, directory, console, started)


def run_growth(device: str, directory: Path, *, last: int | None = None, console: Console | None = None) -> bool:
    """Measure cost growth up to 2^`last` elements. Returns and raises as `run_rates`."""
    console, started = _console(console), Start()
    sizes = range(FIRST, (LAST[device] if last is None else last) + 1, STEP)
    with _Bar(console, len(sizes)) as bar:
        curves = measure_growth(device, last=last, on_size=bar.next)
    table.print_growth(curves, console)
    return _end(Bench(), curves, device, directory, console, started)


@dataclass(frozen=True)
class Start:
    """Time and load of the machine when a bench began."""

    clock: float = field(default_factory=time.monotonic)
    others: float = field(default_factory=load)


def _end(
    bench: Bench, growths: list[CostCurve], device: str, directory: Path, console: Console, started: Start
) -> bool:
    environment = describe_run(backend="native", device=device, seed=0)
    if busy := other_work(started.others, load(), 1):
        environment[BUSY] = busy
        console.print(f"{BUSY}: {busy}", style="yellow")
    page = report.write(bench, growths, environment, directory)
    passed = report.verdict_of(bench, growths) == "pass"
    summary = f"{report.sentence(bench, growths)}; {time.monotonic() - started.clock:.1f} s; report: {page}"
    console.print(summary, markup=False, highlight=False, soft_wrap=True, style="" if passed else "bold red")
    return passed


def _console(console: Console | None) -> Console:
    from rich.console import Console as Terminal

    return console or Terminal()


class _Bar:
    """Progress bar of a bench. `next` names the next task, and completes the previous task."""

    def __init__(self, console: Console, total: int) -> None:
        from narrowgauge.harness.tools.run_cases import progress_bar

        self._progress = progress_bar(console)
        self._task = self._progress.add_task("", total=total)
        self._begun = False

    def next(self, name: str) -> None:
        self._progress.update(self._task, advance=1 if self._begun else 0, description=name)
        self._begun = True

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._progress.update(self._task, advance=1 if kind is None and self._begun else 0)
        self._progress.stop()
