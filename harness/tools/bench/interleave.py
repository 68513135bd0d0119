"""Seconds a call: several things in turn, round after round, so that what disturbs one disturbs its ceiling too."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.harness.operations.stages.repeated import synchronize, timed

ROUNDS = 9
QUICK_ROUNDS = 3
FEWEST = 3
"""Rounds of what takes longer than it may."""
_QUEUED = 100
"""Calls that one round queues on a GPU, at most. Its two events take some microseconds, which they share."""
_ROUND = 2e-3
"""Seconds that one round of short calls takes on a GPU, about."""
_CLOCK = 2.0e9
"""Cycles a second of `torch.cuda._sleep`, at least: an H200 has 1.98e9."""
_LONGEST_SLEEP = 20e-3

_L2S, _COLD_ON_CPU = 4, 1 << 27
"""What inputs that are in no cache fill, one after the other: L2s of a GPU; bytes on a CPU."""

Calls = Sequence[Callable[[], Any]]
"""The same call for every copy of its inputs: taken in turn, so that no input is still in a cache."""


@dataclass(frozen=True)
class Times:
    """Seconds a call, one number for each round."""

    rounds: tuple[float, ...]
    calls: int = 1
    """Calls of a round, whose mean is its number."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; of one round, that one."""
        if len(self.rounds) == 1:
            return self.rounds[0], self.rounds[0]
        first, _, third = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return first, third


def cold(device: torch.device) -> int:
    """Bytes that are several times the cache of a device."""
    return _L2S * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _COLD_ON_CPU


def interleaved(
    calls: Mapping[str, Calls], device: torch.device, *, rounds: int, seconds: float
) -> tuple[dict[str, Times], dict[str, Any]]:
    """Times of each thing, and what its first call gave. No thing is timed for more than about `seconds`.

    A first call of each does not count. On a GPU a round is several calls between two events, behind a sleep and, of
    short ones, one more: the time that Python takes to queue them is not in it, unless a call waits for the GPU itself.
    Results of as many calls as there are copies of the inputs live on, so that outputs too lie elsewhere from call to
    call.
    """
    results = {name: some[0]() for name, some in calls.items()}
    lines = {name: (_queued if device.type == "cuda" else _called)(some, device) for name, some in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    counts = dict.fromkeys(calls, 1)
    for number in range(rounds):
        for name, line in lines.items():
            if number < FEWEST or sum(found[name]) * (number + 1) / number < seconds:
                one, counts[name] = next(line)
                found[name].append(one)
    return {name: Times(tuple(some), counts[name]) for name, some in found.items()}, results


def _called(calls: Calls, device: torch.device) -> Iterator[tuple[float, int]]:
    """Seconds of a call, which is a round of its own."""
    for call in itertools.cycle(calls):
        yield timed(device, call)[1], 1


def _queued(calls: Calls, device: torch.device) -> Iterator[tuple[float, int]]:
    """Seconds a call of a round on a GPU, and its calls. A call before says how many, and how long to sleep."""
    cycle = itertools.cycle(calls)
    kept: deque[Any] = deque(maxlen=len(calls))
    events: Any = torch.cuda  # it has no types
    start, end = (events.Event(enable_timing=True) for _ in range(2))

    def round_of(count: int, sleep: float) -> tuple[float, float]:
        """Seconds a call on the GPU, and those that it took to queue it."""
        synchronize(device)
        events._sleep(int(sleep * _CLOCK))
        if count > 1:  # what was timed before left lines in the L2 cache that have to be written back
            kept.append(next(cycle)())
        start.record()
        before = time.perf_counter()
        for _ in range(count):
            kept.append(next(cycle)())
        queued = time.perf_counter() - before
        end.record()
        synchronize(device)
        return start.elapsed_time(end) / 1e3 / count, queued / count

    round_of(len(calls), _ROUND)  # memory for as many results as will live
    alone, launch = round_of(1, _ROUND)
    count = max(min(_QUEUED, int(_ROUND / alone), int(_LONGEST_SLEEP / (2 * launch))), 1)
    while True:
        yield round_of(count, min(_LONGEST_SLEEP, 2 * count * launch + 0.2e-3))[0], count


def launched(call: Callable[[], Any], device: torch.device, *, rounds: int, calls: int = 100) -> Times:
    """Seconds of Python that a call takes to be queued on a GPU, or, on a CPU, to be done: small inputs are meant."""
    call()
    found = []
    for _ in range(rounds):
        synchronize(device)
        before = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - before) / calls)
    synchronize(device)
    return Times(tuple(found), calls)
