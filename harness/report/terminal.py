"""The summary in a terminal: at 80 columns no name is broken, and passed cases take a line for each operation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from narrowgauge.harness.records.record import OUTCOMES, succeeded
from narrowgauge.harness.report import accuracy, tables, text, times
from narrowgauge.harness.report.failure_view import reproduction
from narrowgauge.harness.report.groups import group

GROUPS = 20
"""Largest number of listed groups of failures without details."""
_STYLES = {"pass": "blue", "unsupported": "yellow", "known": "dim"}
_RED = "bold red"
_QUIET = ("pass", "unsupported", "known")
"""Outcomes that are no failure."""
_FIGURES = {"sqnr_db": "{} dB", "relative_error": "rel.", "cosine": "cos."}
_TIMES = {"reference": "ref.", "diagnosis": "diagn."}
"""Labels of times, short enough for a line of 80 characters."""


def print_summary(records: list[dict[str, Any]], console: Console, *, details: bool = False) -> None:
    """Print a row for each operation, the groups of failures, the parts that were not compared, and the verdict.

    With `details` a row for each operation, recipe and dtype, all groups, the accuracy cost of recipes, and the times.
    """
    # A terminal that cannot encode the glyphs must not turn a verdict into an exception.
    marks = {v: v if console.options.ascii_only else glyph for v, glyph in text.GLYPHS.items()}
    summary = tables.summary(records)
    if rows := summary if details else tables.fold_rows(summary):
        _print_rows(rows, console, marks)
    if details:
        _print_accuracy(records, console)
        _print_times(records, console)
    _print_groups(records, console, marks, GROUPS if not details else len(records))
    for line in text.remarks(records):
        print_text(line, console)
    verdict = "pass" if succeeded(records) else "fail"
    print_text(f"{marks[verdict]} {text.verdict_line(records)}", console, _style(verdict))


def print_text(line: str, console: Console, style: str = "", *, indent: int = 0, hanging: int = 0) -> None:
    """Print a sentence. Lines break between words, so no name is broken, and are indented by `indent` characters, lines
    after the first by `hanging` more."""
    # No line breaks inside words: a part of a backend's message could be a command of a CI service.
    first, rest = " " * indent, " " * (indent + hanging)
    for part in line.split("\n"):
        wrapped = textwrap.fill(
            part, console.width, initial_indent=first, subsequent_indent=rest, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        console.print(Text(wrapped, style=style), soft_wrap=True)
        first = rest


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of the header and of every row: left column first, the figures of the other columns to the right.

    A name that is too long for its column takes a line of its own, above its figures.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(1, len(header))]
    room = width - sum(figure_width + 1 for figure_width in widths)
    room = max(len(row[0]) for row in (header, *rows) if len(row[0]) <= room or row is header)
    lines = []
    for name, *figures in (header, *rows):
        shown = "".join(f" {figure:>{widths[i]}}" for i, figure in enumerate(figures))
        line = f"{name:<{room}}{shown}" if len(name) <= room else f"{name}\n{' ' * room}{shown}"
        lines.append(line.rstrip())
    return lines


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    console: Console,
    *,
    styles: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print `table_lines`, each row in its style, with its note below if the note is not empty."""
    first, *lines = table_lines(header, rows, console.width)
    console.print(Text(first, style="dim"), soft_wrap=True)
    for i, line in enumerate(lines):
        style = styles[i] if styles else ""
        console.print(Text(line, style=style), soft_wrap=True)
        if notes and notes[i]:
            print_text(notes[i], console, style, indent=4)


def _print_rows(rows: list[dict[str, Any]], console: Console, marks: dict[str, str]) -> None:
    header = ["", "passed", "compared", "wrong", "ulp", "error/bound", "time"]
    cells = []
    for row in rows:
        name = " ".join(filter(None, (row[key] for key in ("operation", "recipe", "dtype"))))
        figures = [text.compact(row["compared"]), text.compact(row["mismatches"])]
        figures += [text.ulps(row["max_ulp"]), text.compact(row["budget_max"])]
        # A single number if all cases passed.
        passed = [row["pass"]] if row["pass"] == row["cases"] else [row["pass"], row["cases"]]
        counts = "/".join(map(text.number, passed))
        cells.append([f"{marks[_verdict(row)]} {name}", counts, *figures, text.duration(row["seconds"] or None)])
    # A run with correct results only has no wrong elements, so their columns are empty.
    shown = [i for i, name in enumerate(header) if i < 3 or any(row[i] not in ("", "0") for row in cells)]
    chosen = [[row[i] for i in shown] for row in (header, *cells)]
    styles = [_style(_verdict(row)) if row["pass"] != row["cases"] else "" for row in rows]
    others = [", ".join(f"{text.number(row[v])} {v}" for v in OUTCOMES if v != "pass" and row[v]) for row in rows]
    print_table(chosen[0], chosen[1:], console, styles=styles, notes=others)
    console.print()


def _print_groups(records: list[dict[str, Any]], console: Console, marks: dict[str, str], most: int) -> None:
    """Title and command of each group of failures, worst first."""
    groups = [failures for failures in group(records) if failures.verdict not in _QUIET]
    for failures in groups[:most]:
        print_text(f"{marks[failures.verdict]} {failures.title}", console, _style(failures.verdict), hanging=2)
        # One line, to be copied.
        console.print(Text(f"  {reproduction(failures.records[0])}"), soft_wrap=True)
    if omitted := groups[most:]:
        cases = text.plural(sum(len(failures.records) for failures in omitted), "case")
        print_text(f"{text.plural(len(omitted), 'more group')} with {cases}: in the report, or with --details", console)
    if groups:
        console.print()


def _print_accuracy(records: list[dict[str, Any]], console: Console) -> None:
    rows = accuracy.rows(records)
    if not rows:
        return
    console.print(Text(accuracy.TITLE, style="bold"))
    print_text(accuracy.NOTE, console, "dim")
    header = ["recipe, operation", *(_FIGURES[figure].format(tensor) for tensor, figure in accuracy.COLUMNS)]
    cells = [[f"{row.recipe} {row.operation}", *row.cells] for row in rows]
    if console.options.ascii_only:
        cells = [[cell.replace("−", "-") for cell in row] for row in cells]
    print_table(header, cells, console)
    console.print()


def _print_times(records: list[dict[str, Any]], console: Console) -> None:
    rows = times.rows(records)
    if not rows:
        return
    console.print(Text(times.TITLE, style="bold"))
    print_text(times.NOTE, console, "dim")
    header = ["operation", "cases", *(_TIMES.get(label, label) for label in times.LABELS)]
    # Seconds without a unit: ten columns fit into 80 characters.
    cells = [[row.operation, text.compact(row.cases), *map(_brief, row.seconds)] for row in rows]
    print_table(header, cells, console)
    console.print(Text("\nslowest cases"))
    for name, row in times.slowest(records):
        console.print(Text(f"{text.duration(row.seconds[0]):>9}, {row.largest_phase}: {name}"), soft_wrap=True)
    console.print()


def _brief(seconds: float) -> str:
    """Seconds in at most five characters, empty for 0."""
    if not seconds:
        return ""
    return f"{seconds:.2f}" if seconds < 0.0995 else f"{seconds:.3g}" if seconds < 9.95 else f"{seconds:.0f}"


def _verdict(row: dict[str, Any]) -> str:
    red = [v for v in OUTCOMES if v not in _STYLES and row[v]]
    return next((v for v in (*red, "unsupported", "known") if row[v]), "pass")


def _style(verdict: str) -> str:
    return _STYLES.get(verdict, _RED)
