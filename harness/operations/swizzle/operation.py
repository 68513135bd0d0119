"""The operation swizzle."""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.pack_scales.judge import judge_layout, layout_table
from narrowgauge.harness.operations.pack_scales.operation import bytes_of_any_value
from narrowgauge.harness.operations.swizzle.case import SwizzleCase


def _places(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    # Of a tile's 512 bytes every value comes twice, never in one row or column: rows 64 to 127 are the first 64 with
    # their four bytes turned round. 85 and 51 keep a tile from its neighbours, also the diagonal ones.
    row, column = (torch.arange(n, dtype=torch.int32) for n in (rows, columns))
    inside = torch.where((row % 128 < 64).unsqueeze(1), column % 4, 3 - column % 4)
    tile = 85 * (row // 128).unsqueeze(1) + 51 * (column // 4) + draw.index(256)
    return (4 * row.unsqueeze(1) + inside + tile).bitwise_and_(255).to(torch.uint8)


SCALE_BYTES: dict[str, Callable[[Draw, int, int], torch.Tensor]] = {"bytes": bytes_of_any_value, "position": _places}
"""The families of a swizzle: bytes (R, C)."""


def inputs(make: Maker[SwizzleCase]) -> Inputs:
    """x: the bytes (R, C)."""
    return Inputs({"x": SCALE_BYTES[make.case.inputs](make.draw("x"), *make.case.shape)})


OPERATION = Operation(case=SwizzleCase, inputs=inputs, judge=judge_layout, show=layout_table)
