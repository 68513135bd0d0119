"""One case, element by element: what `narrowgauge show` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.schema import MODULES
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.inputs.capture import Captured
from narrowgauge.harness.inputs.inputs import Inputs
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
from narrowgauge.harness.report.view import explanation_lines
from narrowgauge.harness.running.judging import explained, judge
from narrowgauge.harness.running.runner import make_case_inputs
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.spec.quantized import Quantized

Place = tuple[int, int]
NEIGHBOURS = 8
"""Elements of a row that are shown, where it has no blocks."""
WIDTH = 110
"""Columns of the narrowest table: bits that are cut short tell nothing."""
SHOWN_OF_WHOLE = 32
"""Elements of a row that are shown, where the tensor has one scale."""


def show_case(
    case: Case,
    backend: Backend,
    *,
    device: str,
    seed: int,
    source: Path | None,
    at: Place | None,
    saved: Inputs | None = None,
) -> bool:
    """Run `case` and print every stage, then the elements around `at`, (row, column), or around the first wrong one.

    Rows of sections are counted through all of them; of two halves the place is in the wrong one, or in the rowwise
    one. `saved` inputs take the place of those that the seed makes. True where every stage is right. Raises
    BackendError and Unsupported.
    """
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    captures = None if source is None else Captured.load(source)
    inputs = saved.to(device) if saved else make_case_inputs(case, seed=seed, captures=captures, device=device)
    outcome = judge(case, inputs, backend)
    console.print(f"{case.id}   backend {backend.name}, device {device}, seed {seed}", markup=False)
    console.print(_stages(outcome))
    for line in explanation_lines(explained(outcome, backend)):
        console.print(line, markup=False)
    table = _SHOWN[case.operation](inputs, outcome, at)
    console.print("the result is empty" if table is None else table)
    return all(stage.right for stage in outcome.stages)


def _stages(outcome: Outcome) -> Table:
    table = Table("stage", "rule", "compared", "wrong", "", box=None)
    for s in outcome.stages:
        table.add_row(s.stage, s.rule, str(s.compared), str(s.mismatches), s.sentence or "✓")
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _wrong_element(outcome: Outcome, stage: str) -> dict[str, Any] | None:
    """The first wrong element of a stage."""
    for result in outcome.stages:
        if result.stage == stage and result.finding is not None:
            found: dict[str, Any] = result.finding["elements"][0]
            return found
    return None


def _place(outcome: Outcome, stage: str, at: Place | None, shape: Sequence[int]) -> Place:
    """Where to look in a matrix: as asked, within it; else the first wrong element of the stage; else the first."""
    if at is not None:
        return min(at[0], shape[0] - 1), min(at[1], shape[1] - 1)
    element = _wrong_element(outcome, stage)
    return (0, 0) if element is None else (element["row"], element["column"])


def _quantized(_: Inputs, outcome: Outcome, at: Place | None) -> Table | None:
    """A block of the matrix that has the place."""
    wrong = {judged.prefix: _wrong_element(outcome, f"{judged.prefix}codes") for judged in outcome.judged}
    prefix = next((prefix for prefix, element in wrong.items() if element), next(iter(wrong), ""))
    parts = [judged for judged in outcome.judged if judged.prefix == prefix]
    some = [number for number, judged in enumerate(parts) if judged.subject.matrix.numel()]
    if not some:
        return None
    element = wrong[prefix]
    number = some[0] if element is None else element.get("section", 0)
    if at is not None:
        number, at = _section(parts, some, at)
    judged = parts[number]
    shape = judged.subject.matrix.shape
    if judged.kernel.transposed:  # its findings are in the coordinates of x
        column, row = _place(outcome, f"{prefix}codes", at, shape[::-1])
        place = (row, column)
    else:
        place = _place(outcome, f"{prefix}codes", at, shape)
    name = f"section {number}, " if len(parts) > 1 else f"{prefix.rstrip('.')} half, " if prefix else ""
    return _block(judged, place, name)


def _section(parts: list[Judged], some: list[int], at: Place) -> tuple[int, Place]:
    """The part that has a row, counted through all of them, and the place in it; the last for a row behind them."""
    row = at[0]
    for number in some[:-1]:
        rows = parts[number].subject.matrix.shape[int(parts[number].kernel.transposed)]
        if row < rows:
            return number, (row, at[1])
        row -= rows
    return some[-1], (row, at[1])


def _block(judged: Judged, at: Place, name: str) -> Table:
    """The block of an element (row, column) of the matrix that is quantized: of x, or of its transpose."""
    x, oracle, kernel = judged.subject.x, judged.oracle, judged.kernel
    recipe = judged.subject.recipe
    transposed = kernel.transposed
    width = SHOWN_OF_WHOLE if recipe.whole else recipe.block[1]
    row, block = at[0], at[1] // width
    columns = range(block * width, min((block + 1) * width, x.shape[1]))
    stored = scale_place(recipe, row, at[1])
    title = f"{name}{'column' if transposed else 'row'} {row}, block {0 if recipe.whole else block}"
    title += ", rotated in the reference's order" if recipe.transform else ""
    lines = [title, *(_scales(which, q, row, stored) for which, q in (("expected", oracle), ("actual", kernel)))]
    headings = ("row" if transposed else "column", "x", "bits of x", "x·e", "expected", "", "actual", "")
    table = _table("\n".join(lines), headings)
    encode = of_row(_encode_scale(kernel, x.dtype), row)
    own = slice(stored[0], stored[0] + 1)
    scaled = scaled_elements(x[row : row + 1], linear_scales(kernel)[own], encode, recipe, judged.subject.blocks[own])[
        0
    ]
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


def _scales(which: str, q: Quantized, row: int, place: Place) -> str:
    """The numbers of a block whose scale is stored at a place, in one line."""
    amax, encode = ("not shown" if n is None else float(n) for n in (of_row(q.amax, row), of_row(q.tensor_scale, row)))
    value, raw = scale_view(linear_scales(q)[place], q.recipe.scale)
    tensor = "" if q.recipe.tensor_scale == "none" else f"amax {amax}, tensor scale {encode}, "
    return f"{which}: {tensor}block scale {raw} = {value}"


def _update(inputs: Inputs, outcome: Outcome, at: Place | None) -> Table | None:
    """The scale of a tensor, the column of a place, and those beside it."""
    found, expected = outcome.actual, outcome.expected
    assert found is not None
    assert expected is not None
    if not found.numel():
        return None
    wrong = _wrong_element(outcome, "scale") or _wrong_element(outcome, "history") or {"tensor": 0}
    tensor = min(at[1], len(found) - 1) if at is not None else wrong["tensor"]
    table = _table("scales", ("tensor", "first amax", "largest amax", "before", "expected", "", "actual", ""))
    for _, n in _around(0, tensor, found.unsqueeze(0)):
        amaxes, before = inputs.x[:, n], inputs.scale["x"][n]
        largest = amaxes.nan_to_num(nan=0.0, posinf=torch.inf).amax()
        cells = [str(n), *(str(float(number)) for number in (amaxes[0], largest, before))]
        cells += [str(part) for number in (expected[n], found[n]) for part in float_view(number)]
        table.add_row(*cells, style="" if float_view(expected[n]) == float_view(found[n]) else "bold red")
    return table


def _product(_: Inputs, outcome: Outcome, at: Place | None) -> Table | None:
    output, limits = outcome.actual, outcome.limits
    assert output is not None
    assert limits is not None
    if not output.numel():
        return None
    row, column = _place(outcome, "output", at, output.shape)
    table = _table(f"row {row}", ("column", "rule", "expected", "", "lower", "upper", "actual", ""))
    for here in _around(row, column, output):
        exact = bool(limits.exact[here])
        ends = None if exact else (limits.lower[here], limits.upper[here])
        _add(table, here, [rule_at(limits, here)], limits.expected[here], ends, output[here])
    return table


def _transform(inputs: Inputs, outcome: Outcome, at: Place | None) -> Table | None:
    output, expected = outcome.actual, outcome.expected
    assert output is not None
    assert expected is not None
    if not output.numel():
        return None
    row, column = _place(outcome, "output", at, output.shape)
    table = _table(f"row {row}", ("column", "x", "expected", "", "lower", "upper", "actual", ""))
    for here in _around(row, column, output):
        ends = None if outcome.ends is None else (outcome.ends[0][here], outcome.ends[1][here])
        _add(table, here, [str(float(inputs.x[here]))], expected[here], ends, output[here])
    return table


def _around(row: int, column: int, matrix: torch.Tensor) -> list[Place]:
    start = column // NEIGHBOURS * NEIGHBOURS
    return [(row, c) for c in range(start, min(start + NEIGHBOURS, matrix.shape[1]))]


def _add(
    table: Table,
    here: Place,
    first: list[str],
    expected: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor] | None,
    actual: torch.Tensor,
) -> None:
    wanted, found = float_view(expected), float_view(actual)
    lower, upper = ("", "") if ends is None else (str(float(end)) for end in ends)
    cells = [str(here[1]), *first, str(wanted[0]), wanted[1], lower, upper, str(found[0]), found[1]]
    table.add_row(*cells, style="" if wanted == found else "bold")


def _swizzle(inputs: Inputs, outcome: Outcome, at: Place | None) -> Table | None:
    swizzled, scales = outcome.outputs["swizzled"], inputs.x
    assert swizzled is not None
    if not scales.numel():
        return None
    row, column = _place(outcome, "layout", at, scales.shape)
    linear = reference.unswizzle(swizzled, (scales.shape[0], scales.shape[1]))
    table = _table(f"row {row}", ("column", "byte", "read back"))
    for here in _around(row, column, scales):
        expected, actual = (f"0x{int(t[here]):02X}" for t in (scales, linear))
        table.add_row(str(here[1]), expected, actual, style="" if expected == actual else "bold red")
    return table


def _accuracy(_: Inputs, outcome: Outcome, __: Place | None) -> Table:
    """What quantizing costs a module: it has no one element to show."""
    table = _table("beside float64, of the last step", ("tensor", "SQNR, dB", "relative error", "cosine"))
    for entry in outcome.accuracy:
        figures = (entry[name] for name in ("sqnr_db", "relative_error", "cosine"))
        table.add_row(entry["tensor"], *("" if figure is None else f"{figure:.4g}" for figure in figures))
    return table


_SHOWN: dict[str, Callable[[Inputs, Outcome, Place | None], Table | None]] = {
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
