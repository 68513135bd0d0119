"""Places of a matrix that contain all wrong elements, and the number of similar places."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import gcd

import torch

_TILES = (128, 64, 32, 16)
_PERIODS = (4, 8, 16, 32, 64, 128, 256)
"""Periods of bands: vector loads, blocks of the formats, and tiles of kernels."""
_BANDS = sum(range(1, len(_PERIODS) + 1)) * 2
"""Kinds of bands: widths 2, 4, … below each period, of rows and of columns."""
_MIN_PERIODIC_NUMBERS = 3
"""Smallest number of row or column numbers that show a period. Two numbers always have a distance."""


@dataclass(frozen=True)
class Place:
    """Rows and columns of a matrix whose intersection contains all wrong elements."""

    cause: str
    phrase: str
    """Phrase for "only …"."""
    rows: Collection[int]
    columns: Collection[int]
    """Column numbers. For every n-th element in memory: element numbers of the flattened matrix."""
    similar_places: int = 1
    """Number of places of this kind in the matrix, this place included."""
    is_end: bool = False
    """Whether the place is the first or last row, column or tile. Kernels often fail in these places."""
    blocks: tuple[int, int, int] | None = None
    """Of a band of each period: number of its blocks with wrong elements, of its blocks, and of all blocks."""

    @property
    def size(self) -> int:
        """Number of elements in the place."""
        return len(self.rows) * len(self.columns)

    def within(self, container: Place) -> bool:
        """Whether `container` contains the whole place."""
        return all(row in container.rows for row in self.rows) and all(
            column in container.columns for column in self.columns
        )


@dataclass(frozen=True)
class _Axis:
    """The rows or the columns of a matrix."""

    name: str
    lane: str
    """Name of a row or column number modulo a tile."""
    extent: int
    numbers: list[int]
    """Ascending numbers of the rows or columns with wrong elements."""


def places(wrong: torch.Tensor) -> Iterator[Place]:
    """Places that contain all True elements of a mask, bool (M, N)."""
    rows, columns = (wrong.any(1 - axis).nonzero().flatten().tolist() for axis in (0, 1))
    m, n = wrong.shape
    row_axis, column_axis = _Axis("row", "row-lane", m, rows), _Axis("column", "lane", n, columns)
    if rows[0] == m - 1 and columns[0] == n - 1:
        yield Place("place:last-element", "in the last element", range(m - 1, m), range(n - 1, n), is_end=True)
    for cause, phrase, selected, similar_places, is_end in _axis_places(row_axis):
        yield Place(cause, phrase, selected, range(n), similar_places, is_end)
    for cause, phrase, selected, similar_places, is_end in _axis_places(column_axis):
        yield Place(cause, phrase, range(m), selected, similar_places, is_end)
    for cause, phrase, band, similar_places, blocks in _bands(row_axis):
        yield Place(cause, phrase, band, range(n), similar_places, blocks=blocks)
    for cause, phrase, band, similar_places, blocks in _bands(column_axis):
        yield Place(cause, phrase, range(m), band, similar_places, blocks=blocks)
    yield from _tile_places(row_axis, column_axis)
    yield from _memory_places(wrong)
    yield from _interval_places(row_axis, column_axis)


_AxisPlaces = Iterator[tuple[str, str, range, int, bool]]
"""Cause, phrase, rows or columns, number of similar places, and whether the place is an end."""


def _axis_places(axis: _Axis) -> _AxisPlaces:
    name, extent, numbers = axis.name, axis.extent, axis.numbers
    first, last = numbers[0], numbers[-1]
    if extent == 1:
        return
    if first == extent - 1:
        yield f"place:last-{name}", f"in the last {name}", range(first, extent), 1, True
    elif last == 0:
        yield f"place:first-{name}", f"in the first {name}", range(1), 1, True
    elif first == last:
        yield f"place:{name}-{first}", f"in {name} {first}", range(first, first + 1), extent, False
    for tile in _TILES:
        if extent <= tile:
            continue
        if len({number % tile for number in numbers}) == 1:
            lane = first % tile
            phrase = (
                f"at column {lane} of each block of {tile}" if name == "column" else f"in rows {lane} modulo {tile}"
            )
            yield f"place:{axis.lane}-{lane}", phrase, range(lane, extent, tile), tile, False
        start = extent // tile * tile
        if extent % tile and first >= start:
            phrase = f"in the last {extent - start} {name}s, behind the last whole {tile}"
            yield f"place:tail-of-{name}s", phrase, range(start, extent), 1, True
        elif first >= extent - tile and not extent % tile:
            yield f"place:last-{name}s", f"in the last {tile} {name}s", range(extent - tile, extent), 1, True
        elif first // tile == last // tile:
            block = range(first // tile * tile, min((first // tile + 1) * tile, extent))
            phrase = f"in {name}s {block[0]} to {block[-1]}"
            yield f"place:{name}s-{block[0]}", phrase, block, -(-extent // tile), False
    if len(numbers) >= _MIN_PERIODIC_NUMBERS:
        yield from _periodic_places(axis)


def _periodic_places(axis: _Axis) -> _AxisPlaces:
    first = axis.numbers[0]
    period = gcd(*(number - first for number in axis.numbers))
    if period < 2 or period in _TILES:
        return
    phase = first % period
    selected = range(phase, axis.extent, period)
    if period == 2:
        kind = "odd" if phase else "even"
        nibble = "" if axis.name == "row" else f", the {'second' if phase else 'first'} of two"
        yield f"only:{kind}-{axis.name}s", f"in {kind} {axis.name}s{nibble}", selected, 2, False
    else:
        phrase = f"in every {_ordinal_number(period)} {axis.name}, from {axis.name} {phase} on"
        yield f"place:period-{period}", phrase, selected, axis.extent * period, False


@dataclass(frozen=True)
class _Band(Collection[int]):
    """Numbers of rows or columns with a remainder from `low` to `high`, modulo `period`."""

    low: int
    high: int
    period: int
    extent: int

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < self.extent and self.low <= number % self.period <= self.high

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(self.extent) if number in self)

    def __len__(self) -> int:
        whole, rest = divmod(self.extent, self.period)
        return whole * (self.high - self.low + 1) + max(0, min(rest, self.high + 1) - self.low)


def _bands(axis: _Axis) -> Iterator[tuple[str, str, _Band, int, tuple[int, int, int]]]:
    """Rows 96 to 127 of every 128: cause, phrase, rows, number of similar places, and counts of blocks.

    A block is the smallest aligned power of two of rows that contains the band, at most half of a period. Rows of a
    block often fail together, because a warp or a tile computes them: a block is one observation.
    """
    for period in (number for number in _PERIODS if number < axis.extent):
        residues = {number % period for number in axis.numbers}
        low, high = min(residues), max(residues)
        width = 1 << (low ^ high).bit_length()
        if low == high or width >= period:
            continue
        wrong = len({number // width for number in axis.numbers})
        blocks = (wrong, -(-(axis.extent - low) // period), -(-axis.extent // width))
        phrase = f"in {axis.name}s {low} to {high} of every {period}"
        cause = f"place:{axis.name}s-{low}-to-{high}-of-{period}"
        yield cause, phrase, _Band(low, high, period, axis.extent), _BANDS * (period // width), blocks


def _tile_places(row_axis: _Axis, column_axis: _Axis) -> Iterator[Place]:
    """Square tiles. None if all wrong elements are in a single row or column: the row or column says more."""
    if len(row_axis.numbers) == 1 or len(column_axis.numbers) == 1:
        return
    for tile in _TILES:
        if row_axis.extent <= tile or column_axis.extent <= tile:
            continue
        tile_ranges, at_end = [], []
        for axis in (row_axis, column_axis):
            start = axis.numbers[0] // tile * tile
            if axis.numbers[-1] >= start + tile:
                break
            tile_ranges.append(range(start, min(start + tile, axis.extent)))
            at_end.append(start + tile >= axis.extent)
        if len(tile_ranges) < 2:
            continue
        rows, columns = tile_ranges
        if all(at_end):
            yield Place("place:last-tile", f"in the last tile of {tile}x{tile}", rows, columns, is_end=True)
        else:
            number = -(-row_axis.extent // tile) * -(-column_axis.extent // tile)
            phrase = f"in the tile of {tile}x{tile} at row {rows[0]}, column {columns[0]}"
            yield Place(f"place:tile-{rows[0]}-{columns[0]}", phrase, rows, columns, number)


def _interval_places(row_axis: _Axis, column_axis: _Axis) -> Iterator[Place]:
    """From the first to the last row, column, and both: exact ranges, where no tile is as small. None if all wrong
    elements are in a single row or column."""
    axes = (row_axis, column_axis)
    if any(len(axis.numbers) == 1 for axis in axes):
        return
    whole = [range(axis.extent) for axis in axes]
    spans = [range(axis.numbers[0], axis.numbers[-1] + 1) for axis in axes]
    phrases = [f"{axis.name}s {span[0]} to {span[-1]}" for axis, span in zip(axes, spans, strict=True)]
    # Any interval could have been reported.
    similar = [axis.extent * (axis.extent + 1) // 2 for axis in axes]
    narrow = [len(span) < axis.extent for axis, span in zip(axes, spans, strict=True)]
    if narrow[0]:
        yield Place(f"place:rows-{spans[0][0]}", f"in {phrases[0]}", spans[0], whole[1], similar[0])
    if narrow[1]:
        yield Place(f"place:columns-{spans[1][0]}", f"in {phrases[1]}", whole[0], spans[1], similar[1])
    if all(narrow):
        cause = f"place:rows-{spans[0][0]}-columns-{spans[1][0]}"
        yield Place(cause, f"in {', '.join(phrases)}", spans[0], spans[1], similar[0] * similar[1])


def _memory_places(wrong: torch.Tensor) -> Iterator[Place]:
    """Every n-th element in memory, if n is not a period of columns."""
    flat = wrong.flatten().nonzero().flatten()
    if len(flat) < _MIN_PERIODIC_NUMBERS or wrong.shape[0] == 1:
        return
    period = _common_divisor(flat - flat[0])
    if period > 2 and wrong.shape[1] % period:
        phase = int(flat[0]) % period
        phrase = f"in every {_ordinal_number(period)} element as they lie in memory, from element {phase} on"
        selected = range(phase, wrong.numel(), period)
        yield Place(f"place:period-{period}", phrase, range(-1, 0), selected, wrong.numel() * period)


def _common_divisor(numbers: torch.Tensor) -> int:
    """Greatest common divisor of integers, int64 (n,). 1 or 2 stands for every divisor up to 2."""
    divisor = gcd(*numbers[:64].tolist())
    while divisor > 2:
        indivisible = (numbers % divisor).nonzero()
        if not len(indivisible):
            break
        divisor = gcd(divisor, int(numbers[indivisible[0, 0]]))
    return divisor


def _ordinal_number(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
