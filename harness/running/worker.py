"""A worker: a process that runs one case after the other, so that what ends it ends one case."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.memory import room
from narrowgauge.harness.machine.gpu_lock import lock_gpu, pop_gpu_error, probe_gpu, without_gpu_lock
from narrowgauge.harness.machine.processors import VISIBLE_DEVICES, cores
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running.sanitizer import Sanitizer, settle_sanitizer

if TYPE_CHECKING:
    from narrowgauge.harness.records.record import Record
    from narrowgauge.harness.running.save_failures import Keeper


@dataclass(frozen=True)
class Settings:
    """What every case of a run shares."""

    backend: str = "native"
    device: str = "cpu"
    seed: int = 0
    """Of the inputs, where a task does not name its own."""
    workers: int = 1
    timeout: float = 300.0
    """Seconds that one case may take."""
    input_path: str = ""
    """File of captured tensors, for cases made from one."""
    failures: str = ""
    """Folder into which failures are saved, shrunk; nothing where they are not."""
    schedules: int = 0
    """Ways to shuffle the threads of a block that each case runs through, seeded; 0: as the backend has it."""
    sanitize: bool = False
    """Whether the workers have the sanitizers, and build native kernels with them."""
    sharing: int = 0
    """Cases that share the run's false alarms; 0: `run_tasks` counts its tasks."""


@dataclass(frozen=True)
class Task:
    """What a worker does at once: one case on the inputs of one seed."""

    case: Case
    seed: int
    first: bool = False
    """Whether it is one of its kind that is run before others, on a GPU, to compile kernels: it waits for no turn."""


GRACE = 5.0
"""Seconds that a worker without work has to end by itself."""
KILLED = 30.0
"""Seconds that a killed worker has to be gone: a driver may hold it until a kernel is off the GPU."""
LOAD = 300.0
"""Seconds that a backend may take to load, or a case's timeout where that is more: some compile while they do."""
SO_FAR = "so far"
"""Before a record that counts if the process ends while the failure is shrunk."""
LAST = "last"
"""Before a record after which the process ends by itself: its GPU no longer answers."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_… of malloc.h: bytes that are free at the end of a heap, and bytes that are given a mapping of their own."""
_PARENT_DIES = 1
"""PR_SET_PDEATHSIG of linux/prctl.h. The parent is the run, or the server, which ends with the run."""
_PRELOADED = (
    "narrowgauge.harness.running.worker",
    "narrowgauge.harness.running.save_failures",
    "narrowgauge.harness.operations.registry",
    "narrowgauge.native.ops",
    "numpy.random",
    "torch._dynamo",
)
"""What every process needs. torch imports the last at the first allocation that a guard sees, which takes a second."""
_EXPENDABLE = "500"
"""oom_score_adj: where memory runs out, the system ends a worker rather than the run that holds the records."""


class Lost(Exception):
    """A worker that is of no more use: how its case ended, and why."""

    def __init__(self, verdict: str, message: str, *, loaded: bool) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.loaded = loaded
        """Whether it had loaded the backend; where it had not, another one would not either."""


