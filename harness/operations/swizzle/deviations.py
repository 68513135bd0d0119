"""Known mistakes of swizzle and unswizzle: wrong layouts of block scales, in place of the 128×4 layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.layout import swizzle
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES

SWIZZLE_READS = {
    "swizzle-columns-not-padded": "tiles of swizzled scales of {} are counted by columns that are not padded",
    **{
        f"swizzle-rows-modulo:{rows}": f"row r of swizzled scales of {{}} is read from row r modulo {rows}"
        for rows in (128 << n for n in range(10))
    },
}
"""Sentences of wrong offsets from which swizzled scales are read, with {} for the matrix."""
WRONG_ORDERS = {
    "swizzle-32-4": ("scales: the row of a tile is split as (32, 4), not as (4, 32)", "A c:32 b:4", "A G c b h"),
    "swizzle-tiles-by-column": (
        "scales: tiles of 128x4 lie column by column, not row by row", "A b:4 c:32", "G A c b h"
    ),
    "swizzle-columns-before-rows": (
        "scales: the 16 bytes of a tile's row are ordered by column before row", "A b:4 c:32", "A G c h b"
    ),
    "swizzle-linear-tiles": ("scales: tiles of 128x4 are linear inside", "A b:4 c:32", "A G b c h"),
}  # fmt: skip
"""Sentence of each wrong layout, its digits of the row and its order in memory."""
WrongLayout = tuple[str, str, torch.Tensor]
"""Cause, sentence, and the swizzled bytes in the padded shape (⌈R/128⌉·128, ⌈C/4⌉·4)."""
_RIGHT = LAYOUTS[TILES]


def deviating_layouts(scales: torch.Tensor) -> Iterator[WrongLayout]:
    """Linear scales (R, C) in known wrong layouts. The scales are uint8 or numbers of their places.

    Several layouts can give the same bytes, also the correct bytes: tiles in a single column, equal scales. Source of
    the correct layout and of the wrong split of the row: docs/numerics.md#scale-layout.
    """
    padded = _RIGHT.pad(scales)
    flat = torch.zeros_like(padded).flatten()
    flat[: scales.numel()] = scales.flatten()
    yield "not-swizzled", "scales are linear, not swizzled", padded
    yield "not-swizzled", "scales are linear, neither swizzled nor padded", flat.view(padded.shape)
    for cause, (sentence, row_digits, order) in WRONG_ORDERS.items():
        yield cause, sentence, replace(_RIGHT, rows=row_digits, order=order).pack(scales)
    transposed = scales.T.reshape(scales.shape)
    yield "scales-transposed", "scales are transposed, then swizzled", _RIGHT.pack(transposed)


def wrong_offsets(cause: str, shape: torch.Size, device: torch.device) -> torch.Tensor | None:
    """Wrong byte offsets from which swizzled scales of `shape` (R, C) are read, int64 (R, C), for a cause in
    `SWIZZLE_READS`. None if the offsets are right for this shape.
    """
    rows, columns = shape
    row, column = torch.arange(rows, device=device).unsqueeze(1), torch.arange(columns, device=device)
    if cause == "swizzle-columns-not-padded":
        if columns % 4 == 0 or rows <= 128:
            return None
        return _RIGHT.offset(row, column, (rows, columns // 4 * 4))
    count = int(cause.rpartition(":")[2])
    return None if rows <= count else _RIGHT.offset(row % count, column, shape)


def padding_not_zeroed(swizzled: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether `swizzled` has the scales (R, C) in the correct layout, and its only mistake is nonzero padding."""
    padding = swizzle(torch.ones_like(scales)) == 0
    wrong = swizzled != swizzle(scales)
    return bool(wrong.any()) and not bool((wrong & ~padding).any())


def wrong_layouts(scales: torch.Tensor, swizzled: torch.Tensor, _: StageResult, __: Limit) -> Iterator[Cause]:
    """Mistakes that give the swizzled bytes of the linear scales (R, C)."""
    if padding_not_zeroed(swizzled, scales):
        yield "padding-not-zeroed", "bytes of the padding are not 0"
    for cause, sentence, bytes_ in deviating_layouts(scales):
        if torch.equal(bytes_, swizzled):
            yield cause, sentence


def wrong_reads(swizzled: torch.Tensor, linear: torch.Tensor, _: StageResult, __: Limit) -> Iterator[Cause]:
    """Mistakes that read the linear scales (R, C) from the swizzled ones as a wrong layout."""
    swizzled = swizzled.flatten()
    numbers = torch.arange(1, linear.numel() + 1, device=linear.device).view(linear.shape)
    for cause, sentence, places in deviating_layouts(numbers):
        positions = places.flatten().nonzero().flatten()
        read = torch.empty_like(linear).flatten()
        read[places.flatten()[positions] - 1] = swizzled[positions]
        if torch.equal(read.view(linear.shape), linear):
            yield cause, f"swizzled scales are read as such: {sentence}"
    for cause, sentence in SWIZZLE_READS.items():
        offsets = wrong_offsets(cause, linear.shape, linear.device)
        if offsets is not None and torch.equal(swizzled[offsets], linear):
            yield cause, sentence.format("the matrix")
