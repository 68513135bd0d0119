"""Coverage of numbers on the page: a row and a map of every recipe."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from narrowgauge.harness.inputs.reached import Reached, joined
from narrowgauge.harness.report import text

TITLE = "Numbers that the inputs reach"
NOTE = (
    "Of rowwise quantize with byte scales. A pair is a scale and a side of a rounding boundary: exactly a "
    "number of the format, below, on or above a midpoint, or above the largest number. In a map, scales ascend from "
    "the left to the right, exponents of the scaled elements from the bottom to the top."
)
LEVELS = (
    ("no pair", "c0392b"), ("to 1/3", "e67e22"), ("to 2/3", "f1c40f"), ("more", "9ccc65"), ("all pairs", "1b7837"),
)  # fmt: skip
"""Names of the levels of a map, and their colours."""
_UNREACHABLE = len(LEVELS)
"""Level without a reachable pair: transparent."""


def rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every recipe with a coverage of numbers: recipe, share, sets and map (the address of an image), the smallest
    share first."""
    found = joined((record["recipe"], record["numbers"]) for record in records)
    return [
        {
            "recipe": recipe,
            "share": text.share(reached.share),
            "sets": [f"{text.number(some)} of {text.number(of)} {words}" for words, (some, of) in _sets(reached)],
            "map": _image([[_level(share) for share in line] for line in reversed(reached.levels())]),
        }
        for recipe, reached in sorted(found.items(), key=lambda entry: entry[1].share)
    ]


def _sets(reached: Reached) -> Iterable[tuple[str, tuple[int, int]]]:
    pairs = len(reached.cells & reached.possible), len(reached.possible)
    return [("pairs", pairs), ("scales", reached.scales()), *reached.plain().items()]


def _level(share: float | None) -> int:
    if share is None:
        return _UNREACHABLE
    return len(LEVELS) - 1 if share == 1 else int(3 * share) + (share > 0)


def _image(lines: Sequence[Sequence[int]]) -> str:
    """A PNG of levels as a data address. Source of the format: PNG (Portable Network Graphics) 1.2, sections 3 to 5."""
    width = 1 + max(n for line in lines for n, level in enumerate(line) if level != _UNREACHABLE)
    pixels = b"".join(b"\0" + bytes(line[:width]) for line in lines)
    palette = b"".join(bytes.fromhex(colour) for _, colour in LEVELS) + bytes(3)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, len(lines), 8, 3, 0, 0, 0), b"PLTE": palette,
        b"tRNS": bytes([255] * len(LEVELS) + [0]), b"IDAT": zlib.compress(pixels, 9), b"IEND": b"",
    }  # fmt: skip
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks.items()
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()
