"""The TOML files that people write: of cases, of known failures, of mutants. Each holds tables of one name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.schema import nearest


def read(path: Path, name: str, *, what: str, error: type[Exception]) -> Any:
    """What stands under `name` in a file, `what` says of which kind; None where nothing does.

    Raises `error` where the file cannot be read, is not TOML, or holds anything else.
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
