"""Where time goes: seconds of every part of the cases, by operation and recipe, and the slowest cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from narrowgauge.harness.machine.timing import PARTS
from narrowgauge.harness.report import text
from narrowgauge.harness.report.tables import family

TITLE = "Where time goes"
NOTE = (
    "Seconds of a wall clock, of all processes together. Other: digests, the record, turns on a GPU. Core: "
    "seconds of processors in that time, more where a case has several threads, less where it waits for one."
)
SLOWEST = 10
LABELS = ("all", *PARTS, "other", "core")
"""What `Row.seconds` has, in order."""


class Row(NamedTuple):
    """Cases whose time was measured."""

    operation: str
    recipe: str
    """Their recipe, or `nvfp4 (12)`: the family of so many; nothing where they have none, or all are together."""
    cases: int
    seconds: tuple[float, ...]

    @property
    def shown(self) -> list[str]:
        """The seconds for people, nothing for a part that has none."""
        return [text.duration(value) if value else "" for value in self.seconds]

    @property
    def most(self) -> str:
        """The part that takes most of it, and its share."""
        share, part = max(zip(self.seconds[1:-1], LABELS[1:-1], strict=True))
        return f"{part} {100 * share / (self.seconds[0] or 1):.0f} %"


def rows(records: Iterable[dict[str, Any]], *, recipes: bool = False) -> list[Row]:
    """A row for each operation, and where `recipes` each family of recipes, the one that takes longest first.

    Where there are several, the first row is of all.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    measured = [record for record in records if record["seconds_total"] is not None]
    for record in measured:
        groups.setdefault((record["operation"], family(record["recipe"]) if recipes else ""), []).append(record)
    found = [_row(operation, members, recipes=recipes) for (operation, _), members in groups.items()]
    found.sort(key=lambda row: (-row.seconds[0], row.operation, row.recipe))
    return [_row("all", measured, recipes=False), *found] if len(found) > 1 else found


def slowest(records: Iterable[dict[str, Any]]) -> list[tuple[str, Row]]:
    """Ids and times of the cases that took longest."""
    measured = [record for record in records if record["seconds_total"] is not None]
    measured.sort(key=lambda record: (-record["seconds_total"], record["case"]))
    return [(record["case"], _row(record["operation"], [record], recipes=True)) for record in measured[:SLOWEST]]


def _row(operation: str, members: Sequence[dict[str, Any]], *, recipes: bool) -> Row:
    names = {record["recipe"] for record in members} if recipes else {""}
    name = next(iter(names)) if len(names) == 1 else f"{family(next(iter(names)))} ({len(names)})"
    parts = [_sum(members, f"seconds_{part}") for part in PARTS]
    whole = _sum(members, "seconds_total")
    seconds = (whole, *parts, max(0.0, whole - sum(parts)), _sum(members, "seconds_core"))
    return Row(operation, name, len(members), seconds)


def _sum(members: Sequence[dict[str, Any]], name: str) -> float:
    return sum(record[name] or 0.0 for record in members)
