"""The server of judges: a process that has imported torch, the reference and the checks, and forks judges.

The server is a fork of the starter of kernel hosts: a run imports torch once. The starter itself never imports the
reference, which kernel hosts must not have. The server runs no case and has no thread.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from narrowgauge.harness.cases.operations import OPERATIONS, OperationError, main_module
from narrowgauge.harness.hosts.frames import Connection, FrameError, close_others
from narrowgauge.harness.hosts.starter import Channel, end_child, import_if_present, run_and_exit, take_state
from narrowgauge.harness.machine.process import detach_process, end_with_parent

_IMPORTED = (
    "narrowgauge.harness.running.worker", "narrowgauge.harness.running.save_failures",
    "narrowgauge.harness.operations.registry", "narrowgauge.harness.hosts.remote_host",
)  # fmt: skip


def main(descriptor: int) -> None:
    """Fork and end processes as the run says, until the run ends."""
    end_with_parent()
    gc.disable()
    for name in _IMPORTED:
        import_module(name)
    for name in OPERATIONS:
        with suppress(OperationError):  # the judge of a case of this operation reports the error
            main_module(name)
    gc.freeze()  # a collection in a judge would copy every page
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run = Connection(socket.socket(fileno=descriptor))
    processes: dict[int, int] = {}
    """Process ids by the numbers of the run."""
    while True:
        try:
            message, descriptors = run.receive()
        except FrameError:
            return
        if "preload" in message:
            import_if_present(message["preload"])
        elif "target" in message:
            processes[message["number"]] = pid = os.fork()
            if not pid:
                run_and_exit(partial(_call, message, *descriptors))
            for end in descriptors:
                os.close(end)
        else:
            pid = processes.pop(message["number"], 0)  # 0: a process of an earlier server, which ended with it
            status = end_child(pid, message["wait"]) if pid else -signal.SIGKILL
            with suppress(FrameError):
                run.send({"number": message["number"], "status": status})


def _call(message: dict[str, Any], connection: int, *channels: int) -> None:
    """Call the function of a message."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    detach_process()
    close_others([connection, *channels])
    take_state(message["state"])
    module, _, name = message["target"].partition(":")
    given = [Channel(socket.socket(fileno=channel)) for channel in channels]
    getattr(import_module(module), name)(Connection(socket.socket(fileno=connection)), *given, *message["arguments"])
