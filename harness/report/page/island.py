"""The records as JSON inside the page: columns, not objects, and the figures of failures up to a number of bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from narrowgauge.harness.records.record import outcome
from narrowgauge.harness.report import text
from narrowgauge.harness.report.groups import SEVERITY, Group
from narrowgauge.harness.report.page.failure import failure
from narrowgauge.harness.report.view import reproduction, saved_of

FIGURES = 6 << 20
"""Bytes that the figures of failures may take: the first of every group, then the second, until they are used up."""
LONGEST = 240
"""Characters of a message in the table of all cases."""

_SHOWN = {
    "verdict": "verdict", "case": "case", "backend": "backend", "device": "device", "stage": "stage",
    "message": "message", "known": "known", "compared": "compared", "mismatches": "wrong", "max_ulp": "ulp",
    "budget_max": "budget", "sqnr_db": "SQNR dB", "seconds": "seconds",
}  # fmt: skip
_HIDDEN = ("operation", "recipe", "shape", "dtype", "group", "line")
_NUMERIC = ("compared", "mismatches", "max_ulp", "budget_max", "sqnr_db", "seconds", "group")
_OFTEN_ONE = ("backend", "device", "stage", "message", "known")
"""Columns that are not shown where every record has the same."""


def arranged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records in the order of the table: the worst outcome first."""
    return sorted(records, key=lambda r: (SEVERITY.index(outcome(r)), r["case"], r["backend"]))


def island(records: Sequence[dict[str, Any]], groups: Sequence[Group]) -> str:
    """`records`, as `arranged` has them, as JSON that can stand inside a script element.

    Infinity and NaN are strings in it. A column has `values`, one a record, or `at`, for each record the place of its
    value among them.
    """
    of = {id(record): number for number, one in enumerate(groups) for record in one.records}
    made: dict[str, Callable[[dict[str, Any]], Any]] = {
        "verdict": outcome,
        "message": lambda record: text.clipped(record["message"], LONGEST),
        "group": lambda record: of.get(id(record)),
        "line": _line,
    }
    content = {
        "rows": len(records),
        "columns": [
            _column(name, [made[name](record) if name in made else record[name] for record in records])
            for name in (*_SHOWN, *_HIDDEN)
        ],
        "groups": [len(one.records) for one in groups],
        "glyphs": text.GLYPHS,
        "severity": SEVERITY,
    }
    failures = ",".join(f'"{row}":{found}' for row, found in _failures(records, groups))
    return f'{_plain(content)[:-1]},"failures":{{{failures}}}}}'


def _plain(content: Any) -> str:
    """JSON without a character that means something to HTML."""
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _line(record: dict[str, Any]) -> str:
    """The line that runs a record again, with a NUL in the place of its id: then most records share it."""
    words = reproduction(record).split(" ")
    return " ".join("\0" if n == 2 and word == record["case"] else word for n, word in enumerate(words))


def _column(name: str, values: list[Any]) -> dict[str, Any]:
    numeric = name in _NUMERIC
    values = [_finite(value) for value in values]
    different = list(dict.fromkeys(values))
    label = "" if name in _OFTEN_ONE and len(different) < 2 else _SHOWN.get(name, "")
    column: dict[str, Any] = {"name": name, "label": label, "numeric": numeric}
    if 2 * len(different) > len(values):
        return column | {"values": values}
    place = {value: n for n, value in enumerate(different)}
    return column | {"values": different, "at": [place[value] for value in values]}


def _finite(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(f"{value:.4g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _failures(records: Sequence[dict[str, Any]], groups: Sequence[Group]) -> Iterator[tuple[int, str]]:
    """Row and figures, as JSON, of as many failures as there is room for."""
    row = {id(record): n for n, record in enumerate(records)}
    left = FIGURES
    saved = [saved_of(one.records) for one in groups]
    for layer in zip_longest(*(one.records for one in groups)):
        for number, record in enumerate(layer):
            if record is None:
                continue
            found = _plain(failure(record, saved[number]))
            left -= len(found)
            if left < 0:
                return
            yield row[id(record)], found
