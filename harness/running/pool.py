"""Cases over several workers. A case that ends its kernel host costs only itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import estimated_seconds
from narrowgauge.harness.checks.statistics.holm import count_chance_cases
from narrowgauge.harness.machine.processors import worker_gpu
from narrowgauge.harness.running.queue import GPU_JUDGES, Queue
from narrowgauge.harness.running.supervisor import Died, late_or_readable, preload
from narrowgauge.harness.running.worker import Lost, OnRecord, Settings, Task, Worker, without_result

__all__ = ["OnRecord", "Settings", "Task", "run_cases", "run_tasks"]

START = {"cpu": 0.5, "cuda": 10.0}
"""Seconds of a core for the start of a worker on each device. On a CPU: 4 cases with 4 workers take 1.5 to 2 s more
than with one, on 2 cores under load. On a GPU the value is an upper bound: 1040 small cases with 40 workers on two H200
took 485 s, and 12 s each if the cases took nothing."""


def run_cases(
    cases: Sequence[Case],
    settings: Settings,
    on_record: OnRecord,
    on_loaded: OnRecord = lambda news: None,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Run every case on the inputs of the settings' seed, as `run_tasks` does; the records, in the order they came."""
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        on_record(record)

    run_tasks([Task(case, settings.seed) for case in cases], settings, keep, on_loaded, seconds)
    return records


def run_tasks(
    tasks: Iterable[Task],
    settings: Settings,
    on_record: OnRecord,
    on_loaded: OnRecord = lambda news: None,
    seconds: float = math.inf,
) -> None:
    """Run every task and hand every record to `on_record` at once: no record is kept here. `on_loaded` gets the sources
    loaded by the backend (`harness.records.loaded_sources`), before the record of the loading case.

    A run begins with as many workers as the tasks are worth (`worthwhile_workers`). Another worker starts whenever the
    workers were busy for as long as a start takes: the time of a task is an estimate, and kernels may be compiled.
    A worker whose judge dies, or gives no record in time, is replaced; its task gets the verdict `crash` or `timeout`.
    If the new worker cannot load the backend, the remaining tasks are errors. An interrupt, and the end of `seconds`,
    end the run early and keep all records. Raises BackendError if the backend cannot be loaded at the start.
    """
    given, until = list(tasks), time.monotonic() + seconds
    settings = replace(settings, sharing=settings.sharing or count_chance_cases(task.case for task in given))
    finished = 0
    gpus = [worker_gpu(number, settings.device) for number in range(min(settings.workers, len(given)))]
    for module in dict.fromkeys(module for task in given for module in task.case.preloaded):
        preload(module)
    waiting = Queue(given, settings.device, len(set(gpus)))
    started = worthwhile_workers(given, settings)
    workers = [Worker(settings, gpu, on_loaded) for gpu in gpus[:started]]
    busy_since = float("inf")

    def finish(record: dict[str, Any]) -> None:
        nonlocal finished
        finished += 1
        on_record(record)

    def grow() -> None:
        """Start another worker after a time of work with all workers."""
        nonlocal started, busy_since
        now = time.monotonic()
        if not all(worker.ready for worker in workers) or not waiting or started == len(gpus):
            busy_since = float("inf")
        elif busy_since == float("inf"):
            busy_since = now
        elif now - busy_since >= START[settings.device]:
            workers.append(Worker(settings, gpus[started], on_loaded))
            started += 1

    def replaced(worker: Worker) -> None:
        worker.stop()
        workers.remove(worker)
        if waiting:
            workers.append(Worker(settings, worker.gpu, on_loaded))

    def lose(worker: Worker, lost: Lost) -> None:
        if not lost.loaded and not finished:
            raise BackendError(str(lost))
        if not lost.loaded:
            while task := waiting.take():
                finish(without_result(task, settings, "error", str(lost)))
        elif (task := worker.task) is not None:
            finish(without_result(task, settings, lost.verdict, str(lost)))
        replaced(worker)

    def feed(worker: Worker) -> None:
        worker.task = None
        if worker.last:
            replaced(worker)
            return
        running = [other.task for other in workers if other.task is not None]
        task = waiting.take(running, spared=is_spared(worker, workers))
        if task is None:  # other workers have the last tasks
            worker.finish()
            workers.remove(worker)
            return
        worker.judges_on_gpu |= waiting.on_gpu(task)
        try:
            worker.give(task)
        except Died:  # the judge died after its last record: another worker takes the task
            waiting.put_back(task)
            replaced(worker)

    try:
        while workers and time.monotonic() < until:
            for worker in [worker for worker in workers if worker.stopped]:
                lose(worker, Lost("timeout", "the judge of the case was stopped by another process", loaded=True))
            for worker in late_or_readable(workers):
                try:
                    record = worker.record()
                except Lost as lost:
                    lose(worker, lost)
                    continue
                if record is not None:
                    finish(record)
                if worker.room is not None:
                    waiting.room = min(worker.room, waiting.room or worker.room)
                if record is not None or worker.task is None:
                    feed(worker)
            grow()
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            worker.stop()


def is_spared(worker: Worker, workers: Sequence[Worker]) -> bool:
    """Whether a worker has not yet used its GPU, and enough workers have."""
    judges = sum(other.judges_on_gpu and other.gpu == worker.gpu for other in workers)
    return not worker.judges_on_gpu and judges >= GPU_JUDGES


def worthwhile_workers(tasks: Sequence[Task], settings: Settings) -> int:
    """Number of workers, up to that of the settings, for which the tasks take as long as the starts of the workers."""
    seconds = sum(estimated_seconds(task.case) for task in tasks)
    return min(settings.workers, len(tasks), 1 + int(seconds / START[settings.device]))
