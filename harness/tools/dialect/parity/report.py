"""Parity of several kernels as a table, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.text import share
from narrowgauge.harness.tools.dialect.parity.parity import Parity


def cell(pair: Parity) -> str:
    """A pair in a table: `=`, the first stage with the share of its elements that differ, or why it is not equal."""
    if pair:
        return "="
    if not pair.found.elements:
        return "not compared"
    if not pair.found.differences:
        return "not repeatable" if pair.changing else "refused"
    first = pair.found.differences[0]
    return f"{first.stage} {share(first.different / first.compared)}"


def matrix(pairs: Sequence[Parity]) -> dict[str, dict[str, str]]:
    """A row for each kernel with the cells of all kernels; empty beside itself."""
    names = list(dict.fromkeys(name for pair in pairs for name in pair.names))
    cells = {names_: cell(pair) for pair in pairs for names_ in (pair.names, pair.names[::-1])}
    return {row: {column: cells.get((row, column), "") for column in names} for row in names}


def text(pairs: Sequence[Parity]) -> str:
    """For people: with more than two kernels the table, then each pair."""
    lines = []
    if len(pairs) > 1:
        rows = matrix(pairs)
        table = [["", *rows], *([name, *cells.values()] for name, cells in rows.items())]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        lines.append("")
    return escape("\n".join([*lines, *(line for pair in pairs for line in pair.lines())]))


def as_json(pairs: Sequence[Parity]) -> dict[str, Any]:
    """As JSON can hold it."""
    return {"equal": all(pairs), "subject": pairs[0].subject, "table": matrix(pairs),
            "pairs": [pair.as_json() for pair in pairs]}  # fmt: skip


def page(pairs: Sequence[Parity]) -> str:
    """The page."""
    equal = sum(map(bool, pairs))
    return template.render(
        Path(__file__).with_name("parity.html"), name="narrowgauge parity", verdict="pass" if all(pairs) else "fail",
        sentence=f"{pairs[0].subject}: {equal} of {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} of kernels "
        "give equal bytes",
        table=matrix(pairs), pairs=pairs,
    )  # fmt: skip
