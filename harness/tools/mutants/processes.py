"""Running mutants in processes of their own: a crash or a hang affects only its own mutant."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import ending, forkserver
from narrowgauge.harness.tools.mutants.conventional_tests import ConventionalTests, Detections
from narrowgauge.harness.tools.mutants.module_files import replaced_module
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.result import MutantResult
from narrowgauge.harness.tools.mutants.selection import selected

ENOUGH = 6
"""Number of failing cases after which a mutant ends: enough for a common pattern."""
TIMEOUT = 60.0
"""Seconds for a case, including the compilation of the changed kernel."""
_NO_COMPILATION = "ToolchainError"
_CRASHED = Detections(True, True, True)

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
    context = forkserver("narrowgauge.harness.tools.mutants.processes")

    def examine(mutant: Mutant) -> MutantResult:
        result = _examine(context, mutant, selected(mutant, cases), timeout)
        on_result(result)
        return result

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(examine, mutants))


def _examine(context: Any, mutant: Mutant, cases: Sequence[Case], timeout: float) -> MutantResult:
    result = MutantResult(mutant)
    by_id = {case.id: case for case in cases}
    with tempfile.TemporaryDirectory(prefix="narrowgauge-mutant-") as scratch:
        last = ""
        for message in _messages(context, _judge, (mutant, cases, Path(scratch)), timeout):
            match message:
                case ("case", str(name)):
                    last, result.ran = name, result.ran + 1
                case ("record", dict(record)):
                    result.failing.append(record)
                case ("seconds", float(seconds)):
                    result.seconds += seconds
                case ("right kernels fail", str(name)):
                    result.failing = [record for record in result.failing if record["case"] != name]
                case ("lost", str(verdict), str(reason)):
                    if last:
                        lost_record = new_record(by_id[last], backend="native", device="cpu", seed=0)
                        lost_record.verdict, lost_record.message = verdict, reason
                        result.failing.append(lost_record.to_dict())
                    else:
                        result.problem = reason
        result.problem = result.problem or next(
            (record["message"] for record in result.failing if _NO_COMPILATION in record["message"]), ""
        )
        ready = False
        for message in _messages(context, _measure, (mutant, Path(scratch)), timeout):
            match message:
                case "ready":
                    ready = True
                case ("lost", _, str(reason)) if not ready:
                    result.problem = f"the yardsticks cannot be made: {reason}"
                case ("noticed", Detections() as detections):
                    result.detections = detections
                case ("seconds", float(seconds)):
                    result.seconds += seconds
    return result


def _messages(context: Any, target: Callable[..., None], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
    """Messages of a process. The last message is `("lost", verdict, reason)` if the process dies or times out."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(sender, *arguments), daemon=True)
    process.start()
    sender.close()
    messages: list[Any] = []
    try:
        while True:
            if not receiver.poll(timeout):
                messages.append(("lost", "timeout", f"no result after {timeout:g} s"))
                return messages
            message = receiver.recv()
            if message is None:
                return messages
            messages.append(message)
    except EOFError:
        process.join()
        messages.append(("lost", "crash", f"the process died ({ending(process.exitcode)})"))
        return messages
    finally:
        process.kill()
        process.join()
        receiver.close()


def _prepare() -> None:
    """Use one thread: every core has a process."""
    import torch

    torch.set_flush_denormal(False)
    torch.set_num_threads(1)


def _changed(mutant: Mutant, scratch: Path) -> AbstractContextManager[None]:
    """Context in which imported and compiled code has the mutant's change."""
    from narrowgauge.native.runtime.sources import replaced

    if mutant.of_module:
        return replaced_module(mutant.file, mutant.changed_text())
    return replaced(mutant.file, mutant.changed_text(), scratch)


def _judge(connection: Connection, mutant: Mutant, cases: Sequence[Case], scratch: Path) -> None:
    """Run cases with the changed kernel until `ENOUGH` fail, then these cases with the real kernel, which must pass."""
    from narrowgauge.harness.backends.backend import load_backend

    _prepare()
    failing = []
    with _changed(mutant, scratch):
        backend = load_backend("native", "cpu")
        for case in cases:
            connection.send(("case", case.id))
            record = run_case(case, backend)
            if record.verdict in ("pass", "unsupported"):
                continue
            connection.send(("record", record.to_dict()))
            failing.append(case)
            if len(failing) == ENOUGH or _NO_COMPILATION in record.message:
                break
    backend = load_backend("native", "cpu")
    for case in failing:
        if run_case(case, backend).verdict != "pass":
            connection.send(("right kernels fail", case.id))
    _end(connection)


def _end(connection: Connection) -> None:
    """Send the processor seconds of this process and its compilers, and the end of the messages."""
    usages = [resource.getrusage(usage_of) for usage_of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    connection.send(("seconds", sum(usage.ru_utime + usage.ru_stime for usage in usages)))
    connection.send(None)


def _measure(connection: Connection, mutant: Mutant, scratch: Path) -> None:
    _prepare()
    tests = ConventionalTests(mutant.door, mutant.recipe, import_module("narrowgauge.native.ops"))
    connection.send("ready")
    with _changed(mutant, scratch):
        try:
            detections = tests.notice(import_module("narrowgauge.native.ops"))
        except Exception:  # every conventional test detects an exception
            detections = _CRASHED
    connection.send(("noticed", detections))
    _end(connection)
