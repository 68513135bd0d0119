"""Differences between the figures of two runs, case by case, and printing of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from narrowgauge.harness.gate.figures import Change, Figures, changes
from narrowgauge.harness.report.text import number, sentence


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
    """Changes as a phrase: `wrong 0 → 37, ulp none → 1`."""
    return ", ".join(map(str, changed))


LISTED = 50
"""Largest number of printed lines of a kind. A last line counts the omitted lines."""


def print_kinds(kinds: Mapping[str, Sequence[str]], console: Console, style: str) -> None:
    """Print every kind with lines."""
    for kind, lines in kinds.items():
        if lines:
            console.print(f"{kind}: {len(lines)}", style=style, markup=False, highlight=False)
        for line in lines[:LISTED]:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if len(lines) > LISTED:
            console.print(f"  … and {number(len(lines) - LISTED)} more", markup=False, highlight=False)


def failure_reason(record: dict[str, Any]) -> str:
    """Why a record did not pass, in brackets and on one line. Empty for a passed record."""
    reason = " ".join(sentence(record).split()) if record["verdict"] != "pass" else ""
    return f" ({reason})" if reason else ""
