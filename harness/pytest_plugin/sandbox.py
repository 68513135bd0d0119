"""Cases one at a time: in a worker of their own, which may die, or in this process, for a debugger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.machine.processors import gpu_of
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import Lost, Settings, Task, Worker, prepare_process, without_result

WAIT = 1.0
"""Seconds that it waits at a time. An interrupt between Python's last look and the wait itself is seen after it."""
Note = Callable[[dict[str, Any]], None]
"""Is given the record of a failure before it is shrunk: it counts if that ends in an exception."""


class Runner(Protocol):
    """Runs one case after the other."""

    def load(self) -> None:
        """Load the backend. Raises BackendError where that is impossible."""

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """The record of a task that may take `timeout` seconds (0: as the settings have it)."""

    def close(self) -> None:
        """End what was started."""


class Sandbox:
    """One worker, and another where it dies: a case costs itself, whatever it does."""

    def __init__(self, settings: Settings, number: int = 0) -> None:
        """`number`: which of the run's workers it is, from 0; it decides the GPU. Starts nothing yet."""
        self.settings = settings
        self._gpu = gpu_of(number, settings.device)
        self._worker: Worker | None = None
        self._problem = ""
        """Why there cannot be a worker: others would not load the backend either."""

    def load(self) -> None:
        """Start the worker and wait until it has loaded the backend. Raises BackendError where it cannot."""
        try:
            self._ready()
        except Lost as lost:
            self._drop()
            self._problem = str(lost)
        if self._problem:
            raise BackendError(self._problem)

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """The record of a task; `note` is not called, as a case that is ended leaves its failure."""
        self.settings = replace(self.settings, sharing=sharing)
        try:
            self.load()
        except BackendError as error:
            return without_result(task, self.settings, "error", str(error))
        try:
            worker = self._given(task, timeout)
            while (record := self._answer(worker)) is None:
                pass
        except Lost as lost:
            found = self._lost(task, lost)
            self._drop()
            return found
        except BaseException:  # an interrupt: the worker is in the midst of a case that nobody waits for
            self._drop()
            raise
        if worker.last:
            self._drop()
        return record

    def _lost(self, task: Task, lost: Lost) -> dict[str, Any]:
        """The record of a task that gave none."""
        if self._worker is None or not lost.loaded:
            self._problem = str(lost)
            return without_result(task, self.settings, "error", str(lost))
        if self._worker.so_far is not None:
            self.settings = replace(self.settings, failures="")  # the next one would die of it again
        return self._worker.loss(lost)

    def close(self) -> None:
        """End the worker."""
        self._drop()

    def _ready(self) -> Worker:
        """The worker, started where there is none. Raises Lost where it does not load the backend."""
        if self._worker is None:
            self._worker = Worker(self.settings, self._gpu)
        while not self._worker.ready:
            self._answer(self._worker)
        return self._worker

    def _given(self, task: Task, timeout: float) -> Worker:
        """The worker that has taken the task."""
        worker = self._ready()
        try:
            worker.give(task, timeout)
        except OSError:  # it died after its last record: another one takes the task
            self._drop()
            worker = self._ready()
            worker.give(task, timeout)
        return worker

    def _answer(self, worker: Worker) -> dict[str, Any] | None:
        return worker.receive() if worker.connection.poll(min(worker.left(), WAIT)) else None

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.stop(kill=True)
            self._worker = None


class InProcess:
    """This process: a debugger stops in the backend, and a crash ends the run."""

    def __init__(self, settings: Settings) -> None:
        import torch  # which a run that has workers does without

        from narrowgauge.harness.running.save_failures import Keeper

        self.settings = settings
        self._threads = torch.get_num_threads()
        self._keeper = Keeper(Path(settings.failures))

    def load(self) -> None:
        """Load the backend, once. Raises BackendError where that is impossible."""
        if not hasattr(self, "_backend"):
            prepare_process(self.settings.workers)
            self._backend = load_backend(self.settings.backend, self.settings.device, self.settings.schedules)

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """The record of a task. Nothing here ends a case that hangs. Raises BackendError as `load` does."""
        self.load()
        self._keeper.before = note
        return run_case(
            task.case, self._backend, device=self.settings.device, seed=task.seed, keeper=self._keeper, sharing=sharing
        ).to_dict()

    def close(self) -> None:
        """Give torch the threads back that it had: who called pytest in this process goes on."""
        import torch

        torch.set_num_threads(self._threads)
