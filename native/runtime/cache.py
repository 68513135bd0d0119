"""Cache of compiled kernels on disk, shared by all processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Folder of compiled kernels: $NARROWGAUGE_CACHE, else narrowgauge in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"


def cache_key(*parts: str) -> str:
    """Hash of everything that a compiled kernel depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def cached(name: str, build: Callable[[Path], object], *, folder: Path | None = None) -> Path:
    """The file `name` of the cache, or of `folder`. If the file is missing, `build(path)` makes it.

    The first process builds the file, and other processes wait. The file appears complete or not at all.
    """
    folder = folder or cache_folder()
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / name
                build(built)
                built.replace(target)
    return target
