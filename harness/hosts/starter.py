"""Starting and ending kernel hosts: a process with torch imported forks them, and is their parent.

The starter runs no backend, no kernel and no thread. A fork costs some milliseconds, where an interpreter that imports
torch takes seconds. A new host gets a copy of the starter's fresh state, whatever an earlier host did.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from narrowgauge.harness.hosts.frames import Connection, FrameError, close_others, pair
from narrowgauge.harness.machine.process import KILLED, adopt_orphans, detach_process, end_with_parent

_IMPORTED = ("torch", "numpy.random", "torch._dynamo", "narrowgauge.harness.hosts.serve", "narrowgauge.native.ops")
"""torch imports `torch._dynamo` at the first allocation that a guard sees, which takes a second."""
_POLL = 0.05


class StarterError(Exception):
    """The process that starts hosts does not answer."""


class Channel:
    """A connection to the starter, for one judge."""

    def __init__(self, end: socket.socket) -> None:
        self._connection = Connection(end)

    def start(
        self, descriptors: list[int], *, environment: Mapping[str, str] | None = None, deadline: float = float("inf")
    ) -> int:
        """Start a host, and give its process id. `descriptors`: its connection, its output, and further open files.

        `environment`: variables of a fresh interpreter, for libraries that load at its start; None: a fork.
        """
        state = {"folder": os.getcwd(), "path": sys.path, "environment": dict(os.environ)}
        message = {"op": "start", "state": state, "fresh": None if environment is None else dict(environment)}
        return int(self._ask(message, descriptors, deadline)["pid"])

    def end(self, pid: int, *, wait: float = 0.0) -> int | None:
        """Kill a host, after `wait` seconds, and its descendants. Gives its exit status, negative for a signal."""
        answer = self._ask({"op": "end", "pid": pid, "wait": wait}, [], time.monotonic() + wait + KILLED + 5)
        return None if answer["status"] is None else int(answer["status"])

    def close(self) -> None:
        """End the connection, and all hosts of the judge."""
        self._connection.close()

    def _ask(self, message: dict[str, Any], descriptors: list[int], deadline: float) -> dict[str, Any]:
        try:
            self._connection.send(message, descriptors=descriptors)
            return self._connection.receive(deadline=deadline)[0]
        except (FrameError, TimeoutError) as error:
            raise StarterError(f"the process that starts kernel hosts does not answer: {error}") from error


class Starter:
    """The starter, as seen by the process that runs cases."""

    def __init__(self) -> None:
        ours, theirs = pair()
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[2])"
        code += "; from narrowgauge.harness.hosts.starter import main; main(int(sys.argv[1]))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), json.dumps(sys.path)], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._connection = Connection(ours)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """The judge's end of a new channel."""
        ours, theirs = pair()
        self._connection.send({"op": "judge"}, descriptors=[theirs.fileno()])
        theirs.close()
        return ours

    def close(self) -> None:
        """End the process and all hosts."""
        self._connection.close()
        try:
            self._process.wait(KILLED)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_starter: Starter | None = None


def starter() -> Starter:
    """The starter of this process. It starts with the first call, and again if it has ended. The system ends it with
    the thread of that call."""
    global _starter  # noqa: PLW0603
    if _starter is not None and not _starter.alive:
        close_starter()
    if _starter is None:
        atexit.register(close_starter)
        _starter = Starter()
    return _starter


def close_starter() -> None:
    """End the starter of this process, if there is one."""
    global _starter  # noqa: PLW0603
    if _starter is not None:
        _starter.close()
        _starter = None


# ---- in the starter --------------------------------------------------------------------------------------------------


@dataclass
class _Hosts:
    """The hosts of all judges."""

    judge_of: dict[int, Connection] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    ending: dict[int, tuple[Connection, float, float]] = field(default_factory=dict)
    """By process: the judge that waits for its end, the time of the kill, and the time at which to give up."""


