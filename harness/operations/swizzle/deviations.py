"""Known mistakes of swizzle and unswizzle: wrong layouts of block scales, in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.layout import swizzle
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES

_RIGHT = LAYOUTS[TILES]


def _linear(scales: torch.Tensor) -> torch.Tensor:
    """Scales in linear order without padded rows or columns, then zeros up to the padded size."""
    flat = torch.zeros_like(_RIGHT.pad(scales)).flatten()
    flat[: scales.numel()] = scales.flatten()
    return flat.view(_RIGHT.padded_shape(scales.shape))


WRONG_LAYOUTS: tuple[Deviation[torch.Tensor], ...] = (
    Deviation("not-swizzled", "scales are linear, not swizzled", "layout", _RIGHT.pad),
    Deviation("not-swizzled", "scales are linear, neither swizzled nor padded", "layout", _linear),
    Deviation("swizzle-32-4", "scales: the row of a tile is split as (32, 4), not as (4, 32)", "layout",
              replace(_RIGHT, rows="A c:32 b:4").pack),
    Deviation("swizzle-tiles-by-column", "scales: tiles of 128x4 lie column by column, not row by row", "layout",
              replace(_RIGHT, order="G A c b h").pack),
    Deviation("swizzle-columns-before-rows", "scales: the 16 bytes of a tile's row are ordered by column before row",
              "layout", replace(_RIGHT, order="A G c h b").pack),
    Deviation("swizzle-linear-tiles", "scales: tiles of 128x4 are linear inside", "layout",
              replace(_RIGHT, order="A G b c h").pack),
    Deviation("scales-transposed", "scales are transposed, then swizzled", "layout",
              lambda s: _RIGHT.pack(s.T.reshape(s.shape))),
)  # fmt: skip
"""Wrong layouts of linear scales (R, C), which are uint8 or numbers of their places: functions to the swizzled bytes in
the padded shape (⌈R/128⌉·128, ⌈C/4⌉·4).

Several layouts can give the same bytes, also the correct bytes: tiles in a single column, equal scales. Source of the
correct layout and of the wrong split of the row: docs/numerics.md#scale-layout.
"""


def _rows_and_columns(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (torch.arange(extent, device=scales.device) for extent in scales.shape)
    return rows.unsqueeze(1), columns


def _columns_not_padded(scales: torch.Tensor) -> torch.Tensor | None:
    count, columns = scales.shape
    if columns % 4 == 0 or count <= 128:
        return None
    return _RIGHT.offset(*_rows_and_columns(scales), (count, columns // 4 * 4))


def _rows_modulo(count: int, scales: torch.Tensor) -> torch.Tensor | None:
    rows, columns = _rows_and_columns(scales)
    return None if len(rows) <= count else _RIGHT.offset(rows % count, columns, scales.shape)


SWIZZLE_READS: tuple[Deviation[torch.Tensor], ...] = (
    Deviation("swizzle-columns-not-padded",
              "tiles of swizzled scales of {of} are counted by columns that are not padded", "offsets",
              _columns_not_padded),
    Deviation("swizzle-rows-modulo:{}", "row r of swizzled scales of {of} is read from row r modulo {}", "offsets",
              _rows_modulo, {str(rows): rows for rows in (128 << n for n in range(10))}),
)  # fmt: skip
"""Wrong byte offsets from which swizzled scales (R, C) are read, int64 (R, C); None if they are right for this shape.
The sentence has {of} for the matrix."""


PADDING_NOT_ZEROED: Deviation[Any] = Deviation("padding-not-zeroed", "bytes of the padding are not 0", "layout")


def padding_not_zeroed(swizzled: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether `swizzled` has the scales (R, C) in the correct layout, and its only mistake is nonzero padding."""
    padding = swizzle(torch.ones_like(scales)) == 0
    wrong = swizzled != swizzle(scales)
    return bool(wrong.any()) and not bool((wrong & ~padding).any())


def wrong_layouts(scales: torch.Tensor, swizzled: torch.Tensor, _: StageResult, __: Limit) -> Iterator[Cause]:
    """Mistakes that give the swizzled bytes of the linear scales (R, C)."""
    if padding_not_zeroed(swizzled, scales):
        yield PADDING_NOT_ZEROED.cause, PADDING_NOT_ZEROED.sentence
    for row in WRONG_LAYOUTS:
        if torch.equal(row.result(scales), swizzled):
            yield row.cause, row.sentence


def wrong_reads(swizzled: torch.Tensor, linear: torch.Tensor, _: StageResult, __: Limit) -> Iterator[Cause]:
    """Mistakes that read the linear scales (R, C) from the swizzled ones as a wrong layout."""
    swizzled = swizzled.flatten()
    numbers = torch.arange(1, linear.numel() + 1, device=linear.device).view(linear.shape)
    for row in WRONG_LAYOUTS:
        places = row.result(numbers).flatten()
        positions = places.nonzero().flatten()
        read = torch.empty_like(linear).flatten()
        read[places[positions] - 1] = swizzled[positions]
        if torch.equal(read.view(linear.shape), linear):
            yield row.cause, f"swizzled scales are read as such: {row.sentence}"
    for row in rows_of(SWIZZLE_READS, linear):
        offsets = row.result(linear)
        if offsets is not None and torch.equal(swizzled[offsets], linear):
            yield row.cause, row.sentence.format(of="the matrix")
