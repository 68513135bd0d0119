"""Cases over several processes. A process that dies or hangs costs its own case and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.backend import BackendError
from harness.case import Case
from harness.runner import new_record


@dataclass(frozen=True)
class Settings:
    """What every case of a run shares."""

    backend: str = "native"
    device: str = "cpu"
    seed: int = 0
    workers: int = 1
    timeout: float = 300.0
    """Seconds that one case may take."""
    input_path: str = ""
    """File of captured tensors, for cases made from one."""


GRACE = 5.0
"""Seconds that a worker without work has to end by itself."""
OnRecord = Callable[[dict[str, Any]], None]


def prepare_process(workers: int) -> None:
    """Make this one of `workers` processes: its share of the cores for torch, and for the native kernels, which follow
    torch; and subnormal numbers kept, which some library may have switched off."""
    import torch

    torch.set_flush_denormal(False)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _serve(connection: Connection, settings: Settings) -> None:
    """A worker: cases in, records out, until None comes."""
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
    while (case := connection.recv()) is not None:
        record = run_case(case, backend, device=settings.device, seed=settings.seed, captures=captures)
        connection.send(record.to_dict())


class _Worker:
    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None
        self.ready = False
        self.since = 0.0

    def give(self, case: Case) -> None:
        self.case, self.since = case, time.monotonic()
        self.connection.send(case)

    def stop(self, *, kill: bool = False) -> None:
        if not kill:
            with suppress(OSError):  # it may be dead already
                self.connection.send(None)
            self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_cases(cases: Sequence[Case], settings: Settings, on_record: OnRecord) -> list[dict[str, Any]]:
    """Run every case and hand each record to `on_record` as it comes; the records, in the order in which they came.

    A dead worker gives a `crash`, one past the timeout a `timeout`, and a new one takes its place; where that one
    cannot load the backend, the cases left are errors. An interrupt ends the run early and keeps what was measured.
    Raises BackendError where the backend cannot be loaded at the start.
    """
    waiting = list(reversed(cases))
    records: list[dict[str, Any]] = []
    workers = [_Worker(settings) for _ in range(min(settings.workers, len(cases)))]

    def finish(record: dict[str, Any]) -> None:
        records.append(record)
        on_record(record)

    def lost(worker: _Worker, verdict: str, message: str) -> None:
        worker.stop(kill=True)
        workers.remove(worker)
        if worker.case is not None:
            finish(_without_result(worker.case, settings, verdict, message))
        if waiting:
            workers.append(_Worker(settings))

    def not_loaded(worker: _Worker, message: str) -> None:
        if not records:
            raise BackendError(message)
        worker.stop(kill=True)
        workers.remove(worker)
        while waiting:
            finish(_without_result(waiting.pop(), settings, "error", message))

    def feed(worker: _Worker) -> None:
        if waiting:
            case = waiting.pop()
            try:
                worker.give(case)
            except OSError:  # it died after its last record: another one takes the case
                waiting.append(case)
                worker.case = None
                lost(worker, "", "")
        else:
            worker.case = None
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
                    ending = _ending(worker.process.exitcode)
                    if worker.ready:
                        lost(worker, "crash", f"the process died ({ending})")
                    else:
                        not_loaded(worker, f"a worker process died at its start ({ending})")
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
            for worker in [w for w in workers if w.case is not None and now - w.since > settings.timeout]:
                lost(worker, "timeout", f"no result after {settings.timeout:g} s")
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            worker.stop(kill=True)
    return records


def _without_result(case: Case, settings: Settings, verdict: str, message: str) -> dict[str, Any]:
    record = new_record(case, backend=settings.backend, device=settings.device, seed=settings.seed)
    record.verdict, record.message = verdict, message
    return record.to_dict()


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"
