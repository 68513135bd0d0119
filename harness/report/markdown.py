"""The summary as Markdown, for a pull request or a job's page: worst failures first, within a budget of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from narrowgauge.harness.machine import plain_text
from narrowgauge.harness.records.record import OUTCOMES, succeeded
from narrowgauge.harness.report import accuracy, tables, text, times
from narrowgauge.harness.report.failure_view import distribution_lines, group_saved_lines, reproduction
from narrowgauge.harness.report.groups import SHOWN, Group, group

BUDGET = 1 << 20
"""Largest size of a job's summary on GitHub, in bytes of UTF-8."""
CASES = 10
LONGEST = 2000
"""Largest length of a message, a command or an id in characters. Longer text is cut."""
_FIGURES = {
    "compared": "compared", "mismatches": "wrong", "max_ulp": "max ulp", "budget_max": "error/bound",
    "exact_share": "tier 0", "ordered_share": "tier 1", "seconds": "time",
}  # fmt: skip


def render(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    elapsed: float | None,
    *,
    remarks: Sequence[str] | None = None,
    link: str = "",
    budget: int = BUDGET,
) -> str:
    """The verdict, the worst groups of failing cases, a table per operation, recipe and dtype, and the environment.

    `remarks`: result of `text.remarks`, or None to make it here. The last line links to `link`, or to the page beside
    the summary. Content above `budget` bytes is omitted, first from the end of the groups, then from the table, and the
    omitted groups and rows are counted. The result is empty if verdict and link alone exceed the budget.
    """
    mark = text.GLYPHS["pass" if succeeded(records) else "fail"]
    title = f"# {mark} narrowgauge: {escape(text.verdict_line(records, elapsed))}"
    address = link.replace("<", "%3C").replace(">", "%3E")
    last = f"The whole report: {f'<{address}>' if address else '[index.html](index.html)'}"
    page = _Page(budget, title, last)
    if not page.holds:
        return ""
    for remark in text.remarks(records) if remarks is None else remarks:
        page.add("", escape(remark))
    own = {"commit": "commit of narrowgauge"}
    facts = ["", *(f"- {escape(own.get(label, label))}: {escape(value)}" for label, value in environment.items())]
    table = _table(records) if records else []
    costs, durations = _accuracy(records), _times(records)
    groups = group(records)
    # Groups may be long: reserve space for the table and the facts, which are short and come later.
    reserved = min(page.size_of("", *table, *costs, *durations, *facts), page.left // 2)
    shown = 0
    for failure_group in groups[:SHOWN]:
        if not page.add("", *_group(failure_group), spare=reserved + _NOTE):
            break
        shown += 1
    if omitted := groups[shown:]:
        cases = sum(len(failure_group.records) for failure_group in omitted)
        page.add("", f"{text.plural(len(omitted), 'more group')} with {text.plural(cases, 'case')} left out.")
    if table:
        page.add("", *table[:2])
        rows = 0
        for row in table[2:]:
            if not page.add(row, spare=_NOTE):
                break
            rows += 1
        if rows < len(table) - 2:
            page.add("", f"{text.plural(len(table) - 2 - rows, 'more row')} left out.")
    for title, lines in ((accuracy.TITLE, costs), (times.TITLE, durations)):
        if lines and not page.add(*lines, spare=page.size_of(*facts)):
            page.add("", f"{title}: left out.")
    page.add(*facts)
    return page.text


_NOTE = 100
"""Largest size in bytes of a line that counts omitted content."""


class _Page:
    """Lines between a title and a last line, within a budget of bytes."""

    def __init__(self, budget: int, title: str, last: str) -> None:
        self._lines = [title]
        self._last = ["", last]
        self.left = budget - self.size_of(title, *self._last)

    @property
    def holds(self) -> bool:
        """Whether title and last line fit into the budget."""
        return self.left >= 0

    @staticmethod
    def size_of(*lines: str) -> int:
        """Bytes of the lines with their line ends."""
        return sum(len(line.encode()) + 1 for line in lines)

    def add(self, *lines: str, spare: int = 0) -> bool:
        """Append all lines if they fit and leave `spare` bytes. Returns False if the lines do not fit."""
        size = self.size_of(*lines)
        if size + spare > self.left:
            return False
        self.left -= size
        self._lines += lines
        return True

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join([*self._lines, *self._last]) + "\n"


def cut(value: object) -> str:
    """Text on one line, with at most `LONGEST` characters."""
    # Also cut before the lines are joined: a message may have a million lines.
    line = " ".join(plain_text.escape(str(value)[: 2 * LONGEST]).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def escape(value: object) -> str:
    """Text on one line, cut, with Markdown and HTML characters escaped. An invisible character behind each @ keeps a
    name from being notified."""
    return re.sub(r"(?<!\w)@(?=\w)", "@\u200b", re.sub(r"([\\`*_~\[\]<>|&#])", r"\\\1", cut(value)))


def code(value: str) -> str:
    """Code span with text that may contain backticks, cut."""
    value = cut(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", value)), default=0))
    pad = " " if "`" in value else ""
    return f"{fence}{pad}{value}{pad}{fence}"


def _table(records: list[dict[str, Any]]) -> list[str]:
    """Header, rule, and a row per operation, recipe and dtype: rows with failures first, worst first."""
    rows = sorted(tables.summary(records), key=_wrong, reverse=True)
    outcomes = [v for v in OUTCOMES if v == "pass" or any(row[v] for row in rows)]
    lines = [
        _row(["operation", "recipe", "dtype", "cases", *outcomes, *_FIGURES.values()]),
        _row(["---"] * 3 + ["---:"] * (1 + len(outcomes) + len(_FIGURES))),
    ]
    for row in rows:
        names = [escape(row[key]) for key in ("operation", "recipe", "dtype")]
        counts = [text.number(row[key]) for key in ("cases", *outcomes)]
        lines.append(_row([*names, *counts, *(_figure(key, row[key]) for key in _FIGURES)]))
    return lines


def _accuracy(records: list[dict[str, Any]]) -> list[str]:
    """Accuracy cost of each recipe: title, note, table. Empty if no module ran."""
    rows = accuracy.rows(records)
    if not rows:
        return []
    figures = [f"{tensor} {accuracy.FIGURES[figure]}" for tensor, figure in accuracy.COLUMNS]
    return [
        "", f"## {accuracy.TITLE}", "", accuracy.NOTE, "",
        _row(["recipe", "operation", "cases", *figures]),
        _row(["---"] * 2 + ["---:"] * (1 + len(figures))),
        *(_row([escape(row.recipe), escape(row.operation), text.number(row.cases), *row.cells]) for row in rows),
    ]  # fmt: skip


def _times(records: list[dict[str, Any]]) -> list[str]:
    """Times: title, note, a table by operation and recipe, and a table of the slowest cases."""
    rows = times.rows(records, recipes=True)
    if not rows:
        return []
    rule = ["---:"] * len(times.LABELS)
    return [
        "", f"## {times.TITLE}", "", times.NOTE, "",
        _row(["operation", "recipe", "cases", *times.LABELS]),
        _row(["---", "---", "---:", *rule]),
        *(_row([escape(row.operation), escape(row.recipe), text.number(row.cases), *row.cells]) for row in rows),
        "", _row(["slowest cases", *times.LABELS]), _row(["---", *rule]),
        *(_row([code(name), *row.cells]) for name, row in times.slowest(records)),
    ]  # fmt: skip


def _wrong(row: dict[str, Any]) -> tuple[int, int]:
    return row["cases"] - row["pass"] - row["known"], row["mismatches"]


def _figure(key: str, value: float | None) -> str:
    if key == "seconds":
        return text.duration(value)
    return text.share(value) if key.endswith("_share") else text.number(value)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _distribution(record: dict[str, Any]) -> list[str]:
    """The `distribution_lines` of the first wrong stage."""
    findings = [finding for finding in record["findings"] if finding.get("stage") == record["stage"]][:1]
    return [line for finding in findings for line in distribution_lines(finding)]


def _group(failure_group: Group) -> Iterable[str]:
    worst, *others = failure_group.records
    wrong = f", {text.plural(failure_group.mismatches, 'wrong element')}" if failure_group.mismatches else ""
    glyph = text.GLYPHS[failure_group.verdict]
    yield f"## {glyph} {escape(failure_group.title)}{wrong}"
    yield ""
    yield escape(text.sentence(worst))
    yield ""
    if worst["known"]:
        yield f"known: {escape(worst['known'])}"
        yield ""
    if failure_group.explanation is not None:
        yield escape(text.explanation(failure_group.explanation))
        yield ""
    yield code(reproduction(worst))
    for line in _distribution(worst):
        yield ""
        yield escape(line)
    for line in group_saved_lines(failure_group.records):
        yield ""
        yield code(line)
    if others:
        yield ""
    for record in others[: CASES - 1]:
        yield f"- {code(record['case'])} on {escape(record['backend'])}, {escape(record['device'])}"
    if len(others) >= CASES:
        yield f"- and {text.plural(len(others) - CASES + 1, 'more case')}"
