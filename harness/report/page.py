"""The page: one HTML file that needs no network, for the person who has to fix the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.record import succeeded
from harness.report import accuracy, template, text, times
from harness.report.failure import cut
from harness.report.groups import SHOWN, Group, group
from harness.report.island import arranged, island
from harness.view import reproduction

_HERE = Path(__file__).parent
_SCRIPTS = ("data.js", "draw.js", "failure.js", "table.js", "matrix.js", "times.js", "page.js")
"""One module in this order."""


def render(records: list[dict[str, Any]], environment: dict[str, str], elapsed: float | None) -> str:
    """The whole page. Everything that comes from a record or the environment is escaped."""
    from markupsafe import Markup

    rows = arranged(records)
    row = {id(record): n for n, record in enumerate(rows)}
    groups = group(records)
    return template.render(
        _HERE / "page.html",
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
    return (_HERE / name).read_text(encoding="utf-8")


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
