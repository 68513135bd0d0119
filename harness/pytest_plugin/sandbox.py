"""Running a case at a time: in a worker process, which may die, or in this process for a debugger."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.hosts.frames import FrameError, readable
from narrowgauge.harness.machine.float_environment import restored_environment
from narrowgauge.harness.machine.process import prepare_process
from narrowgauge.harness.machine.processors import worker_gpu
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import Lost, Settings, Task, Worker, without_result

WAIT = 1.0
"""Seconds of a wait. Repeated waits let an interrupt take effect that arrives just before a wait."""
Note = Callable[[dict[str, Any]], None]
"""Called with the record of a failure before shrinking. This record counts if shrinking ends in an exception."""


class Runner(Protocol):
    """Runs cases in sequence."""

    loaded: list[dict[str, Any]]
    """What the backend has loaded (`harness.records.loaded_sources`). The reader empties the list."""

    def load(self) -> None:
        """Load the backend. Raises BackendError on failure."""

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """Record of a task. `timeout`: time limit in seconds; 0: the limit in the settings."""

    def close(self) -> None:
        """End the processes of the runner."""


class Sandbox:
    """Runs cases in a worker. A crash affects only its own case."""

    def __init__(self, settings: Settings, number: int = 0) -> None:
        """`number`: number of the worker in the run, from 0, which selects the GPU. The worker starts later."""
        self.settings = settings
        self._gpu = worker_gpu(number, settings.device)
        self._worker: Worker | None = None
        self.loaded: list[dict[str, Any]] = []
        self._problem = ""
        """Why no worker can start: a new worker could not load the backend either."""

    def load(self) -> None:
        """Start the worker and wait until it has loaded the backend. Raises BackendError on failure."""
        try:
            self._ready()
        except Lost as lost:
            self._drop()
            self._problem = str(lost)
        if self._problem:
            raise BackendError(self._problem)

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """Record of a task. `note` is not used: the judge survives the timeout of a case."""
        if self._worker is None:
            self.settings = replace(self.settings, sharing=sharing)
        try:
            self.load()
        except BackendError as error:
            return without_result(task, self.settings, "error", str(error))
        try:
            worker = self._given(task, timeout, sharing)
            while (record := self._answer(worker)) is None:
                pass
        except Lost as lost:
            self._drop()
            if not lost.loaded:
                self._problem = str(lost)
            return without_result(task, self.settings, lost.verdict, str(lost))
        except BaseException:  # after an interrupt the worker is in the middle of an abandoned case
            self._drop()
            raise
        if worker.last:
            self._drop()
        return record

    def close(self) -> None:
        """End the worker."""
        self._drop()

    def _ready(self) -> Worker:
        """The running worker, or a new worker. Raises Lost if it cannot load the backend."""
        if self._worker is None:
            self._worker = Worker(self.settings, self._gpu)
        while not self._worker.ready:
            self._answer(self._worker)
        return self._worker

    def _given(self, task: Task, timeout: float, sharing: int) -> Worker:
        """The worker, with the task sent to it."""
        worker = self._ready()
        try:
            worker.give(task, timeout, sharing)
        except FrameError:  # the judge died after its last record: send the task to a new worker
            self._drop()
            worker = self._ready()
            worker.give(task, timeout, sharing)
        return worker

    def _answer(self, worker: Worker) -> dict[str, Any] | None:
        ready = readable([worker.connection], time.monotonic() + min(worker.left(), WAIT))
        record = worker.receive() if ready else None
        self.loaded += worker.loaded
        worker.loaded.clear()
        return record

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.stop(kill=True)
            self._worker = None


class InProcess:
    """Runs cases in this process: a debugger can stop in the backend, and a crash ends the run."""

    def __init__(self, settings: Settings) -> None:
        import torch  # a run with workers does not import torch

        from narrowgauge.harness.running.save_failures import Keeper

        self.settings = settings
        self.loaded: list[dict[str, Any]] = []  # the modules of the backend are not told from those of the tests
        self._threads = torch.get_num_threads()
        self._keeper = Keeper(Path(settings.failures))

    def load(self) -> None:
        """Load the backend, once. Raises BackendError on failure."""
        if not hasattr(self, "_backend"):
            prepare_process(self.settings.workers)
            with restored_environment():
                self._backend = load_backend(self.settings.backend, self.settings.device, self.settings.schedules)

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """Record of a task, without a time limit. Raises BackendError as `load` does."""
        self.load()
        self._keeper.before = note
        return run_case(
            task.case, self._backend, device=self.settings.device, seed=task.seed, keeper=self._keeper,
            sharing=sharing, options=self.settings.options,
        ).to_dict()  # fmt: skip

    def close(self) -> None:
        """Restore torch's number of threads for the caller of pytest in this process."""
        import torch

        torch.set_num_threads(self._threads)
