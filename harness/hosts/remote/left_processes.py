"""Processes left behind by a backend after a case."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.harness.hosts.starter import parent_of, processes


@dataclass(frozen=True)
class LeftProcess:
    """A running process started by a host."""

    pid: int
    name: str
    copy: bool
    """Whether the process is a fork of the host, without a program of its own."""


class LeftProcesses:
    """Watches the descendants of a host."""

    def __init__(self, host: int, marker: str, adopts: int = 0) -> None:
        """`marker`: name of the shared memory of the host, mapped only by its descendants. `adopts`: the process that
        adopts the orphans of the host, without further children; 0: none."""
        self._host, self._marker, self._adopts = host, marker, adopts
        self._newest = _newest()
        self._known = set(processes())

    def expect(self, *hosts: int) -> None:
        """Know other hosts of the judge: these hosts are no descendants."""
        self._known.update(hosts)

    def new(self) -> list[LeftProcess]:
        """Descendants of the host, started since the last call. Copies of the host are killed: a worker pool of a
        library, which executes its own program, runs until its host ends."""
        newest = _newest()
        if newest and newest == self._newest:  # no process has started on this machine
            return []
        self._newest = newest
        now = set(processes())
        found = [left for pid in sorted(now - self._known) if (left := self._left(pid)) is not None]
        self._known = now
        for left in found:
            if left.copy:
                with suppress(OSError):
                    os.kill(left.pid, signal.SIGKILL)
        return found

    def _left(self, pid: int) -> LeftProcess | None:
        ancestor = pid
        while ancestor not in (0, 1, self._host, self._adopts):
            ancestor = parent_of(ancestor)
        # An orphan whose adopter has ended too is known by the shared memory of its host.
        try:
            if ancestor in (0, 1) and self._marker not in _read(pid, "maps"):
                return None
            if " Z " in _read(pid, "stat"):
                return None
            name = _read(pid, "comm").strip()
            return LeftProcess(pid, name, copy=_read(pid, "cmdline") == _read(self._host, "cmdline"))
        except OSError:  # it has ended
            return None


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def _newest() -> int:
    """The last process id of the system, of a process or a thread. 0: unknown."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return int(file.read().rpartition(" ")[2])
    except (OSError, ValueError):
        return 0
