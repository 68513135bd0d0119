"""A bench in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.harness.tools.bench.report import cells

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.harness.tools.bench.bench import Bench
    from narrowgauge.harness.tools.bench.growth import Growth

_PLAIN = str.maketrans("µ−×·", "u-x*")
WIDTH = 160
"""Of the table where nobody sees it: in a file or a pipe."""


def print_bench(bench: Bench, console: Console) -> None:
    """Print the table, what misses its figure, what is wrong, and who was not measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        console.width = WIDTH
    plain = console.options.ascii_only

    def said(words_of: str) -> str:
        return words_of.translate(_PLAIN) if plain else words_of

    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for number, column in enumerate(cells.COLUMNS):
        left = number < 3
        table.add_column(said(column), justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for row in cells.shown(bench.rows):
        style = "bold red" if row.red else "yellow" if row.met is False else ""
        table.add_row(*(Text(said(cell)) for cell in cells.cells(row, plain=plain)), style=style)
    console.print(table)
    console.print(Text(said(cells.EXPLAINED), style="dim"))
    for style, lines in (("yellow", cells.missed(bench.rows)), ("red", cells.wrong(bench.rows))):
        for line in lines:
            console.print(said(line), markup=False, highlight=False, soft_wrap=True, style=style)
    for name, why in sorted(bench.notes.items()):
        console.print(f"{name}: {why}", markup=False, highlight=False, soft_wrap=True)


def print_growth(growths: list[Growth], console: Console) -> None:
    """Print a row for each size, and what is said of each curve."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("who", "elements", "time", "ns an element", "memory", "bytes an element"):
        table.add_column(column, justify="left" if column == "who" else "right", no_wrap=True)
    for growth in growths:
        for point in growth.points:
            table.add_row(
                growth.who, f"2^{point.exponent}", cells.time(point.seconds), f"{point.nanoseconds:.3g}",
                cells.rate(point.memory, "B"), f"{point.memory_each:.3g}",
            )  # fmt: skip
    console.print(table)
    for growth in growths:
        console.print(growth.sentence(), markup=False, highlight=False, soft_wrap=True)
