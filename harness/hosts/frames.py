"""Messages between a judge, its kernel host and the process that starts hosts: JSON frames of limited length.

A frame is its length in four bytes, big-endian, and a JSON object. File descriptors travel beside the length. Nothing
is unpickled: a kernel can write any bytes into the connection of its host.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

LIMIT = 1 << 24
"""Largest length of a frame in bytes. The steps of a transformer layer take 50 kB."""
_LENGTH = struct.Struct(">I")
_DESCRIPTORS = 8
"""Largest number of file descriptors beside the bytes of a call of the system."""
_HELD = 64
"""Largest number of file descriptors waiting for their message."""
_PART = 1 << 16
_LONGEST = (1 << 31) - 1


class FrameError(Exception):
    """The peer wrote bytes that are no frame, or closed the connection."""


class Connection:
    """An end of a connection. A Unix stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._read = bytearray()
        """Bytes of the next messages."""
        self._descriptors: list[int] = []
        """File descriptors of the next messages."""
        end.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor of the socket."""
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Whether bytes of the next message have been read."""
        return bool(self._read)

    def send(self, *messages: dict[str, Any], descriptors: Sequence[int] = (), deadline: float = float("inf")) -> None:
        """Send messages. File descriptors belong to a single message. `deadline`: latest time of `time.monotonic()`.

        Raises TimeoutError after the deadline, FrameError if the other side is gone or a message is too long.
        """
        data = bytearray()
        for message in messages:
            content = json.dumps(message | {"descriptors": len(descriptors)} if descriptors else message).encode()
            if len(content) > LIMIT:
                raise FrameError(f"a message of {len(content)} bytes exceeds the limit of {LIMIT}")
            data += _LENGTH.pack(len(content)) + content
        rest = memoryview(data)
        while rest:
            try:
                sent = socket.send_fds(self._socket, [rest], descriptors) if descriptors else self._socket.send(rest)
            except BlockingIOError:
                _wait(self._socket, select.POLLOUT, deadline)
                continue
            except OSError as error:
                raise FrameError(f"the connection is closed: {error.strerror}") from error
            rest, descriptors = rest[sent:], ()

    def receive(self, *, deadline: float = float("inf")) -> tuple[dict[str, Any], list[int]]:
        """The next message, and its file descriptors.

        Raises TimeoutError after the deadline, FrameError if the bytes are no frame.
        """
        self._fill(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._read)
        if length > LIMIT:
            raise FrameError(f"the length of a message is {length} bytes; the limit is {LIMIT}")
        end = _LENGTH.size + length
        self._fill(end, deadline)
        content = bytes(self._read[_LENGTH.size : end])
        del self._read[:end]
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a message is not JSON: {type(error).__name__}") from error
        if not isinstance(message, dict):
            raise FrameError(f"a message is {type(message).__name__}, not an object")
        count = message.get("descriptors", 0)
        if not isinstance(count, int) or not 0 <= count <= len(self._descriptors):
            raise FrameError(f"a message has {count} file descriptors; {len(self._descriptors)} have come")
        descriptors = self._descriptors[:count]
        del self._descriptors[:count]
        return message, descriptors

    def _fill(self, count: int, deadline: float) -> None:
        """Read until at least `count` bytes are there."""
        while len(self._read) < count:
            try:
                part, descriptors, _, _ = socket.recv_fds(self._socket, _PART, _DESCRIPTORS)
            except BlockingIOError:
                _wait(self._socket, select.POLLIN, deadline)
                continue
            except OSError as error:
                raise FrameError(f"the connection is closed: {error.strerror}") from error
            if not part:
                raise FrameError("the other side closed the connection")
            self._read += part
            self._descriptors += descriptors
            if len(self._descriptors) > _HELD:
                raise FrameError(f"{len(self._descriptors)} file descriptors have come; the limit is {_HELD}")

    def close(self) -> None:
        """Close this end, and the file descriptors of unreceived messages."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def readable(connections: Sequence[Any], deadline: float) -> list[Any]:
    """The connections and file descriptors with something to read. Empty after the deadline."""
    if ready := [c for c in connections if isinstance(c, Connection) and c.waiting]:
        return ready
    poll = select.poll()
    by_number = {c if isinstance(c, int) else c.fileno(): c for c in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(_milliseconds_to(deadline))]


def _wait(end: socket.socket, event: int, deadline: float) -> None:
    """Wait until a socket can be read or written. Raises TimeoutError after the deadline."""
    poll = select.poll()
    poll.register(end, event)
    if not poll.poll(_milliseconds_to(deadline)):
        raise TimeoutError


def _milliseconds_to(deadline: float) -> int | None:
    """Milliseconds until a deadline, 24 days at most, the limit of `poll`. None: no deadline."""
    if deadline == float("inf"):
        return None
    return min(_LONGEST, max(0, math.ceil(1000 * (deadline - time.monotonic()))))


def close_others(kept: Sequence[int]) -> None:
    """Close all file descriptors of this process beside standard input, output, error and `kept`."""
    last = 2
    for number in sorted(kept):
        os.closerange(last + 1, number)
        last = max(last, number)
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 16)
