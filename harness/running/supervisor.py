"""Processes that this process starts, waits for and kills: forks of the server of judges, or fresh interpreters.

A process has a connection to this process, and a deadline for its next message. A caller starts a process with a
target, sends work, waits for a message, and stops the process; its death and its silence are exceptions of `receive`.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import IO, Any, TypeVar

from narrowgauge.harness.hosts.frames import Connection, FrameError, pair, readable
from narrowgauge.harness.hosts.starter import process_state, starter
from narrowgauge.harness.machine.process import KILLED, interpreter
from narrowgauge.harness.machine.processors import ALL_DEVICES, VISIBLE_DEVICES, visible_gpus

SERVER = "narrowgauge.harness.running.judge_server"
_WAIT = 1.0
"""Seconds of a wait. Repeated waits let an interrupt take effect that arrives just before a wait."""
_lock = Lock()
"""Held while a process starts or ends: threads share the connections to the starter and to the server."""
_numbers = count()


class Died(Exception):
    """A process ended, or wrote bytes that are no message. `status`: exit status, negative for a signal; None if the
    process does not end."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Process:
    """A process of this one. `Fork` and `Interpreter` start it."""

    connection: Connection

    def expect(self, seconds: float) -> None:
        """Set the seconds that the next message may take from now on."""
        self.seconds, self.deadline = seconds, time.monotonic() + seconds

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, and file descriptors with it. Raises Died if the process has ended."""
        try:
            self.connection.send(message, descriptors=descriptors)
        except FrameError as error:
            raise Died(str(error), self.end(KILLED)) from None

    def receive(self) -> dict[str, Any]:
        """The next message. Raises TimeoutError if none comes in time, and Died if the process has ended."""
        while not late_or_readable([self]):
            pass
        try:
            return self.connection.receive(deadline=self.deadline)[0]
        except FrameError as error:
            raise Died(str(error), self.end(KILLED)) from None

    def stop(self, wait: float = 0.0) -> None:
        """End the process as `end` does, and the connection."""
        self.end(wait)
        self.connection.close()

    def end(self, wait: float = 0.0) -> int | None:
        """Wait `wait` seconds for the end of the process, then kill it. Gives its exit status as in `Died`."""
        raise NotImplementedError


AnyProcess = TypeVar("AnyProcess", bound=Process)


def late_or_readable(processes: Sequence[AnyProcess]) -> list[AnyProcess]:
    """The processes with a message or without time: their `receive` returns or raises at once. May be empty: waits a
    second at most."""
    now = time.monotonic()
    until = min([now + _WAIT, *(process.deadline for process in processes)])
    ready = readable([process.connection for process in processes], until)
    now = time.monotonic()
    return [process for process in processes if process.connection in ready or process.deadline <= now]


class Fork(Process):
    """A fork of the server, which has imported torch, the reference and the checks. Its group is killed with it."""

    def __init__(
        self, target: str, arguments: Sequence[Any], *, channels: int = 0, gpu: str = "", seconds: float = float("inf")
    ) -> None:
        """Call the function `target`, "module:name", with its connection, as many channels to the starter of kernel
        hosts, and arguments of JSON. `gpu`: name of the only GPU that the process sees; empty: it sees all.
        """
        ours, theirs = pair()
        self.connection, self._number = Connection(ours), next(_numbers)
        self._status: int | None = None
        self._ended = False
        state = process_state()
        if gpu:
            state["environment"] |= {VISIBLE_DEVICES: gpu, ALL_DEVICES: ",".join(visible_gpus())}
        message = {"target": target, "number": self._number, "arguments": arguments, "state": state}
        with _lock:
            ends = [theirs, *(starter().connect() for _ in range(channels))]
            try:
                _send(message, ends)
            finally:
                for end in ends:
                    end.close()
        self.expect(seconds)

    def end(self, wait: float = 0.0) -> int | None:
        with _lock:
            if not self._ended:
                answer: dict[str, Any] = {"number": -1}
                try:
                    server = _send({"number": self._number, "wait": wait})
                    self._ended = True
                    while answer["number"] != self._number:  # an interrupt leaves an answer behind
                        answer, _ = server.receive()
                    self._status = answer["status"]
                except FrameError:  # the server has ended, and its processes with it
                    self._ended, self._status = True, -signal.SIGKILL
        return self._status


class Interpreter(Process):
    """A fresh interpreter, for a program that may have threads and CUDA contexts and must not fork."""

    def __init__(self, target: str, output: IO[bytes], environment: Mapping[str, str]) -> None:
        """Call the function `target`, "module:name", with the file descriptor of its connection."""
        ours, theirs = pair()
        self.connection = Connection(ours)
        with theirs:
            self._process = subprocess.Popen(
                interpreter(target, theirs.fileno()), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.expect(float("inf"))

    def end(self, wait: float = 0.0) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(KILLED)
        return None


def start_server() -> None:
    """Start the server before the first judge. It then imports the oracle while the starter imports the kernels."""
    starter().server(SERVER)


def preload(module: str) -> None:
    """Import a module in the server and in the starter, for all judges and kernel hosts that start later: each would
    import the module itself."""
    with _lock:
        starter().preload(module)
        _send({"preload": module})


def _send(message: dict[str, Any], ends: Sequence[socket.socket] = ()) -> Connection:
    """Send a message to the server, and give the connection. A server that has ended is replaced."""
    descriptors = [end.fileno() for end in ends]
    with suppress(FrameError):
        starter().server(SERVER).send(message, descriptors=descriptors)
        return starter().server(SERVER)
    starter().drop_server(SERVER)
    starter().server(SERVER).send(message, descriptors=descriptors)
    return starter().server(SERVER)
