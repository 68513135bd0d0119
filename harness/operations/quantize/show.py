"""What `narrowgauge show` prints of a quantized matrix: the block around an element."""

from __future__ import annotations

import torch

from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import (
    Judged,
    code_view,
    of_row,
    scale_place,
    scale_view,
    scaled_elements,
    stored_along_rows,
)
from narrowgauge.harness.operations.stages.table import Place, Table, place_in, wrong_element
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.spec.quantized import Half, Quantized

SHOWN_OF_WHOLE = 32
"""Shown elements of a row of a tensor with a single scale."""


def quantized_table(_: Inputs, outcome: Outcome, chosen_place: Place | None) -> Table | None:
    """Block of the matrix around the place."""
    wrong = {judged.prefix: wrong_element(outcome, f"{judged.prefix}codes") for judged in outcome.judged}
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
        column, row = place_in(outcome, f"{prefix}codes", chosen_place, shape[::-1])
        place = (row, column)
    else:
        place = place_in(outcome, f"{prefix}codes", chosen_place, shape)
    operand = prefix.rstrip(".")
    subject = f"{operand}{' half' if operand in tuple(Half) else ''}, " if prefix else ""
    name = f"section {number}, " if len(parts) > 1 else subject
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


def _block(judged: Judged, place: Place, name: str) -> Table:
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
    table = Table("\n".join(lines), headings)
    given = recipe.tensor_scale == "given"
    encode = of_row(oracle.tensor_scale if given else _encode_scale(kernel, x.dtype), row)
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
