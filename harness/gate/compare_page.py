"""The page of a comparison: one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.harness.gate.compare import TIME_COLUMNS, Comparison
from narrowgauge.harness.report.page import template

MOST = 5000
"""Cases of one kind on the page; it says how many it left out."""


def render(found: Comparison, a: str, b: str) -> str:
    """The page of a comparison of the runs called `a` and `b`. Everything that comes from a record is escaped."""
    return template.render(
        Path(__file__).with_name("compare.html"),
        name="narrowgauge",
        verdict="pass" if found.no_worse else "fail",
        sentence=found.sentence,
        aside=f"A is {a}, B is {b}; {found.outputs}.",
        found=found,
        time_columns=TIME_COLUMNS,
        times=[time.cells() for time in found.times],
        most=MOST,
    )
