"""A case element by element: output of `narrowgauge show`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.modules import MODULES
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.inputs.capture import Captured
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.product import rule_at
from narrowgauge.harness.operations.stages.quantized import (
    Judged,
    code_view,
    of_row,
    scale_place,
    scale_view,
    scaled_elements,
    stored_along_rows,
)
from narrowgauge.harness.report.failure_view import explanation_lines
from narrowgauge.harness.report.terminal import print_table, print_text
from narrowgauge.harness.report.text import number as grouped
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.spec.quantized import Quantized

Place = tuple[int, int]
NEIGHBOURS = 8
"""Shown elements of a row without blocks."""
SHOWN_OF_WHOLE = 32
"""Shown elements of a row of a tensor with a single scale."""


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
    for inputs, outcome in judged:
        _print_stages(outcome, console)
        for line in explanation_lines(record.explanations, every=True):
            _print_text(line, console)
        table = _SHOWN[case.operation](inputs, outcome, place)
        if table is None:
            console.print("the result is empty")
        else:
            table.print(console)
    return record.verdict == "pass"


def _print_text(line: str, console: Console, style: str = "") -> None:
    """Print a sentence. Only a terminal breaks it, between words: in a file it stays whole, to be searched."""
    if console.is_terminal:
        print_text(line, console, style, hanging=2)
    else:
        console.print(Text(line, style=style), soft_wrap=True)


def _print_stages(outcome: Outcome, console: Console) -> None:
    """A row for each stage, with the sentence of a wrong stage below it."""
    cells, notes = [], []
    for s in outcome.stages:
        mark = "wrong" if s.sentence else "ok" if console.options.ascii_only else "✓"
        cells.append((s.stage, s.rule, grouped(s.compared), grouped(s.mismatches), mark))
        notes.append(s.sentence or (f"assumes {s.assumes}" if s.assumes else ""))
    print_table(("stage", "rule", "compared", "wrong", ""), cells, console, notes=notes)


class _Table:
    """Elements in columns, aligned to the right. Columns beyond the width of a terminal continue on a second line."""

    def __init__(self, title: str, headings: Sequence[str]) -> None:
        self.title = title
        self.rows = [(list(headings), "dim")]

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row. `style`: of rich."""
        self.rows.append((list(cells), style))

    def print(self, console: Console) -> None:
        """Print the title and all rows."""
        for line in self.title.split("\n"):
            _print_text(line, console, "italic")
        most = console.width if console.is_terminal else math.inf
        headings = self.rows[0][0]
        widths = [max(len(cells[i]) for cells, _ in self.rows) for i in range(len(headings))]
        for cells, style in self.rows:
            line = ""
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                # A column without a heading has the bits of the value before it: the two stay together.
                needed = width if "" not in headings[i + 1 : i + 2] else width + 2 + widths[i + 1]
                if line and headings[i] and len(line) + 2 + needed > most:
                    console.print(Text(line.rstrip(), style=style), soft_wrap=True)
                    line = " " * widths[0]
                line += "  " * bool(line) + cell.rjust(width)
            console.print(Text(line.rstrip(), style=style), soft_wrap=True)


def _wrong_element(outcome: Outcome, stage: str) -> dict[str, Any] | None:
    """First wrong element of a stage."""
    for result in outcome.stages:
        if result.stage == stage and result.finding is not None:
            element: dict[str, Any] = result.finding["elements"][0]
            return element
    return None


def _place(outcome: Outcome, stage: str, place: Place | None, shape: Sequence[int]) -> Place:
    """Place to show: the given place limited to the matrix, else the stage's first wrong element, else (0, 0)."""
    if place is not None:
        return min(place[0], shape[0] - 1), min(place[1], shape[1] - 1)
    element = _wrong_element(outcome, stage)
    return (0, 0) if element is None else (element["row"], element["column"])


