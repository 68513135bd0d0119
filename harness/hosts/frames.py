"""Messages between a judge, its kernel host and the process that starts hosts: JSON frames of limited length.

A frame is its length in four bytes, big-endian, and a JSON object. File descriptors travel beside the length. Nothing
is unpickled: a kernel can write any bytes into the connection of its host.
"""

from __future__ import annotations

import json
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
_DESCRIPTORS = 4
"""Largest number of file descriptors beside a frame."""


class FrameError(Exception):
    """The other side wrote bytes that are no frame, or closed the connection."""


class Connection:
    """One end of a connection. A Unix stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(True)

    def fileno(self) -> int:
        """The file descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = (), *, deadline: float = float("inf")) -> None:
        """Send a message. `deadline`: latest time of `time.monotonic()`.

        Raises TimeoutError after the deadline, FrameError if the other side is gone or the message is too long.
        """
        content = json.dumps(message).encode()
        if len(content) > LIMIT:
            raise FrameError(f"a message of {len(content)} bytes exceeds the limit of {LIMIT}")
        data = memoryview(_LENGTH.pack(len(content)) + content)
        try:
            self._socket.settimeout(_seconds_to(deadline))
            sent = socket.send_fds(self._socket, [data], list(descriptors)) if descriptors else 0
            self._socket.settimeout(_seconds_to(deadline))
            self._socket.sendall(data[sent:])
        except TimeoutError:
            raise
        except OSError as error:
            raise FrameError(f"the connection is closed: {error.strerror}") from error

    def receive(self, *, deadline: float = float("inf")) -> tuple[dict[str, Any], list[int]]:
        """The next message, and its file descriptors.

        Raises TimeoutError after the deadline, FrameError if the bytes are no frame.
        """
        try:
            head, descriptors = self._read_length(deadline)
            (length,) = _LENGTH.unpack(head)
            if length > LIMIT:
                raise FrameError(f"the length of a message is {length} bytes; the limit is {LIMIT}")
            content = self._read(length, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise FrameError(f"the connection is closed: {error.strerror}") from error
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a message is not JSON: {type(error).__name__}") from error
        if not isinstance(message, dict):
            raise FrameError(f"a message is {type(message).__name__}, not an object")
        return message, descriptors

    def _read_length(self, deadline: float) -> tuple[bytes, list[int]]:
        self._socket.settimeout(_seconds_to(deadline))
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _DESCRIPTORS)
        if not head:
            raise FrameError("the other side closed the connection")
        return head + self._read(_LENGTH.size - len(head), deadline), descriptors

    def _read(self, count: int, deadline: float) -> bytes:
        content = bytearray(count)
        rest = memoryview(content)
        while rest:
            self._socket.settimeout(_seconds_to(deadline))
            read = self._socket.recv_into(rest)
            if not read:
                raise FrameError("the other side closed the connection within a message")
            rest = rest[read:]
        return bytes(content)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def readable(connections: Sequence[Any], deadline: float) -> list[Any]:
    """The connections and file descriptors with something to read. Empty after the deadline."""
    poll = select.poll()
    by_number = {c if isinstance(c, int) else c.fileno(): c for c in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    left = None if deadline == float("inf") else max(0, round(1000 * (deadline - time.monotonic())))
    return [by_number[number] for number, _ in poll.poll(left)]


def _seconds_to(deadline: float) -> float | None:
    """Seconds until a deadline, at least a millisecond. None: no deadline."""
    return None if deadline == float("inf") else max(1e-3, deadline - time.monotonic())


def close_others(kept: Sequence[int]) -> None:
    """Close all file descriptors of this process beside standard input, output, error and `kept`."""
    last = 2
    for number in sorted(kept):
        os.closerange(last + 1, number)
        last = max(last, number)
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 16)
