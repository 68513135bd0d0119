"""Two runs, side by side: verdicts, figures, times, and outputs whose bytes differ."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowgauge.harness.gate.difference import difference, print_kinds, why, words
from narrowgauge.harness.gate.figures import device_class, figures, not_finite
from narrowgauge.harness.records.journal import Run
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.text import duration, number, plural, verdict_counts

Line = tuple[str, str]
"""A case, and what there is to say of it."""


@dataclass(frozen=True)
class Time:
    """Seconds of the backend over the cases of an operation that both runs timed."""

    operation: str
    cases: int
    before: float
    after: float
    median: float
    """Median over the cases of after / before."""

    def cells(self) -> tuple[str, ...]:
        """The row of a table, under `TIME_COLUMNS`."""
        ratio = f"{self.after / self.before:.3g}"
        return (
            self.operation, number(self.cases), duration(self.before), duration(self.after), ratio, f"{self.median:.3g}"
        )  # fmt: skip


TIME_COLUMNS = ("operation", "cases", "A", "B", "B / A", "median of cases")


@dataclass(frozen=True)
class Comparison:
    """What differs between runs A and B."""

    heads: list[tuple[str, str, str]]
    """What the two are: a fact's name, and its value in A and in B."""
    kinds: dict[str, list[Line]]
    """What differs, by kind; a kind may have no line."""
    outputs: str
    """Of how many cases the outputs are the same bytes, in words."""
    both: int
    """Cases that both have."""
    times: list[Time]
    """Each operation, then all where there are several."""
    no_worse: bool
    """Whether B has every case of A, one at least, and none is worse, or has a figure that is not finite."""

    @property
    def sentence(self) -> str:
        """The comparison in one line."""
        if not self.both:
            return "no case is in both A and B: nothing was compared"
        counts = [f"{kind}: {number(len(lines))}" for kind, lines in self.kinds.items() if lines]
        verdict = "B is nowhere worse than A" if self.no_worse else "B is worse than A"
        return f"{verdict}; {'; '.join(counts) or 'no figure and no byte differs'}"


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs, of any backends and devices, case by case."""
    before, after = ({record["case"]: record for record in run.records} for run in (a, b))
    both = sorted(before.keys() & after.keys())
    odd = {case: (not_finite(before[case]), not_finite(after[case])) for case in both}
    differs = difference(
        *({case: figures(records[case]) for case in both if not any(odd[case])} for records in (before, after))
    )
    changed = {case: words(found) for case, found in (differs.worse | differs.better).items()}
    verdicts = {case for case in both if before[case]["verdict"] != after[case]["verdict"]}
    alike = [
        case for case in both if before[case]["input_digest"] == after[case]["input_digest"] != "" and
        before[case]["output_digest"] and after[case]["output_digest"]
    ]  # fmt: skip
    other = [case for case in alike if before[case]["output_digest"] != after[case]["output_digest"]]
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    kinds: dict[str, list[Line]] = {
        "verdict changed": [
            (case, changed.get(case, _verdicts(before[case], after[case])) + why(after[case]))
            for case in sorted(verdicts)
        ],
        "figures worse": [(case, changed[case]) for case in differs.worse if case not in verdicts],
        "figures better": [(case, changed[case]) for case in differs.better if case not in verdicts],
        "not finite": [(case, f"{_listed(x)} → {_listed(y)}") for case, (x, y) in odd.items() if x or y],
        "only in A": [(case, before[case]["verdict"]) for case in gone],
        "only in B": [(case, after[case]["verdict"] + why(after[case])) for case in new],
        "other bytes of the same inputs": [
            (case, f"{before[case]['output_digest']} → {after[case]['output_digest']}") for case in other
        ],
    }
    return Comparison(
        heads=_heads(a, b),
        kinds=kinds,
        both=len(both),
        outputs=_outputs(len(both), len(alike), len(other)),
        times=_times([(before[case], after[case]) for case in both]),
        no_worse=bool(both) and not (differs.worse or gone or any(y for _, y in odd.values())),
    )


def _verdicts(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"verdict {a['verdict']} → {b['verdict']}"


def _listed(figures: list[str]) -> str:
    return ", ".join(figures) or "finite"


def _heads(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """What the runs are: always what they ran, and the facts of the environment in which they differ."""
    rows = [
        (name, str(of(a)), str(of(b)))
        for name, of in {
            "backend": lambda run: run.backend,
            "device": lambda run: device_class(run.device, run.environment),
            "seed": lambda run: run.seed,
            "cases": _cases,
        }.items()
    ]
    shown = {name for name, _, _ in rows}
    for name in [n for n in dict.fromkeys([*a.environment, *b.environment]) if n not in shown]:
        x, y = a.environment.get(name, ""), b.environment.get(name, "")
        if x != y:
            rows.append((name, x, y))
    return rows


def _cases(run: Run) -> str:
    counts = ", ".join(f"{number(count)} {verdict}" for verdict, count in verdict_counts(run.records).items())
    missing = len(run.missing)
    return (counts or "none") + (f", {number(missing)} did not run" if missing else "")


def _outputs(both: int, alike: int, other: int) -> str:
    return (
        f"of {plural(both, 'case')} in both, {number(alike)} with the same inputs: {number(alike - other)} with the "
        f"same bytes, {number(other)} with others"
    )


def _times(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Time]:
    timed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for a, b in pairs:
        if a["seconds"] and b["seconds"]:
            timed[a["operation"]].append((a["seconds"], b["seconds"]))
    if len(timed) > 1:
        timed["all"] = [pair for found in timed.values() for pair in found]
    return [
        Time(
            operation, len(found), sum(x for x, _ in found), sum(y for _, y in found),
            statistics.median(y / x for x, y in found),
        )
        for operation, found in timed.items()
    ]  # fmt: skip


def show(found: Comparison, console: Console) -> None:
    """Print a comparison: what A and B are, what differs, how long they took, and the whole in one line."""
    for columns, rows in ((("", "A", "B"), found.heads), (TIME_COLUMNS, [time.cells() for time in found.times])):
        table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        if rows:
            console.print(table)
    print_kinds({kind: [": ".join(line) for line in lines] for kind, lines in found.kinds.items()}, console, "bold")
    console.print(found.outputs, markup=False, highlight=False, soft_wrap=True)
    style = "blue" if found.no_worse else "bold red"
    console.print(found.sentence, style=style, markup=False, highlight=False, soft_wrap=True)


MOST = 5000
"""Cases of one kind on the page; it says how many it left out."""


def render(found: Comparison, a: str, b: str) -> str:
    """The page of a comparison of the runs called `a` and `b`. Everything that comes from a record is escaped."""
    return template.render(
        Path(__file__).with_name("compare.html"),
        name="narrowgauge",
        verdict="pass" if found.no_worse else "fail",
        sentence=found.sentence,
        aside=f"A is {a}, B is {b}; {found.outputs}.",
        found=found,
        time_columns=TIME_COLUMNS,
        times=[time.cells() for time in found.times],
        most=MOST,
    )
