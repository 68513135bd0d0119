"""Starting and ending kernel hosts: a process with torch imported forks a process for each judge, which forks hosts.

The starter runs no backend, no kernel and no thread. A fork costs some milliseconds; an interpreter that imports torch
takes seconds. A new host gets a copy of the starter's fresh state, whatever an earlier host did. The starter also forks
servers, such as the process that forks judges (`harness.running.judge_server`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from narrowgauge.harness.hosts.frames import Connection, FrameError, close_others, pair, readable
from narrowgauge.harness.machine.process import (
    KILLED,
    adopt_orphans,
    allow_reading,
    detach_process,
    end_with_parent,
    interpreter,
    kill_group,
)
from narrowgauge.harness.machine.processors import VISIBLE_DEVICES

_IMPORTED = ("torch", "numpy.random", "narrowgauge.harness.hosts.serve")
_KERNELS = "narrowgauge.native.ops"
"""Modules imported for hosts alone, after the fork of the first server: both then import at the same time."""
_REMOVE = 0
"""IPC_RMID of linux/ipc.h."""
_MARK = "NARROWGAUGE_STARTER"
"""Environment variable with a number of its own in the starter and in all its descendants."""
_POLL = 0.02
"""Seconds between two checks of a process about to end."""


class StarterError(Exception):
    """The parent of hosts does not answer."""


class Channel:
    """A connection to the starter, for the hosts of a judge: the end of any host ends all. Threads may share it."""

    def __init__(self, end: socket.socket) -> None:
        self._connection = Connection(end)
        self._lock = threading.Lock()

    def start(
        self,
        descriptors: list[int],
        *,
        environment: Mapping[str, str] | None = None,
        hidden: Sequence[str] | None = None,
        gpu: str = "",
        deadline: float = float("inf"),
    ) -> tuple[int, str]:
        """Start a host. Returns its process id, and the mechanism of its separation (`harness.hosts.separation`).

        `descriptors`: its connection, its output, and the file of its stacks. `environment`: variables of a fresh
        interpreter, for libraries loaded at its start; None: a fork. `hidden`: folders of the run hidden from a
        separated host; None: the host is not separated, and the mechanism is empty. `gpu`: name of the only GPU of the
        host; empty: those of this process.
        """
        state = process_state()
        state["environment"] |= {VISIBLE_DEVICES: gpu} if gpu else {}
        message = {
            "op": "start", "state": state, "fresh": None if environment is None else dict(environment),
            "hidden": None if hidden is None else list(hidden),
        }  # fmt: skip
        answer = self._ask(message, descriptors, deadline)
        return int(answer["pid"]), str(answer["separation"])

    def end(self, pid: int, *, wait: float = 0.0) -> int | None:
        """Kill a host, after `wait` seconds, and its descendants. Gives its exit status, negative for a signal."""
        answer = self._ask({"op": "end", "pid": pid, "wait": wait}, [], time.monotonic() + wait + KILLED + 5)
        return None if answer["status"] is None else int(answer["status"])

    def close(self) -> None:
        """End the connection, and all hosts of the judge."""
        self._connection.close()

    def _ask(self, message: dict[str, Any], descriptors: list[int], deadline: float) -> dict[str, Any]:
        try:
            with self._lock:
                self._connection.send(message, descriptors=descriptors)
                return self._connection.receive(deadline=deadline)[0]
        except (FrameError, TimeoutError) as error:
            raise StarterError(f"the process that starts kernel hosts does not answer: {error}") from error


class Starter:
    """The starter, as seen by the run."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self._mark = secrets.token_hex(16)
        self._process = subprocess.Popen(
            interpreter(f"{__name__}:main", theirs.fileno()), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True, env=os.environ | {_MARK: self._mark},
        )  # fmt: skip
        theirs.close()
        self._connection = Connection(ours)
        self._servers: dict[str, Connection] = {}

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def preload(self, module: str) -> None:
        """Import a module, for all processes forked later. A module that is missing is left out."""
        self._connection.send({"op": "preload", "module": module})

    def connect(self) -> socket.socket:
        """The judge's end of a new channel."""
        ours, theirs = pair()
        self._connection.send({"op": "judge"}, descriptors=[theirs.fileno()])
        theirs.close()
        return ours

    def server(self, module: str) -> Connection:
        """Connection to a fork that runs the function `main` of a module. The first call starts the fork."""
        if module not in self._servers:
            ours, theirs = pair()
            self._connection.send({"op": "server", "module": module}, descriptors=[theirs.fileno()])
            theirs.close()
            self._servers[module] = Connection(ours)
        return self._servers[module]

    def drop_server(self, module: str) -> None:
        """End a server. The next call of `server` starts another."""
        if (connection := self._servers.pop(module, None)) is not None:
            connection.close()

    def close(self) -> None:
        """End the process, all servers and all hosts, and processes left behind by a backend that killed their
        parents."""
        if not readable([self._connection], 0.0):  # it still imports torch, and has no children
            self._process.kill()
        for module in list(self._servers):
            self.drop_server(module)
        self._connection.close()
        try:
            self._process.wait(KILLED)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _end_marked(self._mark)


