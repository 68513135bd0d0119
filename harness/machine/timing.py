"""What a case's seconds go into: its inputs, the backend, the reference, checks, diagnosis; the rest is other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

CHECKS = "checks"
PARTS = ("inputs", "backend", "reference", CHECKS, "diagnosis")
"""Inputs: making them, and taking them to the device. Backend: every call of it, on guarded memory. Reference: all that
judges ask of it. Checks: the rest of judging, guard zones and poison too. Diagnosis: explaining, shrinking and saving a
failure."""
OTHER = "other"
"""Of a case: digests, figures for information, making its record, and waiting for a turn on a GPU."""

P = ParamSpec("P")
T = TypeVar("T")


class Watch:
    """Seconds of each part, of a wall clock. One part runs at a time."""

    def __init__(self, device: str) -> None:
        self.seconds = dict.fromkeys((*PARTS, OTHER), 0.0)
        self._device, self._part, self._since = device, OTHER, time.perf_counter()

    def enters(self, part: str) -> bool:
        """Whether the part begins: what diagnosis asks of the backend is diagnosis, and only checks are interrupted."""
        return self._part in (OTHER, CHECKS) and self._part != part

    def switch(self, part: str) -> str:
        """Begin a part, and say which ran so far: what a GPU still does of it is waited for, and is its own."""
        if self._device == "cuda" and OTHER not in (part, self._part):
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before


_running: ContextVar[Watch | None] = ContextVar("running", default=None)


@contextmanager
def watching(device: str) -> Iterator[Watch]:
    """Within the context, seconds are those of a case on `device`; when it ends, all of them are in the watch."""
    watch = Watch(device)
    token = _running.set(watch)
    try:
        yield watch
    finally:
        watch.switch(OTHER)
        _running.reset(token)


@contextmanager
def spending(part: str) -> Iterator[None]:
    """Within the context, seconds are this part's, where a case is watched."""
    watch = _running.get()
    if watch is None or not watch.enters(part):
        yield
        return
    before = watch.switch(part)
    try:
        yield
    finally:
        watch.switch(before)


def counted(part: str, function: Callable[P, T]) -> Callable[P, T]:
    """The function, its seconds counted to a part."""

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with spending(part):
            return function(*arguments, **options)

    return call
