"""The operation pack-scales."""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.pack_scales.case import PackScalesCase
from narrowgauge.harness.operations.pack_scales.judge import judge_layout, layout_table

_BASE = 251
"""Places are written in this base: its digits are 1 to 251, and 0 is padding."""


def bytes_of_any_value(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """Random bytes (R, C)."""
    return draw.below(256, rows, columns).to(torch.uint8)


def _digit(number: int, rows: int, columns: int) -> torch.Tensor:
    places = torch.arange(rows * columns).view(rows, columns)
    return places.div(_BASE**number, rounding_mode="floor").remainder(_BASE).add(1).to(torch.uint8)


def _powers(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    return (draw.below(255, rows, columns).to(torch.int32) << 23).view(torch.float32)


def _mantissas(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    return _powers(draw, rows, columns).view(torch.int32).bitwise_or_(0x600000).view(torch.float32)


SCALES: dict[str, Callable[[Draw, int, int], torch.Tensor]] = {
    "position": lambda draw, rows, columns: _digit(0, rows, columns),
    "bytes": bytes_of_any_value,
    "position-high": lambda draw, rows, columns: _digit(1, rows, columns),
    "powers": _powers,
    "mantissas": _mantissas,
}
"""The families of scales: bytes or float32 (R, C)."""


def inputs(make: Maker[PackScalesCase]) -> Inputs:
    """x: the scales (R, C), or those of all batches (B*R, C)."""
    case = make.case
    rows, columns = case.shape
    return Inputs({"x": SCALES[case.inputs](make.draw("x"), rows * max(1, case.batch), columns)})


OPERATION = Operation(case=PackScalesCase, inputs=inputs, judge=judge_layout, show=layout_table)
