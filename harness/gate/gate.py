"""The judgement of a run by a baseline: what got worse, by name. Whatever cannot be compared counts against the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from narrowgauge.harness.gate.baseline import Baseline
from narrowgauge.harness.gate.difference import difference, print_kinds, why, words
from narrowgauge.harness.gate.figures import device_class, figures, not_finite
from narrowgauge.harness.records.journal import Run
from narrowgauge.harness.records.record import elements_compared
from narrowgauge.harness.report.text import number, plural


@dataclass
class Judgement:
    """What the gate found: lines by kind, in the order in which they are printed."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    """Each fails the gate."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    same: int = 0
    """Cases that are as accepted."""

    @property
    def passed(self) -> bool:
        return not self.problems

    def fail(self, kind: str, line: str) -> None:
        self.problems.setdefault(kind, []).append(line)

    def note(self, kind: str, line: str) -> None:
        self.notes.setdefault(kind, []).append(line)


def judge(run: Run, baseline: Baseline) -> Judgement:
    """Hold a run against a baseline. A run of something else is not compared case by case, and fails."""
    found = Judgement()
    _whole(run, found)
    if _same_kind(run, baseline, found):
        _cases(run, baseline, found)
    return found


def _whole(run: Run, found: Judgement) -> None:
    if not run.records:
        found.fail("nothing ran", "the run has no record")
    elif not any(map(elements_compared, run.records)):
        found.fail("nothing was compared", f"no element in {plural(len(run.records), 'case')}")
    if missing := run.missing:
        found.fail(
            "interrupted",
            f"{number(len(missing))} of {plural(len(run.cases), 'case')} did not run, the first {missing[0]}",
        )
    if run.shard is not None:
        found.fail("a part", f"the run is shard {run.shard} of a matrix; narrowgauge merge joins all shards into one")
    for case, count in Counter(record["case"] for record in run.records).items():
        if count > 1:
            found.fail("recorded twice", f"{case}: {count} records")


def _same_kind(run: Run, baseline: Baseline, found: Judgement) -> bool:
    pairs = {
        "another device": (baseline.device, device_class(run.device, run.environment)),
        "another backend": (baseline.backend, run.backend),
        "another seed": (baseline.seed, run.seed),
    }
    differ = {kind: pair for kind, pair in pairs.items() if pair[0] != pair[1]}
    for kind, (accepted, given) in differ.items():
        found.fail(kind, f"the baseline is of {accepted}, the run of {given}: no case was compared")
    return not differ


def _cases(run: Run, baseline: Baseline, found: Judgement) -> None:
    accepted = baseline.cases()
    records = {record["case"]: record for record in run.records}
    finite = {}
    for case, record in records.items():
        if bad := not_finite(record):
            found.fail("not finite", f"{case}: {', '.join(bad)}{why(record)}")
        else:
            finite[case] = figures(record)
    differs = difference(accepted, finite)
    for case, changed in differs.worse.items():
        found.fail("worse", f"{case}: {words(changed)}{why(records[case])}")
    for case in differs.gone:
        if case not in records:
            found.fail("did not run", case)
    for case in differs.new:
        if finite[case].verdict == "pass":
            found.note("new", f"{case}: {finite[case]}")
        else:
            found.fail("new, and not pass", f"{case}: {finite[case]}{why(records[case])}")
    for case, changed in differs.better.items():
        found.note("better", f"{case}: {words(changed)}")
    _skips(sum(one.verdict == "unsupported" for one in accepted.values()), run.records, found)
    found.same = len(finite) - len(differs.worse) - len(differs.better) - len(differs.new)


def _skips(accepted: int, records: Iterable[dict[str, Any]], found: Judgement) -> None:
    skipped = Counter(record["message"] for record in records if record["verdict"] == "unsupported")
    if skipped.total() > accepted:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common(3))
        found.fail(
            "more skips",
            f"{plural(skipped.total(), 'case')} unsupported, and {accepted} accepted; most often: {reasons}",
        )


def show(found: Judgement, name: str, console: Console) -> None:
    """Print a judgement by the baseline called `name`: what is new or better, the problems, and the verdict."""
    print_kinds(found.notes, console, "blue")
    print_kinds(found.problems, console, "bold red")
    counts = [f"{plural(found.same, 'case')} as accepted"]
    counts += [f"{number(len(lines))} {kind}" for kind, lines in (found.problems | found.notes).items()]
    verdict, style = ("holds", "blue") if found.passed else ("fails", "bold red")
    console.print(
        f"gate {verdict} against {name}: {', '.join(counts)}", style=style, markup=False, highlight=False,
        soft_wrap=True,
    )  # fmt: skip
