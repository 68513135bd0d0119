"""Running a case at a time: in a worker process, which may die, or in this process for a debugger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.machine.float_environment import restored_environment
from narrowgauge.harness.machine.process import prepare_process
from narrowgauge.harness.machine.processors import worker_gpu
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.supervisor import Died
from narrowgauge.harness.running.worker import Lost, Settings, Task, Worker, without_result

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
            self._lose(lost)
            raise BackendError(self._problem) from lost

    def run(self, task: Task, *, timeout: float, sharing: int, note: Note) -> dict[str, Any]:
        """Record of a task. `note` is not used: the judge survives the timeout of a case."""
        if self._worker is None:
            self.settings = replace(self.settings, sharing=sharing)
        try:
            worker = self._ready()
            try:
                worker.give(task, timeout, sharing)
            except Died:  # the judge died after its last record: send the task to a new worker
                self.close()
                worker = self._ready()
                worker.give(task, timeout, sharing)
            record = worker.record()
            assert record is not None
        except Lost as lost:
            self._lose(lost)
            return without_result(task, self.settings, lost.verdict if lost.loaded else "error", str(lost))
        except BaseException:  # after an interrupt the worker is in the middle of an abandoned case
            self.close()
            raise
        if worker.last:
            self.close()
        return record

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _ready(self) -> Worker:
        """The running worker, or a new worker. Raises Lost if it cannot load the backend, and again after that."""
        if self._problem:
            raise Lost("error", self._problem, loaded=False)
        if self._worker is None:
            self._worker = Worker(self.settings, self._gpu, self.loaded.append)
        if not self._worker.ready:
            self._worker.record()
        return self._worker

    def _lose(self, lost: Lost) -> None:
        self.close()
        if not lost.loaded:
            self._problem = str(lost)


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
