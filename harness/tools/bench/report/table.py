"""Output of a bench in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.harness.tools.bench.report import cells

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.harness.tools.bench.bench import Bench
    from narrowgauge.harness.tools.bench.cost_growth import CostCurve

_PLAIN = str.maketrans("µ−×·", "u-x*")
WIDTH = 160
"""Width of the table in a file or a pipe."""


def print_bench(bench: Bench, console: Console) -> None:
    """Print the table, wrong outputs, and the peers that were not measured."""
    from rich.text import Text

    from narrowgauge.harness.report.terminal import print_table

    if not console.is_terminal:
        console.width = WIDTH
    ascii_only = console.options.ascii_only

    def encodable(line: str) -> str:
        return line.translate(_PLAIN) if ascii_only else line

    shown = cells.shown(bench.rows)
    rows = [[encodable(cell) for cell in cells.cells(row, ascii_only=ascii_only)] for row in shown]
    header = [encodable(column) for column in cells.COLUMNS]
    print_table(
        ["", *header[3:]],
        [[" ".join(row[:3]), *row[3:]] for row in rows],
        console,
        styles=["bold red" if row.failed else "" for row in shown],
    )
    console.print(Text(encodable(cells.EXPLAINED), style="dim"))
    for line in cells.wrong(bench.rows):
        console.print(encodable(line), markup=False, highlight=False, soft_wrap=True, style="red")
    for name, reason in sorted(bench.notes.items()):
        console.print(f"{name}: {reason}", markup=False, highlight=False, soft_wrap=True)


def print_growth(growths: list[CostCurve], console: Console) -> None:
    """Print a row per size, and a sentence per curve."""
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
