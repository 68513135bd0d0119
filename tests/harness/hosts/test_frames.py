"""Frames: whole messages arrive, and bytes that are no message are named errors."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from narrowgauge.harness.hosts.frames import LIMIT, Connection, FrameError, pair


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the raw socket of the other side."""
    ours, theirs = pair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def soon() -> float:
    return time.monotonic() + 5


def framed(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello\n", "the length of a message is 1751477356 bytes; the limit is 16777216"),
        (bytes(4), "a message is not JSON"),
        (struct.pack(">I", LIMIT + 1), f"{LIMIT + 1} bytes; the limit is {LIMIT}"),
        (framed(b"\x80\x04cposix\nsystem\n"), "a message is not JSON: UnicodeDecodeError"),
        (framed(b"{"), "a message is not JSON"),
        (framed(b"[" * 10**6), "a message is not JSON: RecursionError"),
        (framed(b'{"a":' * 10**5), "a message is not JSON"),
        (framed(b"1" * 10**5), "a message is not JSON: ValueError"),
        (framed(b"[]"), "a message is list, not an object"),
        (framed(b"null"), "a message is NoneType, not an object"),
        (framed(b'{"descriptors": 1}'), "a message has 1 file descriptors; 0 have come"),
        (framed(b'{"descriptors": -1}'), "a message has -1 file descriptors"),
        (framed(b'{"descriptors": "x"}'), "a message has x file descriptors"),
        (framed(b"{}")[:-1], "the other side closed the connection"),
        (b"", "the other side closed the connection"),
    ],
)
def test_bytes_that_are_no_message_are_an_error(
    data: bytes, message: str, ends: tuple[Connection, socket.socket]
) -> None:
    connection, theirs = ends

    def write() -> None:
        with suppress(OSError):  # the reader may close the connection first
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(FrameError) as caught:
        connection.receive(deadline=soon())
    assert message in str(caught.value)
    writer.join()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 1 << 16])
def test_messages_arrive_whole_in_any_division(size: int, ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    messages = [{"text": "x" * n, "number": n} for n in (0, 1, 100)]
    data = b"".join(framed(json.dumps(message).encode()) for message in messages)
    writer = threading.Thread(
        target=lambda: [theirs.sendall(data[start : start + size]) for start in range(0, len(data), size)]
    )
    writer.start()
    assert [connection.receive(deadline=soon())[0] for _ in messages] == messages
    writer.join()
    assert not connection.waiting


def test_messages_larger_than_a_buffer_and_up_to_the_limit(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    text = "x" * (LIMIT - len('{"text": ""}'))
    writer = threading.Thread(target=lambda: Connection(theirs).send({"text": text}, {"n": 1}, deadline=soon()))
    writer.start()
    assert connection.receive(deadline=soon()) == ({"text": text}, [])
    assert connection.receive(deadline=soon()) == ({"n": 1}, [])
    writer.join()
    with pytest.raises(FrameError, match=f"a message of {LIMIT + 1} bytes exceeds the limit of {LIMIT}"):
        connection.send({"text": text + "x"})


def test_file_descriptors_belong_to_their_message(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    sender = Connection(theirs)
    files = [os.memfd_create(f"file-{n}") for n in range(3)]
    for n, file in enumerate(files):
        os.write(file, b"%d" % n)
    sender.send({"n": 0}, descriptors=files[:1])
    sender.send({"n": 1})
    sender.send({"n": 2}, descriptors=files[1:])
    found = [connection.receive(deadline=soon()) for _ in range(3)]
    assert [message["n"] for message, _ in found] == [0, 1, 2]
    contents = [[os.pread(file, 9, 0) for file in received] for _, received in found]
    assert contents == [[b"0"], [], [b"1", b"2"]]
    for file in [*files, *(file for _, received in found for file in received)]:
        os.close(file)


def test_descriptors_without_a_message_are_closed(ends: tuple[Connection, socket.socket]) -> None:
    """A kernel could send descriptors until the judge has no more."""
    connection, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    theirs.setblocking(False)
    theirs.send(struct.pack(">I", 1000))
    for _ in range(100):
        socket.send_fds(theirs, [b"x"], [theirs.fileno()] * 8)
    with pytest.raises(FrameError, match="file descriptors"):
        connection.receive(deadline=soon())
    assert len(os.listdir("/proc/self/fd")) < before + 100
    connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_send_ends_at_its_deadline_and_at_a_closed_connection(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    with pytest.raises(TimeoutError):
        connection.send({"text": "x" * (1 << 22)}, deadline=time.monotonic() + 0.05)
    theirs.close()
    with pytest.raises(FrameError, match="the connection is closed: Broken pipe"):
        connection.send({"text": "x"}, deadline=soon())
