"""Processes of judges: forks of a process that has imported torch, the reference and the checks.

That process, the server, is a fork of the starter of kernel hosts: a run imports torch once. The starter itself never
imports the reference, which kernel hosts must not have. The server runs no case and has no thread.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from threading import Lock
from typing import Any

from narrowgauge.harness.cases.operations import OPERATIONS, OperationError, main_module
from narrowgauge.harness.hosts.frames import Connection, FrameError, close_others, pair, readable
from narrowgauge.harness.hosts.starter import import_if_present, process_state, run_and_exit, starter, take_state
from narrowgauge.harness.machine.process import detach_process, end_with_parent

_IMPORTED = (
    "narrowgauge.harness.running.worker", "narrowgauge.harness.running.save_failures",
    "narrowgauge.harness.operations.registry", "narrowgauge.harness.hosts.remote_host",
)  # fmt: skip

_lock = Lock()
"""Held while a message is sent: threads share the connection to the server."""


class JudgeProcess:
    """A process of a judge. The end of the run ends the process."""

    def __init__(
        self,
        target: str,
        sockets: Sequence[socket.socket],
        arguments: Sequence[Any],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Call the function `target`, "module:name", with sockets and arguments of JSON. The sockets are closed here.

        `environment`: variables of the process, by default those of this process.
        """
        self.exitcode: int | None = None
        """Exit status, negative for a signal. None until `join` has seen the end."""
        self._pid = 0
        self._end, theirs = pair()
        self._status: Connection | None = Connection(self._end)
        state = process_state() | ({} if environment is None else {"environment": dict(environment)})
        message = {"target": target, "arguments": arguments, "state": state}
        try:
            _send(message, [theirs.fileno(), *(end.fileno() for end in sockets)])
        finally:
            for end in (theirs, *sockets):
                end.close()

    @property
    def pid(self) -> int:
        """The process id. Waits for the start of the process."""
        if not self._pid and self._status is not None:
            self._pid = int(self._status.receive()[0]["pid"])
        return self._pid

    def kill(self) -> None:
        """Kill the process, if it still runs. Does not wait for its end."""
        if self._status is not None:
            with suppress(OSError):  # the server has ended
                self._end.shutdown(socket.SHUT_WR)

    def join(self, seconds: float = float("inf")) -> None:
        """Wait for the end of the process, for this time at most."""
        deadline = time.monotonic() + seconds
        while self._status is not None:
            try:
                message, _ = self._status.receive(deadline=deadline)
            except TimeoutError:
                return
            except FrameError:  # the server has ended, and its processes with it
                message = {"status": -signal.SIGKILL}
            if "status" in message:
                self.exitcode = message["status"]
                self._status.close()
                self._status = None


def start_server() -> None:
    """Start the server before the first judge. It then imports the oracle while the starter imports the kernels."""
    starter().server(__name__)


def preload(module: str) -> None:
    """Import a module in the server and in the starter, for all judges and kernel hosts that start later: each would
    import the module itself."""
    starter().preload(module)
    _send({"preload": module}, [])


def _send(message: dict[str, Any], descriptors: list[int]) -> None:
    """Send a message to the server. The first message starts the server."""
    with _lock:
        with suppress(FrameError):
            starter().server(__name__).send(message, descriptors=descriptors)
            return
        starter().drop_server(__name__)
        starter().server(__name__).send(message, descriptors=descriptors)


# ---- in the server ---------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork a process for each message of the run, until the run ends."""
    end_with_parent()
    gc.disable()
    for name in _IMPORTED:
        import_module(name)
    for name in OPERATIONS:
        with suppress(OperationError):  # the judge of a case of this operation reports the error
            main_module(name)
    gc.freeze()  # a collection in a judge would copy every page
    gc.enable()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    run = Connection(socket.socket(fileno=descriptor))
    running: dict[int, Connection] = {}
    """Connection for the exit status of each process."""
    killed: set[int] = set()
    """Processes whose connection the run has shut."""
    while True:
        open_ends = {connection: pid for pid, connection in running.items() if pid not in killed}
        for ready in readable([run, woken, *open_ends], float("inf")):
            if ready is run:
                try:
                    message, descriptors = run.receive()
                except FrameError:
                    return
                if "preload" in message:
                    import_if_present(message["preload"])
                else:
                    _fork(message, descriptors, running)
            elif ready in open_ends:
                killed.add(open_ends[ready])
                os.kill(open_ends[ready], signal.SIGKILL)
            else:
                with suppress(BlockingIOError):
                    os.read(woken, select.PIPE_BUF)
        killed -= _report(running)


def _fork(message: dict[str, Any], descriptors: list[int], running: dict[int, Connection]) -> None:
    status, *others = descriptors
    pid = os.fork()
    if not pid:
        run_and_exit(partial(_be_judge, message, others))
    running[pid] = Connection(socket.socket(fileno=status))
    for other in others:
        os.close(other)
    with suppress(FrameError):
        running[pid].send({"pid": pid})


def _report(running: dict[int, Connection]) -> set[int]:
    """Send the exit status of every process that has ended. Gives these processes."""
    ended = set()
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            ended.add(pid)
            connection = running.pop(pid)
            with suppress(FrameError):
                connection.send({"status": os.waitstatus_to_exitcode(status)})
            connection.close()
    return ended


def _be_judge(message: dict[str, Any], descriptors: list[int]) -> None:
    """Call the function of a message."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    detach_process()
    close_others(descriptors)
    take_state(message["state"])
    module, _, name = message["target"].partition(":")
    ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    getattr(import_module(module), name)(*ends, *message["arguments"])
