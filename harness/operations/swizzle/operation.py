"""The operation swizzle."""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table, neighbours, place_in
from narrowgauge.harness.operations.swizzle.case import SwizzleCase
from narrowgauge.harness.operations.swizzle.judge import judge_swizzle
from narrowgauge.reference import ops as reference


def _bytes(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    return draw.below(256, rows, columns).to(torch.uint8)


def _places(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    # Of a tile's 512 bytes every value comes twice, never in one row or column: rows 64 to 127 are the first 64 with
    # their four bytes turned round. 85 and 51 keep a tile from its neighbours, also the diagonal ones.
    row, column = (torch.arange(n, dtype=torch.int32) for n in (rows, columns))
    inside = torch.where((row % 128 < 64).unsqueeze(1), column % 4, 3 - column % 4)
    tile = 85 * (row // 128).unsqueeze(1) + 51 * (column // 4) + draw.index(256)
    return (4 * row.unsqueeze(1) + inside + tile).bitwise_and_(255).to(torch.uint8)


SCALE_BYTES: dict[str, Callable[[Draw, int, int], torch.Tensor]] = {"bytes": _bytes, "position": _places}
"""The families of a swizzle: bytes (R, C)."""


def inputs(make: Maker[SwizzleCase]) -> Inputs:
    """x: the bytes (R, C)."""
    return Inputs({"x": SCALE_BYTES[make.case.inputs](make.draw("x"), *make.case.shape)})


def layout_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The row of a byte, and the bytes that are read back from its layout."""
    swizzled, scales = outcome.outputs["swizzled"], inputs.x
    if not scales.numel():
        return None
    row, column = place_in(outcome, "layout", place, scales.shape)
    linear = reference.unswizzle(swizzled, (scales.shape[0], scales.shape[1]))
    table = Table(f"row {row}", ("column", "byte", "read back"))
    for neighbour in neighbours(row, column, scales):
        expected, actual = (f"0x{int(t[neighbour]):02X}" for t in (scales, linear))
        table.add_row(str(neighbour[1]), expected, actual, style="" if expected == actual else "bold red")
    return table


OPERATION = Operation(case=SwizzleCase, inputs=inputs, judge=judge_swizzle, show=layout_table)
