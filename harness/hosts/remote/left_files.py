"""Files in /dev/shm left behind by a host: the files take memory after its end."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from narrowgauge.harness.hosts.starter import children, processes

_FOLDER = "/dev/shm"


class LeftFiles:
    """Watches the files in /dev/shm that a host makes, and has open at the end of a case or at its own end."""

    def __init__(self) -> None:
        self._listed = self._earlier = _files()
        self._made: dict[int, str] = {}
        """Paths of the files of the host by inode."""

    def look(self, host: int) -> None:
        """Remember the new files open in a host or in its children."""
        now = _files()
        if now.keys() != self._listed.keys():  # no process has made a file
            new = now.keys() - self._earlier.keys()
            self._made |= {inode: now[inode] for inode in _open_files([host, *children(host)], new)}
        self._listed = now

    def remove(self) -> None:
        """Remove the files of the host without a process that has them open."""
        kept = _open_files(processes(), self._made) if self._made else set()
        for inode, path in self._made.items():
            with suppress(OSError):
                found = os.lstat(path)
                if inode not in kept and (found.st_ino, found.st_uid) == (inode, os.getuid()):
                    os.unlink(path)


def _files() -> dict[int, str]:
    """Paths of the files in /dev/shm by inode. Empty without the folder."""
    with suppress(OSError), os.scandir(_FOLDER) as entries:
        return {entry.inode(): entry.path for entry in entries}
    return {}


def _open_files(processes: Iterable[int], inodes: Collection[int]) -> set[int]:
    """The files in /dev/shm, of these, that a process has open or maps."""
    device = os.stat(_FOLDER).st_dev if inodes else 0
    return {inode for process in processes if inodes for inode in _inodes(process, device) if inode in inodes}


def _inodes(process: int, device: int) -> Iterator[int]:
    """Inodes of the open or mapped files of a device in a process. None for an ended process."""
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{process}/fd"):
            with suppress(OSError):
                found = os.stat(entry.path)
                if found.st_dev == device:
                    yield found.st_ino
        place = f" {os.major(device):02x}:{os.minor(device):02x} "
        for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
            before, found_place, rest = line.partition(place)
            if found_place and before.count(" ") == 2:
                yield int(rest.split()[0])
