"""Records as JSON inside the page: by column, with the figures of failures up to a limit of bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any

from narrowgauge.harness.machine.timing import PHASES
from narrowgauge.harness.records.record import elements_compared, outcome
from narrowgauge.harness.report import text
from narrowgauge.harness.report.accuracy import TENSORS
from narrowgauge.harness.report.failure_view import group_saved_lines, note_lines, reproduction
from narrowgauge.harness.report.groups import SEVERITY, Group
from narrowgauge.harness.report.page.failure import cut, failure

FIGURES = 1 << 19
"""Largest number of bytes for the figures of failures: the first failure of every group, then the second, and so on."""
NOTES = 1 << 19
"""Largest number of characters of all notes. The tables have every note."""
LONGEST = 240
"""Largest length of a message in the table of all cases, in characters."""

_SHOWN = {
    "verdict": "verdict", "case": "case", "backend": "backend", "device": "device", "stage": "stage",
    "message": "message", "known": "known", "compared": "compared", "mismatches": "wrong", "max_ulp": "ulp",
    "budget_max": "error/bound", "sqnr_db": "SQNR dB", "seconds": "time",
}  # fmt: skip
_HIDDEN = (
    "operation", "recipe", "shape", "dtype", "group", "line", "interval_ulps_max", "interval_ulps_mean",
    "budget_histogram", "accuracy", "stages", "counts", "times", "input_digest", "output_digest",
)  # fmt: skip
_NUMERIC = (
    "compared", "mismatches", "max_ulp", "budget_max", "sqnr_db", "seconds", "group", "interval_ulps_max",
    "interval_ulps_mean",
)  # fmt: skip
_DIGESTS = ("input_digest", "output_digest")
"""Columns of 16 hexadecimal digits, or of none."""
_COUNTS = ("compared", "mismatches", "excused", "max_ulp", "unbounded")
TIMES = (*PHASES, "total", "core")
"""Columns `seconds_…` of a case that the page shows, in order."""
_TIMES = [f"seconds_{part}" for part in TIMES]
_OFTEN_ONE = ("backend", "device", "stage", "message", "known")
"""Columns that are hidden if all records have the same value."""


def sorted_records(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records in the order of the table: worst outcome first."""
    return sorted(records, key=lambda r: (SEVERITY.index(outcome(r)), r["case"], r["backend"]))


def records_json(
    records: Sequence[dict[str, Any]], groups: Sequence[Group], history: dict[str, Any] | None = None
) -> str:
    """`records`, sorted by `sorted_records`, and `history`, as JSON for a script element.

    Infinity and NaN are strings. A column has `values` with a value for each record, or distinct `values` and `at`, the
    index of each record's value, or `runs`: an index and the number of successive records with it, and so on. A column
    with a single value has neither. A column of digests has `digits`, 16 for each record, 0 for a record without a
    digest. `case` begins with a NUL in place of operation, recipe, shape and dtype.
    """
    group_of = {id(record): number for number, failure_group in enumerate(groups) for record in failure_group.records}
    computed: dict[str, Callable[[dict[str, Any]], Any]] = {
        "verdict": outcome,
        "case": _case,
        "message": lambda record: text.clipped(record["message"], LONGEST),
        "compared": elements_compared,
        "group": lambda record: group_of.get(id(record)),
        "line": _line,
        "budget_histogram": lambda record: " ".join(map(str, record["budget_histogram"])),
        "accuracy": _accuracy,
        "stages": _stages,
        "counts": _counts,
        "times": _times,
    }
    columns = [
        # As text at once: values of all columns together take more memory than the records.
        _plain(_column(name, list(map(computed.get(name, itemgetter(name)), records))))
        for name in (*_SHOWN, *_HIDDEN)
    ]
    content = {
        "groups": [len(failure_group.records) for failure_group in groups],
        "times": TIMES,
        "glyphs": text.GLYPHS,
        "severity": SEVERITY,
        "notes": _notes(records),
        "history": history or {},
    }
    failures = ",".join(f'"{row}":{figures}' for row, figures in _failures(records, groups))
    start = f'{{"rows":{len(records)},"columns":[{",".join(columns)}],{_plain(content)[1:-1]}'
    return f'{start},"failures":{{{failures}}}}}'


