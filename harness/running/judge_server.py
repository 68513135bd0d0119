"""The server of judges: a process that has imported torch, the reference and the checks, and forks judges.

The server is a fork of the starter of kernel hosts: a run imports torch once. The starter itself never imports the
reference, which kernel hosts must not have. The server runs no case and has no thread.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from narrowgauge.harness.cases.operations import OPERATIONS, OperationError, main_module
from narrowgauge.harness.hosts.frames import Connection, FrameError, close_others, readable
from narrowgauge.harness.hosts.starter import Channel, import_if_present, run_and_exit, take_state
from narrowgauge.harness.machine.process import detach_process, end_with_parent, kill_group

_IMPORTED = (
    "narrowgauge.harness.running.worker", "narrowgauge.harness.running.save_failures",
    "narrowgauge.harness.operations.registry", "narrowgauge.harness.hosts.remote_host",
)  # fmt: skip


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
                    pid, connection = _fork(message, *descriptors)
                    running[pid] = connection
            elif ready in open_ends:
                killed.add(open_ends[ready])
                kill_group(open_ends[ready])
            else:
                with suppress(BlockingIOError):
                    os.read(woken, select.PIPE_BUF)
        killed -= _report(running)


def _fork(message: dict[str, Any], status: int, *others: int) -> tuple[int, Connection]:
    """Fork a process. Gives its process id, and the connection for its exit status."""
    pid = os.fork()
    if not pid:
        run_and_exit(partial(_call, message, *others))
    for other in others:
        os.close(other)
    return pid, Connection(socket.socket(fileno=status))


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


def _call(message: dict[str, Any], connection: int, *channels: int) -> None:
    """Call the function of a message."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    detach_process()
    close_others([connection, *channels])
    take_state(message["state"])
    module, _, name = message["target"].partition(":")
    given = [Channel(socket.socket(fileno=channel)) for channel in channels]
    getattr(import_module(module), name)(Connection(socket.socket(fileno=connection)), *given, *message["arguments"])
