"""Comparison of a run with a baseline: worse figures by name. A case that cannot be compared fails the gate."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.harness.gate.architecture import architecture
from narrowgauge.harness.gate.baseline import Baseline, BaselineError, read, rules_of
from narrowgauge.harness.gate.difference import (
    ChangeGroup,
    changes_text,
    difference,
    failure_reason,
    grouped,
    print_kinds,
)
from narrowgauge.harness.gate.figures import figures, not_finite
from narrowgauge.harness.machine.collection import paused_collection
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.harness.records.record import elements_compared, outcome
from narrowgauge.harness.report.failure_view import reproduction
from narrowgauge.harness.report.github import annotate
from narrowgauge.harness.report.text import number, plural

_OTHER_KINDS = ("another architecture", "another backend", "another seed", "another rule")
_OF_RUN = ("nothing ran", "nothing was compared", "interrupted", "a part", *_OTHER_KINDS)
"""Kinds of a problem of the whole run, with a single line."""
KNOWN = "known to fail"
"""Kind of a case that fails as the ledger expects, and that is not in the baseline with these figures."""
PASSES = "known to fail, and pass"


@dataclass
class Judgement:
    """Result of the gate: lines by kind, in printed order."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    """Lines by kind; each line fails the gate."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, list[ChangeGroup]] = field(default_factory=dict)
    """The cases of a kind in groups with a common cause, for kinds whose lines are cases of the run."""
    same: int = 0
    """Cases with the accepted figures."""

    @property
    def passed(self) -> bool:
        return not self.problems

    def sentence(self, name: str) -> str:
        """The verdict by the baseline called `name`, with the number of cases of each kind."""
        counts = [f"{plural(self.same, 'case')} as accepted"]
        counts += [
            kind if kind in _OF_RUN else f"{number(len(lines))} {kind}"
            for kind, lines in (self.problems | self.notes).items()
        ]
        return f"gate {'holds' if self.passed else 'fails'} against {name}: {', '.join(counts)}"

    def fail(self, kind: str, line: str) -> None:
        self.problems.setdefault(kind, []).append(line)

    def note(self, kind: str, line: str) -> None:
        self.notes.setdefault(kind, []).append(line)


@paused_collection()
def judge(run: RecordedRun, baseline: Baseline) -> Judgement:
    """Compare a run with a baseline. A run of another architecture, backend or seed fails, and its cases are not
    compared."""
    judgement = Judgement()
    _check_complete(run, judgement)
    if _check_same_kind(run, baseline, judgement):
        _compare_cases(run, baseline, judgement)
    return judgement


def _check_complete(run: RecordedRun, judgement: Judgement) -> None:
    if not run.records:
        judgement.fail("nothing ran", "the run has no record")
    elif not any(map(elements_compared, run.records)):
        judgement.fail("nothing was compared", f"no element in {plural(len(run.records), 'case')}")
    if missing := run.missing:
        judgement.fail(
            "interrupted",
            f"{number(len(missing))} of {plural(len(run.cases), 'case')} did not run, the first {missing[0]}",
        )
    if run.shard is not None:
        judgement.fail(
            "a part", f"the run is shard {run.shard} of a matrix; narrowgauge merge joins all shards into one"
        )
    for case, count in Counter(record["case"] for record in run.records).items():
        if count > 1:
            judgement.fail("recorded twice", f"{case}: {count} records")


def _check_same_kind(run: RecordedRun, baseline: Baseline, judgement: Judgement) -> bool:
    pairs = {
        "another architecture": (baseline.architecture, architecture(run.device, run.environment)),
        "another backend": (baseline.backend, run.backend),
        "another seed": (baseline.seed, run.seed),
    }
    rules = rules_of(run)
    for name, digest in baseline.rules.items():
        if rules.get(name, digest) != digest:
            judgement.fail(
                "another rule",
                f"{name} is {digest} in the baseline, {rules[name]} in the run: its file has changed; restore it, or "
                "accept the run anew",
            )
    differ = {kind: pair for kind, pair in pairs.items() if pair[0] != pair[1]}
    for kind, (accepted, actual) in differ.items():
        judgement.fail(kind, f"the baseline is of {accepted}, the run of {actual}: no case was compared")
    return not differ


def _compare_cases(run: RecordedRun, baseline: Baseline, judgement: Judgement) -> None:
    accepted = baseline.cases()
    records = {record["case"]: record for record in run.records}
    finite = {}
    known = {case: record for case, record in records.items() if outcome(record) == "known"}
    for case, record in records.items():
        if (problems := not_finite(record)) and case not in known:
            judgement.fail("not finite", f"{case}: {', '.join(problems)}{failure_reason(record)}")
        elif not problems:
            finite[case] = figures(record)
    differs = difference(accepted, finite)
    new, failed = (
        [case for case in differs.new if (finite[case].verdict == "pass") is passed and case not in known]
        for passed in (True, False)
    )
    worse = {case: changed for case, changed in differs.worse.items() if case not in known}
    expected = [case for case in known if case in differs.worse or case in differs.new or case not in finite]
    notes = {
        KNOWN: [(case, known[case]["known"]) for case in expected],
        PASSES: [(case, record["message"]) for case, record in records.items() if outcome(record) == "unexpected"],
        "worse": [(case, f"{changes_text(changed)}{failure_reason(records[case])}") for case, changed in worse.items()],
        "new": [(case, str(finite[case])) for case in new],
        "new, and not pass": [(case, f"{finite[case]}{failure_reason(records[case])}") for case in failed],
        "better": [(case, changes_text(changed)) for case, changed in differs.better.items()],
    }
    judgement.groups = {kind: grouped(found, records, accepted, finite) for kind, found in notes.items()}
    for case, line in notes["worse"]:
        judgement.fail("worse", f"{case}: {line}")
    for case in differs.removed:
        if case not in records:
            judgement.fail("did not run", case)
    for kind in (KNOWN, PASSES, "new", "new, and not pass", "better"):
        add = judgement.fail if kind == "new, and not pass" else judgement.note
        for case, line in notes[kind]:
            add(kind, f"{case}: {line}")
    _check_skips(sum(figures_.verdict == "unsupported" for figures_ in accepted.values()), run.records, judgement)
    judgement.same = len(finite) - len(differs.worse) - len(differs.better) - len(differs.new)


