"""Sentences and formatted figures shared by page, summary and terminal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.diagnosis.cause_names import is_condition, is_pattern
from narrowgauge.harness.machine.plain_text import RELATIVE_FROM
from narrowgauge.harness.records.record import (
    OUTCOMES,
    PASSES_ALONE,
    STACK,
    STATE_BETWEEN_CALLS,
    elements_compared,
    outcome,
)


@cache
def _stages(operation: str, recipe: str, dtype: str, inputs: str, flags: str, rank: int) -> tuple[str, ...]:
    """Stages of a case with these labels (`Case.stages`), whatever its shape. Empty for labels that no case has:
    the operation is unknown, or another version wrote the record."""
    try:
        case = case_from_labels(operation, recipe, (1,) * rank, dtype, inputs, filter(None, flags.split("+")))
        return case.stages()
    except (LookupError, ValueError, TypeError):
        return ()


def expected_stages(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Stages that a kernel can report of the case of a record."""
    return _stages(*_labels_of(record), record["shape"].count("x") + 1)


_labels_of = itemgetter("operation", "recipe", "dtype", "inputs", "flags")


GLYPHS = {
    "pass": "✓", "fail": "✗", "error": "!", "crash": "‼", "timeout": "…", "unsupported": "–", "unexpected": "?",
    "known": "○",
}  # fmt: skip


def number(value: float | str | None) -> str:
    """A figure for people: groups of thousands, four digits of a fraction, empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return f"{value:.4g}" if isinstance(value, float) else value


def share(value: float | None) -> str:
    """A share in percent. 100 % and 0 % stand only for exactly all and none."""
    if value is None:
        return ""
    percent = f"{100 * value:.3g}"
    if percent == "100" and value < 1:
        percent = "> 99.9"
    return f"{percent} %"


def duration(seconds: float | None) -> str:
    """Three digits and a unit, ms below a second, or minutes and seconds."""
    if seconds is None or math.isnan(seconds):
        return ""
    if seconds >= 99.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.3g} s" if seconds >= 0.9995 or not seconds else f"{seconds * 1e3:.3g} ms"


def compact(value: float | None) -> str:
    """A number in at most seven characters: integers up to 99 999 in full, larger counts with k, M or G, and other
    numbers with three or four digits: 0.2048, 2.56e22."""
    if value is None or (isinstance(value, int) and abs(value) < 100_000):
        return number(value)
    if isinstance(value, int):
        for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
            if abs(value) < 999.5 * size:
                return f"{value / size:.3g}{unit}"
    figure = f"{value:.4g}" if 1e-4 <= abs(value) < 1e4 or not math.isfinite(value) else f"{value:.3g}"
    return re.sub(r"e([+-])0?(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", figure)


def ulps(value: int | None) -> str:
    """A distance in steps of a format for a table. From `RELATIVE_FROM` on, no count of steps says anything."""
    return number(value) if value is None or value < RELATIVE_FROM else f"> {RELATIVE_FROM - 1}"


def interval(value: float | None) -> str:
    """The width of an accepted interval: `3 ulp`, `1.2e7 ulp`."""
    return "" if value is None else f"{compact(float(value))} ulp"


RULES = {
    "exact": "equal bytes", "bound": "inside the proved interval", "boundary": "equal, or next to a rounding boundary",
    "statistics": "statistical tests", "scope": "one hidden number a row", "guard": "memory around it unchanged",
    "repeat": "equal bytes in every run",
}  # fmt: skip
"""Rules of stages in words, by the names of the record."""


def rule(name: str) -> str:
    """A rule in words; the name of a rule of another version."""
    return RULES.get(name, name)


def plural(count: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{number(count)} {noun}" + ("" if count == 1 else "s")


def verdict_counts(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Number of records by outcome, in the order of `OUTCOMES`."""
    counts = Counter(map(outcome, records))
    return {name: counts[name] for name in OUTCOMES if counts[name]}


REASONS = 5
"""Largest number of reasons of unsupported cases in a line."""


def verdict_line(records: list[dict[str, Any]], elapsed: float | None = None) -> str:
    """The run as a sentence. A run without cases fails, and so does a run without a compared element."""
    duration_of_run = f" in {duration(elapsed)}" if elapsed is not None else ""
    if not records:
        return f"nothing ran{duration_of_run}: no case, so no verdict"
    counts = verdict_counts(records)
    names = ("pass", "unexpected", "known", "unsupported")
    passed, unexpected, known_failures, unsupported = (counts.pop(name, 0) for name in names)
    suffix = f"; {plural(unexpected, 'case')} passed though known to fail" if unexpected else ""
    suffix += f"; {plural(known_failures, 'known failure')}" if known_failures else ""
    suffix += f"; {number(unsupported)} unsupported" if unsupported else ""
    if not counts:
        compared = sum(map(elements_compared, records))
        compared_text = f"{number(compared)} elements compared" if compared else "but nothing was compared"
        return f"{plural(passed, 'case')} passed{duration_of_run}, {compared_text}{suffix}"
    counts_text = ", ".join(f"{number(count)} {verdict}" for verdict, count in counts.items())
    wrong = f"{number(sum(counts.values()))} of {plural(len(records), 'case')} did not pass"
    return f"{wrong}{duration_of_run}: {counts_text}{suffix}"


