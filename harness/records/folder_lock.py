"""Lock of a report folder: a single process at a time writes into the folder.

The lock is a POSIX record lock on a hidden file. The lock ends with the process, also after a kill, and child processes
do not inherit the lock. NFS passes the lock on to all hosts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.harness.machine.plain_text import escape

LOCK_NAME = ".narrowgauge-lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_ATTEMPTS = 100
"""Largest number of attempts to lock. An attempt fails if a second process removes the lock file at this moment."""


class FolderInUseError(OSError):
    """A second process writes into the folder. `strerror` names the folder, the process and the remedy."""


@dataclass
class _Lock:
    """A lock of this process."""

    file: int
    """File descriptor. A POSIX lock ends if the process closes any descriptor of the file: there is only this one."""
    process: int
    users: int
    created: list[Path]
    """Folders created for the lock, the innermost first."""


_locks: dict[Path, _Lock] = {}


def lock_folder(folder: Path) -> None:
    """Lock a folder, or count one more user if this process holds the lock. Creates a missing folder.

    A lock whose folder was deleted is taken again. On a file system without locks the folder stays unlocked, with a
    warning. Raises FolderInUseError if another process holds the lock, OSError if the folder cannot be written.
    """
    key = _key(folder)
    held = _locks.get(key)
    if held is not None and held.process == os.getpid():
        if not _is_at(held.file, key / LOCK_NAME):
            replacement, _ = _lock(key, folder)
            os.close(held.file)
            held.file = replacement
        held.users += 1
        return
    file, created = _lock(key, folder)
    _locks[key] = _Lock(file, os.getpid(), 1, created)


def unlock_folder(folder: Path) -> None:
    """End the lock with its last user: remove its file, and folders that were created for it and are empty."""
    key = _key(folder)
    held = _locks[key]
    held.users -= 1
    if held.users:
        return
    del _locks[key]
    with suppress(OSError):
        if _is_at(held.file, key / LOCK_NAME):
            (key / LOCK_NAME).unlink()  # before the lock ends: afterwards the file may be another process's
    os.close(held.file)
    with suppress(OSError):
        for path in held.created:
            path.rmdir()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises as `lock_folder` does."""
    lock_folder(folder)
    try:
        yield
    finally:
        unlock_folder(folder)


def _key(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _lock(key: Path, folder: Path) -> tuple[int, list[Path]]:
    """Descriptor of the locked file, and the created folders."""
    created = [path for path in (key, *key.parents) if not path.exists()]
    path = key / LOCK_NAME
    missing: FileNotFoundError | None = None
    for _ in range(_ATTEMPTS):
        key.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError as error:  # the last user in another process removed the folder, or no file can be
            missing = error
            continue
        missing = None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = _holder(file)
                os.close(file)
                raise FolderInUseError(
                    errno.EAGAIN,
                    f"{folder}: in use by {holder}, which writes its report into this folder; wait for its end, or "
                    "give another --report-dir",
                ) from error
            warnings.warn(
                f"{folder}: its file system has no locks ({error.strerror}); start no second run into this folder",
                RuntimeWarning,
                stacklevel=3,
            )
        if _is_at(file, path):
            _describe(file)
            return file, created
        os.close(file)
    if missing is not None:
        raise missing
    message = f"{folder}: other processes lock and unlock it all the time; give another --report-dir"
    raise FolderInUseError(errno.EAGAIN, message)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the file of a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _describe(file: int) -> None:
    """Write the name of this process into the lock file, for messages of other processes."""
    command = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])[:100]
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # a full disk: the lock holds without the text
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since} ({command})".encode(), 0)


def _holder(file: int) -> str:
    with suppress(OSError):
        if text := os.pread(file, 400, 0).decode(errors="replace"):
            return escape(" ".join(text.split()))
    return "another process"
