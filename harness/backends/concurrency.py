"""Further calls of a backend: one after the other, from two threads, on two CUDA streams, or in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import BackendError, Unsupported

if TYPE_CHECKING:
    import torch

SEQUENTIAL, THREADS, STREAMS, GRAPH = "sequential", "threads", "streams", "graph"


@dataclass(frozen=True)
class Calls:
    """The calls of a run, and the inputs that they are given."""

    inputs: dict[Any, torch.Tensor]
    function: Callable[[dict[Any, torch.Tensor]], Any]
    """From inputs to results."""


def execute(kind: str, count: int, runs: Sequence[Calls], device: torch.device) -> list[list[Any]]:
    """Results of `count` executions of each run: [run][number].

    `threads`: a thread for each run. `streams`: a CUDA stream for each run, all from this thread. `graph`: the first
    run is captured, and replayed with the inputs of each run in turn.

    Raises Unsupported if a kind needs a GPU, or if the calls cannot be captured, and BackendError or Unsupported as the
    calls do. The message of a BackendError names the number of the failing call.
    """
    if kind in (STREAMS, GRAPH) and device.type != "cuda":
        raise Unsupported(f"concurrency {kind!r} needs a GPU; the device is {device.type}")
    functions = {SEQUENTIAL: _sequential, THREADS: _threads, STREAMS: _streams, GRAPH: _graph}
    return functions[kind](count, runs)


def _numbered(run: Calls, number: int, count: int) -> Any:
    try:
        return run.function(run.inputs)
    except BackendError as error:
        raise BackendError(f"call {number + 1} of {count}: {error}") from error


def _sequential(count: int, runs: Sequence[Calls]) -> list[list[Any]]:
    return [[_numbered(run, number, count) for number in range(count)] for run in runs]


def _threads(count: int, runs: Sequence[Calls]) -> list[list[Any]]:
    results: list[list[Any]] = [[] for _ in runs]
    errors: list[Exception] = []
    start = threading.Barrier(len(runs))

    def work(run: Calls, found: list[Any]) -> None:
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


def _streams(count: int, runs: Sequence[Calls]) -> list[list[Any]]:
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


def _graph(count: int, runs: Sequence[Calls]) -> list[list[Any]]:
    import torch

    first = runs[0]
    captured = {key: tensor.clone() for key, tensor in first.inputs.items()}
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(warm):  # compiles and loads kernels, which a capture cannot
        first.function(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = first.function(captured)
    except Exception as error:
        raise Unsupported(f"the calls cannot be captured in a CUDA graph: {error}") from error
    results: list[list[Any]] = [[] for _ in runs]
    for _ in range(count):
        for run, found in zip(runs, results, strict=True):
            for key, tensor in run.inputs.items():
                captured[key].copy_(tensor)
            graph.replay()
            torch.cuda.synchronize()
            found.append(_copied(result))
    return results


def _copied(result: Any) -> Any:
    """A result whose tensors are copies: a replay writes to the same memory again."""
    from dataclasses import fields, is_dataclass, replace

    import torch

    if isinstance(result, torch.Tensor):
        return result.clone()
    if isinstance(result, dict):
        return {name: _copied(part) for name, part in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(map(_copied, result))
    if is_dataclass(result) and not isinstance(result, type):
        parts = {field.name: getattr(result, field.name) for field in fields(result)}
        return replace(result, **{name: _copied(part) for name, part in parts.items()})
    return result
