"""The results of mutants for people: a row each, totals, and why the equivalent ones are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from narrowgauge.harness.tools.mutants.result import Result, totals

WIDTH = 170
"""Columns, where the terminal has fewer: a row that is folded is hard to read."""


def print_results(results: Sequence[Result], console: Console) -> None:
    """A row for each mutant, then totals, then the equivalent ones with their arguments."""
    table = Table(box=None, pad_edge=False)
    for column in (
        "mutant",
        "class",
        "killed by",
        "at stage",
        "failing",
        "cause",
        "named",
        "allclose",
        "bytes",
        "SQNR",
    ):
        table.add_column(column, no_wrap=column != "cause", overflow="fold")
    for result in sorted(results, key=lambda one: bool(one.mutant.equivalent)):
        table.add_row(*_row(result), style="" if result.right else "red")
    console.print(table, markup=False)
    console.print(totals(results).sentence, markup=False, highlight=False)
    for result in results:
        if result.problem:
            console.print(f"{result.mutant.name}: {result.problem}", style="red", markup=False)
        if result.mutant.equivalent:
            console.print(f"{result.mutant.name} is equivalent: {result.mutant.equivalent}", markup=False)


def _row(result: Result) -> list[str]:
    m, noticed = result.mutant, result.noticed
    survived = "equivalent" if m.equivalent else "SURVIVED"
    causes = ", ".join(f"{cause} {count}" for cause, count in result.causes)
    ticks = ["✓" if seen else "–" for seen in (noticed.allclose, noticed.compare_bytes, noticed.sqnr)]
    return [
        m.name, m.kind, "no result" if result.problem else result.check or survived, result.stage,
        f"{len(result.failing)} of {result.ran}", causes, "✓" if result.named else "–" if result.killed else "", *ticks,
    ]  # fmt: skip
