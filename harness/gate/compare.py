"""Comparison of two runs: verdicts, figures, times, and outputs with different bytes."""

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

from narrowgauge.harness.gate.architecture import architecture
from narrowgauge.harness.gate.difference import (
    CaseNote,
    ChangeGroup,
    changes_text,
    difference,
    failure_reason,
    grouped,
    print_kinds,
)
from narrowgauge.harness.gate.figures import figures, not_finite
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.terminal import print_text
from narrowgauge.harness.report.text import duration, number, plural, verdict_counts


@dataclass(frozen=True)
class OperationTime:
    """Seconds of the backend for an operation, over the cases that both runs timed."""

    operation: str
    cases: int
    before: float
    after: float
    median: float
    """Median of after / before over the cases."""

    def cells(self) -> tuple[str, ...]:
        """Row of the table with the columns `TIME_COLUMNS`."""
        ratio = f"{self.after / self.before:.3g}"
        return (
            self.operation, number(self.cases), duration(self.before), duration(self.after), ratio, f"{self.median:.3g}"
        )  # fmt: skip


NOT_FINITE, OTHER_BYTES = "not finite", "other bytes of the same inputs"
"""Kinds whose cases are no change of a figure."""
ONLY_A = "only in A"
"""Kind of the cases that the report of B has not."""
TIME_COLUMNS = ("time of", "cases", "A", "B", "B / A", "median B / A of a case")


@dataclass(frozen=True)
class RunComparison:
    """Differences between runs A and B."""

    heads: list[tuple[str, str, str]]
    """Description of the runs: name of a fact, its value in A, its value in B."""
    kinds: dict[str, list[CaseNote]]
    """Differences by kind. A kind may be empty."""
    groups: dict[str, list[ChangeGroup]]
    """The differences of each kind in groups with a common cause."""
    outputs: str
    """Sentence on the number of cases with equal output bytes."""
    common_cases: int
    """Cases in both runs."""
    times: list[OperationTime]
    """Times by operation, then of all operations if the list has several."""
    no_worse: bool
    """Whether B has every case of A (at least one), with no worse figure and no figure that is not finite."""

    @property
    def sentence(self) -> str:
        """The comparison as a sentence."""
        if not self.common_cases:
            return "no case is in both A and B: nothing was compared"
        counts = [f"{kind}: {number(len(lines))}" for kind, lines in self.kinds.items() if lines]
        verdict = "B is nowhere worse than A" if self.no_worse else "B is worse than A"
        return f"{verdict}; {'; '.join(counts) or 'no figure and no byte differs'}"


def compare(a: RecordedRun, b: RecordedRun) -> RunComparison:
    """Compare two runs case by case. Backends and architectures may differ."""
    before, after = ({record["case"]: record for record in run.records} for run in (a, b))
    common = sorted(before.keys() & after.keys())
    not_finite_figures = {case: (not_finite(before[case]), not_finite(after[case])) for case in common}
    old, new = (
        {case: figures(records[case]) for case in common if not any(not_finite_figures[case])}
        for records in (before, after)
    )
    differs = difference(old, new)
    changed = {case: changes_text(case_changes) for case, case_changes in (differs.worse | differs.better).items()}
    verdicts = {case for case in common if before[case]["verdict"] != after[case]["verdict"]}
    same_inputs = [
        case for case in common if before[case]["input_digest"] == after[case]["input_digest"] != "" and
        before[case]["output_digest"] and after[case]["output_digest"]
    ]  # fmt: skip
    different_outputs = [case for case in same_inputs if before[case]["output_digest"] != after[case]["output_digest"]]
    only_a, only_b = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    kinds: dict[str, list[CaseNote]] = {
        "verdict changed": [
            (case, changed.get(case, _verdicts(before[case], after[case])) + failure_reason(after[case]))
            for case in sorted(verdicts)
        ],
        "figures worse": [(case, changed[case]) for case in differs.worse if case not in verdicts],
        "figures better": [(case, changed[case]) for case in differs.better if case not in verdicts],
        NOT_FINITE: [
            (case, f"{_not_finite_text(y)}, was {_not_finite_text(x)}")
            for case, (x, y) in not_finite_figures.items()
            if x or y
        ],
        ONLY_A: [(case, before[case]["verdict"]) for case in only_a],
        "only in B": [(case, after[case]["verdict"] + failure_reason(after[case])) for case in only_b],
        OTHER_BYTES: [
            (case, f"{after[case]['output_digest']}, was {before[case]['output_digest']}") for case in different_outputs
        ],
    }
    return RunComparison(
        heads=_heads(a, b),
        kinds=kinds,
        groups={
            kind: grouped(notes, before | after, old, new, causes=kind not in (NOT_FINITE, OTHER_BYTES))
            for kind, notes in kinds.items()
        },
        common_cases=len(common),
        outputs=_outputs(len(common), len(same_inputs), len(different_outputs)),
        times=_times([(before[case], after[case]) for case in common]),
        no_worse=bool(common) and not (differs.worse or only_a or any(y for _, y in not_finite_figures.values())),
    )


