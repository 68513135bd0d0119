"""Differences between the figures of two runs: case by case, in groups of cases with a common cause, and printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rich.console import Console

from narrowgauge.harness.gate.figures import Change, Figures, changes, total
from narrowgauge.harness.report.groups import common, group
from narrowgauge.harness.report.report import PAGE
from narrowgauge.harness.report.terminal import print_text
from narrowgauge.harness.report.text import number, plural, sentence

CaseNote = tuple[str, str]
"""Id of a case, and a sentence about it. The sentence may be empty."""


@dataclass(frozen=True)
class Difference:
    """Ids of cases, sorted. A case in no list is unchanged."""

    worse: dict[str, list[Change]]
    """Cases with a worse figure, and all their changed figures, worse figures first."""
    better: dict[str, list[Change]]
    """Changed cases without a worse figure."""
    removed: list[str]
    """Cases that are missing in the new run."""
    new: list[str]


def difference(before: Mapping[str, Figures], after: Mapping[str, Figures]) -> Difference:
    """Differences of `after` from `before`, both by case id."""
    result = Difference({}, {}, sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys()))
    for case in sorted(before.keys() & after.keys()):
        if before[case] != after[case] and (changed := changes(before[case], after[case])):
            (result.worse if changed[0].worse else result.better)[case] = changed
    return result


def changes_text(changed: list[Change]) -> str:
    """Changes as a phrase: `37 wrong elements, was 0; largest error 1 ulp, was 0`."""
    return "; ".join(map(str, changed))


@dataclass(frozen=True)
class ChangeGroup:
    """Cases of a kind of difference that changed for the same cause."""

    title: str
    """Cause, changes of all cases together, number of cases, common dimensions: `codes wrong, explained exactly by
    ties-away: largest error 1 ulp, was 0; 12 cases, all quantize nvfp4 bf16`."""
    notes: list[CaseNote]
    """Cases, the worst case first, with a sentence each if the title has neither a cause nor a change."""
    reason: str = ""
    """Why the worst case did not pass. Empty if the case passed."""


def grouped(
    notes: Sequence[CaseNote],
    records: Mapping[str, dict[str, Any]],
    before: Mapping[str, Figures],
    after: Mapping[str, Figures],
    *,
    causes: bool = True,
) -> list[ChangeGroup]:
    """Groups of the noted cases, by the causes of `harness.report.groups.group` for records that did not pass, else by
    operation and changed figures. `records` has the record of every case, `before` and `after` figures by case id.

    Without `causes` the groups are the operations, and every case keeps its sentence.
    """
    sentences = dict(notes)
    noted = [records[case] for case, _ in notes]
    members: list[tuple[str, list[dict[str, Any]]]] = []
    if causes:
        members += [(found.failure, found.records) for found in group(noted)]
    else:
        before = after = {}
    failed = {id(record) for _, records_ in members for record in records_}
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in noted:
        if id(record) not in failed:
            case = record["case"]
            both = case in before and case in after
            names = [change.figure for change in changes(before[case], after[case])] if both else []
            alike[record["operation"], *names].append(record)
    members += [("", records_) for records_ in alike.values()]
    return [_change_group(cause, records_, sentences, before, after) for cause, records_ in members]


def _change_group(
    cause: str,
    records: Sequence[dict[str, Any]],
    sentences: Mapping[str, str],
    before: Mapping[str, Figures],
    after: Mapping[str, Figures],
) -> ChangeGroup:
    both = [record["case"] for record in records if record["case"] in before and record["case"] in after]
    changed = changes(*(total(side[case] for case in both) for side in (before, after))) if both else []
    if changed:  # it begins with the verdict, as the cause of a case without a result does
        cause = cause.removeprefix(f"{records[0]['verdict']}: ")
    start = ": ".join(filter(None, (cause, changes_text(changed))))
    every = "all " if len(records) > 1 else ""
    title = "; ".join(filter(None, (start, f"{plural(len(records), 'case')}, {every}{common(records)}")))
    notes = [(record["case"], "" if start else sentences[record["case"]]) for record in records]
    reason = " ".join(sentence(records[0]).split())
    return ChangeGroup(title, notes, "" if reason in title else reason)


LISTED = 50
"""Largest number of printed lines or groups of a kind. A last line counts the omitted lines."""
CASES = 3
"""Largest number of printed cases of a group. A last line counts the omitted cases."""


def print_kinds(
    kinds: Mapping[str, Sequence[str | CaseNote]],
    console: Console,
    style: str,
    groups: Mapping[str, Sequence[ChangeGroup]] | None = None,
    page: Path | None = None,
) -> None:
    """Print every kind with lines, as its groups if `groups` has them: the title, the first cases, and the address of
    the worst case on `page`, the report of the run."""
    for kind, lines in kinds.items():
        if lines:
            console.print(f"{kind}: {number(len(lines))}", style=style, markup=False, highlight=False)
        found = (groups or {}).get(kind)
        shown: Sequence[Any] = lines if found is None else found
        for entry in shown[:LISTED]:
            if isinstance(entry, ChangeGroup):
                _print_group(entry, console, page)
            else:
                line = entry if isinstance(entry, str) else ": ".join(filter(None, entry))
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if len(shown) > LISTED:
            console.print(f"  … and {number(len(shown) - LISTED)} more", markup=False, highlight=False)


def _print_group(found: ChangeGroup, console: Console, page: Path | None) -> None:
    print_text(found.title, console, indent=2, hanging=2)
    if found.reason:
        print_text(found.reason, console, indent=4, hanging=2)
    for note in found.notes[:CASES]:
        console.print(f"    {': '.join(filter(None, note))}", markup=False, highlight=False, soft_wrap=True)
    if len(found.notes) > CASES:
        console.print(f"    and {plural(len(found.notes) - CASES, 'more case')}", markup=False, highlight=False)
    if page is not None:
        address = f"{page}#{urlencode({'case': found.notes[0][0]})}"
        console.print(f"    report: {address}", markup=False, highlight=False, soft_wrap=True)


def page_of(run: Path) -> Path | None:
    """The page of a run in a report folder, or None if the folder has no page."""
    folder = run if run.is_dir() else run.parent
    return folder / PAGE if (folder / PAGE).is_file() else None


def failure_reason(record: dict[str, Any]) -> str:
    """Why a record did not pass, in brackets and on one line. Empty for a passed record."""
    reason = " ".join(sentence(record).split()) if record["verdict"] != "pass" else ""
    return f" ({reason})" if reason else ""