def main(descriptor: int) -> None:
    """Start and end hosts until the process that runs cases ends."""
    end_with_parent()
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the run decides what a signal means
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _IMPORTED:
            import_module(name)
    _warm_up()
    gc.collect()
    gc.freeze()  # a collection in a host would copy every page
    run = Connection(socket.socket(fileno=descriptor))
    hosts = _Hosts()
    wake, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(run, selectors.EVENT_READ, None)
        selector.register(wake, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select(_POLL if hosts.ending else None):
                if key.fileobj is run:
                    try:
                        _, (judge,) = run.receive()
                    except FrameError:  # the run has ended
                        _end_all(hosts)
                        return
                    selector.register(Connection(socket.socket(fileno=judge)), selectors.EVENT_READ, None)
                elif key.fileobj == wake:
                    with suppress(BlockingIOError):
                        os.read(wake, 1 << 12)
                else:
                    _answer(key.fileobj, hosts, partial(selector.unregister, key.fileobj))
            _reap(hosts)


def _warm_up() -> None:
    """Make torch give its warning of read-only memory, which it gives once."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(1), dtype=torch.uint8)


def _answer(judge: Any, hosts: _Hosts, forget: Callable[[], object]) -> None:
    """Do what a judge asks. The hosts of a judge that has ended are killed."""
    try:
        message, descriptors = judge.receive()
    except FrameError:
        forget()
        judge.close()
        for pid in [pid for pid, owner in hosts.judge_of.items() if owner is judge]:
            _kill(pid)
        return
    if message["op"] == "end":
        now = time.monotonic()
        hosts.ending[message["pid"]] = (judge, now + message["wait"], now + message["wait"] + KILLED)
        return
    pid = os.fork()
    if not pid:
        _be_host(message, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    hosts.judge_of[pid] = judge
    judge.send({"pid": pid})


def _be_host(message: dict[str, Any], descriptors: list[int]) -> None:
    """Become a host. Does not return."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        detach_process()
        connection, output = descriptors[:2]
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        close_others([connection, *descriptors[2:]])
        state = message["state"]
        os.chdir(state["folder"])
        os.environ.clear()
        os.environ.update(state["environment"])
        sys.path[:] = state["path"]
        if message["fresh"] is not None:
            os.environ.update(message["fresh"])
            os.set_inheritable(connection, True)
            code = "import json, sys; sys.path[:] = json.loads(sys.argv[2])"
            code += "; from narrowgauge.harness.hosts.starter import serve_on; serve_on(int(sys.argv[1]))"
            os.execve(sys.executable, [sys.executable, "-c", code, str(connection), json.dumps(sys.path)], os.environ)
        serve_on(connection)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        with suppress(Exception):
            traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def serve_on(descriptor: int) -> None:
    """Serve the judge at the other end of a connection. The first message has the settings."""
    from narrowgauge.harness.hosts.serve import serve

    connection = Connection(socket.socket(fileno=descriptor))
    with suppress(FrameError):
        settings, _ = connection.receive()
        serve(connection, settings)


def _kill(pid: int) -> None:
    """Kill a host and its process group."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _reap(hosts: _Hosts) -> None:
    """Take the exit statuses of ended processes, kill hosts that are to end, and answer their judges."""
    ended_one = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            break
        if pid in hosts.judge_of:
            ended_one = True
            hosts.statuses[pid] = os.waitstatus_to_exitcode(status)
            _kill(pid)  # its process group
    now = time.monotonic()
    for pid, (judge, kill_at, give_up_at) in list(hosts.ending.items()):
        found = hosts.statuses.get(pid)
        if found is None and pid in hosts.judge_of and now < give_up_at:
            if now >= kill_at:
                _kill(pid)
            continue
        del hosts.ending[pid]
        hosts.judge_of.pop(pid, None)
        hosts.statuses.pop(pid, None)
        with suppress(FrameError):
            judge.send({"status": found})
    if ended_one:
        _kill_orphans(hosts)


def _kill_orphans(hosts: _Hosts) -> None:
    """Kill the processes that ended hosts left behind: this process has adopted them."""
    for pid in children(os.getpid()):
        if pid not in hosts.judge_of or pid in hosts.statuses:
            _kill(pid)


def _end_all(hosts: _Hosts) -> None:
    for _ in range(100):  # a killed process hands over its children
        found = children(os.getpid())
        if not found:
            return
        for pid in found:
            _kill(pid)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    """Process ids of the children of a process. Empty on systems without /proc."""
    found = []
    for entry in os.listdir("/proc") if Path("/proc").is_dir() else []:
        if entry.isdigit() and parent_of(int(entry)) == parent:
            found.append(int(entry))
    return found


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(status[status.rindex(b")") + 2 :].split()[1])
