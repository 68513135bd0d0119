"""Overhead of the harness: the time of a case outside of the reference, the kernels and the checks."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.running.runner import run_case

INTERVAL = 1e-3
"""Seconds between two samples of the running code."""
SAMPLE = 150
"""Approximate number of measured cases."""
_ROOT = Path(__file__).parents[3]
_PARTS = {
    f"{_ROOT}/reference/": "reference", f"{_ROOT}/native/": "kernel", f"{_ROOT}/harness/checks/": "check",
    f"{_ROOT}/harness/": "harness",
}  # fmt: skip
"""Owner of the code in a folder. A subfolder stands before its parent."""


@dataclass(frozen=True)
class Overhead:
    """Average processor time of the cases of an operation."""

    operation: str
    cases: int
    milliseconds: float
    harness: float
    """Milliseconds of the harness within `milliseconds`."""


def sample_cases(cases: Sequence[Case]) -> list[Case]:
    """About `SAMPLE` cases at equal distances."""
    return list(cases[:: max(1, len(cases) // SAMPLE)])


def overheads(cases: Sequence[Case], backend: Backend, device: str) -> list[Overhead]:
    """A row for each operation of the cases, largest overhead first.

    Cases run in this process, and each record is formatted as a line of a journal. The first case of an operation runs
    twice and counts once, so that imports and compilation do not count.
    """
    totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: Counter[str] = Counter()
    for case in cases:
        if case.operation not in counts:
            run_case(case, backend, device=device)
        with attribute_seconds(totals[case.operation]):
            json.dumps(run_case(case, backend, device=device).to_dict())
        counts[case.operation] += 1
    rows = [
        Overhead(
            name, counts[name], 1e3 * sum(seconds.values()) / counts[name], 1e3 * seconds["harness"] / counts[name]
        )
        for name, seconds in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.harness)


@contextmanager
def attribute_seconds(seconds: defaultdict[str, float]) -> Iterator[None]:
    """Add the processor seconds of the context to `seconds`, by owner of the running code. For the main thread only.

    A timer interrupts the running code, and the seconds since the previous interrupt count for the owner of this code.
    A call that cannot be interrupted counts as a whole when it returns.
    """
    previous = time.thread_time()

    def elapsed() -> float:
        nonlocal previous
        now = max(time.thread_time(), previous)  # on a virtual machine the clock went back by 5 ms once
        interval, previous = now - previous, now
        return interval

    def sample_frame(_: int, frame: FrameType | None) -> None:
        seconds[code_owner(frame)] += elapsed()

    previous_handler = signal.signal(signal.SIGPROF, sample_frame)
    signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous_handler)
        seconds["harness"] += elapsed()  # at the end of a case the harness makes its record


def code_owner(frame: FrameType | None) -> str:
    """Owner of the innermost frame with code of this project; the harness without such a frame."""
    while frame is not None:
        file = frame.f_code.co_filename
        for folder, part in _PARTS.items():
            if file.startswith(folder):
                return part
        frame = frame.f_back
    return "harness"