def _quantized(_: Inputs, outcome: Outcome, chosen_place: Place | None) -> _Table | None:
    """Block of the matrix around the place."""
    wrong = {judged.prefix: _wrong_element(outcome, f"{judged.prefix}codes") for judged in outcome.judged}
    prefix = next((prefix for prefix, element in wrong.items() if element), next(iter(wrong), ""))
    parts = [judged for judged in outcome.judged if judged.prefix == prefix]
    non_empty = [number for number, judged in enumerate(parts) if judged.subject.matrix.numel()]
    if not non_empty:
        return None
    element = wrong[prefix]
    number = non_empty[0] if element is None else element.get("section", 0)
    if chosen_place is not None:
        number, chosen_place = _section(parts, non_empty, chosen_place)
    judged = parts[number]
    shape = judged.subject.matrix.shape
    if judged.kernel.transposed:  # findings have the coordinates of x
        column, row = _place(outcome, f"{prefix}codes", chosen_place, shape[::-1])
        place = (row, column)
    else:
        place = _place(outcome, f"{prefix}codes", chosen_place, shape)
    name = f"section {number}, " if len(parts) > 1 else f"{prefix.rstrip('.')} half, " if prefix else ""
    return _block(judged, place, name)


def _section(parts: list[Judged], non_empty: list[int], place: Place) -> tuple[int, Place]:
    """The section of a row counted through all sections, and the place inside of it. Large rows give the last
    section."""
    row = place[0]
    for number in non_empty[:-1]:
        rows = parts[number].subject.matrix.shape[int(parts[number].kernel.transposed)]
        if row < rows:
            return number, (row, place[1])
        row -= rows
    return non_empty[-1], (row, place[1])


def _block(judged: Judged, place: Place, name: str) -> _Table:
    """The block of an element (row, column) of the quantized matrix: x or its transpose."""
    x, oracle, kernel = judged.subject.x, judged.oracle, judged.kernel
    recipe = judged.subject.recipe
    transposed = kernel.transposed
    width = SHOWN_OF_WHOLE if recipe.whole else recipe.block[1]
    row, block = place[0], place[1] // width
    columns = range(block * width, min((block + 1) * width, x.shape[1]))
    stored = scale_place(recipe, row, place[1])
    title = f"{name}{'column' if transposed else 'row'} {row}, block {0 if recipe.whole else block}"
    title += ", rotated in the reference's order" if recipe.transform else ""
    lines = [title, *(_scales(side, q, row, stored) for side, q in (("expected", oracle), ("actual", kernel)))]
    headings = ("row" if transposed else "column", "x", "bits of x", "x·e", "expected", "", "actual", "")
    table = _Table("\n".join(lines), headings)
    encode = of_row(_encode_scale(kernel, x.dtype), row)
    stored_row = slice(stored[0], stored[0] + 1)
    scaled = scaled_elements(
        x[row : row + 1], linear_scales(kernel)[stored_row], encode, recipe, judged.subject.blocks[stored_row]
    )[0]
    codes = [elements(stored_along_rows(q)[row : row + 1], x.shape[1], recipe)[0] for q in (oracle, kernel)]
    for column in columns:
        value, raw = float_view(x[row, column])
        expected, actual = (int(c[column]) for c in codes)
        cells = [str(column), str(value), raw, f"{float(scaled[column]):.9g}"]
        for code in (expected, actual):
            shown, of_code = code_view(code, recipe.element)
            cells += [of_code, str(shown)]
        table.add_row(*cells, style="" if expected == actual else "bold red")
    return table


def _encode_scale(q: Quantized, dtype: torch.dtype) -> torch.Tensor | None:
    if q.tensor_scale is not None or q.amax is None:
        return q.tensor_scale
    return tensor_scale(q.amax, q.recipe, dtype)


def _scales(side: str, q: Quantized, row: int, place: Place) -> str:
    """Amax, tensor scale and block scale of a block, in a line. `place`: position of the stored block scale."""
    amax, encode = ("not shown" if n is None else float(n) for n in (of_row(q.amax, row), of_row(q.tensor_scale, row)))
    value, raw = scale_view(linear_scales(q)[place], q.recipe.scale)
    tensor = "" if q.recipe.tensor_scale == "none" else f"amax {amax}, tensor scale {encode}, "
    return f"{side}: {tensor}block scale {raw} = {value}"


def _update(inputs: Inputs, outcome: Outcome, place: Place | None) -> _Table | None:
    """Scale of a tensor, with the scales around it."""
    actual, expected = outcome.actual, outcome.expected
    assert actual is not None
    assert expected is not None
    if not actual.numel():
        return None
    wrong = _wrong_element(outcome, "scale") or _wrong_element(outcome, "history") or {"tensor": 0}
    tensor = min(place[1], len(actual) - 1) if place is not None else wrong["tensor"]
    table = _Table("scales", ("tensor", "first amax", "largest amax", "before", "expected", "", "actual", ""))
    for _, n in _neighbours(0, tensor, actual.unsqueeze(0)):
        amaxes, before = inputs.x[:, n], inputs.scale["x"][n]
        largest = amaxes.nan_to_num(nan=0.0, posinf=torch.inf).amax()
        cells = [str(n), *(str(float(number)) for number in (amaxes[0], largest, before))]
        cells += [str(part) for number in (expected[n], actual[n]) for part in float_view(number)]
        table.add_row(*cells, style="" if float_view(expected[n]) == float_view(actual[n]) else "bold red")
    return table


