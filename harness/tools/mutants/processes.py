"""Running mutants: a kernel host has the mutant, its judge has not. A crash or a hang affects only its own mutant."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module
from threading import Lock
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.hosts.changed_source import changed_source
from narrowgauge.harness.hosts.frames import Connection, FrameError, pair
from narrowgauge.harness.hosts.starter import starter
from narrowgauge.harness.machine.process import detach_process, prepare_process
from narrowgauge.harness.running.worker import LOAD, Lost, Settings, Task, Worker, forkserver
from narrowgauge.harness.tools.mutants.conventional_tests import ConventionalTests, Detections
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.result import MutantResult
from narrowgauge.harness.tools.mutants.selection import selected

ENOUGH = 6
"""Number of failing cases after which a mutant ends: enough for a common pattern."""
TIMEOUT = 60.0
"""Seconds for a case, including the compilation of the changed kernel."""
_NO_COMPILATION = "ToolchainError"
_START = Lock()
"""Held while a worker starts: all workers ask the same process for their hosts."""

Change = tuple[str, str, str]
"""A changed file, its text, and the folder of its compiled kernels."""
OnResult = Callable[[MutantResult], None]


def run_mutants(
    mutants: Sequence[Mutant],
    cases: Sequence[Case],
    *,
    workers: int,
    on_result: OnResult = lambda result: None,
    timeout: float = TIMEOUT,
) -> list[MutantResult]:
    """Run every mutant on the cases that its change affects. Returns the results in the order of the mutants.

    Each mutant has its own processes, which do not write to the cache of compiled kernels. `on_result` is called for
    every result, from any thread.
    """
    settings = Settings(workers=workers, timeout=timeout)
    starter()  # in this thread: the system ends it with the thread that starts it

    def examine(mutant: Mutant) -> MutantResult:
        result = _examine(mutant, selected(mutant, cases), settings)
        on_result(result)
        return result

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(examine, mutants))


def _examine(mutant: Mutant, cases: Sequence[Case], settings: Settings) -> MutantResult:
    started = time.monotonic()
    result = MutantResult(mutant)
    with tempfile.TemporaryDirectory(prefix="narrowgauge-mutant-") as scratch:
        change = (mutant.file, mutant.changed_text(), scratch)
        try:
            _judge(result, cases, settings, change)
        except (Lost, FrameError) as lost:
            result.problem = str(lost)
        _measure(result, settings, change)
    result.seconds = time.monotonic() - started
    return result


def _judge(result: MutantResult, cases: Sequence[Case], settings: Settings, change: Change) -> None:
    """Run cases with the changed kernel until `ENOUGH` fail, then these cases with the real kernel, which must pass.

    A crash or a hang ends the mutant. Raises Lost if a worker does not start.
    """
    failing: dict[str, tuple[Case, dict[str, Any]]] = {}
    with _worker(replace(settings, change=change)) as run:
        for case in cases:
            record = run(case)
            result.ran += 1
            if record["verdict"] in ("pass", "unsupported"):
                continue
            failing[case.id] = case, record
            if _NO_COMPILATION in record["message"]:
                result.problem = record["message"]
            if result.problem or record["verdict"] in ("crash", "timeout") or len(failing) == ENOUGH:
                break
    if failing:
        with _worker(settings) as run:
            result.failing = [record for case, record in failing.values() if run(case)["verdict"] == "pass"]


@contextmanager
def _worker(settings: Settings) -> Iterator[Callable[[Case], dict[str, Any]]]:
    """Gives a function that runs a case in a worker: the record. Raises Lost if the worker does not start."""
    with _START:
        worker = Worker(settings)

    def run(case: Case) -> dict[str, Any]:
        worker.give(Task(case, settings.seed))
        record = worker.receive()
        assert record is not None
        return record

    try:
        worker.receive()
        yield run
    finally:
        worker.stop(kill=True)


def _measure(result: MutantResult, settings: Settings, change: Change) -> None:
    """Apply the conventional tests in a process of their own. A mutant that ends it is detected by all of them."""
    ours, theirs = pair()
    mutant = result.mutant
    arguments = (theirs, settings.workers, mutant.door, mutant.recipe, change)
    process = forkserver().Process(target=_notice, args=arguments, daemon=True)
    process.start()
    theirs.close()
    connection = Connection(ours)
    try:
        connection.receive(deadline=time.monotonic() + LOAD)
    except (FrameError, TimeoutError) as error:
        result.problem = f"the conventional tests cannot be made: {error}"
    with suppress(FrameError, TimeoutError, TypeError):
        answer, _ = connection.receive(deadline=time.monotonic() + settings.timeout)
        result.detections = Detections(**answer)
    process.kill()
    process.join()
    connection.close()


def _notice(end: socket.socket, workers: int, door: str, recipe: str, change: Change) -> None:
    """Apply the conventional tests to the kernels, and then to the changed kernels."""
    detach_process()
    prepare_process(workers)
    connection = Connection(end)
    tests = ConventionalTests(door, recipe, import_module("narrowgauge.native.ops"))
    connection.send({})
    with changed_source(*change):
        try:
            detections = tests.notice(import_module("narrowgauge.native.ops"))
        except Exception:  # every conventional test detects an exception
            detections = Detections(True, True, True)
    connection.send(asdict(detections))
