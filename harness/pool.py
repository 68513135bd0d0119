"""Cases over several processes. A process that dies or hangs costs its own case and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.backend import BackendError
from harness.case import Case
from harness.checks.holm import sharing
from harness.runner import new_record


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
    sharing: int = 1
    """Cases that share the run's false alarms: `run_tasks` counts them."""


@dataclass(frozen=True)
class Task:
    """What a worker does at once: one case on the inputs of one seed."""

    case: Case
    seed: int


GRACE = 5.0
"""Seconds that a worker without work has to end by itself."""
SO_FAR = "so far"
"""Before a record that counts if the process ends while the failure is shrunk."""
OnRecord = Callable[[dict[str, Any]], None]


def prepare_process(workers: int) -> None:
    """Make this one of `workers` processes: its share of the cores for torch, and for the native kernels, which follow
    torch; and subnormal numbers kept, which some library may have switched off."""
    import torch

    torch.set_flush_denormal(False)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _serve(connection: Connection, settings: Settings) -> None:
    """A worker: tasks in, records out, until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    prepare_process(settings.workers)
    from harness.backend import load_backend
    from harness.capture import Captured
    from harness.runner import run_case

    try:
        backend = load_backend(settings.backend, settings.device)
        captures = Captured.load(settings.input_path) if settings.input_path else None
    except Exception as error:
        connection.send(str(error))
        return
    connection.send("")
    keeper = None
    if settings.failures:
        from harness.keep import Keeper

        keeper = Keeper(Path(settings.failures), before=lambda record: connection.send((SO_FAR, record)))
    while (task := connection.recv()) is not None:
        record = run_case(
            task.case, backend, device=settings.device, seed=task.seed, captures=captures, keeper=keeper,
            sharing=settings.sharing,
        )  # fmt: skip
        if keeper is not None and record.verdict == "fail" and not _usable(settings.device):
            os._exit(1)  # at another shape the kernel left a GPU that answers no more; the record so far is sent
        connection.send(record.to_dict())


def _usable(device: str) -> bool:
    """Whether the device still answers."""
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class _Worker:
    so_far: dict[str, Any] | None = None
    """The record of a failure that is being shrunk."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.ready = False
        self.since = 0.0

    def give(self, task: Task) -> None:
        self.task, self.since, self.so_far = task, time.monotonic(), None
        self.connection.send(task)

    def stop(self, *, kill: bool = False) -> None:
        if not kill:
            with suppress(OSError):  # it may be dead already
                self.connection.send(None)
            self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_cases(cases: Sequence[Case], settings: Settings, on_record: OnRecord) -> list[dict[str, Any]]:
    """Run every case on the inputs of the settings' seed, as `run_tasks` does; the records, in the order they came."""
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        on_record(record)

    run_tasks([Task(case, settings.seed) for case in cases], settings, keep)
    return records


def run_tasks(tasks: Iterable[Task], settings: Settings, on_record: OnRecord) -> None:
    """Run every task and hand each record to `on_record` as it comes: nothing of it is kept here.

    A dead worker gives a `crash`, one past the timeout a `timeout`, and a new one takes its place; where that one
    cannot load the backend, the tasks left are errors. An interrupt ends the run early and keeps what was measured.
    Raises BackendError where the backend cannot be loaded at the start.
    """
    waiting = list(tasks)[::-1]
    settings = replace(settings, sharing=sharing(task.case for task in waiting))
    finished = 0
    workers = [_Worker(settings) for _ in range(min(settings.workers, len(waiting)))]

    def finish(record: dict[str, Any]) -> None:
        nonlocal finished
        finished += 1
        on_record(record)

    def lost(worker: _Worker, verdict: str, message: str) -> None:
        nonlocal settings
        worker.stop(kill=True)
        workers.remove(worker)
        if worker.task is not None and worker.so_far is not None:
            settings = replace(settings, failures="")  # the next one would die of it again
            finish(worker.so_far | {"save_note": f"not shrunk: at another shape, {verdict}: {message}"})
        elif worker.task is not None:
            finish(_without_result(worker.task, settings, verdict, message))
        if waiting:
            workers.append(_Worker(settings))

    def not_loaded(worker: _Worker, message: str) -> None:
        if not finished:
            raise BackendError(message)
        worker.stop(kill=True)
        workers.remove(worker)
        while waiting:
            finish(_without_result(waiting.pop(), settings, "error", message))

    def feed(worker: _Worker) -> None:
        if waiting:
            task = waiting.pop()
            try:
                worker.give(task)
            except OSError:  # it died after its last record: another one takes the task
                waiting.append(task)
                worker.task = None
                lost(worker, "", "")
        else:
            worker.task = None
            worker.stop()
            workers.remove(worker)

    try:
        while workers:
            for ready in wait([w.connection for w in workers], timeout=1.0):
                worker = next(w for w in workers if w.connection is ready)
                try:
                    answer = worker.connection.recv()
                except (EOFError, ConnectionError):
                    worker.process.join()
                    how = ending(worker.process.exitcode)
                    if worker.ready:
                        lost(worker, "crash", f"the process died ({how})")
                    else:
                        not_loaded(worker, f"a worker process died at its start ({how})")
                    continue
                if isinstance(answer, tuple):
                    worker.so_far = answer[1]
                    continue
                if isinstance(answer, str):
                    if answer:
                        not_loaded(worker, answer)
                        continue
                    worker.ready = True
                else:
                    finish(answer)
                feed(worker)
            now = time.monotonic()
            for worker in [w for w in workers if w.task is not None and now - w.since > settings.timeout]:
                lost(worker, "timeout", f"no result after {settings.timeout:g} s")
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            worker.stop(kill=True)


def _without_result(task: Task, settings: Settings, verdict: str, message: str) -> dict[str, Any]:
    record = new_record(task.case, backend=settings.backend, device=settings.device, seed=task.seed)
    record.verdict, record.message = verdict, message
    return record.to_dict()


def ending(exitcode: int | None) -> str:
    """How a process ended, in words."""
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"
