"""Interleaved timing: all calls in turn, round after round, so that a disturbance affects a call and its ceiling
alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.harness.backends.local_host import synchronize
from narrowgauge.harness.operations.timing.operation_bench import Calls

ROUNDS = 9
QUICK_ROUNDS = 3
FEWEST = 3
"""Smallest number of rounds, for calls that exceed the time limit."""
_MAX_QUEUED = 100
"""Largest number of calls queued in a round on a GPU. They share the microseconds of the round's two events."""
_ROUND = 2e-3
"""Approximate seconds of a round of short calls on a GPU."""
_CLOCK = 2.0e9
"""Assumed cycles per second of `torch.cuda._sleep`: an H200 has 1.98e9."""
_LONGEST_SLEEP = 20e-3


@dataclass(frozen=True)
class Times:
    """Seconds per call, a number for each round."""

    rounds: tuple[float, ...]
    calls: int = 1
    """Calls in a round. The round's number is their mean."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile. With a single round both are this round."""
        if len(self.rounds) == 1:
            return self.rounds[0], self.rounds[0]
        first, _, third = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return first, third


def time_interleaved(
    calls: Mapping[str, Calls], device: torch.device, *, rounds: int, seconds: float
) -> tuple[dict[str, Times], dict[str, Any]]:
    """Times and first results of calls, by name. Each name is timed for at most about `seconds`.

    The first call is not timed. On a GPU a round is several calls between two events, queued behind a sleep, and for
    short calls behind an extra call. The time that Python needs to queue the calls is therefore not measured, unless a
    call itself waits for the GPU. As many results stay alive as the inputs have copies, so that outputs too have
    changing addresses.
    """
    results = {name: copies[0]() for name, copies in calls.items()}
    timers = {
        name: (_time_queued_calls if device.type == "cuda" else _time_calls)(copies, device)
        for name, copies in calls.items()
    }
    seconds_by_name: dict[str, list[float]] = {name: [] for name in calls}
    counts = dict.fromkeys(calls, 1)
    for number in range(rounds):
        for name, timer in timers.items():
            if number < FEWEST or sum(seconds_by_name[name]) * (number + 1) / number < seconds:
                call_seconds, counts[name] = next(timer)
                seconds_by_name[name].append(call_seconds)
    return {name: Times(tuple(seconds_list), counts[name]) for name, seconds_list in seconds_by_name.items()}, results


def _time_calls(calls: Calls, device: torch.device) -> Iterator[tuple[float, int]]:
    """Seconds of each call. A round is a single call."""
    for call in itertools.cycle(calls):
        yield seconds_of(call, device), 1


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, until the device is idle again."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def _time_queued_calls(calls: Calls, device: torch.device) -> Iterator[tuple[float, int]]:
    """Seconds per call of a round on a GPU, and the number of calls. A first call gives the number of calls and the
    sleep."""
    cycle = itertools.cycle(calls)
    live_results: deque[Any] = deque(maxlen=len(calls))
    events: Any = torch.cuda  # torch.cuda.Event has no type annotations
    start, end = (events.Event(enable_timing=True) for _ in range(2))

    def round_of(count: int, sleep: float) -> tuple[float, float]:
        """Seconds per call on the GPU, and seconds per call to queue it."""
        synchronize(device)
        events._sleep(int(sleep * _CLOCK))
        if count > 1:  # the extra call writes back lines that the previous calls left in the L2 cache
            live_results.append(next(cycle)())
        start.record()
        before = time.perf_counter()
        for _ in range(count):
            live_results.append(next(cycle)())
        queued = time.perf_counter() - before
        end.record()
        synchronize(device)
        return start.elapsed_time(end) / 1e3 / count, queued / count

    round_of(len(calls), _ROUND)  # allocates memory for the results that stay alive
    single_call, launch = round_of(1, _ROUND)
    count = max(min(_MAX_QUEUED, int(_ROUND / single_call), int(_LONGEST_SLEEP / (2 * launch))), 1)
    while True:
        yield round_of(count, min(_LONGEST_SLEEP, 2 * count * launch + 0.2e-3))[0], count


def time_launches(call: Callable[[], Any], device: torch.device, *, rounds: int, calls: int = 100) -> Times:
    """Seconds that Python needs to queue a call on a GPU, or to run it on a CPU. For small inputs."""
    call()
    call_seconds = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        call_seconds.append((time.perf_counter() - start) / calls)
    synchronize(device)
    return Times(tuple(call_seconds), calls)
