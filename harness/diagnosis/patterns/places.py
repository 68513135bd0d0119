"""Places: where in a matrix all wrong elements lie, and how many such places there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch

_TILES = (128, 64, 32, 16)
_PERIODIC = 3
"""Numbers that a period is seen from at least: any two lie at some distance."""


@dataclass(frozen=True)
class Place:
    """Some rows times some columns of a matrix, and in them all wrong elements."""

    cause: str
    words: str
    """As in "only …"."""
    rows: range
    columns: range
    """Of a matrix as one row, where the elements are every n-th of it as they lie in memory."""
    like_it: int = 1
    """Places of its kind, of which it is one."""
    end: bool = False
    """Whether it is a row, a column or a tile where a matrix begins or ends: few, and where kernels go wrong."""

    @property
    def size(self) -> int:
        """Elements that lie there."""
        return len(self.rows) * len(self.columns)

    def within(self, other: Place) -> bool:
        """Whether all of it lies in another place."""
        return all(row in other.rows for row in self.rows) and all(column in other.columns for column in self.columns)


@dataclass(frozen=True)
class _Axis:
    """Rows or columns."""

    name: str
    lane: str
    """What their number modulo a tile is called."""
    extent: int
    numbers: list[int]
    """Of those with wrong elements, ascending."""


def places(wrong: torch.Tensor) -> Iterator[Place]:
    """Places of a mask, bool (M, N), in which all its elements lie."""
    rows, columns = (wrong.any(1 - axis).nonzero().flatten().tolist() for axis in (0, 1))
    m, n = wrong.shape
    down, across = _Axis("row", "row-lane", m, rows), _Axis("column", "lane", n, columns)
    if rows[0] == m - 1 and columns[0] == n - 1:
        yield Place("place:last-element", "in the last element", range(m - 1, m), range(n - 1, n), end=True)
    for cause, words, some, like_it, end in _along(down):
        yield Place(cause, words, some, range(n), like_it, end)
    for cause, words, some, like_it, end in _along(across):
        yield Place(cause, words, range(m), some, like_it, end)
    yield from _tiles(down, across)
    yield from _in_memory(wrong)


_Along = Iterator[tuple[str, str, range, int, bool]]
"""Cause, words, rows or columns, places of the kind, and whether it is an end."""


def _along(axis: _Axis) -> _Along:
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
            words = f"at lane {lane} of each block of {tile}" if name == "column" else f"in rows {lane} modulo {tile}"
            yield f"place:{axis.lane}-{lane}", words, range(lane, extent, tile), tile, False
        start = extent // tile * tile
        if extent % tile and first >= start:
            words = f"in the last {extent - start} {name}s, behind the last whole {tile}"
            yield f"place:tail-of-{name}s", words, range(start, extent), 1, True
        elif first >= extent - tile and not extent % tile:
            yield f"place:last-{name}s", f"in the last {tile} {name}s", range(extent - tile, extent), 1, True
        elif first // tile == last // tile:
            block = range(first // tile * tile, min((first // tile + 1) * tile, extent))
            words = f"in {name}s {block[0]} to {block[-1]}"
            yield f"place:{name}s-{block[0]}", words, block, -(-extent // tile), False
    if len(numbers) >= _PERIODIC:
        yield from _period(axis)


def _period(axis: _Axis) -> _Along:
    first = axis.numbers[0]
    period = gcd(*(number - first for number in axis.numbers))
    if period < 2 or period in _TILES:
        return
    phase = first % period
    some = range(phase, axis.extent, period)
    if period == 2:
        kind = "odd" if phase else "even"
        nibble = "" if axis.name == "row" else f", the {'second' if phase else 'first'} of two"
        yield f"only:{kind}-{axis.name}s", f"in {kind} {axis.name}s{nibble}", some, 2, False
    else:
        words = f"in every {_ordinal(period)} {axis.name}, from {axis.name} {phase} on"
        yield f"place:period-{period}", words, some, axis.extent * period, False


def _tiles(down: _Axis, across: _Axis) -> Iterator[Place]:
    """Tiles of as many rows as columns; of one row or column they would say less."""
    if len(down.numbers) == 1 or len(across.numbers) == 1:
        return
    for tile in _TILES:
        if down.extent <= tile or across.extent <= tile:
            continue
        found, ends = [], []
        for axis in (down, across):
            start = axis.numbers[0] // tile * tile
            if axis.numbers[-1] >= start + tile:
                break
            found.append(range(start, min(start + tile, axis.extent)))
            ends.append(start + tile >= axis.extent)
        if len(found) < 2:
            continue
        rows, columns = found
        if all(ends):
            yield Place("place:last-tile", f"in the last tile of {tile}x{tile}", rows, columns, end=True)
        else:
            number = -(-down.extent // tile) * -(-across.extent // tile)
            words = f"in the tile of {tile}x{tile} at row {rows[0]}, column {columns[0]}"
            yield Place(f"place:tile-{rows[0]}-{columns[0]}", words, rows, columns, number)


def _in_memory(wrong: torch.Tensor) -> Iterator[Place]:
    """Every n-th element of the rows one behind the other, where that is no period of columns."""
    flat = wrong.flatten().nonzero().flatten()
    if len(flat) < _PERIODIC or wrong.shape[0] == 1:
        return
    period = gcd(*(flat - flat[0]).tolist())
    if period > 2 and wrong.shape[1] % period:
        phase = int(flat[0]) % period
        words = f"in every {_ordinal(period)} element as they lie in memory, from element {phase} on"
        some = range(phase, wrong.numel(), period)
        yield Place(f"place:period-{period}", words, range(-1, 0), some, wrong.numel() * period)


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
