"""The history of runs as data of the page: runs, and figures of each operation, recipe and dtype over these runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.harness.report.text import number

_PASSED = ("pass", "unsupported", "known")
"""Outcomes of a case that is no failure."""


def since_last_run(rows: Sequence[dict[str, Any]]) -> str:
    """Sentence on the changes from the run before to the last run of `rows`, as of `runs_json`. Empty if the history
    has a single run."""
    numbers = list({row["id"]: None for row in rows})[-2:]
    if len(numbers) < 2:
        return ""
    old, new = ([row for row in rows if row["id"] == number] for number in numbers)

    def figures(run: Sequence[dict[str, Any]]) -> dict[str, int]:
        cases = sum(row["cases"] for row in run)
        return {
            "{} failed cases": cases - sum(row[name] for row in run for name in _PASSED),
            "largest error {} ulp": max(row["max_ulp"] or 0 for row in run),
            "{} cases": cases,
        }

    before = figures(old)
    changes = [
        f"{words.format(number(now))}, was {number(before[words])}"
        for words, now in figures(new).items()
        if now != before[words]
    ]
    commit = old[0]["commit_id"][:7] or "no commit"
    run = f"the run before ({commit}{' with uncommitted changes' if old[0]['dirty'] else ''}, {old[0]['time'][:10]})"
    return f"Since {run}: {'; '.join(changes) or 'as many failed cases, the same largest error'}."


def runs_json(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs and figures of `rows` (`harness.records.history.history_rows`), or neither if there are less than two runs.

    A figure has a value for each run, None if the run has no such case. `ulp` is 0 if the run had no wrong element.
    """
    first = {row["id"]: row for row in rows}
    if len(first) < 2:
        return {"runs": [], "places": []}
    position = {number: n for n, number in enumerate(first)}
    places: dict[tuple[str, ...], dict[str, list[Any]]] = {}
    for row in rows:
        key = (row["operation"], row["recipe"], row["dtype"])
        figures = places.setdefault(key, {name: [None] * len(first) for name in ("cases", "failed", "ulp", "budget")})
        values = (
            row["cases"],
            row["cases"] - sum(row[name] for name in _PASSED),
            row["max_ulp"] or 0,
            None if row["budget_max"] is None else float(f"{min(row['budget_max'], 1e300):.4g}"),
        )
        for name, value in zip(figures, values, strict=True):
            figures[name][position[row["id"]]] = value
    runs = [
        {
            "commit": row["commit_id"],
            "dirty": row["dirty"],
            "time": row["time"],
            "seed": row["seed"],
            "seconds": round(row["seconds"], 3),
        }
        for row in first.values()
    ]
    return {
        "runs": runs,
        "places": [
            {"operation": key[0], "recipe": key[1], "dtype": key[2], **figures} for key, figures in places.items()
        ],
    }
