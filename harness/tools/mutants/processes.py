"""Running mutants: a kernel host has the mutant, its judge has not. A crash or a hang affects only its own mutant."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.hosts.changed_source import changed_source
from narrowgauge.harness.hosts.frames import Connection
from narrowgauge.harness.hosts.starter import starter
from narrowgauge.harness.machine.process import prepare_process
from narrowgauge.harness.running.supervisor import Died, Fork
from narrowgauge.harness.running.worker import LOAD, Lost, Settings, Task, Worker
from narrowgauge.harness.tools.mutants.conventional_tests import ConventionalTests, Detections
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.recorded import Entry, Recorded
from narrowgauge.harness.tools.mutants.result import MutantResult
from narrowgauge.harness.tools.mutants.selection import selected

ENOUGH = 6
"""Number of failing cases after which a search ends: enough for a common pattern."""
TIMEOUT = 60.0
"""Seconds for a case, including the compilation of the changed kernel."""
_NO_COMPILATION = "ToolchainError"

Change = tuple[str, str, str]
"""A changed file, its text, and the folder of its compiled kernels."""
OnResult = Callable[[MutantResult], None]
RunCase = Callable[[Case], dict[str, Any]]
"""Runs a case in a worker: the record."""


def run_mutants(
    mutants: Sequence[Mutant],
    cases: Sequence[Case],
    *,
    workers: int,
    recorded: Recorded | None = None,
    on_result: OnResult = lambda result: None,
    timeout: float = TIMEOUT,
) -> list[MutantResult]:
    """Run every mutant on the cases that its change affects. Returns the results in the order of the mutants.

    `recorded`: results of an earlier search. These cases run first; if all fail, the mutant ends.
    The conventional tests run only for mutants that are not recorded. A mutant has its own processes, which do not
    write to the cache of compiled kernels. `on_result` is called for every result, from any thread.
    """
    settings = Settings(workers=workers, timeout=timeout)
    starter()  # in this thread: the system ends it with the thread that starts it

    with _RealKernels(settings) as real:

        def examine(mutant: Mutant) -> MutantResult:
            result = _examine(mutant, (recorded or {}).get(mutant.name), cases, settings, real)
            on_result(result)
            return result

        with ThreadPoolExecutor(workers) as threads:
            return list(threads.map(examine, mutants))


class _RealKernels:
    """Which cases pass with the real kernels. Every case runs once, for any number of failing mutants."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._passes: dict[str, bool] = {}
        self._idle: SimpleQueue[RunCase] = SimpleQueue()
        """Workers without a case; a thread that finds none starts one."""
        self._workers = ExitStack()

    def passes(self, case: Case) -> bool:
        """Whether the case passes. Raises Lost if a worker does not start."""
        if case.id not in self._passes:
            try:
                run = self._idle.get_nowait()
            except Empty:
                run = self._workers.enter_context(_worker(self._settings))
            self._passes[case.id] = run(case)["verdict"] == "pass"
            self._idle.put(run)
        return self._passes[case.id]

    def __enter__(self) -> _RealKernels:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()


def _examine(
    mutant: Mutant, entry: Entry | None, cases: Sequence[Case], settings: Settings, real: _RealKernels
) -> MutantResult:
    started = time.monotonic()
    result = MutantResult(mutant)
    with tempfile.TemporaryDirectory(prefix="narrowgauge-mutant-") as scratch:
        change = (mutant.file, mutant.changed_text(), scratch)
        try:
            _judge(result, entry.cases if entry else (), cases, replace(settings, change=change), real)
        except (Lost, Died) as lost:
            result.problem = str(lost)
        if entry:
            result.detections = entry.detections
        else:
            _measure(result, settings, change)
    result.seconds = time.monotonic() - started
    return result


def _judge(
    result: MutantResult, names: Sequence[str], cases: Sequence[Case], settings: Settings, real: _RealKernels
) -> None:
    """Run cases with the changed kernel: the recorded `names`, and unless all of them fail the cases that the change
    affects, until `ENOUGH` cases have failed. Failures count only for cases that pass with the real kernels.

    A crash or a case that exceeds its time ends the mutant. The latter is no failure: a busy machine can make a right
    kernel exceed its time. Raises Lost if a worker does not start.
    """
    failing: dict[str, tuple[Case, dict[str, Any]]] = {}
    first = [case for case in cases if case.id in names]
    with _worker(settings) as run:
        for case in _in_order(result.mutant, first, cases):
            record = run(case)
            result.ran += 1
            if record["verdict"] == "timeout":
                result.timed_out = "" if failing else case.id
                break
            if record["verdict"] not in ("pass", "unsupported"):
                failing[case.id] = case, record
            if case.id in failing and _NO_COMPILATION in record["message"]:
                result.problem = record["message"]
            if result.problem or record["verdict"] == "crash" or len(failing) == ENOUGH:
                break
            if len(failing) == result.ran == len(first):
                break
    result.failing = [record for case, record in failing.values() if real.passes(case)]


def _in_order(mutant: Mutant, first: Sequence[Case], cases: Sequence[Case]) -> Iterator[Case]:
    """`first`, and then the remaining affected cases of the mutant. They are selected only if the caller asks for them:
    the selection reads the names of all cases."""
    yield from first
    yield from (case for case in selected(mutant, cases) if case not in first)


@contextmanager
def _worker(settings: Settings) -> Iterator[RunCase]:
    """Gives a function that runs a case in a worker: the record. Raises Lost if the worker does not start."""
    worker = Worker(settings)

    def run(case: Case) -> dict[str, Any]:
        worker.give(Task(case, settings.seed))
        record = worker.record()
        assert record is not None
        return record

    try:
        worker.record()
        yield run
    finally:
        worker.stop()


def _measure(result: MutantResult, settings: Settings, change: Change) -> None:
    """Apply the conventional tests in a process of their own. A mutant that ends it is detected by all of them."""
    mutant = result.mutant
    process = Fork(f"{__name__}:notice", [settings.workers, mutant.door, mutant.recipe, change], seconds=LOAD)
    try:
        process.receive()
    except (Died, TimeoutError) as error:
        result.problem = f"the conventional tests cannot be made: {error}"
    process.expect(settings.timeout)
    with suppress(Died, TimeoutError, TypeError):
        result.detections = Detections(**process.receive())
    process.stop()


def notice(connection: Connection, workers: int, door: str, recipe: str, change: Change) -> None:
    """Apply the conventional tests to the kernels, and then to the changed kernels."""
    prepare_process(workers)
    tests = ConventionalTests(door, recipe, import_module("narrowgauge.native.ops"))
    connection.send({})
    with changed_source(*change):
        try:
            detections = tests.notice(import_module("narrowgauge.native.ops"))
        except Exception:  # every conventional test detects an exception
            detections = Detections(True, True, True)
    connection.send(asdict(detections))
