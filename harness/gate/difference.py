"""What differs between the figures of two runs, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.harness.gate.figures import Change, Figures, changes


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
