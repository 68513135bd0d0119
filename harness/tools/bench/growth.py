"""How cost grows: time and memory of quantize against elements, by the kernels and by the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.tools.bench.interleave import Calls, cold, interleaved
from narrowgauge.harness.tools.bench.judge import Given, judge_quantized
from narrowgauge.harness.tools.bench.row import OURS
from narrowgauge.harness.tools.bench.silence_stderr import without_stderr
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe

RECIPE = "nvfp4"
FIRST, LAST = 16, {"cpu": 26, "cuda": 30}
"""Of the sizes, as powers of two; every fourth power of two between them."""
STEP = 2
LARGE = {"cpu": 22, "cuda": 26}
"""From here on a curve is held to a line: what a call costs anyway no longer counts. On an H200 that is 7 µs, of 26 µs
for 2^24 elements and 84 for 2^26."""
LINEAR = 0.2
"""How far from one another the costs of an element may lie for a curve to be linear."""
_ROUNDS, _SECONDS = 9, 1.0
_DRAWN = 1 << 22
"""Numbers that are random. Others repeat them."""


@dataclass(frozen=True)
class Point:
    """What 2^exponent elements cost."""

    exponent: int
    seconds: float
    memory: int
    """Bytes that were in use at once, beyond the input."""

    @property
    def elements(self) -> int:
        return 1 << self.exponent

    @property
    def nanoseconds(self) -> float:
        """Of an element."""
        return 1e9 * self.seconds / self.elements

    @property
    def memory_each(self) -> float:
        """Bytes of an element."""
        return self.memory / self.elements


@dataclass
class Growth:
    """The curve of one side."""

    who: str
    points: list[Point] = field(default_factory=list)
    ended: str = ""
    """Why it ends early, or is wrong."""
    wrong: bool = False
    large: int = LARGE["cpu"]
    """The exponent from which on it is held to a line."""

    def slope(self, cost: Callable[[Point], float]) -> float | None:
        """Least squares of log cost by log elements, over the large sizes; 1 is linear. None of fewer than two."""
        large = [(point.exponent, math.log2(cost(point))) for point in self._large() if cost(point) > 0]
        if len(large) < 2:
            return None
        x, y = (sum(values) / len(large) for values in zip(*large, strict=True))
        return float(sum((a - x) * (b - y) for a, b in large) / sum((a - x) ** 2 for a, _ in large))

    def apart(self, each: Callable[[Point], float]) -> tuple[float, float] | None:
        """How much cheaper and how much dearer an element gets, at most, with the size: (−0.5, 0.1)."""
        costs = [each(point) for point in self._large() if each(point) > 0]
        changes = [late / early - 1 for early, late in itertools.combinations(costs, 2)]
        return (min(0.0, *changes), max(0.0, *changes)) if changes else None

    def _large(self) -> list[Point]:
        return [point for point in self.points if point.exponent >= self.large]

    def sentence(self) -> str:
        """What was measured of it."""
        parts = []
        for name, cost, each in (
            ("time", lambda point: point.seconds, lambda point: point.nanoseconds),
            ("memory", lambda point: point.memory, lambda point: point.memory_each),
        ):
            slope, apart = self.slope(cost), self.apart(each)
            if slope is not None and apart is not None:
                cheaper, dearer = apart
                linear = "dearer than" if dearer > LINEAR else "cheaper than" if cheaper < -LINEAR else "within"
                parts.append(
                    f"{name} grows as elements^{slope:.3f}, that of an element by {100 * cheaper:+.1f} to "
                    f"{100 * dearer:+.1f} %: {linear} linear ± {100 * LINEAR:.0f} %"
                )
        said = "; ".join(parts) or "too few large sizes to say how it grows"
        ended = f"; {self.ended}" if self.ended else ""
        return f"{self.who}, from 2^{self.large}: {said}{ended}"


def grow(
    device_name: str, *, last: int | None = None, on_size: Callable[[str], None] = lambda name: None
) -> list[Growth]:
    """Quantize ever larger matrices, and judge each result of the kernels. `last`: the largest, as a power of two.

    A side that raises, where memory ends for example, has no larger sizes, and says so. Times are of all sizes in turn,
    round after round, and of inputs that are in no cache.
    """
    device = torch.device(device_name)
    large = LARGE[device.type]
    sides = [(Growth(OURS, large=large), native), (Growth("reference", large=large), reference)]
    calls: dict[str, Calls] = {}
    memory: dict[str, int] = {}
    results = []  # they live until all sizes have been called, as they do while those are timed
    exponents = range(FIRST, (LAST[device.type] if last is None else last) + 1, STEP)
    numbers = _numbers(exponents[-1], device)
    for exponent in exponents:
        on_size(f"2^{exponent} elements")
        inputs = numbers.view(-1, 1 << exponent // 2, 1 << exponent - exponent // 2)
        for growth, doors in sides:
            if growth.ended:
                continue
            name = _name(growth, exponent)
            copies = -(-cold(device) // inputs[0].nbytes)
            some = [partial(doors.quantize, x, RECIPE) for x in inputs[:copies]]
            try:
                results.append(some[0]())
                memory[name] = _peak(some[0], device)
            except Exception as error:
                growth.ended = f"ends before 2^{exponent}: {type(error).__name__}: {str(error)[:200]}"
                continue
            calls[name] = some
            if growth.who == OURS:
                verdict = judge_quantized(inputs[0], find_recipe(RECIPE), Given(), results[-1])
                if verdict.sentence:
                    growth.ended, growth.wrong = f"wrong at 2^{exponent}: {verdict.sentence}", True
    results.clear()
    times, _ = interleaved(calls, device, rounds=_ROUNDS, seconds=_SECONDS)
    for growth, _ in sides:
        for exponent in exponents:
            if (name := _name(growth, exponent)) in times:
                growth.points.append(Point(exponent, times[name].median, memory[name]))
    return [growth for growth, _ in sides]


def _name(growth: Growth, exponent: int) -> str:
    return f"{growth.who} 2^{exponent}"


def _numbers(largest: int, device: torch.device) -> torch.Tensor:
    """Normally distributed bfloat16 numbers: 2^largest, or as many as no cache holds."""
    count = 1 << max(largest, math.ceil(math.log2(cold(device) / 2)))
    some = torch.randn(
        min(count, _DRAWN), generator=torch.Generator(device).manual_seed(0), device=device, dtype=torch.bfloat16
    )
    return some.repeat(count // len(some))


def _peak(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes of torch's own that were in use at once within a call, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler of torch 2.13 writes a line whenever it starts and stops.
    with without_stderr(), torch.autograd.profiler.profile(profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0))
