"""A line of a journal as a value: its text escaped, no key twice in an object, equal keys and words shared."""

from __future__ import annotations

import json
from itertools import chain
from sys import intern
from typing import Any

import msgspec

from narrowgauge.harness.machine.plain_text import LONGEST, plain_value, unique_keys
from narrowgauge.harness.records.record import ENTRIES
from narrowgauge.harness.records.record_check import record_decoder

_INFINITE = b'"sqnr_db": Infinity, "sweep": '
"""Text of the only infinite figure in the record of a pass. A line without a backslash has this text at no further
place: no other object has these keys in this order, and no string has a quote."""
_FINITE = b'"sqnr_db": null, "sweep": '
_PLAIN = bytes(set(range(0x20, 0x7F)) - set(b"\\"))
"""Characters that `plain_text.escape` keeps, unless `::` or `##` begins a command, without the escape of JSON."""
_CONTAINERS = frozenset((dict, list))
_WORDS = (
    "file", "operation", "recipe", "shape", "dtype", "inputs", "flags", "tier", "backend", "device", "verdict", "stage",
    "options", "declares",
)  # fmt: skip
"""Columns with the same few words in thousands of records."""
_PLACE = "\0"
"""Stands for a part of a record in its JSON: the texts of a record lack the character (`plain_text`)."""
_PLACE_JSON = json.dumps(_PLACE)
_COUNTS = ("modulo", "heat")
"""Columns of counts in a finding: most of the bytes of a failing record."""


def record_json(record: dict[str, Any]) -> str:
    """A record as by `json.dumps`, in half of its time."""
    parts = record | {"stages": _PLACE, "findings": _PLACE}
    start, middle, end = json.dumps(parts).split(_PLACE_JSON)
    return f"{start}{stages_json(record['stages'])}{middle}{findings_json(record['findings'])}{end}"


def stages_json(stages: list[dict[str, Any]]) -> str:
    """The column `stages` of a record as by `json.dumps`."""
    return _without_floats(stages)


def findings_json(findings: list[dict[str, Any]]) -> str:
    """The column `findings` of a record as by `json.dumps`."""
    if not findings:
        return "[]"
    text = json.dumps([finding | dict.fromkeys(_COUNTS, _PLACE) for finding in findings])
    counts = [_without_floats(finding[name]) for finding in findings for name in finding if name in _COUNTS]
    return "".join(chain(*zip(text.split(_PLACE_JSON), [*counts, ""], strict=True)))


def _without_floats(value: Any) -> str:
    """A value without a float as by `json.dumps`. msgspec takes a third of the time, but writes floats differently."""
    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=0)
    except (OverflowError, msgspec.DecodeError):  # a number beyond 64 bits
        return json.dumps(value)
    return text.decode() if text.isascii() else json.dumps(value)


def parse_line(line: bytes) -> Any:
    """The value of a line of JSON. Its texts are escaped and cut (`harness.machine.plain_text`).

    Raises ValueError for a line that is not JSON, or has a repeated key in an object; RecursionError for a line with
    too many levels.
    """
    return plain_value(json.loads(line.decode(), object_pairs_hook=unique_keys))


def parse_record(line: bytes) -> dict[str, Any] | None:
    """`parse_line` of most records, in a fifth of its time: each has every column, of its type.

    None for another line, a line with a character that JSON or `plain_text` escapes, a number that msgspec does not
    read, and a key that may be there twice.
    """
    if line.rstrip(b"\n").translate(None, _PLAIN) or b"::" in line or b"##" in line or len(line) > LONGEST:
        return None
    finite = line.replace(_INFINITE, _FINITE)
    try:
        record: dict[str, Any] = record_decoder().decode(finite)
    except (msgspec.DecodeError, RecursionError):
        return None
    # The end of a string and a colon, between which JSON allows spaces: the end of a key, unless a string begins so.
    # msgspec leaves out a key without a column.
    if finite.count(b'":') != _keys_of_record(record) or b" :" in finite:
        return None
    if len(finite) != len(line):
        record["sqnr_db"] = float("inf")
    return record


def _keys_of_record(record: dict[str, Any]) -> int:
    """Number of keys of all objects in a complete record."""
    own = len(record) + sum([len(record[column]) * len(keys) for column, keys in ENTRIES.items()])
    return own + sum([_keys(value) for finding in record["findings"] for value in finding.values()])


def _keys(value: Any) -> int:
    """Number of keys of the objects in a value."""
    if type(value) not in _CONTAINERS:
        return 0
    inner, own = (value, 0) if type(value) is list else (value.values(), len(value))
    if _CONTAINERS.isdisjoint(map(type, inner)):
        return own
    return own + sum([_keys(part) for part in inner if type(part) in _CONTAINERS])


def share_words(record: dict[str, Any]) -> None:
    """Share the words of a record and of its stages with all records, as the same objects."""
    for name in _WORDS:
        record[name] = intern(record[name])
    for stage in record["stages"]:
        stage["stage"], stage["rule"] = intern(stage["stage"]), intern(stage["rule"])