class Worker:
    """The worker of a run, seen from the run."""

    room: int | None = None
    """Bytes of memory that it found when it was ready."""
    so_far: dict[str, Any] | None = None
    """The record of a failure that is being shrunk."""

    def __init__(self, settings: Settings, gpu: str = "") -> None:
        """Start the process, on the GPU of that name; it says whether it has loaded the backend before anything."""
        # Sanitizers come with the start of an interpreter, and the server has started. And no process can use CUDA
        # whose parent has as much as asked whether there is any, which a library may do as it is imported.
        alone = settings.sanitize or settings.device == "cuda"
        context: Any = multiprocessing.get_context("spawn") if alone else forkserver()
        environment = {} if alone else dict(os.environ)  # the server's may be older
        if gpu:
            environment[VISIBLE_DEVICES] = gpu
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, settings, environment), daemon=True)
        self._sanitizer = Sanitizer() if settings.sanitize else None
        with self._sanitizer.environment() if self._sanitizer else nullcontext():
            self.process.start()
        theirs.close()
        self.settings, self.gpu = settings, gpu
        self.task: Task | None = None
        self.ready = False
        self.last = False
        """Whether it ends by itself after the record that it gave."""
        self.since, self.limit = time.monotonic(), max(LOAD, settings.timeout)

    def give(self, task: Task, timeout: float = 0.0) -> None:
        """Give it a task and `timeout` seconds, or the settings'. Raises OSError where it has died meanwhile."""
        self.task, self.since, self.so_far = task, time.monotonic(), None
        self.limit = timeout or self.settings.timeout
        self.connection.send(task)

    def receive(self) -> dict[str, Any] | None:
        """Wait for its next word: the record of its task, or None. Raises Lost where there will be none."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(KILLED)
            how = ending(self.process.exitcode)
            words = f"the process died ({how})" if self.ready else f"a worker process died at its start ({how})"
            if self._sanitizer and (found := self._sanitizer.finding(self.process.pid)):
                words = f"sanitizer: {found}"
            raise Lost("crash", words, loaded=self.ready) from None
        if isinstance(answer, str):
            raise Lost("error", answer, loaded=False)
        if isinstance(answer, int):
            self.ready, self.room = True, answer
            return None
        if isinstance(answer, tuple):
            kind, record = answer
            if kind == SO_FAR:
                self.so_far = record
                return None
            self.last = True
            return dict(record)
        return dict(answer)

    def left(self) -> float:
        """Seconds that it has for what it does. Raises Lost where there are none."""
        left = self.since + self.limit - time.monotonic()
        if left > 0:
            return left
        if self.ready:
            raise Lost("timeout", f"no result after {self.limit:g} s", loaded=True)
        words = f"did not load within {self.limit:g} s; a longer --timeout gives it more"
        raise Lost("timeout", f"backend {self.settings.backend} {words}", loaded=False)

    def loss(self, task: Task, lost: Lost) -> dict[str, Any]:
        """The record of the task that was lost with the worker."""
        if self.so_far is not None:
            return self.so_far | {"save_note": f"not shrunk: at another shape, {lost.verdict}: {lost}"}
        return without_result(task, self.settings, lost.verdict, str(lost))

    def stop(self, *, kill: bool = False) -> None:
        """End the process and what it started: at once, or when it has read that there is no more."""
        if not kill:
            with suppress(OSError):  # it may be dead already
                self.connection.send(None)
            self.process.join(GRACE)
        with suppress(OSError, TypeError):  # no group of its own yet, or no process
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(KILLED)
        self.connection.close()
        if self._sanitizer:
            self._sanitizer.close()


def without_result(task: Task, settings: Settings, verdict: str, message: str) -> dict[str, Any]:
    """The record of a task that gave none."""
    record = new_record(task.case, backend=settings.backend, device=settings.device, seed=task.seed)
    record.verdict, record.message = verdict, message
    return record.to_dict()


def ending(exitcode: int | None) -> str:
    """How a process ended, in words."""
    if exitcode is None:
        return f"it does not end, though it was killed {KILLED:g} s ago"
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"signal {name}" + (", as where memory runs out" if name == "SIGKILL" else "")
    return f"exit status {exitcode}"


def prepare_process(workers: int) -> None:
    """Make this one of `workers` processes: its share of the cores for torch, and for the native kernels, which follow
    torch; and subnormal numbers kept, which some library may have switched off."""
    import torch

    _keep_memory()
    torch.set_flush_denormal(False)
    torch.set_num_threads(max(1, cores() // workers))


def _keep_memory() -> None:
    """Let freed memory be used again before the system has it back, which clears every page anew: of a product of 2^21
    outputs, judged on a CPU, that is a sixth of the time."""
    with suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        # Some releases take no threshold above half of what a thread's heap can have.
        if not mallopt(_MMAP_THRESHOLD, 1 << 30):
            mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, 1 << 29)


def forkserver(*modules: str) -> ForkServerContext:
    """What starts processes that have imported torch, and these modules, already.

    A fork of a process that has run torch, or spoken to a GPU, can hang; this server has imported it, and runs nothing.
    """
    context = multiprocessing.get_context("forkserver")
    ours = [name for name in ("pytest",) if name in sys.modules]  # a process imports what the main module does
    context.set_forkserver_preload([*_PRELOADED, *ours, *modules])
    return context


def _main(connection: Connection, settings: Settings, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what an interrupt means
    _detach()
    if settings.sanitize:
        settle_sanitizer()
    os.environ.update(environment)  # CUDA reads it at its first call, which nobody has made yet
    prepare_process(settings.workers)
    with suppress(EOFError, BrokenPipeError):  # the run is gone
        serve(connection, settings)


def _detach() -> None:
    """Be the head of a group that can be killed as one, end with the run, and before it where memory runs out."""
    os.setsid()
    # The server ends when nobody holds this: the run alone should, and not what the server started.
    held = getattr(multiprocessing.forkserver, "_forkserver", None)
    if (alive := getattr(held, "_forkserver_alive_fd", None)) is not None:
        os.close(alive)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE)


def serve(connection: Connection, settings: Settings) -> None:
    """Be a worker: tasks in, records out, until None comes."""
    from narrowgauge.harness.backends.backend import load_backend
    from narrowgauge.harness.inputs.capture import Captured
    from narrowgauge.harness.running.runner import run_case

    try:
        backend = load_backend(settings.backend, settings.device, settings.schedules)
        captures = Captured.load(settings.input_path) if settings.input_path else None
        found = room(settings.device)
    except Exception as error:
        connection.send(str(error))
        return
    connection.send(found)
    keeper, noted = _keeper(connection, settings)
    while (task := connection.recv()) is not None:
        noted.clear()
        with without_gpu_lock() if task.first else nullcontext():
            record = run_case(
                task.case, backend, device=settings.device, seed=task.seed, captures=captures, keeper=keeper,
                sharing=max(1, settings.sharing),
            )  # fmt: skip
        usable = settle(record)
        sys.stdout.flush()  # what a kernel printed belongs to its case
        sys.stderr.flush()
        if usable:
            connection.send(record.to_dict())
        elif noted:
            os._exit(1)  # it was at another shape, and the record so far is sent
        else:
            connection.send((LAST, record.to_dict()))
            os._exit(1)  # not by the libraries' own end, which may wait for the GPU


def _keeper(connection: Connection, settings: Settings) -> tuple[Keeper | None, list[str]]:
    """What saves failures, and a list that it puts a word into when it begins."""
    from narrowgauge.harness.running.save_failures import Keeper

    noted: list[str] = []

    def before(record: dict[str, Any]) -> None:
        noted.append(record["case"])
        connection.send((SO_FAR, record))

    return (Keeper(Path(settings.failures), before=before) if settings.failures else None), noted


def settle(record: Record) -> bool:
    """After a case: give back memory that ran out, and let a GPU's late error be its own. Whether the GPU goes on.

    A kernel's fault may show at the next use of the GPU only, and may leave a context in which nothing works again.
    """
    if record.device != "cuda":
        return True
    if "OutOfMemory" in record.message:
        gc.collect()
    late = pop_gpu_error()
    if late is None or (not late and record.verdict != "pass"):  # whose diagnosis takes no turns
        with lock_gpu(record.device):
            late = probe_gpu()
        pop_gpu_error()
    if not late:
        if "OutOfMemory" in record.message:
            import torch

            torch.cuda.empty_cache()
        return True
    usable = not probe_gpu()  # an error of one launch is told once, one of the context for ever
    before = f"; before that, {record.verdict}: {record.message.splitlines()[0]}" if record.message else ""
    if usable:
        record.verdict, record.message = "error", f"after the case the GPU reports {late}{before}"
    else:
        record.verdict, record.message = "crash", f"the GPU no longer answers this process: {late}{before}"
    return usable
