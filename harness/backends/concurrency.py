"""Further calls of a backend: one after the other, from two threads, or on two CUDA streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import BackendError, Unsupported

if TYPE_CHECKING:
    import torch

SEQUENTIAL, THREADS, STREAMS = "sequential", "threads", "streams"


Run = Callable[[], Any]
"""Calls of a run on its inputs: the results."""


def execute(kind: str, count: int, runs: Sequence[Run], device: torch.device) -> list[list[Any]]:
    """Results of `count` executions of each run: [run][number].

    `threads`: a thread for each run. `streams`: a CUDA stream for each run, all from this thread.

    Raises Unsupported if a kind needs a GPU, and BackendError or Unsupported as the calls do. The message of a
    BackendError names the number of the failing call.
    """
    if kind == STREAMS and device.type != "cuda":
        raise Unsupported(f"concurrency {kind!r} needs a GPU; the device is {device.type}")
    functions = {SEQUENTIAL: _sequential, THREADS: _threads, STREAMS: _streams}
    return functions[kind](count, runs)


def _numbered(run: Run, number: int, count: int) -> Any:
    try:
        return run()
    except BackendError as error:
        raise BackendError(f"call {number + 1} of {count}: {error}") from error


def _sequential(count: int, runs: Sequence[Run]) -> list[list[Any]]:
    return [[_numbered(run, number, count) for number in range(count)] for run in runs]


def _threads(count: int, runs: Sequence[Run]) -> list[list[Any]]:
    results: list[list[Any]] = [[] for _ in runs]
    errors: list[Exception] = []
    start = threading.Barrier(len(runs))

    def work(run: Run, found: list[Any]) -> None:
        try:
            start.wait()
            found += [_numbered(run, number, count) for number in range(count)]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(runs, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _streams(count: int, runs: Sequence[Run]) -> list[list[Any]]:
    import torch

    results: list[list[Any]] = [[] for _ in runs]
    streams: list[Any] = [torch.cuda.Stream() for _ in runs]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()  # the inputs were written on another stream
    for number in range(count):
        for run, found, stream in zip(runs, results, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(_numbered(run, number, count))
    torch.cuda.synchronize()
    return results
