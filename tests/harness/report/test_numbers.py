"""Coverage of numbers on the page: shares, sets and maps."""

from __future__ import annotations

import base64
import struct
import zlib

from narrowgauge.harness.inputs.reached import BitSet, Reached
from narrowgauge.harness.report.page.numbers import LEVELS, rows
from narrowgauge.spec.formats import E2M1
from tests.harness.runs import record

WIDTH = 16 * 5


def test_a_row_of_every_recipe_the_smallest_share_first() -> None:
    """Two scales; code 1 of the first scale has one of its two pairs, and code 7 of the second scale both."""
    possible = 0b11 << 5 | 0b11 << WIDTH + 35
    cells = 0b1 << 5 | 0b11 << WIDTH + 35
    plain = BitSet(4, 0b101)
    reachable = BitSet(2 * WIDTH, possible)
    sets = [Reached(E2M1, BitSet(2 * WIDTH, bits), reachable, plain, plain, BitSet(0)) for bits in (cells, 0)]
    text = [each.pack() for each in sets]
    found = rows([record(numbers=text[0]), record(recipe="mxfp4", numbers=text[1]), record(recipe="mxfp6-e2m3")])
    assert [row["recipe"] for row in found] == ["mxfp4", "nvfp4"]
    assert [row["share"] for row in found] == ["0 %", "75 %"]
    assert found[1]["sets"] == ["3 of 4 pairs", "2 of 2 scales", "2 of 4 pairs of codes", "2 of 4 columns of the amax"]
    kind, data = found[1]["map"].split(",")
    assert kind == "data:image/png;base64"
    png = base64.b64decode(data)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        body = png[place + 4 : place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length : place + 12 + length]) == (zlib.crc32(body),)
        chunks[body[:4]] = body[4:]
        place += 12 + length
    assert chunks[b"IHDR"] == struct.pack(">IIBBBBB", 2, 4, 8, 3, 0, 0, 0)
    names, none = [name for name, _ in LEVELS], len(LEVELS)
    half, every = names.index("to 2/3"), names.index("all pairs")
    pixels = zlib.decompress(chunks[b"IDAT"])
    lines = [list(pixels[n + 1 : n + 3]) for n in range(0, 12, 3)]
    assert lines == [[none, every], [none] * 2, [none] * 2, [half, none]]