def _product(_: Inputs, outcome: Outcome, place: Place | None) -> _Table | None:
    output, limits = outcome.actual, outcome.limits
    assert output is not None
    assert limits is not None
    if not output.numel():
        return None
    row, column = _place(outcome, "output", place, output.shape)
    table = _Table(f"row {row}", ("column", "rule", "expected", "", "lower", "upper", "actual", ""))
    for neighbour in _neighbours(row, column, output):
        exact = bool(limits.exact[neighbour])
        ends = None if exact else (limits.lower[neighbour], limits.upper[neighbour])
        _add_row(table, neighbour, [rule_at(limits, neighbour)], limits.expected[neighbour], ends, output[neighbour])
    return table


def _transform(inputs: Inputs, outcome: Outcome, place: Place | None) -> _Table | None:
    output, expected = outcome.actual, outcome.expected
    assert output is not None
    assert expected is not None
    if not output.numel():
        return None
    row, column = _place(outcome, "output", place, output.shape)
    table = _Table(f"row {row}", ("column", "x", "expected", "", "lower", "upper", "actual", ""))
    for neighbour in _neighbours(row, column, output):
        ends = None if outcome.ends is None else (outcome.ends[0][neighbour], outcome.ends[1][neighbour])
        _add_row(table, neighbour, [str(float(inputs.x[neighbour]))], expected[neighbour], ends, output[neighbour])
    return table


def _neighbours(row: int, column: int, matrix: torch.Tensor) -> list[Place]:
    start = column // NEIGHBOURS * NEIGHBOURS
    return [(row, c) for c in range(start, min(start + NEIGHBOURS, matrix.shape[1]))]


def _add_row(
    table: _Table,
    place: Place,
    first: list[str],
    expected: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor] | None,
    actual: torch.Tensor,
) -> None:
    expected_value, actual_value = float_view(expected), float_view(actual)
    lower, upper = ("", "") if ends is None else (str(float(end)) for end in ends)
    cells = [
        str(place[1]),
        *first,
        str(expected_value[0]),
        expected_value[1],
        lower,
        upper,
        str(actual_value[0]),
        actual_value[1],
    ]
    table.add_row(*cells, style="" if expected_value == actual_value else "bold")


def _swizzle(inputs: Inputs, outcome: Outcome, place: Place | None) -> _Table | None:
    swizzled, scales = outcome.outputs["swizzled"], inputs.x
    assert swizzled is not None
    if not scales.numel():
        return None
    row, column = _place(outcome, "layout", place, scales.shape)
    linear = reference.unswizzle(swizzled, (scales.shape[0], scales.shape[1]))
    table = _Table(f"row {row}", ("column", "byte", "read back"))
    for neighbour in _neighbours(row, column, scales):
        expected, actual = (f"0x{int(t[neighbour]):02X}" for t in (scales, linear))
        table.add_row(str(neighbour[1]), expected, actual, style="" if expected == actual else "bold red")
    return table


def _accuracy(_: Inputs, outcome: Outcome, __: Place | None) -> _Table:
    """Accuracy cost of quantizing a module, which has no single element to show."""
    table = _Table("beside float64, of the last step", ("tensor", "SQNR, dB", "relative error", "cosine"))
    for entry in outcome.accuracy:
        figures = (entry[name] for name in ("sqnr_db", "relative_error", "cosine"))
        table.add_row(entry["tensor"], *("" if figure is None else f"{figure:.4g}" for figure in figures))
    return table


_SHOWN: dict[str, Callable[[Inputs, Outcome, Place | None], _Table | None]] = {
    "quantize": _quantized,
    "quantize-grouped": _quantized,
    "transform": _transform,
    "swizzle": _swizzle,
    "update-scale": _update,
    "gemm": _product,
    "gemm-grouped": _product,
    "gemm-quantized": _product,
    **dict.fromkeys(MODULES, _accuracy),
}
