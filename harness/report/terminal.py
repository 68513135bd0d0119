"""The summary in a terminal."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowgauge.harness.records.record import OUTCOMES, succeeded
from narrowgauge.harness.report import accuracy, tables, text, times

_SHORT = {"unsupported": "unsup.", "unexpected": "unexp."}
_STYLES = {"pass": "blue", "unsupported": "yellow", "known": "dim"}
_RED = "bold red"
_FIGURES = {"sqnr_db": "{} dB", "relative_error": "rel.", "cosine": "cos."}
_SCREEN = 40
"""Rows on a screen."""


def print_summary(records: list[dict[str, Any]], console: Console) -> None:
    """Print a row per operation, recipe and dtype, the parts that were not compared, and the verdict.

    Passed rows are folded if the rows do not fit on a screen. The page and the tables have all rows.
    """
    # A terminal that cannot encode the glyphs must not turn a verdict into an exception.
    marks = {v: v if console.options.ascii_only else glyph for v, glyph in text.GLYPHS.items()}
    rows = tables.fold_rows(tables.summary(records), _SCREEN)
    if rows:
        console.print(_table(rows, marks))
    if costs := _costs(records):
        console.print(Text(f"\n{accuracy.TITLE}", style="bold"))
        console.print(Text(accuracy.NOTE, style="dim"))
        console.print(_accuracy(costs, ascii_only=console.options.ascii_only), Text())
    if durations := times.rows(records):
        console.print(Text(f"\n{times.TITLE}", style="bold"))
        console.print(Text(times.NOTE, style="dim"))
        console.print(_times(durations))
        console.print(Text("\nslowest cases"))
        for name, row in times.slowest(records):
            console.print(Text(f"{text.duration(row.seconds[0]):>9}, {row.largest_phase}: {name}"), soft_wrap=True)
        console.print()
    for line in filter(None, [text.not_compared(records), text.note_counts(records)]):
        # No line breaks inside words: a part of a backend's message could be a command of a CI service.
        wrapped = textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False)
        console.print(Text(wrapped), soft_wrap=True)
    verdict = "pass" if succeeded(records) else "fail"
    console.print(Text(f"{marks[verdict]} {text.verdict_line(records)}", style=_style(verdict)))


def _table(rows: list[dict[str, Any]], marks: dict[str, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("")
    for name in ("operation", "recipe", "dtype"):
        table.add_column(name, overflow="fold")
    table.add_column("passed", justify="right", no_wrap=True)
    table.add_column("others")
    for name in ("compared", "wrong", "ulp", "budget", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        verdict = _verdict(row)
        table.add_row(
            marks[verdict],
            *(_cell(row[key]) for key in ("operation", "recipe", "dtype")),
            # A single number if all cases passed: a second 10 118 would push the time off a line of 80 characters.
            f"{row['pass']}" if row["pass"] == row["cases"] else f"{row['pass']}/{row['cases']}",
            ", ".join(f"{row[v]} {_SHORT.get(v, v)}" for v in OUTCOMES if v != "pass" and row[v]),
            compact(row["compared"]),
            compact(row["mismatches"]),
            compact(row["max_ulp"]),
            text.number(row["budget_max"]),
            text.duration(row["seconds"]),
            style=_style(verdict) if verdict != "pass" else "",
        )
    return table


def _costs(records: list[dict[str, Any]]) -> list[accuracy.AccuracyRow]:
    """Accuracy cost of each recipe and operation; of each recipe only if the rows do not fit on a screen."""
    rows = accuracy.rows(records)
    return rows if len(rows) <= _SCREEN else accuracy.rows(records, operations=False)


def _accuracy(rows: list[accuracy.AccuracyRow], *, ascii_only: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("recipe", overflow="fold", min_width=9)
    table.add_column("operation", overflow="fold", min_width=9)
    for tensor, figure in accuracy.COLUMNS:
        table.add_column(_FIGURES[figure].format(tensor), justify="right", no_wrap=True)
    for row in rows:
        shown = [cell.replace("−", "-") if ascii_only else cell for cell in row.cells]
        table.add_row(_cell(row.recipe), _cell(row.operation), *shown)
    return table


def _times(rows: list[times.TimeRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("operation", overflow="fold", min_width=9)
    for name in ("cases", *times.LABELS):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        # Large values as whole seconds: eleven columns fit into 80 characters.
        table.add_row(_cell(row.operation), compact(row.cases), *map(_brief, row.seconds))
    return table


def _brief(seconds: float) -> str:
    return "" if not seconds else f"{seconds:.3g}" if seconds < 9.95 else f"{seconds:.0f}"


def _cell(value: str) -> Text:
    """Text for a column that breaks lines inside words: `::` at the start of a line is a command of a CI service."""
    return Text(value.replace("::", r"\:\:"))


def _verdict(row: dict[str, Any]) -> str:
    red = [v for v in OUTCOMES if v not in _STYLES and row[v]]
    return next((v for v in (*red, "unsupported", "known") if row[v]), "pass")


def _style(verdict: str) -> str:
    return _STYLES.get(verdict, _RED)


def compact(value: int | None) -> str:
    """A count in at most six characters: exact up to 99 999, then three digits."""
    if value is None or value < 100_000:
        return text.number(value)
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 999.5 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value / 1e12:.3g}T"
