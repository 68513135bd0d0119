"""Soak: a part of the matrix over many seeds, in which an unchanged kernel never fails."""

from __future__ import annotations

import hashlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import work as elements_of
from narrowgauge.harness.gate.ledger import Ledger
from narrowgauge.harness.inputs.inputs import make_inputs
from narrowgauge.harness.records.record import elements_compared, outcome
from narrowgauge.harness.report.text import duration, number, plural
from narrowgauge.harness.report.view import reproduction
from narrowgauge.harness.running.pool import Settings, Task, run_tasks
from narrowgauge.harness.running.runner import digest
from narrowgauge.harness.tools.run_cases import progress_bar

SHOWN = 20
"""Cases that failed which are printed, each with one line that reproduces it; the rest are counted."""
SEEDS_COMPARED = 4
"""Seeds whose inputs are compared, to see whether a case depends on its seed."""
LEAST = 1 << 14
"""Work of the smallest cases, in elements: fewer cost no less, and see less."""


def chosen(cases: Sequence[Case], share: float) -> list[Case]:
    """About `share` of the cases, in their order: cheap ones that hold everything that occurs.

    Held is each recipe, input family, dtype and flag of each operation, even where that takes more cases. The rest are
    those of least work, times how often what they hold is held already. Cases whose inputs are the same for every seed
    are taken only where no other case holds what they do, or none is left. The choice depends on the cases alone.
    """
    wanted = math.ceil(share * len(cases))
    held: Counter[str] = Counter()
    taken: list[int] = []
    fixed: list[int] = []
    waiting = [(0, work(case), hashlib.sha256(case.id.encode()).digest(), n) for n, case in enumerate(cases)]
    heapq.heapify(waiting)

    def times(place: int) -> int:
        return min(held[part] for part in parts(cases[place]))

    def take(place: int) -> None:
        taken.append(place)
        held.update(parts(cases[place]))

    def take_next() -> None:
        score, cost, mark, place = heapq.heappop(waiting)
        if (now := cost * times(place)) > score:  # what it holds was taken since it was put there
            heapq.heappush(waiting, (now, cost, mark, place))
        elif varies(cases[place]):
            take(place)
        else:
            fixed.append(place)

    while waiting and waiting[0][0] == 0:
        take_next()
    for place in fixed:
        if not times(place):
            take(place)
    while waiting and len(taken) < wanted:
        take_next()
    left = [place for place in fixed if place not in taken]
    return [cases[place] for place in sorted(taken + left[: max(0, wanted - len(taken))])]


def parts(case: Case) -> list[str]:
    """What a case holds of its operation: a recipe, a family, a dtype, flags."""
    named = {"recipe": case.recipe, "inputs": case.inputs, "dtype": case.dtype}
    found = [f"{case.operation} {name} {value}" for name, value in named.items()]
    return found + [f"{case.operation} flag {flag}" for flag in case.flags]


def work(case: Case) -> int:
    """What a case costs to run and judge, in elements: enough to tell cheap cases from others."""
    return max(LEAST, elements_of(case))


def varies(case: Case) -> bool:
    """Whether there are inputs, and they depend on the seed."""
    if not math.prod(case.shape):
        return False

    def fingerprint(seed: int) -> tuple[str, str]:
        inputs = make_inputs(case, seed=seed)
        counters = {name: bits for name, bits in inputs.random.items() if isinstance(bits, tuple)}
        return digest(inputs.tensors()), str(counters)

    first = fingerprint(0)
    return any(fingerprint(seed) != first for seed in range(1, SEEDS_COMPARED))


def soak(
    cases: Sequence[Case], seeds: range, settings: Settings, console: Console, *, ledger: Ledger | None = None
) -> bool:
    """Run every case on the inputs of every seed; print what failed, and one line at the end. True where all passed,
    or failed as `ledger` expects.

    What it expects to fail may pass on some seeds: `narrowgauge run` says where an entry is no longer right. What it
    expects to crash is not to be among the cases (`Ledger.launchable`). Proved rules raise no false alarm at any number
    of runs; statistical tests share the false alarms that one run is allowed
    (`harness.checks.statistics.holm`), whatever the number of seeds.

    Raises BackendError where the backend cannot be loaded.
    """
    started = time.monotonic()
    ledger = ledger or Ledger()
    runs = compared = failures = known = 0
    failed: dict[str, dict[str, Any]] = {}
    times: Counter[str] = Counter()
    with progress_bar(console) as progress:
        bar = progress.add_task("running", total=len(cases) * len(seeds))

        def on_record(record: dict[str, Any]) -> None:
            nonlocal runs, compared, failures, known
            runs += 1
            compared += elements_compared(record)
            ledger.mark(record)
            if outcome(record) == "known":
                known += 1
            elif record["verdict"] != "pass":
                failures += 1
                times[record["case"]] += 1
                failed.setdefault(record["case"], record)
            progress.update(bar, advance=1, description=plural(failures, "failure"))

        run_tasks((Task(case, seed) for seed in seeds for case in cases), settings, on_record)
    for record in list(failed.values())[:SHOWN]:
        of = f"{record['verdict']} in {times[record['case']]} of {plural(len(seeds), 'seed')}"
        console.print(f"{of}: {record['message']}", markup=False, highlight=False, soft_wrap=True, style="red")
        console.print(f"reproduce: {reproduction(record)}", markup=False, highlight=False, soft_wrap=True)
    if len(failed) > SHOWN:
        console.print(f"and {plural(len(failed) - SHOWN, 'more case')} that failed", style="red")
    missing = len(cases) * len(seeds) - runs
    words = [
        f"{plural(len(seeds), 'seed')} from {seeds.start}", plural(len(cases), "case"),
        f"{plural(runs, 'run')} in {duration(time.monotonic() - started)}",
        f"{number(compared)} elements compared" if compared else "nothing was compared", plural(failures, "failure"),
    ]  # fmt: skip
    if known:
        words.append(plural(known, "known failure"))
    if missing:
        words.append(f"interrupted: {plural(missing, 'run')} did not happen")
    passed = not failures and not missing and compared > 0
    style = "" if passed else "bold red"
    console.print(", ".join(words), markup=False, highlight=False, soft_wrap=True, style=style)
    return passed
