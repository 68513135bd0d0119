"""Seconds of a case by phase: inputs, backend, reference, checks, diagnosis, and the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

CHECKS = "checks"
PHASES = ("inputs", "backend", "reference", CHECKS, "diagnosis")
"""Inputs: making the inputs and copying them to the device. Backend: every call of the backend, on guarded memory.
Reference: all calls of the reference by judges. Checks: the rest of judging, with guard zones and poison. Diagnosis:
explaining, shrinking and saving a failure."""
OTHER = "other"
"""The rest of a case: digests, figures for information, its record, and waiting for the lock of a GPU."""

P = ParamSpec("P")
T = TypeVar("T")


class Stopwatch:
    """Wall-clock seconds by phase. A single phase runs at a time."""

    def __init__(self, device: str) -> None:
        self.seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        self._device, self._phase, self._since = device, OTHER, time.perf_counter()

    def may_start(self, phase: str) -> bool:
        """Whether the phase can interrupt the running phase. Only checks are interrupted; backend calls of the
        diagnosis count as diagnosis."""
        return self._phase in (OTHER, CHECKS) and self._phase != phase

    def move(self, seconds: float) -> None:
        """Move seconds of the running phase to the rest."""
        self.seconds[self._phase] -= seconds
        self.seconds[OTHER] += seconds

    def switch(self, phase: str) -> str:
        """Begin a phase and return the phase that ran before. The GPU is synchronized first: its kernels count for
        their launching phase."""
        if self._device == "cuda" and OTHER not in (phase, self._phase):
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        previous, self._phase, self._since = self._phase, phase, now
        return previous


_running: ContextVar[Stopwatch | None] = ContextVar("running", default=None)


@contextmanager
def stopwatch(device: str) -> Iterator[Stopwatch]:
    """Measure a case on `device` within the context. At its end the stopwatch holds the seconds of every phase."""
    watch = Stopwatch(device)
    token = _running.set(watch)
    try:
        yield watch
    finally:
        watch.switch(OTHER)
        _running.reset(token)


class count_seconds:
    """Count the seconds of the context for a phase, if a stopwatch is running."""

    def __init__(self, phase: str) -> None:
        self._phase, self._previous = phase, ""

    def __enter__(self) -> None:
        self._watch = _running.get()
        if self._watch is not None and self._watch.may_start(self._phase):
            self._previous = self._watch.switch(self._phase)

    def __exit__(self, *raised: object) -> None:
        if self._watch is not None and self._previous:
            self._watch.switch(self._previous)


def count_as_other(seconds: float) -> None:
    """Move seconds of the running phase to the rest of the case: a kernel host waited for the lock of a GPU."""
    if (watch := _running.get()) is not None:
        watch.move(seconds)


def timed_function(phase: str, function: Callable[P, T]) -> Callable[P, T]:
    """`function`, with the seconds of its calls counted for a phase."""

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with count_seconds(phase):
            return function(*arguments, **options)

    return call
