"""The page: an HTML file without network access, for the engineer who fixes the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.harness.records.record import succeeded
from narrowgauge.harness.report import accuracy, text, times
from narrowgauge.harness.report.failure_view import reproduction
from narrowgauge.harness.report.groups import SHOWN, Group, group
from narrowgauge.harness.report.page import numbers, template
from narrowgauge.harness.report.page.failure import cut
from narrowgauge.harness.report.page.history_json import runs_json, since_last_run
from narrowgauge.harness.report.page.records_json import records_json, sorted_records

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = (
    "data.js", "draw.js", "failure.js", "heat_map.js", "plots.js", "history.js", "table.js", "times.js", "page.js",
)  # fmt: skip
"""Scripts, joined into one module in this order."""
_VENDORED = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
"""d3 and Observable Plot, unchanged from npm, with their licences beside them."""
_FIRST_GROUPS = 3
"""Largest number of groups of failures that are named below the verdict."""


def render(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    elapsed: float | None,
    past: Sequence[dict[str, Any]] = (),
    strength: Sequence[Mapping[str, str]] = (),
    remarks: Sequence[str] | None = None,
) -> str:
    """The whole page. Text from records and the environment is escaped. `past`: rows of the history of runs; a single
    run has no section of its history. `strength`: as in `harness.report.report.write`. `remarks`: as in
    `harness.report.markdown.render`."""
    from markupsafe import Markup

    rows = sorted_records(records)
    earlier_runs = runs_json(past)
    row = {id(record): n for n, record in enumerate(rows)}
    groups = group(records)
    return template.render(
        _ASSETS / "page.html",
        name="narrowgauge",
        verdict="pass" if succeeded(records) else "fail",
        sentence=text.verdict_line(records, elapsed),
        aside=" ".join(text.remarks(records) if remarks is None else remarks),
        environment=environment,
        script="\n".join(map(_read, (*_VENDORED, *_SCRIPTS))),
        groups=[_group(failure_group) | {"row": row[id(failure_group.records[0])]} for failure_group in groups[:SHOWN]],
        first_groups=_FIRST_GROUPS,
        groups_left=groups[SHOWN:],
        since=since_last_run(past),
        counts=text.verdict_counts(records),
        accuracy=accuracy,
        accuracies=accuracy.rows(records),
        numbers=numbers,
        reached=numbers.rows(records),
        times=times,
        spent=times.rows(records, recipes=True),
        slowest=times.slowest(records),
        strength=strength,
        past_runs=len(earlier_runs["runs"]),
        records=Markup(records_json(rows, groups, earlier_runs)),
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _group(failure_group: Group) -> dict[str, Any]:
    worst = failure_group.records[0]
    title = failure_group.title.removeprefix(f"{failure_group.verdict}: ")
    gist = cut(text.sentence(worst))  # the title has the cause
    return {
        "verdict": failure_group.verdict,
        "title": title,
        "gist": "" if gist in title else gist,
        "cases": len(failure_group.records),
        "mismatches": failure_group.mismatches,
        "sentence": cut(text.sentence(worst)),
        "explanation": cut(text.explanation(failure_group.explanation)),
        "reproduction": reproduction(worst),
    }
