"""The page: one HTML file that needs no network, for the person who has to fix the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.harness.records.record import succeeded
from narrowgauge.harness.report import accuracy, text, times
from narrowgauge.harness.report.groups import SHOWN, Group, group
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.page.failure import cut
from narrowgauge.harness.report.page.island import arranged, island
from narrowgauge.harness.report.view import reproduction

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("data.js", "draw.js", "failure.js", "table.js", "matrix.js", "times.js", "page.js")
"""One module in this order."""


def render(records: list[dict[str, Any]], environment: dict[str, str], elapsed: float | None) -> str:
    """The whole page. Everything that comes from a record or the environment is escaped."""
    from markupsafe import Markup

    rows = arranged(records)
    row = {id(record): n for n, record in enumerate(rows)}
    groups = group(records)
    return template.render(
        _ASSETS / "page.html",
        name="narrowgauge",
        verdict="pass" if succeeded(records) else "fail",
        sentence=text.verdict_line(records, elapsed),
        aside=text.not_compared(records),
        environment=environment,
        script="\n".join(map(_read, _SCRIPTS)),
        groups=[_group(one) | {"row": row[id(one.records[0])]} for one in groups[:SHOWN]],
        groups_left=groups[SHOWN:],
        counts=text.verdict_counts(records),
        accuracy=accuracy,
        accuracies=accuracy.rows(records),
        times=times,
        spent=times.rows(records, recipes=True),
        slowest=times.slowest(records),
        records=Markup(island(rows, groups)),
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _group(one: Group) -> dict[str, Any]:
    worst = one.records[0]
    return {
        "verdict": one.verdict,
        "title": one.title,
        "cases": len(one.records),
        "mismatches": one.mismatches,
        "sentence": cut(text.sentence(worst)),
        "explanation": cut(text.explanation(one.explanation)),
        "reproduction": reproduction(worst),
    }
