"""Replacing the files of a folder, all or none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge.harness.records.folder_lock import locked_folder


@contextmanager
def replace_files(directory: Path, *, last: str) -> Iterator[Path]:
    """Yield an empty folder to write into. Afterwards its files replace the files of the same name in `directory`.

    Nothing changes if the block raises. Raises FolderInUseError, an OSError, if another process holds the lock of
    `directory` (`harness.records.folder_lock`). `last` is the file people open, removed first and written last, so a
    run killed between two renames never leaves it beside files of another run.
    """
    # No rename of the whole folder: it may hold further files (reports/ holds baselines/) or be a mount point.
    with locked_folder(directory), tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as scratch:
        new_files = Path(scratch)
        yield new_files
        (directory / last).unlink(missing_ok=True)
        for path in sorted(new_files.iterdir(), key=lambda path: path.name == last):
            path.replace(directory / path.name)
