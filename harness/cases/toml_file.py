"""TOML files written by people: cases, known failures, mutants. A file holds tables of a single name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.keys import nearest


def read(path: Path, name: str, *, what: str, error: type[Exception]) -> Any:
    """The value of the key `name` of a file, or None. `what`: the kind of file, for messages.

    Raises `error` if the file cannot be read, is not TOML, or has another key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    except tomllib.TOMLDecodeError as problem:
        raise error(f"{path}: not TOML: {problem}") from problem
    for key in content:
        if key != name:
            raise error(f"{path}: unknown key {key!r}{nearest(key, [name])}; {what} holds [[{name}]] tables")
    return content.get(name)