_starter: Starter | None = None


def starter() -> Starter:
    """The starter of this process. The starter starts with the first call, and again if it has ended. The system ends
    the starter with the thread of this call."""
    global _starter  # noqa: PLW0603
    if _starter is not None and not _starter.alive:
        close_starter()
    if _starter is None:
        atexit.register(close_starter)
        _starter = Starter()
    return _starter


def close_starter() -> None:
    """End the starter of this process, if any."""
    global _starter  # noqa: PLW0603
    if _starter is not None:
        _starter.close()
        _starter = None


# ---- in the starter --------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork a process per judge, until the run ends."""
    end_with_parent()
    gc.disable()  # imports make no garbage, and collections take a tenth of the time of importing torch
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the run decides what a signal means
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _IMPORTED:
            import_module(name)
    _warm_up()
    gc.freeze()  # a collection in a host would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the exit status of these processes
    adopt_orphans()  # a backend can kill the process that would end what its host leaves behind
    run = Connection(socket.socket(fileno=descriptor))
    forked: dict[int, int] = {}
    """Forks of this process, by file descriptors that become readable at their end."""
    channels: dict[int, socket.socket] = {}
    """Channels before the judge's first request for a host: most judges never use their second channel."""
    with suppress(FrameError):
        run.send({"ready": True})
        while True:
            for ready in readable([run, *channels, *forked], float("inf")):
                if ready in forked:
                    os.close(ready)
                    del forked[ready]
                    _end_descendants(forked.values())
                    continue
                if ready is not run:
                    with channels.pop(ready) as channel:
                        if channel.recv(1, socket.MSG_PEEK):  # else the judge has ended
                            forked |= _fork(_start_hosts, ready)
                    continue
                message, descriptors = run.receive()
                if message["op"] == "judge" and _KERNELS not in sys.modules:
                    import_module(_KERNELS)
                    gc.freeze()
                if message["op"] == "preload":
                    import_if_present(message["module"])
                for end in descriptors:
                    if message["op"] == "judge":
                        channels[end] = socket.socket(fileno=end)
                    else:
                        forked |= _fork(import_module(message["module"]).main, end)
                        os.close(end)
    _wait_for_children(forked.values())


def _fork(function: Callable[[int], None], end: int) -> dict[int, int]:
    """Call a function with a connection, by its file descriptor, in a fork. Gives its process id by a file descriptor
    that can be read at its end."""
    if not (pid := os.fork()):
        gc.enable()
        close_others([end])
        run_and_exit(partial(function, end))
    return {os.pidfd_open(pid): pid}


def import_if_present(module: str) -> None:
    """Import a module, for all forks of this process. A module that is missing is left out."""
    with suppress(ImportError):
        import_module(module)
        gc.freeze()


def process_state() -> dict[str, Any]:
    """The folder, the import path and the environment variables of this process, for `take_state` of another."""
    return {"folder": os.getcwd(), "path": sys.path, "environment": dict(os.environ)}


def take_state(state: dict[str, Any]) -> None:
    """Take the folder, the import path and the environment variables of a second process."""
    os.chdir(state["folder"])
    os.environ.clear()
    os.environ.update(state["environment"])
    sys.path[:] = state["path"]


def run_and_exit(function: Callable[[], None]) -> None:
    """Call a function in a fork, and end the process with its exit status. Does not return."""
    status = 1
    try:
        function()
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


