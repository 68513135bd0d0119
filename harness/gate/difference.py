"""The differences between the figures of two runs, case by case, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from narrowgauge.harness.gate.figures import Change, Figures, changes
from narrowgauge.harness.report.text import number, sentence


@dataclass(frozen=True)
class Difference:
    """Cases by id, in order; those that are in neither list are as they were."""

    worse: dict[str, list[Change]]
    """Cases of which a figure is worse: every figure that changed, the worse ones first."""
    better: dict[str, list[Change]]
    """Cases that changed, of which no figure is worse."""
    gone: list[str]
    """Cases that were, and are not."""
    new: list[str]


def difference(before: Mapping[str, Figures], after: Mapping[str, Figures]) -> Difference:
    """How `after` differs from `before`, both by case id."""
    found = Difference({}, {}, sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys()))
    for case in sorted(before.keys() & after.keys()):
        if before[case] != after[case] and (changed := changes(before[case], after[case])):
            (found.worse if changed[0].worse else found.better)[case] = changed
    return found


def words(changed: list[Change]) -> str:
    """Changes as one phrase: `wrong 0 → 37, ulp none → 1`."""
    return ", ".join(map(str, changed))


LISTED = 50
"""Lines of one kind that are printed; the last says how many more there are."""


def print_kinds(kinds: Mapping[str, Sequence[str]], console: Console, style: str) -> None:
    """Print every kind that has lines."""
    for kind, lines in kinds.items():
        if lines:
            console.print(f"{kind}: {len(lines)}", style=style, markup=False, highlight=False)
        for line in lines[:LISTED]:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if len(lines) > LISTED:
            console.print(f"  … and {number(len(lines) - LISTED)} more", markup=False, highlight=False)


def why(record: dict[str, Any]) -> str:
    """What a record that did not pass says is wrong, in brackets and on one line; nothing of one that passed."""
    said = " ".join(sentence(record).split()) if record["verdict"] != "pass" else ""
    said = said.encode(errors="replace").decode()  # half a surrogate pair can be printed nowhere
    return f" ({said})" if said else ""
