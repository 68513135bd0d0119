"""TOML files written by people: cases, known failures, mutants. A file holds tables of a single name."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.keys import nearest

LARGEST = 1 << 18
"""Bytes of a file."""
LONGEST = 2000
"""Characters of a line and of a text. The parser needs quadratic time for a key with many dots."""
DEEPEST = 6
"""Lists and tables inside each other, with the file itself. A list of shapes has a depth of 5."""


def read(path: Path, name: str, *, what: str, error: type[Exception]) -> Any:
    """The value of the key `name` of a file, or None. `what`: the kind of file, for messages.

    Raises `error` as `read_all` does, and if the file has another key.
    """
    return read_all(path, [name], what=what, error=error).get(name)


def read_all(path: Path, names: Sequence[str], *, what: str, error: type[Exception]) -> dict[str, Any]:
    """The values of the keys of a file. The first of `names` is the name of its tables.

    Raises `error` if the file cannot be read, is larger than the limits of this module, is not TOML, or has a key that
    is not in `names`.
    """
    if path.exists() and not path.is_file():
        raise error(f"{path}: cannot be read: it is no regular file; {what} is a TOML file")
    try:
        with path.open("rb") as file:
            stored = file.read(LARGEST + 1)  # not more, whatever the size of the file
        text = stored.decode("utf-8") if len(stored) <= LARGEST else ""
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    if len(stored) > LARGEST:
        raise error(f"{path}: has more than {LARGEST} bytes, the limit of {what}; divide it into several files")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST:
            raise error(f"{path}: line {number} has {len(line)} characters, the limit is {LONGEST}; break the line")
    try:
        content = tomllib.loads(text)
    except RecursionError as problem:
        raise error(f"{path}: lists or tables are nested too deeply; {what} needs at most {DEEPEST}") from problem
    except ValueError as problem:  # TOMLDecodeError, or a number with too many digits
        raise error(f"{path}: not TOML: {problem}") from problem
    if wrong := _beyond_limits(content):
        raise error(f"{path}: {wrong}")
    for key in content:
        if key not in names:
            raise error(f"{path}: unknown key {key!r}{nearest(key, names)}; {what} holds [[{names[0]}]] tables")
    return content


def _beyond_limits(content: dict[str, Any]) -> str:
    """Why a content exceeds the limits, or the empty string. Recursion would fail for deep tables."""
    level: list[Any] = [content]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str) and len(value) > LONGEST:
                return f"the text {value[:20]!r}… has {len(value)} characters; the limit is {LONGEST}"
            if isinstance(value, int) and value.bit_length() > 63:
                return f"the number {hex(value)[:20]}… has more than 64 bits"
            if isinstance(value, dict | list):
                below += value.values() if isinstance(value, dict) else value
        level = below
    return f"lists or tables are nested more than {DEEPEST} deep; write fewer brackets or dots" if level else ""
