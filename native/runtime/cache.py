"""Compiled kernels on disk, shared by all processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled kernels stay: $NARROWGAUGE_CACHE, else narrowgauge below $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"


def cache_key(*parts: str) -> str:
    """A short name for everything that a compiled kernel depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def cached(name: str, build: Callable[[Path], object], *, folder: Path | None = None) -> Path:
    """The file `name` of the cache, or of another folder, made by `build(path)` where it is not there.

    Processes that want the same file wait for the first one to make it; it appears whole or not at all.
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
