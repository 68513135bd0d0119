"""A case element by element: output of `narrowgauge show`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.inputs.capture import Captured
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.registry import operation_of
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table
from narrowgauge.harness.records.record import STACK
from narrowgauge.harness.report.failure_view import explanation_lines, note_lines
from narrowgauge.harness.report.terminal import print_table, print_text
from narrowgauge.harness.report.text import number as grouped
from narrowgauge.harness.report.text import rule
from narrowgauge.harness.running.runner import run_case


def show_case(
    case: Case,
    backend: Backend,
    *,
    device: str,
    seed: int,
    source: Path | None,
    place: Place | None,
    saved: Inputs | None = None,
    after: Sequence[Case] = (),
    timeout: float = 300.0,
    untrusted: bool = False,
) -> bool:
    """Run `case` and print its failure, every stage, and the elements around `place` (row, column) or around the first
    wrong element.

    Rows are counted through all sections. With two halves the place is in the wrong half, or in the rowwise half.
    `saved` inputs replace the inputs made from the seed. The cases of `after` run before, in the same host; their
    verdicts are printed. `timeout` and `untrusted`: as of `run_case`. True if the case passes. A case without a result
    has no stages: the verdict and the reason are printed. Raises Unsupported.
    """
    console = Console(highlight=False)
    captures = None if source is None else Captured.load(source)
    _print_text(f"{case.id}   backend {backend.name}, device {device}, seed {seed}", console)
    judged: list[tuple[Inputs, Outcome]] = []

    def keep(inputs: Inputs, outcome: Outcome) -> None:
        judged.append((inputs, outcome))

    for earlier in after:
        before = run_case(
            earlier, backend, device=device, seed=seed, captures=captures, timeout=timeout, untrusted=untrusted
        )
        _print_text(f"after {earlier.id}: {before.verdict}", console)
    record = run_case(
        case, backend, device=device, seed=seed, captures=captures, inputs=saved, on_outcome=keep, timeout=timeout,
        untrusted=untrusted, diagnosis=math.inf,
    )  # fmt: skip
    if record.verdict == "unsupported":
        raise Unsupported(record.message)
    if record.verdict != "pass":
        _print_text(escape(f"{record.verdict}: {record.message}"), console)
        for line in note_lines({"notes": [note for note in record.notes if note["cause"] == STACK]}):
            console.print(Text(escape(line)), soft_wrap=True)
    for inputs, outcome in judged:
        _print_stages(outcome, console)
        for line in explanation_lines(record.explanations, every=True):
            _print_text(line, console)
        table = operation_of(case).show(inputs, outcome, place)
        if table is None:
            console.print("the result is empty")
        else:
            _print_elements(table, console)
        if isinstance(case, ContractCase):
            _print_steps(case, console)
    return record.verdict == "pass"


def _print_steps(case: ContractCase, console: Console) -> None:
    """Print the steps of a contract: the basis of the judgement of a stage."""
    console.print(Text(f"steps of {case.operation}", style="italic"))
    for line in case.program.text().split("\n"):
        console.print(Text(line), soft_wrap=True)


def _print_text(line: str, console: Console, style: str = "") -> None:
    """Print a sentence. Only a terminal breaks it, between words: in a file it stays whole, to be searched."""
    if console.is_terminal:
        print_text(line, console, style, hanging=2)
    else:
        console.print(Text(line, style=style), soft_wrap=True)


def _print_stages(outcome: Outcome, console: Console) -> None:
    """A row per stage, with the sentence of a wrong stage below."""
    cells, notes = [], []
    for s in outcome.stages:
        mark = "wrong" if s.sentence else "ok" if console.options.ascii_only else "✓"
        cells.append((s.stage, rule(s.rule), grouped(s.compared), grouped(s.mismatches), mark))
        notes.append(s.sentence or (f"assumes {s.assumes}" if s.assumes else ""))
    print_table(("stage", "compared how", "compared", "wrong", ""), cells, console, notes=notes)


def _print_elements(table: Table, console: Console) -> None:
    """Print the title and all rows of a table. Columns are aligned to the right. Columns beyond the width of a
    terminal continue on a second line."""
    for line in table.title.split("\n"):
        _print_text(line, console, "italic")
    most = console.width if console.is_terminal else math.inf
    headings = table.rows[0][0]
    widths = [max(len(cells[i]) for cells, _ in table.rows) for i in range(len(headings))]
    for cells, style in table.rows:
        line = ""
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            # A column without a heading has the bits of the value before it: the two stay together.
            needed = width if "" not in headings[i + 1 : i + 2] else width + 2 + widths[i + 1]
            if line and headings[i] and len(line) + 2 + needed > most:
                console.print(Text(line.rstrip(), style=style), soft_wrap=True)
                line = " " * widths[0]
            line += "  " * bool(line) + cell.rjust(width)
        console.print(Text(line.rstrip(), style=style), soft_wrap=True)