def next_commands(judgement: Judgement, run: RecordedRun, baseline: Path, folder: Path) -> list[str]:
    """The command to run after a judgement, and others with the condition of each, as comments of the shell.
    `baseline`: file of the baseline; `folder`: report folder of the run."""
    kinds = judgement.problems
    again = run.command or _command("run", "--backend", run.backend, "--device", run.device)
    if kinds.keys() & {"nothing ran", "nothing was compared", "recorded twice"}:
        return [again]
    if "interrupted" in kinds:
        return [f"{again} --resume"]
    if "a part" in kinds:
        return [f"{_command('merge', folder)} OTHER_SHARD…"]
    if kinds.keys() & set(_OTHER_KINDS[:3]):  # another rule has no baseline of its own
        return [_with_its_baseline(run, kinds, baseline, folder)]
    accept = _accept(baseline, folder)
    if kinds.keys() == {"did not run"}:
        return [
            f"{_without_keyword(again)}  # with the cases that did not run",
            f"{accept}  # if they are gone on purpose",
        ]
    if kinds:
        records = {record["case"]: record for record in run.records}
        groups = (group for kind in kinds for group in judgement.groups.get(kind, ()))
        failing = [group.notes[0][0] for group in groups] or [
            case for case, record in records.items() if outcome(record) not in ("pass", "known")
        ]
        shown = [reproduction(records[case]) for case in failing[:1]]
        return [*shown, f"{accept}  # if the change is intended"]
    if kept := [kind for kind in ("better", "new") if kind in judgement.notes]:
        return [f"{accept}  # to keep what is {' and '.join(kept)}"]
    return [f"nothing to do: every case is as accepted{', or ' + KNOWN if KNOWN in judgement.notes else ''}"]


def _without_keyword(command: str) -> str:
    """A command without its selection by keyword, which may have left out cases."""
    words = shlex.split(command)
    return shlex.join(words[: words.index("-k")] + words[words.index("-k") + 2 :]) if "-k" in words else command


def _command(*words: object) -> str:
    return shlex.join(["narrowgauge", *map(str, words)])


def _accept(baseline: Path, folder: Path) -> str:
    return _command("baseline", "accept", "--baseline", baseline, "--run", folder)


def _with_its_baseline(run: RecordedRun, kinds: Collection[str], baseline: Path, folder: Path) -> str:
    """The gate with the baseline of the architecture, backend and seed of a run, or its acceptance as a new file."""
    name = architecture(run.device, run.environment)
    for file in sorted(baseline.parent.glob("*.json")):
        with suppress(BaselineError):
            found = read(file)
            if (found.architecture, found.backend, found.seed) == (name, run.backend, run.seed):
                return _command("gate", "--baseline", file, "--run", folder)
    name += f"-{re.sub('[^A-Za-z0-9]+', '-', run.backend)}" if "another backend" in kinds else ""
    name += f"-seed-{run.seed}" if "another seed" in kinds else ""
    return f"{_accept(baseline.with_name(f'{name}.json'), folder)}  # for a baseline of this kind of run"


def _check_skips(accepted: int, records: Iterable[dict[str, Any]], judgement: Judgement) -> None:
    skipped = Counter(record["message"] for record in records if record["verdict"] == "unsupported")
    if skipped.total() > accepted:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common(3))
        judgement.fail(
            "more skips",
            f"{plural(skipped.total(), 'case')} unsupported, and {accepted} accepted; most often: {reasons}",
        )


def show(
    judgement: Judgement, name: str, console: Console, page: Path | None = None, following: Sequence[str] = ()
) -> None:
    """Print a judgement by the baseline called `name`: new and better cases, problems, and the verdict, with addresses
    on `page`, the report of the run, and the commands `following`. In a GitHub job a failed gate is an annotation."""
    print_kinds(judgement.notes, console, "blue", judgement.groups, page)
    print_kinds(judgement.problems, console, "bold red", judgement.groups, page)
    style = "blue" if judgement.passed else "bold red"
    console.print(judgement.sentence(name), style=style, markup=False, highlight=False, soft_wrap=True)
    for number_, line in enumerate(following):
        words = f"{'or' if number_ else 'next'}: {line}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    if not judgement.passed:
        first = next(line for lines in judgement.problems.values() for line in lines)
        annotate("narrowgauge gate", f"{judgement.sentence(name)}\n{first}", print_line=print)