def not_compared(records: list[dict[str, Any]]) -> str:
    """The parts of a run that were not compared: cases without a result, and stages missing in a result.

    Unsupported cases are listed by the backend's message, such as a missing method.
    """
    cases: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    stages: Counter[tuple[str, str]] = Counter()
    for record in records:
        if record["verdict"] not in ("pass", "fail"):
            cases[record["verdict"]] += 1
            if record["verdict"] == "unsupported" and record["message"]:
                reasons[record["message"]] += 1
            continue
        shape = record["shape"]
        empty = "0" in shape and "0" in shape.split("x")  # a stage of an empty result compares nothing
        if not empty and not elements_compared(record):
            cases["without a compared element"] += 1
        shown = {entry["stage"] for entry in record["stages"] if empty or entry["compared"]}
        expected = expected_stages(record)
        if len(shown) < len(record["stages"]) or not shown.issuperset(expected):
            for stage in dict.fromkeys([*expected, *(entry["stage"] for entry in record["stages"])]):
                if stage not in shown:
                    stages[record["operation"], stage] += 1
    parts = []
    if cases:
        verdicts = ", ".join(f"{number(count)} {verdict}" for verdict, count in sorted(cases.items()))
        parts.append(f"{plural(cases.total(), 'case')} ({verdicts})")
    if reasons:
        reason_texts = [f"{reason} ({number(count)})" for reason, count in reasons.most_common(REASONS)]
        if len(reasons) > REASONS:
            reason_texts.append(plural(len(reasons) - REASONS, "more reason"))
        parts.append(f"not supported: {', '.join(reason_texts)}")
    if stages:
        alike: dict[tuple[str, int], list[str]] = {}
        for (operation, stage), count in stages.most_common():
            alike.setdefault((operation, count), []).append(stage)
        listed = (
            f"{operation} {', '.join(names)} ({plural(count, 'case')}{' each' if len(names) > 1 else ''})"
            for (operation, count), names in alike.items()
        )
        parts.append(f"stages not observed: {', '.join(listed)}")
    if records and not parts:
        return "Every stage of every case was compared."
    return f"Not compared: {'; '.join(parts) or 'everything'}."


def note_counts(records: Iterable[dict[str, Any]]) -> str:
    """Number of notes by cause, most frequent first: `3 notes: changes-rounding-mode 2, …`. Empty without notes. The
    stacks of failures are not counted."""
    counts = Counter(note["cause"] for record in records for note in record["notes"] if note["cause"] != STACK)
    causes = ", ".join(f"{cause} {number(count)}" for cause, count in sorted(counts.items(), key=lambda c: (-c[1], c)))
    return f"{plural(counts.total(), 'note')}: {causes}" if counts else ""


def rows_alone(records: Iterable[dict[str, Any]]) -> str:
    """The stage of rows by themselves in a sentence, with the first case of each operation whose rows depend on others.
    Empty if no case has the stage."""
    found = [
        (record, stage)
        for record in records
        for stage in record["stages"]
        if stage["stage"] == "rows" and stage["rule"] == "repeat"
    ]
    wrong: dict[str, str] = {}
    for record, stage in found:
        if stage["sentence"]:
            wrong.setdefault(record["operation"], f"{record['case']}: {stage['sentence']}")
    if not found or wrong:
        return f"Rows that depend on other rows: {'; '.join(wrong.values())}." if wrong else ""
    rows = number(sum(stage["compared"] for _, stage in found))
    return f"Rows by themselves: {rows} rows of {plural(len(found), 'case')} have the same bytes in every batch."


def interval_widths(records: Iterable[dict[str, Any]]) -> str:
    """The widest accepted interval of each operation, and the mean of its cases, widest first. Empty if no result has
    an interval."""
    of_operation: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record["interval_ulps_max"]:
            widths = record["interval_ulps_max"], record["interval_ulps_mean"]
            of_operation.setdefault(record["operation"], []).append(widths)
    rows = sorted(
        ((max(widest), sum(means) / len(means), name) for name, found in of_operation.items()
         for widest, means in [tuple(zip(*found, strict=True))]),
        reverse=True,
    )  # fmt: skip
    shown = [f"{name} {interval(widest)}, {compact(mean)} on average" for widest, mean, name in rows[:REASONS]]
    more = [f"{plural(len(rows) - REASONS, 'more operation')}"] if len(rows) > REASONS else []
    return f"Widest accepted interval: {'; '.join([*shown, *more])}." if rows else ""


def remarks(records: list[dict[str, Any]]) -> list[str]:
    """Sentences below the verdict: what was not compared, widths of intervals, rows by themselves, number of notes."""
    sentences = (not_compared(records), interval_widths(records), rows_alone(records), note_counts(records))
    return list(filter(None, sentences))


OF_EARLIER_CASES = (STATE_BETWEEN_CALLS, PASSES_ALONE)
"""Causes whose sentences say how the failure depends on earlier cases."""


def explanation(cause: dict[str, Any] | None) -> str:
    """Explanation of a record or a group: earlier calls, an exact deviation, a possible cause, or a pattern."""
    if cause is None:
        return ""
    if cause["cause"] in (*OF_EARLIER_CASES, "no-diagnosis"):
        return str(cause["sentence"])
    pattern = "condition" if is_condition(cause["cause"]) else "wrong elements"
    inexact = pattern if is_pattern(cause["cause"]) else "possible cause"
    return f"{'explained exactly by' if cause['exact'] else inexact}: {cause['sentence']}"


def sentence(record: dict[str, Any]) -> str:
    """Failure of a record: its message, or the sentence of its first finding."""
    return record["message"] or next((s for f in record["findings"] if (s := f.get("sentence"))), "")


def clipped(value: str, most: int) -> str:
    """Text with at most `most` characters. Longer text ends in `…`."""
    return value if len(value) <= most else value[: most - 1] + "…"
