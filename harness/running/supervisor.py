"""Processes that this process starts, waits for and kills: forks of the server of judges, or fresh interpreters.

Each has a connection to this process and a time until which its next message must come. A caller starts it with a
target, sends work, waits for a message, and stops it; its death and its silence are exceptions of `receive`.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import IO, Any, TypeVar

from narrowgauge.harness.hosts.frames import Connection, FrameError, pair, readable
from narrowgauge.harness.hosts.starter import process_state, starter
from narrowgauge.harness.machine.process import KILLED, interpreter
from narrowgauge.harness.machine.processors import VISIBLE_DEVICES

SERVER = "narrowgauge.harness.running.judge_server"
_WAIT = 1.0
"""Seconds of a wait. Repeated waits let an interrupt take effect that arrives just before a wait."""
_lock = Lock()
"""Held while a process starts: threads share the connections to the starter and to the server."""


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
            raise Died(str(error), self.join(KILLED)) from None

    def receive(self) -> dict[str, Any]:
        """The next message. Raises TimeoutError if none comes in time, and Died if the process has ended."""
        while not late_or_readable([self]):
            pass
        try:
            return self.connection.receive(deadline=self.deadline)[0]
        except FrameError as error:
            raise Died(str(error), self.join(KILLED)) from None

    def stop(self, grace: float = 0.0) -> None:
        """Kill the process, if it has not ended in `grace` seconds."""
        if grace:
            self.join(grace)
        self.kill()
        self.join(KILLED)
        self.connection.close()

    def kill(self) -> None:
        """Kill the process, if it still runs. Does not wait for its end."""
        raise NotImplementedError

    def join(self, seconds: float) -> int | None:
        """Wait for the end of the process, for this time at most. Gives its exit status as in `Died`."""
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
        self._end, status = pair()
        self.connection, self._status = Connection(ours), Connection(self._end)
        self._exit: int | None = None
        state = process_state()
        state["environment"] |= {VISIBLE_DEVICES: gpu} if gpu else {}
        with _lock:
            ends = [status, theirs, *(starter().connect() for _ in range(channels))]
            try:
                _send({"target": target, "arguments": arguments, "state": state}, ends)
            finally:
                for end in ends:
                    end.close()
        self.expect(seconds)

    def kill(self) -> None:
        with suppress(OSError):  # the server has ended, and the process with it
            self._end.shutdown(socket.SHUT_WR)

    def join(self, seconds: float) -> int | None:
        if self._exit is None:
            try:
                self._exit = self._status.receive(deadline=time.monotonic() + seconds)[0]["status"]
            except TimeoutError:
                return None
            except FrameError:  # the server has ended, and its processes with it
                self._exit = -signal.SIGKILL
            self._status.close()
        return self._exit


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

    def kill(self) -> None:
        self._process.kill()

    def join(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
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


def _send(message: dict[str, Any], ends: Sequence[socket.socket] = ()) -> None:
    """Send a message to the server. A server that has ended is replaced."""
    descriptors = [end.fileno() for end in ends]
    with suppress(FrameError):
        starter().server(SERVER).send(message, descriptors=descriptors)
        return
    starter().drop_server(SERVER)
    starter().server(SERVER).send(message, descriptors=descriptors)
