"""Times: seconds of every phase of the cases, by operation and recipe, and the slowest cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from narrowgauge.harness.machine.timing import PHASES
from narrowgauge.harness.report import text
from narrowgauge.harness.report.tables import recipe_family

TITLE = "Where time goes"
NOTE = (
    "Seconds of a wall clock, of all processes together. Other: digests, the record, turns on a GPU. Core: "
    "seconds of processors in that time, more where a case has several threads, less where it waits for one."
)
BUSY = "busy machine"
"""Fact of a run whose machine had other work: its times are longer than those of the kernels alone."""
SLOWEST = 10
_SECONDS = itemgetter("seconds_total", "seconds_core", *(f"seconds_{phase}" for phase in PHASES))
LABELS = ("all", *PHASES, "other", "core")
"""Labels of `TimeRow.seconds`, in order."""


class TimeRow(NamedTuple):
    """Times of a group of cases."""

    operation: str
    recipe: str
    """Recipe, or `nvfp4 (12)`: a family of 12 recipes. Empty without a recipe, or for all recipes together."""
    cases: int
    seconds: tuple[float, ...]

    @property
    def cells(self) -> list[str]:
        """Formatted seconds, empty for a phase without time."""
        return [text.duration(value) if value else "" for value in self.seconds]

    @property
    def largest_phase(self) -> str:
        """The phase with the largest share of the time, and its share."""
        share, part = max(zip(self.seconds[1:-1], LABELS[1:-1], strict=True))
        return f"{part} {100 * share / (self.seconds[0] or 1):.0f} %"


def rows(records: Iterable[dict[str, Any]], *, recipes: bool = False) -> list[TimeRow]:
    """A row for each operation, or for each operation and recipe family if `recipes`, slowest first.

    With several rows the first row is the total.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    measured = [record for record in records if record["seconds_total"] is not None]
    for record in measured:
        groups.setdefault((record["operation"], recipe_family(record["recipe"]) if recipes else ""), []).append(record)
    result = [_row(operation, members, recipes=recipes) for (operation, _), members in groups.items()]
    result.sort(key=lambda row: (-row.seconds[0], row.operation, row.recipe))
    return [_row("all", measured, recipes=False), *result] if len(result) > 1 else result


def slowest(records: Iterable[dict[str, Any]]) -> list[tuple[str, TimeRow]]:
    """Ids and times of the slowest cases."""
    measured = [record for record in records if record["seconds_total"] is not None]
    measured.sort(key=lambda record: (-record["seconds_total"], record["case"]))
    return [(record["case"], _row(record["operation"], [record], recipes=True)) for record in measured[:SLOWEST]]


def _row(operation: str, members: Sequence[dict[str, Any]], *, recipes: bool) -> TimeRow:
    names = {record["recipe"] for record in members} if recipes else {""}
    name = next(iter(names)) if len(names) == 1 else f"{recipe_family(next(iter(names)))} ({len(names)})"
    total, core, *parts = (sum(filter(None, values)) for values in zip(*map(_SECONDS, members), strict=True))
    seconds = (total, *parts, max(0.0, total - sum(parts)), core)
    return TimeRow(operation, name, len(members), seconds)
