"""The summary as Markdown, for a pull request or a job's page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from harness.record import VERDICTS, succeeded
from harness.report import tables, text
from harness.report.groups import SHOWN, Group, group
from harness.view import reproduction, saved_of

CASES = 10
_FIGURES = {
    "compared": "compared", "mismatches": "wrong", "max_ulp": "max ulp", "budget_max": "max budget",
    "exact_share": "tier 0", "ordered_share": "tier 1", "seconds": "time",
}  # fmt: skip


def render(records: list[dict[str, Any]], environment: dict[str, str], elapsed: float) -> str:
    """The verdict, the environment, a table per operation, recipe and dtype, and the worst groups of failing cases."""
    mark = text.GLYPHS["pass" if succeeded(records) else "fail"]
    lines = [f"# {mark} narrowgauge: {escape(text.verdict_line(records, elapsed))}", ""]
    lines += [escape(text.not_compared(records)), ""]
    lines += [f"- {escape(label)}: {escape(value)}" for label, value in environment.items()]
    if records:
        lines += ["", *_table(records)]
    groups = group(records)
    for one in groups[:SHOWN]:
        lines += ["", *_group(one)]
    if len(groups) > SHOWN:
        left = sum(len(one.records) for one in groups[SHOWN:])
        lines += ["", f"{text.plural(len(groups) - SHOWN, 'more group')} with {text.plural(left, 'case')} left out."]
    return "\n".join(lines) + "\n"


def escape(value: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    return re.sub(r"([\\`*_~\[\]<>|&#])", r"\\\1", " ".join(str(value).split()))


def code(value: str) -> str:
    """A code span, whatever backticks the text has."""
    fence = "`" * (1 + max(map(len, re.findall("`+", value)), default=0))
    pad = " " if "`" in value else ""
    return f"{fence}{pad}{value}{pad}{fence}"


def _table(records: list[dict[str, Any]]) -> Iterable[str]:
    rows = tables.summary(records)
    verdicts = [v for v in VERDICTS if v == "pass" or any(row[v] for row in rows)]
    yield _row(["operation", "recipe", "dtype", "cases", *verdicts, *_FIGURES.values()])
    yield _row(["---"] * 3 + ["---:"] * (1 + len(verdicts) + len(_FIGURES)))
    for row in rows:
        names = [escape(row[key]) for key in ("operation", "recipe", "dtype")]
        counts = [text.number(row[key]) for key in ("cases", *verdicts)]
        yield _row([*names, *counts, *(_figure(key, row[key]) for key in _FIGURES)])


def _figure(key: str, value: float | None) -> str:
    if key == "seconds":
        return text.duration(value)
    return text.share(value) if key.endswith("_share") else text.number(value)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _group(one: Group) -> Iterable[str]:
    worst, *others = one.records
    count = text.plural(len(one.records), "case")
    wrong = f", {text.plural(one.mismatches, 'wrong element')}" if one.mismatches else ""
    yield f"## {text.GLYPHS[one.verdict]} {escape(one.title)}: {one.verdict} in {count}{wrong}"
    yield ""
    yield escape(text.sentence(worst))
    yield ""
    if one.explanation is not None:
        yield escape(text.explanation(one.explanation))
        yield ""
    yield code(reproduction(worst))
    for line in saved_of(one.records):
        yield ""
        yield code(line)
    if others:
        yield ""
    for record in others[: CASES - 1]:
        yield f"- {code(record['case'])} on {escape(record['backend'])}, {escape(record['device'])}"
    if len(others) >= CASES:
        yield f"- and {text.plural(len(others) - CASES + 1, 'more case')}"
