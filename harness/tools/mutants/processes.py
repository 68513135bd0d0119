"""Mutants over several processes: one that crashes or hangs costs itself and nothing else."""

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
from narrowgauge.harness.tools.mutants.module_files import replaced_module
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.harness.tools.mutants.result import Result
from narrowgauge.harness.tools.mutants.selection import selected
from narrowgauge.harness.tools.mutants.yardsticks import Noticed, Yardsticks

ENOUGH = 6
"""Failing cases after which a mutant is left: enough to see what they have in common."""
TIMEOUT = 60.0
"""Seconds that one case may take, the compilation of a changed kernel included."""
_NO_COMPILATION = "ToolchainError"
_CRASHED = Noticed(True, True, True)

OnResult = Callable[[Result], None]


def run_mutants(
    mutants: Sequence[Mutant],
    cases: Sequence[Case],
    *,
    workers: int,
    on_result: OnResult = lambda result: None,
    timeout: float = TIMEOUT,
) -> list[Result]:
    """Run every mutant against those of the cases that its change touches; the results, in the order of the mutants.

    Each has processes of its own, which leave nothing in the cache of compiled kernels. `on_result` is called as
    results come, from any thread.
    """
    context = forkserver("narrowgauge.harness.tools.mutants.processes")

    def examine(mutant: Mutant) -> Result:
        result = _examine(context, mutant, selected(mutant, cases), timeout)
        on_result(result)
        return result

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(examine, mutants))


def _examine(context: Any, mutant: Mutant, cases: Sequence[Case], timeout: float) -> Result:
    result = Result(mutant)
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
                case ("lost", str(verdict), str(words)):
                    if last:
                        lost = new_record(by_id[last], backend="native", device="cpu", seed=0)
                        lost.verdict, lost.message = verdict, words
                        result.failing.append(lost.to_dict())
                    else:
                        result.problem = words
        result.problem = result.problem or next(
            (record["message"] for record in result.failing if _NO_COMPILATION in record["message"]), ""
        )
        ready = False
        for message in _messages(context, _measure, (mutant, Path(scratch)), timeout):
            match message:
                case "ready":
                    ready = True
                case ("lost", _, str(words)) if not ready:
                    result.problem = f"the yardsticks cannot be made: {words}"
                case ("noticed", Noticed() as noticed):
                    result.noticed = noticed
                case ("seconds", float(seconds)):
                    result.seconds += seconds
    return result


def _messages(context: Any, target: Callable[..., None], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
    """What a process says until it ends; at last `("lost", verdict, words)` where it dies, or says nothing for long."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    found: list[Any] = []
    try:
        while True:
            if not ours.poll(timeout):
                found.append(("lost", "timeout", f"no result after {timeout:g} s"))
                return found
            message = ours.recv()
            if message is None:
                return found
            found.append(message)
    except EOFError:
        process.join()
        found.append(("lost", "crash", f"the process died ({ending(process.exitcode)})"))
        return found
    finally:
        process.kill()
        process.join()
        ours.close()


def _prepare() -> None:
    """One thread for each process: there is one of them for each core."""
    import torch

    torch.set_flush_denormal(False)
    torch.set_num_threads(1)


def _changed(mutant: Mutant, scratch: Path) -> AbstractContextManager[None]:
    """The context in which what is imported and compiled has the mutant's change."""
    from narrowgauge.native.runtime.sources import replaced

    if mutant.of_module:
        return replaced_module(mutant.file, mutant.changed_text())
    return replaced(mutant.file, mutant.changed_text(), scratch)


def _judge(connection: Connection, mutant: Mutant, cases: Sequence[Case], scratch: Path) -> None:
    """Run cases with the changed kernel until enough fail; then those with the real one, which has to pass them."""
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
    """Say how many seconds of a core this process and the compilers that it ran have taken, and that it is done."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    connection.send(("seconds", sum(one.ru_utime + one.ru_stime for one in used)))
    connection.send(None)


def _measure(connection: Connection, mutant: Mutant, scratch: Path) -> None:
    _prepare()
    yardsticks = Yardsticks(mutant.door, mutant.recipe, import_module("narrowgauge.native.ops"))
    connection.send("ready")
    with _changed(mutant, scratch):
        try:
            noticed = yardsticks.notice(import_module("narrowgauge.native.ops"))
        except Exception:  # an error is noticed by all
            noticed = _CRASHED
    connection.send(("noticed", noticed))
    _end(connection)
