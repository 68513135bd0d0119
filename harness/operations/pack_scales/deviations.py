"""Known mistakes of packed block scales: wrong layouts, in place of 128×4 and in place of any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES, Layout, Packing

_RIGHT = LAYOUTS[TILES]


def _linear(scales: torch.Tensor) -> torch.Tensor:
    """Scales in linear order without padded rows or columns, then zeros up to the padded size."""
    flat = torch.zeros_like(_RIGHT.pad(scales)).flatten()
    flat[: scales.numel()] = scales.flatten()
    return flat.view(_RIGHT.padded_shape(scales.shape))


def _packed_with(**digits: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The 128×4 layout with other digits, in the padded shape of the right layout."""
    changed: dict[str, Any] = {**digits}
    layout = replace(_RIGHT, **changed)
    return lambda scales: layout.pack(scales).view(_RIGHT.padded_shape(scales.shape))


WRONG_LAYOUTS: tuple[Deviation[torch.Tensor], ...] = (
    Deviation("not-swizzled", "scales are linear, not swizzled", "layout", _RIGHT.pad),
    Deviation("not-swizzled", "scales are linear, neither swizzled nor padded", "layout", _linear),
    Deviation("swizzle-32-4", "scales: the row of a tile is split as (32, 4), not as (4, 32)", "layout",
              _packed_with(rows="A c:32 b:4")),
    Deviation("swizzle-tiles-by-column", "scales: tiles of 128x4 lie column by column, not row by row", "layout",
              _packed_with(order="G A c b h")),
    Deviation("swizzle-columns-before-rows", "scales: the 16 bytes of a tile's row are ordered by column before row",
              "layout", _packed_with(order="A G c h b")),
    Deviation("swizzle-linear-tiles", "scales: tiles of 128x4 are linear inside", "layout",
              _packed_with(order="A G b c h")),
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
"""Wrong byte offsets from which swizzled scales (R, C) are read, int64 (R, C); None if right for this shape.
The sentence has {of} for the matrix."""


PADDING_NOT_ZEROED: Deviation[Any] = Deviation("padding-not-zeroed", "bytes of the padding are not 0", "layout")
ABSENT_WRITTEN: Deviation[Any] = Deviation(
    "absent-cells-written", "cells that the layout leaves out are written", "padding", exact=False
)
MANTISSAS_PACKED: Deviation[Any] = Deviation(
    "mantissa-bits-in-words", "bits of mantissas are in the words, because the scales are no powers of two", "packed"
)


def padding_not_zeroed(packed: torch.Tensor, packing: Packing, scales: torch.Tensor) -> bool:
    """Whether `packed` has the scales in the correct layout, and its only mistake is nonzero padding."""
    wrong = bool((packed.cpu()[packing.cells("0")] != 0).any())
    return wrong and torch.equal(packing.unpack(packed), scales)


def _other_layouts(packing: Packing) -> dict[str, Layout]:
    return {name: other for name, other in LAYOUTS.items() if name != packing.layout.name}


def _exchanges(packing: Packing) -> dict[str, Layout]:
    """The layout with two neighbouring digits exchanged: in memory, and in the row or in the column."""
    layout, found = packing.layout, {}
    for field, place in (("order", "memory"), ("rows", "the row"), ("columns", "the column")):
        digits = getattr(layout, field).split()
        for n in range(len(digits) - 1):
            order = [*digits[:n], digits[n + 1], digits[n], *digits[n + 2 :]]
            names = " and ".join(digit.partition(":")[0] for digit in digits[n : n + 2])
            changed: dict[str, Any] = {field: " ".join(order)}
            found[f"{names} of {place}"] = replace(layout, **changed)
    return found


def _places(layout: Layout, numbers: torch.Tensor, packing: Packing) -> torch.Tensor | None:
    """Numbers (R, C), (B, R, C) or of sections in another layout, flat; None if the layout does not have the shape."""
    try:
        return replace(packing, layout=layout).pack(numbers).flatten()
    except ValueError:
        return None


def _together(numbers: torch.Tensor, packing: Packing) -> torch.Tensor | None:
    """Batches, or sections, packed as one matrix."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    return None if packing.layout.problem(rows.shape) else packing.layout.pack(rows).flatten()


def _without_last_tile(numbers: torch.Tensor, packing: Packing) -> torch.Tensor | None:
    """Rows, then columns, of a tile that the shape does not fill are left out."""
    height, width = packing.layout.tile
    rows, columns = numbers.shape[-2] // height * height, numbers.shape[-1] // width * width
    if packing.sections is not None or (rows, columns) == numbers.shape[-2:]:
        return None
    kept = torch.zeros_like(numbers)
    kept[..., :rows, :columns] = numbers[..., :rows, :columns]
    return packing.pack(kept).flatten()


def _rows_not_padded(numbers: torch.Tensor, packing: Packing) -> torch.Tensor | None:
    """The stride of the slowest digit, a digit of the column, counts the rows without the padding."""
    layout, rows = packing.layout, numbers.shape[-2]
    if layout.divisible_rows or rows % layout.tile[0] == 0:
        return None
    packed = packing.pack(numbers).view(*numbers.shape[:-2], -1, *packing.packed_shape[-1:])
    return packed[..., : rows * layout.tile[1]].flatten()


def _words_reversed(numbers: torch.Tensor, packing: Packing) -> torch.Tensor:
    return packing.pack(numbers).view(-1, 4).flip(1).flatten()


def _transposed(numbers: torch.Tensor, packing: Packing) -> torch.Tensor:
    return packing.pack(numbers.mT.reshape(numbers.shape)).flatten()


PACKED: tuple[Deviation[Packing], ...] = (
    Deviation("layout-is:{}", "the layout is {}", "packed", _places, _other_layouts),
    Deviation("batches-padded-together", "the batches are padded together, not one by one", "packed", _together,
              when=lambda packing: len(packing.shape) == 3),
    Deviation("sections-padded-together", "the sections are padded together, not one by one", "packed", _together,
              when=lambda packing: packing.sections is not None),
    Deviation("last-tile-left-out", "rows or columns behind the last whole tile are left out", "packed",
              _without_last_tile),
    Deviation("rows-not-padded", "the columns of words are as long as the rows, not padded", "packed",
              _rows_not_padded),
    Deviation("words-big-endian", "the bytes of a word are in reverse order", "packed", _words_reversed,
              when=lambda packing: packing.layout.word == "int32"),
    Deviation("scales-transposed", "scales are transposed, then packed", "packed", _transposed),
    Deviation("digits-exchanged:{}", "the digits {} are exchanged", "packed", _places, _exchanges),
)  # fmt: skip
"""Wrong layouts of linear scales, given as numbers of their places from 1 on: functions to the numbers in the order of
memory, flat, 0 where no scale lies; None if not applicable."""


def _tables(packing: Packing) -> Iterator[tuple[str, str, Any]]:
    """Cause, sentence and function from numbers of places to the packed numbers of every wrong layout."""
    named = packing.layout is _RIGHT and len(packing.shape) == 2 and packing.sections is None
    for row in WRONG_LAYOUTS if named else ():
        yield row.cause, row.sentence, row.result
    covered = ("digits-exchanged", "scales-transposed", "layout-is:linear") if named else ()
    for bound in rows_of(PACKED, packing):
        if not bound.cause.startswith(covered):
            yield bound.cause, bound.sentence, partial(_result, bound, packing)


def _result(row: Deviation[Packing], packing: Packing, numbers: torch.Tensor) -> torch.Tensor | None:
    found: torch.Tensor | None = row.result(numbers, packing)
    return found


def _numbers(packing: Packing, device: torch.device) -> torch.Tensor:
    """Numbers of the places of linear scales, from 1 on."""
    count = math.prod(packing.shape)
    return torch.arange(1, count + 1, dtype=torch.int32, device=device).view(packing.shape)


def wrong_layouts(
    packing: Packing, scales: torch.Tensor, packed: torch.Tensor, stage: StageResult, _: Limit
) -> Iterator[Cause]:
    """Mistakes that give the packed bytes of the linear scales. Cells with a scale in the right layout and without a
    scale in the wrong layout are 0."""
    if padding_not_zeroed(packed, packing, scales):
        yield PADDING_NOT_ZEROED.cause, PADDING_NOT_ZEROED.sentence
    elif stage.stage == "padding":  # the only other mistake of this stage
        yield ABSENT_WRITTEN.cause, ABSENT_WRITTEN.sentence
    numbers, flat = _numbers(packing, packed.device), packed.flatten()
    used = packing.pack(numbers).flatten() != 0
    values = torch.cat([scales.new_zeros(1), scales.flatten()])
    for cause, sentence, layout in _tables(packing):
        places = layout(numbers)
        if places is None:
            continue
        places = _fitted(places.flatten(), len(flat))
        known = (places != 0) | used
        if bool((values[places.long()] == flat)[known].all()):
            yield cause, sentence


def wrong_reads(
    packing: Packing, packed: torch.Tensor, linear: torch.Tensor, _: StageResult, __: Limit
) -> Iterator[Cause]:
    """Mistakes that read the linear scales from the packed scales by a wrong layout."""
    packed = packed.flatten()
    numbers = _numbers(packing, packed.device)
    for cause, sentence, layout in _tables(packing):
        places = layout(numbers)
        if places is None:
            continue
        places = _fitted(places.flatten(), len(packed))
        positions = places.nonzero().flatten()
        read = torch.zeros_like(linear).flatten()
        read[places[positions].long() - 1] = packed[positions]
        if torch.equal(read.view(linear.shape), linear):
            yield cause, f"packed scales are read as such: {sentence}"
    if packing.layout is _RIGHT and linear.dim() == 2:
        for row in rows_of(SWIZZLE_READS, linear):
            offsets = row.result(linear)
            if offsets is not None and torch.equal(packed[offsets], linear):
                yield row.cause, row.sentence.format(of="the matrix")


def _fitted(places: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers of memory, with 0 behind the last."""
    return torch.nn.functional.pad(places[:count], (0, max(0, count - len(places))))


def mantissas_in_words(
    packing: Packing, scales: torch.Tensor, packed: torch.Tensor, _: StageResult, __: Limit
) -> Iterator[Cause]:
    """Words of which each is made of four float32 scales by shifts, without a mask of the exponents."""
    bits = packing.pack(scales.view(torch.int32).long() & 0xFFFFFFFF).view(-1, 4)
    words = (bits[:, 0] >> 23) | (bits[:, 1] >> 15) | (bits[:, 2] >> 7) | (bits[:, 3] << 1)
    used = packing.pack(torch.ones_like(scales, dtype=torch.uint8)).flatten() != 0
    found = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], 1).flatten().to(torch.uint8)
    if torch.equal(found[used], packed.flatten()[used]):
        yield MANTISSAS_PACKED.cause, MANTISSAS_PACKED.sentence