def _verdicts(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{b['verdict']}, was {a['verdict']}"


def _not_finite_text(figures: list[str]) -> str:
    return ", ".join(figures) or "finite"


def _heads(a: RecordedRun, b: RecordedRun) -> list[tuple[str, str, str]]:
    """Backend, architecture, seed and cases of both runs, and the facts of the environment that differ."""
    rows = [
        (name, str(value_of(a)), str(value_of(b)))
        for name, value_of in {
            "backend": lambda run: run.backend,
            "architecture": lambda run: architecture(run.device, run.environment),
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


def _cases(run: RecordedRun) -> str:
    counts = ", ".join(f"{number(count)} {verdict}" for verdict, count in verdict_counts(run.records).items())
    missing = len(run.missing)
    return (counts or "none") + (f", {number(missing)} did not run" if missing else "")


def _outputs(common: int, same_inputs: int, different_outputs: int) -> str:
    return (
        f"{plural(common, 'case')} in both runs, {number(same_inputs)} of them with results of the same inputs: "
        f"{number(same_inputs - different_outputs)} with equal bytes, {number(different_outputs)} with other bytes"
    )


def _times(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[OperationTime]:
    timed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for a, b in pairs:
        if a["seconds"] and b["seconds"]:
            timed[a["operation"]].append((a["seconds"], b["seconds"]))
    if len(timed) > 1:
        timed["all"] = [pair for pairs_ in timed.values() for pair in pairs_]
    return [
        OperationTime(
            operation, len(pairs_), sum(x for x, _ in pairs_), sum(y for _, y in pairs_),
            statistics.median(y / x for x, y in pairs_),
        )
        for operation, pairs_ in timed.items()
    ]  # fmt: skip


def show(comparison: RunComparison, console: Console, page: Path | None = None, page_a: Path | None = None) -> None:
    """Print a comparison: both runs, their differences with addresses on `page`, the report of B, their times, and the
    sentence. Cases that only A has are on `page_a`."""
    for columns, rows in (
        (("", "A", "B"), comparison.heads),
        (TIME_COLUMNS, [time.cells() for time in comparison.times]),
    ):
        table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        if rows:
            console.print(table)
            console.print()
    for kind, lines in comparison.kinds.items():
        print_kinds({kind: lines}, console, "bold", comparison.groups, page_a if kind == ONLY_A else page)
    print_text(comparison.outputs, console)
    style = "blue" if comparison.no_worse else "bold red"
    console.print(comparison.sentence, style=style, markup=False, highlight=False, soft_wrap=True)


MOST = 5000
"""Largest number of cases of a kind on the page. The page counts the omitted cases."""


def render(comparison: RunComparison, a: str, b: str) -> str:
    """HTML page of a comparison of the runs named `a` and `b`. Text from records is escaped."""
    return template.render(
        Path(__file__).with_name("compare.html"),
        name="narrowgauge",
        verdict="pass" if comparison.no_worse else "fail",
        sentence=comparison.sentence,
        aside=f"A is {a}, B is {b}; {comparison.outputs}.",
        found=comparison,
        time_columns=TIME_COLUMNS,
        times=[time.cells() for time in comparison.times],
        most=MOST,
    )
