"""The process of a kernel host, seen from its judge: its connection, its output, its stacks and its end."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from narrowgauge.harness.hosts.frames import Connection, pair, readable
from narrowgauge.harness.hosts.output import StackFile, forward
from narrowgauge.harness.hosts.remote.left_files import LeftFiles
from narrowgauge.harness.hosts.remote.left_processes import LeftProcesses
from narrowgauge.harness.hosts.separation import NAMESPACES
from narrowgauge.harness.hosts.starter import Channel, parent_of

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
"""Numbers of the limited resources."""


class HostProcess:
    """A process of a host."""

    def __init__(
        self,
        channel: Channel,
        marker: str,
        variables: Mapping[str, str] | None,
        hidden: Sequence[str] | None,
        gpu: str = "",
    ) -> None:
        """`marker`: as in `LeftProcesses`. `variables`: environment variables of a fresh interpreter; None: a fork.
        `hidden`, `gpu`: as of `Channel.start`.

        Raises StarterError.
        """
        self._files: LeftFiles | None = LeftFiles()
        ours, theirs = pair()
        self._output, written = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        self._channel, self.stacks, self._exit, self._memory = channel, StackFile(), -1, -1
        self.connection = Connection(ours)
        try:
            given = [theirs.fileno(), written, self.stacks.descriptor]
            self.pid, self.separation = channel.start(given, environment=variables, hidden=hidden, gpu=gpu)
        except BaseException:
            self.close()
            self.stacks.close()
            raise
        finally:
            theirs.close()
            os.close(written)
        with suppress(OSError, AttributeError):
            self._exit = os.pidfd_open(self.pid)
        self.left = LeftProcesses(self.pid, marker, parent_of(self.pid))
        if self.separation == NAMESPACES:
            self._files = None  # it has a /dev/shm of its own
        self.printed = 0
        """Number of printed bytes of the output of the case."""
        self._open = True
        """Whether more output may follow."""

    def news(self, deadline: float) -> list[Any]:
        """Wait for a message, output or the end of the process, and print the output. Empty after the deadline; the
        connection is in it if it can be read."""
        sources: list[Any] = [self.connection]
        sources += [self._output] if self._open else []
        sources += [self._exit] if self._exit >= 0 else []
        ready = readable(sources, deadline)
        if self._output in ready:
            self.forward()
        return ready

    def ended(self, news: list[Any]) -> bool:
        """Whether the process has ended without a message."""
        return self._exit in news and self.connection not in news

    def forward(self) -> None:
        """Print the output of the host."""
        self.printed, self._open = forward(self._output, self.printed)

    def look_for_files(self) -> None:
        """Remember the files in /dev/shm made by the process."""
        if self._files is not None:
            self._files.look(self.pid)

    def limits(self) -> list[tuple[int, int]]:
        """Soft and hard limits of the resources of the process. Empty if the system does not tell them."""
        try:
            return [resource.prlimit(self.pid, number) for number in _LIMITS]
        except (OSError, AttributeError):  # AttributeError: another system
            return []

    def memory(self, address: int, size: int) -> bytes | None:
        """Bytes of the memory of the process. None if the system does not let this process read; fewer bytes, or no
        bytes, without memory."""
        try:
            if self._memory < 0:
                self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.pread(self._memory, size, address)
        except (OSError, OverflowError):
            return b""

    def end(self, *, wait: float = 0.0) -> int | None:
        """End the process, after `wait` seconds, and its descendants, and remove its files in /dev/shm. Gives its exit
        status, and keeps the file of its stacks open. Raises StarterError."""
        self.forward()
        self.look_for_files()
        self.close()
        try:
            return self._channel.end(self.pid, wait=wait)
        finally:
            if self._files is not None:
                self._files.remove()

    def close(self) -> None:
        """Close the descriptors of an ended process."""
        self.connection.close()
        for descriptor in (self._output, self._exit, self._memory):
            if descriptor >= 0:
                os.close(descriptor)
