"""The history of runs as data of the page: runs, and figures of each operation, recipe and dtype over these runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PASSED = ("pass", "unsupported", "known")
"""Outcomes of a case that is no failure."""


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
