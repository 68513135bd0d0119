"""Sections: the division of the rows of a matrix among experts or groups. Sections may be empty. Bands: the rows of a
huge matrix that are judged."""

from __future__ import annotations

import difflib

KINDS = ("even", "front", "middle", "end", "ragged", "empty")
GIVEN = "rows"
"""The kind with given rows, such as `rows:17,0,48`."""
MOST = 256
TILE = 16
"""Rows of a 2-D block: ragged sections begin and end inside a block."""
FAR = (1 << 30, 1 << 31, 1 << 32)
"""Elements around which an index, or the byte of an element of 2 bytes or of half a byte, exceeds 31 or 32 bits."""
BAND = 128
"""Rows of the first and the last band of a huge matrix, whole tiles of scales; other bands have twice as many."""
LAYOUT_TILE = 128
"""Rows of a tile of swizzled scales: ragged sections of whole rotated groups do not end with a tile."""


def number_of(text: str) -> int | None:
    """The number of ASCII digits, or None. Other digits, signs, spaces and more than 18 digits are no number:
    `int` reads "٣" as 3."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def parse(text: object) -> tuple[str, int]:
    """Kind and count of `kind:count`. Raises ValueError; the message names the right values."""
    kind, _, count = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind == GIVEN:
        return kind, len(_given(text, count))
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, (*KINDS, GIVEN), n=1, cutoff=0.5)
        near = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"is {text!r}{near}; sections are a kind and a count, even:4; kinds are {', '.join(KINDS)}, and {GIVEN} "
            "with the rows of each, rows:17,0,48"
        )
    number = number_of(count)
    if number is None or not 1 <= number <= MOST:
        raise ValueError(f"is {text!r}; there can be 1 to {MOST} sections")
    return kind, number


def _given(text: object, sizes: str) -> tuple[int, ...]:
    """The rows of every section in a text such as `17,0,48`. Raises ValueError."""
    numbers = [number for part in sizes.split(",") if (number := number_of(part)) is not None]
    if len(numbers) <= sizes.count(","):
        raise ValueError(f"is {text!r}; rows are numbers with commas between them: rows:17,0,48")
    if len(numbers) > MOST:
        raise ValueError(f"is {text!r}; there can be 1 to {MOST} sections")
    return tuple(numbers)


def section_sizes(text: str, rows: int, *, whole: int = 1) -> tuple[int, ...]:
    """Rows of the sections of a matrix with `rows` rows; all are multiples of `whole`.

    With a = rows/count: even [a, a, a, a]; front [0, a, a, 2a]; middle [a, a, 0, 2a]; end [2a, a, a, 0]; empty, of a
    matrix without rows, [0, 0, 0, 0]. ragged: about 1, 3, 5 … times the first, and no multiples of 16 (of 128 if
    sections are multiples of a group of 16 or 32). rows:17,0,48: the given rows.

    Raises ValueError if the rows cannot be divided in this way.
    """
    kind, count = parse(text)
    if kind == GIVEN:
        given = _given(text, text.partition(":")[2])
        if sum(given) != rows:
            raise ValueError(f"is {text!r}, {sum(given)} rows together; M is {rows}")
        if broken := [size for size in given if size % whole]:
            raise ValueError(f"is {text!r}; {broken[0]} rows are no whole groups of {whole}, which the recipe rotates")
        return given
    if kind == "ragged":
        return _ragged(text, count, rows, whole)
    if kind == "empty":
        if rows:
            raise ValueError(f"is {text!r}, sections without a row; M is {rows} and has to be 0")
        return (0,) * count
    least = {"even": 1, "front": 2, "middle": 3, "end": 2}[kind]
    if count < least:
        raise ValueError(f"is {text!r}; {kind} needs {least} sections or more, of which one is empty")
    each, rest = divmod(rows, count)
    if rest:
        raise ValueError(f"is {text!r}; M = {rows} is no multiple of {count}")
    if each % whole:
        raise ValueError(f"is {text!r}; {each} rows are no whole groups of {whole}, which the recipe rotates")
    sizes = [each] * count
    if kind != "even":
        empty, double = {"front": (0, -1), "middle": (count // 2, -1), "end": (-1, 0)}[kind]
        sizes[empty], sizes[double] = 0, 2 * each
    return tuple(sizes)


def band_rows(rows: int, columns: int) -> list[slice]:
    """The rows of a matrix (rows, columns) that are judged: its first and its last rows, and those around the elements
    `FAR` that it has. Every band begins at a multiple of `BAND`, and no two overlap."""
    middles = [far // columns // BAND for far in FAR if far < rows * columns]
    last = -(-rows // BAND)
    tiles = sorted({0, last - 1} | {tile + side for tile in middles for side in (-1, 0)} - {-1, last})
    starts = [tile for tile in tiles if tile - 1 not in tiles]
    ends = [tile + 1 for tile in tiles if tile + 1 not in tiles]
    return [slice(start * BAND, min(end * BAND, rows)) for start, end in zip(starts, ends, strict=True)]


def bands_problem(elements: int) -> str | None:
    """Reason to judge a matrix of this many elements as a whole, or None."""
    if elements > FAR[1]:
        return None
    return f"bands is true, but the matrix has {elements} elements; up to 2^31 a matrix is judged whole: leave it out"


def division_problem(text: str, rows: int, *, whole: int = 1) -> str | None:
    """Why `section_sizes` cannot divide the rows, as a message that begins with the key; or None."""
    try:
        section_sizes(text, rows, whole=whole)
    except ValueError as error:
        return f"sections {error}"
    return None


def _ragged(text: str, count: int, rows: int, whole: int) -> tuple[int, ...]:
    if rows % whole:
        raise ValueError(f"is {text!r}; M = {rows} is no multiple of {whole}, the group that the recipe rotates")
    units = rows // whole
    sizes = [units * (2 * i + 1) // count**2 for i in range(count)]
    sizes[-1] += units - sum(sizes)
    avoided = (TILE if whole == 1 else LAYOUT_TILE) // whole
    if avoided > 2:  # at most every second number is a multiple
        for i in range(count - 1):
            moved = int(sizes[i] % avoided == 0)
            sizes[i], sizes[-1] = sizes[i] + moved, sizes[-1] - moved
        while count > 1 and (sizes[-1] % avoided == 0 or sizes[0] % avoided == 0):
            sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    if min(sizes) < 1 or (avoided > 2 and any(size % avoided == 0 for size in sizes)):
        raise ValueError(
            f"is {text!r}; M = {rows} cannot be divided into {count} ragged sections of which none is a multiple of "
            f"{avoided * whole}"
        )
    return tuple(size * whole for size in sizes)