def _notes(records: Sequence[dict[str, Any]]) -> dict[int, list[str]]:
    """Notes by row, also of cases that passed, up to a limit of characters."""
    notes = {}
    remaining = NOTES
    for row, record in enumerate(records):
        if lines := [cut(line) for line in note_lines(record)]:
            remaining -= sum(map(len, lines))
            if remaining < 0:
                break
            notes[row] = lines
    return notes


def _plain(content: Any) -> str:
    """JSON with the characters &, < and > escaped."""
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _line(record: dict[str, Any]) -> str:
    """The command for reproducing a record, with a NUL in place of the case id: most records share a command."""
    start, command = f"narrowgauge show {record['case']} ", reproduction(record)
    return f"narrowgauge show \0 {command.removeprefix(start)}" if command.startswith(start) else command


def _case(record: dict[str, Any]) -> str:
    """The case id with a NUL in place of the parts that have columns of their own."""
    place = "/".join([part for name in ("operation", "recipe", "shape", "dtype") if (part := record[name])])
    case = str(record["case"])
    return "\0" + case.removeprefix(place) if place and case.startswith(place) else case


def _accuracy(record: dict[str, Any]) -> str:
    """SQNR in dB of y, dx and dw with a space between them, empty for a tensor without a finite value."""
    found = {entry["tensor"]: entry["sqnr_db"] for entry in record["accuracy"]}
    values = [found.get(tensor) for tensor in TENSORS]
    return " ".join("" if value is None else f"{value:.4g}" for value in values) if found else ""


def _stages(record: dict[str, Any]) -> str:
    """A line for each stage: name and rule with a tab between them. Most records share the text."""
    return "\n".join([_stage(stage.get("stage", ""), stage.get("rule", "")) for stage in record["stages"]])


@cache
def _stage(name: str, rule: str) -> str:
    return f"{name}\t{text.rule(rule)}"


def _counts(record: dict[str, Any]) -> str:
    """Counts of each stage, with spaces between stages: compared, wrong and excused elements, largest distance and
    unbounded elements, with commas between them. A 0 or a missing count is empty, and commas at the end are omitted."""
    return " ".join([_count(stage) for stage in record["stages"]])


def _count(stage: dict[str, Any]) -> str:
    if not (stage.get("mismatches") or stage.get("excused") or stage.get("max_ulp") or stage.get("unbounded")):
        return str(stage.get("compared") or "")
    return ",".join([str(stage.get(key) or "") for key in _COUNTS]).rstrip(",")


def _times(record: dict[str, Any]) -> str:
    """Seconds of `TIMES` with spaces between them, empty for a time that was not measured."""
    return " ".join(["" if (value := record[name]) is None else f"{value:.2g}" for name in _TIMES])


def _column(name: str, values: list[Any]) -> dict[str, Any]:
    numeric = name in _NUMERIC
    if float in set(map(type, values)):
        values = [_finite(value) if type(value) is float else value for value in values]
    different = list(dict.fromkeys(values))
    label = "" if name in _OFTEN_ONE and len(different) < 2 else _SHOWN.get(name, "")
    column: dict[str, Any] = {"name": name, "label": label, "numeric": numeric}
    if len(different) == 1:
        return column | {"values": different}
    if name in _DIGESTS and all(re.fullmatch("(?:[0-9a-f]{16})?", value) for value in different):
        return column | {"digits": "".join(value.rjust(16, "0") for value in values)}
    if 2 * len(different) > len(values):
        return column | {"values": values}
    place = {value: n for n, value in enumerate(different)}
    at = list(map(place.__getitem__, values))
    runs = list(chain.from_iterable((index, len(list(run))) for index, run in groupby(at)))
    return column | {"values": different} | ({"runs": runs} if len(runs) < len(at) else {"at": at})


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return float(f"{value:.4g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _failures(records: Sequence[dict[str, Any]], groups: Sequence[Group]) -> Iterator[tuple[int, str]]:
    """Row and figures (JSON) of as many failures as the limit allows."""
    row = {id(record): n for n, record in enumerate(records)}
    remaining = FIGURES
    saved = [group_saved_lines(failure_group.records) for failure_group in groups]
    for rank in zip_longest(*(failure_group.records for failure_group in groups)):
        for number, record in enumerate(rank):
            if record is None:
                continue
            figures = _plain(failure(record, saved[number]))
            remaining -= len(figures)
            if remaining < 0:
                return
            yield row[id(record)], figures