def _warm_up() -> None:
    """Make torch give its only warning of read-only memory."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(1), dtype=torch.uint8)


def _wait_for_children(forked: Collection[int]) -> None:
    """Wait until the judges and their parents of hosts have ended. End all remaining processes."""
    until = time.monotonic() + KILLED
    while not set(forked).isdisjoint(children(os.getpid())) and time.monotonic() < until:
        time.sleep(_POLL)
    _end_descendants()


def _start_hosts(descriptor: int) -> None:
    """Start and end the hosts of a judge, until the judge ends. A host that kills its parent costs its own judge."""
    end_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    judge = Connection(socket.socket(fileno=descriptor))
    with suppress(FrameError):
        while True:
            message, given = judge.receive()
            if message["op"] == "end":
                status = end_child(message["pid"], message["wait"])
                remove_shared_memory({message["pid"], *_end_descendants()})
                judge.send({"status": status})
                continue
            told, tell = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
            if not pid:
                run_and_exit(partial(_be_host, message, given, tell))
            for number in (*given, tell):
                os.close(number)
            with os.fdopen(told) as answer:  # the host writes before it loads the backend
                judge.send({"pid": pid, "separation": answer.read()})
    remove_shared_memory(_end_descendants())


def _be_host(message: dict[str, Any], descriptors: list[int], tell: int) -> None:
    """Serve as a host. `tell`: pipe for the mechanism of its separation."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection, output, stacks = descriptors
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    close_others([connection, stacks, tell])
    mark = os.environ[_MARK]
    take_state(message["state"])
    os.environ[_MARK] = mark
    if message["hidden"] is not None:
        from narrowgauge.harness.hosts.separation import separate

        os.write(tell, separate(message["hidden"]).encode())
    os.close(tell)
    detach_process()  # a separation ends the bond to the parent
    if message["fresh"] is not None:
        os.environ.update(message["fresh"])
        for kept in (connection, stacks):
            os.set_inheritable(kept, True)
        os.execve(sys.executable, interpreter(f"{__name__}:serve_on", connection, stacks), os.environ)
    serve_on(connection, stacks)


def serve_on(descriptor: int, stacks: int) -> None:
    """Serve the judge at the other end of a connection. The first message has the settings. `stacks`: file for the
    stacks of this process at its end."""
    from narrowgauge.harness.hosts.output import write_stacks
    from narrowgauge.harness.hosts.serve import serve

    end = socket.socket(fileno=descriptor)
    allow_reading(end)
    connection = Connection(end)
    with suppress(FrameError):
        settings, _ = connection.receive()
        # A sanitizer has its own handlers of fatal signals.
        write_stacks(stacks, fatal=not settings["sanitized"])
        serve(connection, settings)


def end_child(pid: int, wait: float) -> int | None:
    """Wait `wait` seconds for the end of a child, then kill it and its group. Gives its exit status."""
    status = _exit_status(pid, wait)
    kill_group(pid)
    return _exit_status(pid, KILLED) if status is None else status


def _exit_status(pid: int, seconds: float) -> int | None:
    """The exit status of a child, negative for a signal. None if the child still runs after this time."""
    until = time.monotonic() + seconds
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # it ended with another host
            return None
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(min(_POLL, seconds / 10))


def end_orphans_at_exit() -> None:
    """Adopt the processes that backends leave behind, also if a backend kills the starter, and end them at the exit of
    this process."""
    adopt_orphans()
    earlier = children(os.getpid())
    atexit.register(lambda: _end_descendants(earlier))


def remove_shared_memory(creators: Collection[int]) -> None:
    """Remove the System V shared memory made by these processes: the memory outlives its processes."""
    with suppress(OSError), open("/proc/sysvipc/shm", encoding="ascii") as file:
        for _, number, _, _, creator, *_ in map(str.split, file.readlines()[1:]):
            if int(creator) in creators:
                ctypes.CDLL(None).shmctl(int(number), _REMOVE, None)


def _end_descendants(kept: Collection[int] = ()) -> set[int]:
    """Kill the children of this process beside `kept`, and the orphans of each killed child. Gives all of them."""
    until, ended = time.monotonic() + KILLED, set[int]()
    while (found := set(children(os.getpid())) - set(kept)) and time.monotonic() < until:
        ended |= found
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return ended


def _end_marked(mark: str) -> None:
    """Kill the processes started with this value of `_MARK`, and their forks."""
    until = time.monotonic() + KILLED
    while (found := [pid for pid in processes() if _began_with(pid, f"{_MARK}={mark}")]) and time.monotonic() < until:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _began_with(pid: int, variable: str) -> bool:
    """Whether a readable process was started with an environment variable."""
    try:
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def processes() -> list[int]:
    """Process ids of all processes. Empty on systems without /proc."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if Path("/proc").is_dir() else []


def children(parent: int) -> list[int]:
    """Process ids of the children of a process. Empty on systems without /proc."""
    return [pid for pid in processes() if parent_of(pid) == parent]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if the process has ended."""
    return int((_status(pid) or ["", "0"])[1])


def state_of(pid: int) -> str:
    """The state of a process as in /proc: T for stopped, t for traced. Empty if the process has ended."""
    return (_status(pid) or [""])[0]


def _status(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat behind the name."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()
