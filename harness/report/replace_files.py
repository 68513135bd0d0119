"""Swapping a folder's files for new ones, all or none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(directory: Path, *, last: str) -> Iterator[Path]:
    """Give an empty folder to write into; afterwards its files replace those of the same name in `directory`.

    Nothing changes where the block raises. `last` is the file that people open: it leaves first and comes last, so
    that even a run killed between two renames never leaves it beside files of another run.
    """
    # Not one rename of the whole folder: it may hold files of others (reports/ holds baselines/) or be a mount point.
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as scratch:
        fresh = Path(scratch)
        yield fresh
        (directory / last).unlink(missing_ok=True)
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == last):
            path.replace(directory / path.name)
