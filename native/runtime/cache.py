"""Cache of compiled kernels on disk, shared by all processes of a user.

Loading an entry runs its code in this process. An entry is therefore loaded only if its digest is right and no other
user can have written it: docs/design.md#cache-of-compiled-kernels.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from narrowgauge.native.runtime.sources import ToolchainError

_DIGEST_BYTES = 32
"""Size of the SHA-256 digest at the end of an entry. The loaders of libraries and cubins ignore bytes behind an ELF
file. A digest in a second file could not be replaced together with the entry in one step."""

_ROOT = 0
"""The superuser can replace every file anyway, and may provide a cache for all users of an image."""
_UNMAPPED = 65534
"""Owner that Linux shows for files of users outside of a container's user namespace, such as `/` in Apptainer."""


def cache_folder() -> Path:
    """Folder of compiled kernels: $NARROWGAUGE_CACHE, else narrowgauge in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"


def cache_key(*parts: str) -> str:
    """Hash of everything that a compiled kernel depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def cached(name: str, build: Callable[[Path], object], *, folder: Path | None = None) -> Path:
    """Path of the whole entry `name` of the cache, or of `folder`. If it is missing or damaged, `build(path)` makes it.

    The first process builds the entry, and other processes wait. An entry appears complete or not at all. If the folder
    cannot be written, or other users can write it, a temporary folder of this user takes its place, with a
    RuntimeWarning that names the folder and the remedy. Raises ToolchainError if no folder can hold the entry, and as
    `build` does.
    """
    content: bytes | None = None
    refused: list[str] = []
    for place in _folders(folder):
        with contextlib.ExitStack() as held:
            try:
                entry = _safe_folder(place) / name
                if _is_whole(entry):
                    return entry
                held.enter_context(_lock(entry))
            except OSError as error:
                refused.append(_refuse(place, error))
                continue
            if _is_whole(entry):
                return entry
            content = content or _built(name, build)
            try:
                _write(entry, content)
            except OSError as error:
                refused.append(_refuse(place, error))
                continue
            return entry
    raise ToolchainError(f"compiled kernel {name} can be kept in no folder: {'; '.join(refused)}")


def _folders(folder: Path | None) -> Iterator[Path]:
    """The wanted folder, and folders that take its place: one for all processes of the user, one for this process."""
    yield folder or cache_folder()
    if folder is None:
        yield Path(tempfile.gettempdir()) / f"narrowgauge-{os.geteuid()}"
    yield _process_folder(os.getpid())


@cache
def _process_folder(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="narrowgauge-"))

    def remove() -> None:
        if os.getpid() == process:  # a forked process inherits the exit functions
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _refuse(folder: Path, error: OSError) -> str:
    """Warns that `folder` does not hold compiled kernels. Returns the reason with its remedy."""
    variable = "NARROWGAUGE_CACHE" if folder == cache_folder() else "TMPDIR"
    reason = f"{folder}: {error}; or set {variable} to another folder"
    warnings.warn(
        f"compiled kernels are not kept in {reason}. A temporary folder is used instead", RuntimeWarning, stacklevel=3
    )
    return reason


def _safe_folder(folder: Path) -> Path:
    """The folder with its links resolved. A missing folder is created for this user alone.

    Raises PermissionError if the folder belongs to another user, or another user can write or replace it.
    """
    for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    real = folder.resolve(strict=True)
    for path in (folder, real):  # a symbolic link of another user may lead to a folder of this user
        owner = path.lstat().st_uid
        if _is_foreign(owner):
            raise PermissionError(f"{path} belongs to user {owner}, not to user {os.geteuid()}; run as user {owner}")
    for path in (real, *real.parents):
        status = path.stat()
        # In a sticky folder, such as /tmp, only the owner of an entry renames it.
        sticky = status.st_mode & stat.S_ISVTX
        if status.st_mode & 0o022 and (path == real or not sticky):
            remedy = "make a folder in it" if sticky else f"run chmod go-w {path}"
            raise PermissionError(f"other users can write {path} (mode {stat.S_IMODE(status.st_mode):04o}); {remedy}")
        if _is_foreign(status.st_uid) and status.st_uid != _UNMAPPED:
            raise PermissionError(f"{path} belongs to user {status.st_uid}, who can replace {real}; move the folder")
    return real


def _is_foreign(owner: int) -> bool:
    return owner not in (_ROOT, os.geteuid())


def _is_whole(entry: Path) -> bool:
    """Whether the entry is a regular file of this user or root, not writable by others, with the right digest."""
    try:
        status = entry.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or _is_foreign(status.st_uid):
            return False
        content = entry.read_bytes()
    except OSError:
        return False
    return content[-_DIGEST_BYTES:] == _digest(entry.name, content[:-_DIGEST_BYTES])


def _digest(name: str, content: bytes) -> bytes:
    """The name is part of the digest: the file of another kernel under this name is damage too."""
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(content)
    return digest.digest()


@contextlib.contextmanager
def _lock(entry: Path) -> Iterator[None]:
    path = entry.with_name(f"{entry.name}.lock")
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _built(name: str, build: Callable[[Path], object]) -> bytes:
    """Content of the entry that `build` makes, with its digest."""
    with tempfile.TemporaryDirectory(prefix="narrowgauge-build-") as scratch:
        path = Path(scratch) / name
        build(path)
        content = path.read_bytes()
    return content + _digest(name, content)


def _write(entry: Path, content: bytes) -> None:
    """Replaces the entry in one step, under its lock.

    Processes may have mapped the previous file: it keeps its bytes until they end. Without fsync, a crash of the
    machine can leave a short file, and its digest shows the damage.
    """
    new = entry.with_name(f"{entry.name}.new")
    new.unlink(missing_ok=True)  # left by a killed process
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            file.write(content)
        new.replace(entry)
    except OSError:
        new.unlink(missing_ok=True)
        raise
