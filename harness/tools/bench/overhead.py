"""The harness's own time: what of a case is neither reference, nor kernel, nor check."""

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
"""Seconds between two looks at what runs."""
SAMPLE = 150
"""Cases that are measured, about."""
_ROOT = Path(__file__).parents[3]
_PARTS = {
    f"{_ROOT}/reference/": "reference", f"{_ROOT}/native/": "kernel", f"{_ROOT}/harness/checks/": "check",
    f"{_ROOT}/harness/": "harness",
}  # fmt: skip
"""Whose the code of a folder is; a folder stands before the one that holds it."""


@dataclass(frozen=True)
class Overhead:
    """What the cases of an operation took, each on average, of a core."""

    operation: str
    cases: int
    milliseconds: float
    harness: float
    """Of those: milliseconds of the harness."""


def sample(cases: Sequence[Case]) -> list[Case]:
    """Cases at equal distances in their order, about `SAMPLE`."""
    return list(cases[:: max(1, len(cases) // SAMPLE)])


def overheads(cases: Sequence[Case], backend: Backend, device: str) -> list[Overhead]:
    """A row for each operation of the cases, the one with most of the harness's own time first.

    Cases run in this process, and each record becomes the line of a journal. The first case of an operation runs twice,
    and counts once: what it imports and compiles is no case's.
    """
    totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: Counter[str] = Counter()
    for case in cases:
        if case.operation not in counts:
            run_case(case, backend, device=device)
        with watched(totals[case.operation]):
            json.dumps(run_case(case, backend, device=device).to_dict())
        counts[case.operation] += 1
    rows = [
        Overhead(name, counts[name], 1e3 * sum(spent.values()) / counts[name], 1e3 * spent["harness"] / counts[name])
        for name, spent in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.harness)


@contextmanager
def watched(spent: defaultdict[str, float]) -> Iterator[None]:
    """Within the context, which is for the main thread, its seconds are added to those that `spent` has of each part.

    They are of a core, so that what else the machine does is not counted. A timer interrupts what runs, and all seconds
    since it last did are that part's: a call that cannot be interrupted is counted as a whole, when it returns.
    """
    last = time.thread_time()

    def since() -> float:
        nonlocal last
        now = max(time.thread_time(), last)  # on a virtual machine it went back, by 5 ms once
        passed, last = now - last, now
        return passed

    def look(_: int, frame: FrameType | None) -> None:
        spent[part_of(frame)] += since()

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        spent["harness"] += since()  # the end of a case is the making of its record


def part_of(frame: FrameType | None) -> str:
    """Whose code runs: that of the innermost frame that is of this project; the harness's where none is."""
    while frame is not None:
        file = frame.f_code.co_filename
        for folder, part in _PARTS.items():
            if file.startswith(folder):
                return part
        frame = frame.f_back
    return "harness"
