"""Soak: part of the matrix over many seeds. A correct kernel never fails."""

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
from narrowgauge.harness.gate.ledger import Ledger
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.records.record import elements_compared, outcome
from narrowgauge.harness.report.failure_view import reproduction
from narrowgauge.harness.report.text import duration, number, plural
from narrowgauge.harness.running.pool import Settings, Task, run_tasks
from narrowgauge.harness.running.runner import digest
from narrowgauge.harness.tools.run_cases import progress_bar

SHOWN = 20
"""Largest number of printed failed cases, with commands for reproduction. Further cases are counted."""
SEEDS_COMPARED = 4
"""Number of seeds whose inputs are compared, to find cases that do not depend on the seed."""
LEAST = 1 << 14
"""Smallest work of a case in elements: smaller cases cost as much, and test less."""


def soak_selection(cases: Sequence[Case], share: float) -> list[Case]:
    """About `share` of the cases, in order: cheap cases that contain every feature.

    Features are the recipes, input families, dtypes and flags of the operations; all are covered, even if that takes
    more cases. Further cases have least work multiplied by the number of earlier cases with their rarest feature. Cases
    with equal inputs for every seed are selected only if no other case has their features, or no other case is left.
    The selection depends only on the cases.
    """
    count = math.ceil(share * len(cases))
    feature_counts: Counter[str] = Counter()
    selected: list[int] = []
    seed_independent: list[int] = []
    queue = [(0, case_work(case), hashlib.sha256(case.id.encode()).digest(), n) for n, case in enumerate(cases)]
    heapq.heapify(queue)

    def rarest_count(index: int) -> int:
        return min(feature_counts[part] for part in case_features(cases[index]))

    def take(index: int) -> None:
        selected.append(index)
        feature_counts.update(case_features(cases[index]))

    def take_next() -> None:
        score, cost, mark, index = heapq.heappop(queue)
        if (now := cost * rarest_count(index)) > score:  # a feature was selected since the score was computed
            heapq.heappush(queue, (now, cost, mark, index))
        elif depends_on_seed(cases[index]):
            take(index)
        else:
            seed_independent.append(index)

    while queue and queue[0][0] == 0:
        take_next()
    for index in seed_independent:
        if not rarest_count(index):
            take(index)
    while queue and len(selected) < count:
        take_next()
    left_over = [index for index in seed_independent if index not in selected]
    return [cases[index] for index in sorted(selected + left_over[: max(0, count - len(selected))])]


def case_features(case: Case) -> list[str]:
    """Features of a case: operation with recipe, input family, dtype, and each flag."""
    fields = {"recipe": case.recipe_label, "inputs": case.inputs, "dtype": case.dtype_label}
    features = [f"{case.operation} {name} {value}" for name, value in fields.items()]
    return features + [f"{case.operation} flag {flag}" for flag in case.flags]


def case_work(case: Case) -> int:
    """Approximate cost of running and judging a case, in elements."""
    return max(LEAST, case.work)


def depends_on_seed(case: Case) -> bool:
    """Whether the case has inputs that depend on the seed."""
    if not math.prod(case.shape):
        return False

    def fingerprint(seed: int) -> tuple[str, str]:
        inputs = make_inputs(case, seed=seed)
        counters = inputs.counters
        return digest(inputs.tensors.values()), str(counters)

    first = fingerprint(0)
    return any(fingerprint(seed) != first for seed in range(1, SEEDS_COMPARED))


def soak(
    cases: Sequence[Case], seeds: range, settings: Settings, console: Console, *, ledger: Ledger | None = None
) -> bool:
    """Run every case on the inputs of every seed, print failures and a final line. True if every case passed, or failed
    as `ledger` expects.

    An expected failure may pass on some seeds; `narrowgauge run` reports outdated entries. Cases expected to crash must
    not be among the cases (`Ledger.launchable`). Proved rules raise no false alarm in any number of runs. Statistical
    tests share the false alarms of a single run (`harness.checks.statistics.holm`), independent of the number of seeds.

    Raises BackendError if the backend cannot be loaded.
    """
    started = time.monotonic()
    ledger = ledger or Ledger()
    runs = compared = failures = known_failures = 0
    failed: dict[str, dict[str, Any]] = {}
    failure_counts: Counter[str] = Counter()
    with progress_bar(console) as progress:
        bar = progress.add_task("running", total=len(cases) * len(seeds))

        def on_record(record: dict[str, Any]) -> None:
            nonlocal runs, compared, failures, known_failures
            runs += 1
            compared += elements_compared(record)
            ledger.mark(record)
            if outcome(record) == "known":
                known_failures += 1
            elif record["verdict"] != "pass":
                failures += 1
                failure_counts[record["case"]] += 1
                failed.setdefault(record["case"], record)
            progress.update(bar, advance=1, description=plural(failures, "failure"))

        run_tasks((Task(case, seed) for seed in seeds for case in cases), settings, on_record)
    for record in list(failed.values())[:SHOWN]:
        failure_count = f"{record['verdict']} in {failure_counts[record['case']]} of {plural(len(seeds), 'seed')}"
        console.print(
            f"{failure_count}: {record['message']}", markup=False, highlight=False, soft_wrap=True, style="red"
        )
        console.print(f"reproduce: {reproduction(record)}", markup=False, highlight=False, soft_wrap=True)
    if len(failed) > SHOWN:
        console.print(f"and {plural(len(failed) - SHOWN, 'more case')} that failed", style="red")
    missing = len(cases) * len(seeds) - runs
    summary = [
        f"{plural(len(seeds), 'seed')} from {seeds.start}", plural(len(cases), "case"),
        f"{plural(runs, 'run')} in {duration(time.monotonic() - started)}",
        f"{number(compared)} elements compared" if compared else "nothing was compared", plural(failures, "failure"),
    ]  # fmt: skip
    if known_failures:
        summary.append(plural(known_failures, "known failure"))
    if missing:
        summary.append(f"interrupted: {plural(missing, 'run')} did not happen")
    passed = not failures and not missing and compared > 0
    style = "" if passed else "bold red"
    console.print(", ".join(summary), markup=False, highlight=False, soft_wrap=True, style=style)
    return passed
