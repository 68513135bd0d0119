"""Tables of the history of runs: figures over commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from narrowgauge.harness.report.terminal import print_table, print_text
from narrowgauge.harness.report.text import compact, number, plural

RUNS = 30
"""Largest number of printed runs of a backend, device and tier: the latest runs."""
HEADER = ("commit, time (UTC)", "cases", "pass", "failed", "ulp", "error/bound", "rel. error")
NOTE = (
    "*: with uncommitted changes. failed: cases that did not pass and were neither unsupported nor known failures. "
    "ulp: largest distance of a wrong element. error/bound: largest fraction of the bound that a GEMM used. "
    "rel. error: largest ‖kernel − reference‖ / ‖reference‖ of a case."
)
_QUIET = ("pass", "unsupported", "known")


def runs_of(rows: Iterable[dict[str, Any]], matches: Callable[[str], bool]) -> dict[tuple[str, ...], list[list[str]]]:
    """Cells of a table row for each run, oldest first, by backend, device and tier.

    The figures of a run are over the rows of `harness.records.history.history_rows` whose text operation/recipe/dtype
    `matches`: sums of counts, largest errors. A run without such a row is left out.
    """
    members: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if matches("/".join(filter(None, (row["operation"], row["recipe"], row["dtype"])))):
            members[row["id"]].append(row)
    result: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for figures in members.values():
        run = figures[0]
        cases, passed, quiet = (
            sum(row[name] for row in figures for name in names) for names in (("cases",), ("pass",), _QUIET)
        )
        commit = (run["commit_id"][:12] or "no commit") + "*" * bool(run["dirty"])
        cells = [f"{commit} {run['time'][:16].replace('T', ' ')}", number(cases), number(passed), number(cases - quiet)]
        cells += [compact(_largest(figures, name)) for name in ("max_ulp", "budget_max", "relative_error")]
        result[run["backend"], run["device"], run["tier"]].append(cells)
    return result


def _largest(rows: Iterable[dict[str, Any]], name: str) -> Any:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def print_history(rows: Iterable[dict[str, Any]], console: Console, matches: Callable[[str], bool]) -> None:
    """Print a table of `runs_of` for each backend, device and tier."""
    tables = runs_of(rows, matches)
    for (backend, device, tier), runs in tables.items():
        print_text(f"{backend} on {device}, {tier} tier: {plural(len(runs), 'run')}", console, "bold")
        if len(runs) > RUNS:
            print_text(f"the latest {RUNS}; {number(len(runs) - RUNS)} earlier left out", console)
        styles = ["bold red" if cells[3] != "0" else "" for cells in runs[-RUNS:]]
        print_table(HEADER, runs[-RUNS:], console, styles=styles)
        console.print()
    note = NOTE.replace("‖", "|").replace("−", "-") if console.options.ascii_only else NOTE
    print_text(note if tables else "no run of the history has such figures", console, "dim")
