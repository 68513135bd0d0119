"""Data of the first-failure view of a record, shown by `failure.js`."""

from __future__ import annotations

import re
from typing import Any

from narrowgauge.harness.diagnosis.cause_names import is_pattern
from narrowgauge.harness.records.record import elements_compared
from narrowgauge.harness.report import text
from narrowgauge.harness.report.failure_view import explanation_lines, label, saved_lines, step_counts, uneven

_BAND = re.compile(r"place:(row|column)s-(\d{1,9})-to-(\d{1,9})-of-(\d{1,9})")
LONGEST = 4000
"""Largest length of a message or a value in characters. Longer text is cut."""


def failure(record: dict[str, Any], saved: list[str]) -> dict[str, Any]:
    """Data of a failed record on the page, without the command for its reproduction.

    `saved`: lines on the saved inputs of the record's group, shown if the record has no saved inputs.
    """
    patterns = [entry for entry in record["explanations"] if is_pattern(entry["cause"]) and not entry["exact"]]
    causes = [entry for entry in record["explanations"] if entry not in patterns]
    findings = sorted(record["findings"], key=lambda finding: finding.get("stage") != record["stage"])
    return {
        "sentence": cut(text.sentence(record)),
        "known": cut(record["known"]),
        "baseline": cut(record["baseline"]),
        "findings": [_finding(finding) | {"bands": _bands(patterns, finding)} for finding in findings],
        "budget": record["budget_histogram"],
        "sweep": [(f"1e-{n}", text.share(value)) for n, value in enumerate(record["sweep"], 1)],
        "causes": [cut(line) for line in explanation_lines(causes)],
        "patterns": [cut(line) for line in explanation_lines(patterns)],
        "saved": [cut(line) for line in saved_lines(record) or saved],
        "figures": _figures(record),
    }


def _bands(patterns: list[dict[str, Any]], finding: dict[str, Any]) -> list[list[Any]]:
    """Bands of each period of a finding, marked in its heat map: ["row", 96, 127, 128]."""
    places = (_BAND.fullmatch(entry["cause"]) for entry in patterns if entry["stage"] == finding.get("stage"))
    return [[place[1], *map(int, place.groups()[1:])] for place in places if place]


def cut(value: str) -> str:
    """Text with at most `LONGEST` characters."""
    return text.clipped(value, LONGEST)


def _figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    number, share = text.number, text.share
    figures = [
        ("compared", number(elements_compared(record))),
        ("wrong", number(record["mismatches"])),
        ("largest distance, steps", text.ulps(record["max_ulp"])),
        ("outputs that no order rounds", share(record["exact_share"])),
        ("outputs judged by the declared order", share(record["ordered_share"])),
        ("other roundings accepted", share(record["excused_share"])),
        ("outside of the bounds, end to end", share(record["outside_share"])),
        ("largest error / proved bound", text.compact(record["budget_max"])),
        ("99th percentile of error / bound", text.compact(record["budget_p99"])),
        ("accepted interval, widest", text.interval(record["interval_ulps_max"])),
        ("accepted interval, mean", text.interval(record["interval_ulps_mean"])),
        ("p-value", number(record["p_value"])),
        ("random roundings counted", number(record["draws"])),
        ("SQNR, dB", number(record["sqnr_db"])),
        ("allclose would pass", number(record["allclose"])),
    ]
    return [(label, value) for label, value in figures if value]


def _finding(finding: dict[str, Any]) -> dict[str, Any]:
    elements = finding.get("elements") or []
    keys = list(dict.fromkeys(key for element in elements for key in element if key != "which"))
    heat = finding.get("heat") or {}
    return {
        "stage": finding.get("stage", ""),
        "rule": text.rule(finding.get("rule", "")),
        "sentence": cut(finding.get("sentence", "")),
        "which": [element.get("which", "") for element in elements],
        "keys": [label(key) for key in keys],
        "elements": [[cut(_value(element.get(key))) for key in keys] for element in elements],
        "heat": {"rows": 1, "columns": 1, **heat} if any(heat.get("counts") or []) else None,
        "modulo": {
            axis: {divisor: counts for divisor, counts in by.items() if uneven(counts)}
            for axis, by in (finding.get("modulo") or {}).items()
        },
        "steps": step_counts(finding.get("steps") or []),
        "census": finding.get("census") or {},
        "table": finding.get("table") or {},
    }


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return repr(value) if isinstance(value, float) else str(value)
