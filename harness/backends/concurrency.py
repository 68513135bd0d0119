"""Further calls of a backend: one after the other, from two threads, on two CUDA streams, or in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from narrowgauge.harness.backends.results import BackendError, Unsupported
from narrowgauge.harness.backends.transfer import map_tensors

if TYPE_CHECKING:
    import torch

SEQUENTIAL, THREADS, STREAMS, GRAPH = "sequential", "threads", "streams", "graph"


class Run(NamedTuple):
    """Calls of a run."""

    inputs: Sequence[torch.Tensor]
    """Inputs of the calls; those of other runs have the same order, shapes and dtypes."""
    function: Callable[[], Any]
    """Performs the calls and returns their results."""


def execute(kind: str, count: int, runs: Sequence[Run], device: torch.device) -> list[list[Any]]:
    """Results of `count` executions of each run: [run][number].

    `threads`: a thread for each run. `streams`: a CUDA stream for each run, all from this thread. `graph`: the first
    run is captured in a CUDA graph, and replayed with the inputs of each run in turn.

    Raises Unsupported if a kind needs a GPU or the calls cannot be captured, and BackendError or Unsupported as the
    calls do. The message of a BackendError names the number of the failing call.
    """
    if kind in (STREAMS, GRAPH) and device.type != "cuda":
        raise Unsupported(f"concurrency {kind!r} needs a GPU; the device is {device.type}")
    functions = {SEQUENTIAL: _sequential, THREADS: _threads, STREAMS: _streams, GRAPH: _graph}
    return functions[kind](count, runs)


def _numbered(run: Run, number: int, count: int) -> Any:
    try:
        return run.function()
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


def _graph(count: int, runs: Sequence[Run]) -> list[list[Any]]:
    import torch

    first = runs[0]
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(warm):  # a capture can neither compile nor load a kernel
        _numbered(first, 0, count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = first.function()
    except Exception as error:
        torch.cuda.synchronize()
        raise Unsupported(f"the calls cannot be captured in a CUDA graph: {error}") from error
    given = [[tensor.clone() for tensor in run.inputs] for run in runs]
    results: list[list[Any]] = [[] for _ in runs]
    for _ in range(count):
        for inputs, found in zip(given, results, strict=True):
            _write(first.inputs, inputs)
            graph.replay()
            found.append(map_tensors(result, torch.Tensor.clone))  # the next replay overwrites it
    _write(first.inputs, given[0])
    torch.cuda.synchronize()
    return results


def _write(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
