"""Coverage of numbers as bit sets: scales, codes and sides of rounding boundaries that the inputs of a recipe reach.

Bit sets are whole numbers: a run joins the sets of its records without torch.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from narrowgauge.spec.formats import FORMATS, Format

SIDES = ("exact", "below the midpoint", "a tie", "above the midpoint", "above the largest")
"""Places of a scaled element from the number of its format at or below it to the next number, ascending."""
_PLAIN = {"pairs": "pairs of codes", "places": "columns of the amax", "tails": "tails of K"}
"""Sets of which all members are reachable, and their names in sentences."""


@dataclass(frozen=True)
class BitSet:
    """A set of numbers below `size`."""

    size: int
    bits: int = 0

    def __or__(self, other: BitSet) -> BitSet:
        return BitSet(self.size, self.bits | other.bits)

    def __and__(self, other: BitSet) -> BitSet:
        return BitSet(self.size, self.bits & other.bits)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def rows(self, width: int) -> list[int]:
        """The bits of every `width` numbers, a multiple of 8."""
        data = self.bits.to_bytes(self.size // 8, "little")
        return [int.from_bytes(data[start : start + width // 8], "little") for start in range(0, len(data), width // 8)]

    def pack(self) -> str:
        """Size and bits as ASCII text without spaces."""
        return _packed(self.size, self.bits)

    @classmethod
    def unpack(cls, text: str) -> Self:
        """The inverse of `pack`. Raises ValueError for other text."""
        size, _, data = text.partition(":")
        try:
            bits = int.from_bytes(zlib.decompress(base64.b64decode(data, validate=True)), "little")
        except zlib.error as error:
            raise ValueError(f"{text[:40]!r} is no bit set: {error}") from error
        if bits >> int(size):
            raise ValueError(f"{text[:40]!r} is no bit set: a number is not below {size}")
        return cls(int(size), bits)


@dataclass(frozen=True)
class Reached:
    """Sets that inputs reach under one recipe."""

    element: Format
    cells: BitSet
    """(code of the scale · codes of the element + code at or below the scaled element) · sides + side."""
    possible: BitSet
    """Cells that bfloat16 numbers can reach."""
    pairs: BitSet
    """First code + 16 · second code of a byte; size 0 for elements of other than 4 bits."""
    places: BitSet
    """Columns of the amax of a block."""
    tails: BitSet
    """Columns of the last block, 0 for a full block."""

    @property
    def sets(self) -> tuple[BitSet, ...]:
        """The sets in order."""
        return self.cells, self.possible, self.pairs, self.places, self.tails

    def __or__(self, other: Reached) -> Reached:
        return Reached(self.element, *(one | two for one, two in zip(self.sets, other.sets, strict=True)))

    def pack(self) -> str:
        """The sets as ASCII text, for a record."""
        return " ".join([self.element.name, *(each.pack() for each in self.sets)])

    @classmethod
    def unpack(cls, text: str) -> Self:
        """The inverse of `pack`. Raises ValueError for other text."""
        element, *sets = text.split(" ")
        if element not in FORMATS or len(sets) != len(_PLAIN) + 2:
            raise ValueError(f"{text[:40]!r} has no coverage of numbers")
        return cls(FORMATS[element], *map(BitSet.unpack, sets))

    @property
    def share(self) -> float:
        """Reached share of the possible cells."""
        return len(self.cells & self.possible) / max(1, len(self.possible))

    @property
    def percent(self) -> str:
        """The share in percent, rounded down."""
        return f"{int(1000 * self.share) / 10} %"

    def scales(self) -> tuple[int, int]:
        """Number of scales with a reached cell, and with a possible cell."""
        rows = [each.rows(self._width) for each in (self.cells & self.possible, self.possible)]
        return sum(map(bool, rows[0])), sum(map(bool, rows[1]))

    def plain(self) -> dict[str, tuple[int, int]]:
        """Numbers of members and sizes of all further nonempty sets, by their names in sentences."""
        sets = {words: getattr(self, name) for name, words in _PLAIN.items()}
        return {words: (len(each), each.size) for words, each in sets.items() if each.size}

    def levels(self) -> list[list[float | None]]:
        """Reached share of the possible cells by exponent of the code at or below, and by scale; None if no cell is
        possible."""
        step = len(SIDES) << self.element.mantissa_bits
        masks = [((1 << step) - 1) << step * row for row in range(1 << self.element.exponent_bits)]
        rows = list(zip((self.cells & self.possible).rows(self._width), self.possible.rows(self._width), strict=True))
        return [
            [(some & mask).bit_count() / (all_ & mask).bit_count() if all_ & mask else None for some, all_ in rows]
            for mask in masks
        ]

    @property
    def _width(self) -> int:
        return self.element.codes * len(SIDES)


@lru_cache(maxsize=256)
def _packed(size: int, bits: int) -> str:
    data = bits.to_bytes(-(-size // 8), "little")
    return f"{size}:{base64.b64encode(zlib.compress(data, 1)).decode()}"


def joined(packed: Iterable[tuple[str, str]]) -> dict[str, Reached]:
    """The union of packed sets by name. `packed`: pairs of a name, for example of a recipe, and the text of a record;
    empty and unreadable texts are left out."""
    found: dict[str, Reached] = {}
    for name, text in packed:
        for each in _readable(text):
            same = name in found and [one.size for one in found[name].sets] == [one.size for one in each.sets]
            found[name] = found[name] | each if same else each
    return found


def _readable(text: str) -> Iterator[Reached]:
    if text:
        try:
            yield Reached.unpack(text)
        except ValueError:  # text of a foreign file
            return
