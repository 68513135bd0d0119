"""A line of a journal as a value: its text escaped, no key twice in an object, equal keys and words shared."""

from __future__ import annotations

import json
from sys import intern
from typing import Any

import msgspec

from narrowgauge.harness.machine.plain_text import LONGEST, plain_value, unique_keys

_INFINITE = b'"sqnr_db": Infinity, "sweep": '
"""Text of the only infinite figure in the record of a pass. A line without a backslash has it at no other place: no
other object has these keys in this order, and no string has a quote."""
_FINITE = b'"sqnr_db": null, "sweep": '
_PLAIN = bytes(set(range(0x20, 0x7F)) - set(b"\\"))
"""Characters that `plain_text.escape` keeps, unless `::` or `##` begins a command, without the escape of JSON."""
_CONTAINERS = frozenset((dict, list))
_WORDS = (
    "file", "operation", "recipe", "shape", "dtype", "inputs", "flags", "tier", "backend", "device", "verdict", "stage",
    "options", "declares",
)  # fmt: skip
"""Columns with the same few words in thousands of records."""


def parse_line(line: bytes) -> Any:
    """The value of a line of JSON. Its texts are escaped and cut (`harness.machine.plain_text`).

    Raises ValueError for a line that is not JSON, or that has a key twice in an object; RecursionError for a line that
    is nested too deep.
    """
    plain = not line.rstrip(b"\n").translate(None, _PLAIN) and b"::" not in line and b"##" not in line
    plain = plain and len(line) <= LONGEST
    if plain and (value := _parse_quickly(line)) is not None:
        return value
    value = json.loads(line.decode(), object_pairs_hook=unique_keys)
    return value if plain else plain_value(value)


def _parse_quickly(line: bytes) -> dict[str, Any] | None:
    """The object of a line without a backslash, by msgspec, in a third of the time of json. None if the line is no
    object, has a number that msgspec does not read, or may have a key twice."""
    finite = line.replace(_INFINITE, _FINITE)
    try:
        value = msgspec.json.decode(finite)
    except (msgspec.DecodeError, RecursionError):
        return None
    # The end of a string and a colon, between which JSON allows spaces: the end of a key, unless a string begins so.
    if type(value) is not dict or finite.count(b'":') != _keys(value) or b" :" in finite:
        return None
    if len(finite) != len(line):
        value["sqnr_db"] = float("inf")
    return value


def _keys(value: Any) -> int:
    """Number of keys of the objects in a value."""
    inner, own = (value, 0) if type(value) is list else (value.values(), len(value))
    if _CONTAINERS.isdisjoint(map(type, inner)):
        return own
    return own + sum([_keys(part) for part in inner if type(part) in _CONTAINERS])


def share_words(record: dict[str, Any]) -> None:
    """Let the words of a record and of its stages be the same objects as those of other records."""
    for name in _WORDS:
        record[name] = intern(record[name])
    for stage in record["stages"]:
        stage["stage"], stage["rule"] = intern(stage["stage"]), intern(stage["rule"])
