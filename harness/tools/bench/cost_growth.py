"""Cost growth: time and memory of an operation against the number of elements, for the kernels and the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.operations.timing.operation_bench import Calls, cold_cache_bytes
from narrowgauge.harness.tools.bench.bench_row import NATIVE
from narrowgauge.harness.tools.bench.interleave import time_interleaved
from narrowgauge.harness.tools.bench.silence_stderr import silence_stderr
from narrowgauge.harness.tools.bench.tasks import benches
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference

FIRST, LAST = 16, {"cpu": 26, "cuda": 30}
"""Smallest and largest size as powers of two. The sizes grow by a factor of four."""
STEP = 2
LARGE = {"cpu": 22, "cuda": 26}
"""Exponent from which a curve is compared with a line: at this size the constant cost of a call is small. On an H200 it
is 7 µs, of 26 µs for 2^24 elements and 84 µs for 2^26."""
LINEAR = 0.2
"""Largest relative change of the cost per element of a linear curve."""
_ROUNDS, _SECONDS = 9, 1.0
_DRAWN = 1 << 22
"""Number of random numbers. Larger inputs repeat them."""


@dataclass(frozen=True)
class CostPoint:
    """Cost of an operation on 2^exponent elements."""

    exponent: int
    seconds: float
    memory: int
    """Peak memory in bytes, without the input."""

    @property
    def elements(self) -> int:
        return 1 << self.exponent

    @property
    def nanoseconds(self) -> float:
        """Nanoseconds per element."""
        return 1e9 * self.seconds / self.elements

    @property
    def memory_each(self) -> float:
        """Bytes per element."""
        return self.memory / self.elements


@dataclass
class CostCurve:
    """Cost of an implementation by size."""

    who: str
    points: list[CostPoint] = field(default_factory=list)
    ended: str = ""
    """Why the curve ends early, or is wrong."""
    wrong: bool = False
    large: int = LARGE["cpu"]
    """Exponent from which the curve is compared with a line."""

    def slope(self, cost: Callable[[CostPoint], float]) -> float | None:
        """Slope of log cost by log elements (least squares) over the large sizes: 1 is linear. None with less than two
        sizes."""
        large = [(point.exponent, math.log2(cost(point))) for point in self._large() if cost(point) > 0]
        if len(large) < 2:
            return None
        x, y = (sum(values) / len(large) for values in zip(*large, strict=True))
        return float(sum((a - x) * (b - y) for a, b in large) / sum((a - x) ** 2 for a, _ in large))

    def relative_change(self, cost_per_element: Callable[[CostPoint], float]) -> tuple[float, float] | None:
        """Largest decrease and largest increase of the cost per element with the size, relative: (−0.5, 0.1)."""
        costs = [cost_per_element(point) for point in self._large() if cost_per_element(point) > 0]
        changes = [late / early - 1 for early, late in itertools.combinations(costs, 2)]
        return (min(0.0, *changes), max(0.0, *changes)) if changes else None

    def _large(self) -> list[CostPoint]:
        return [point for point in self.points if point.exponent >= self.large]

    def sentence(self) -> str:
        """The measured growth in a sentence."""
        parts = []
        for name, cost, cost_per_element in (
            ("time", lambda point: point.seconds, lambda point: point.nanoseconds),
            ("memory", lambda point: point.memory, lambda point: point.memory_each),
        ):
            slope, apart = self.slope(cost), self.relative_change(cost_per_element)
            if slope is not None and apart is not None:
                cheaper, dearer = apart
                linear = "dearer than" if dearer > LINEAR else "cheaper than" if cheaper < -LINEAR else "within"
                parts.append(
                    f"{name} grows as elements^{slope:.3f}, that of an element by {100 * cheaper:+.1f} to "
                    f"{100 * dearer:+.1f} %: {linear} linear ± {100 * LINEAR:.0f} %"
                )
        measured = "; ".join(parts) or "too few large sizes to say how it grows"
        ended = f"; {self.ended}" if self.ended else ""
        return f"{self.who}, from 2^{self.large}: {measured}{ended}"


def measure_growth(
    device_name: str, *, last: int | None = None, on_size: Callable[[str], None] = lambda name: None
) -> list[CostCurve]:
    """Call the operation that has a `Growth` on matrices of growing size, and judge each result of the kernels.
    `last`: largest size, as a power of two.

    An implementation that raises, for example without memory, has no larger sizes; its curve says why it ends. All
    sizes are timed in turn, round after round, with inputs that no cache holds.
    """
    device = torch.device(device_name)
    large = LARGE[device.type]
    operation = next(bench.growth for bench in benches() if bench.growth)
    sides = [(CostCurve(NATIVE, large=large), native), (CostCurve("reference", large=large), reference)]
    calls: dict[str, Calls] = {}
    memory: dict[str, int] = {}
    results = []  # kept until every size was called: memory is allocated as during the timing
    exponents = range(FIRST, (LAST[device.type] if last is None else last) + 1, STEP)
    numbers = _numbers(exponents[-1], device)
    for exponent in exponents:
        on_size(f"2^{exponent} elements")
        inputs = numbers.view(-1, 1 << exponent // 2, 1 << exponent - exponent // 2)
        for curve, ops in sides:
            if curve.ended:
                continue
            name = _name(curve, exponent)
            copies = -(-cold_cache_bytes(device) // inputs[0].nbytes)
            copy_calls = [partial(operation.call, ops, x) for x in inputs[:copies]]
            try:
                results.append(copy_calls[0]())
                memory[name] = _peak(copy_calls[0], device)
            except Exception as error:
                curve.ended = f"ends before 2^{exponent}: {type(error).__name__}: {str(error)[:200]}"
                continue
            calls[name] = copy_calls
            if curve.who == NATIVE:
                verdict = operation.judge(inputs[0], results[-1])
                if verdict.sentence:
                    curve.ended, curve.wrong = f"wrong at 2^{exponent}: {verdict.sentence}", True
    results.clear()
    times, _ = time_interleaved(calls, device, rounds=_ROUNDS, seconds=_SECONDS)
    for curve, _ in sides:
        for exponent in exponents:
            if (name := _name(curve, exponent)) in times:
                curve.points.append(CostPoint(exponent, times[name].median, memory[name]))
    return [curve for curve, _ in sides]


def _name(curve: CostCurve, exponent: int) -> str:
    return f"{curve.who} 2^{exponent}"


def _numbers(largest: int, device: torch.device) -> torch.Tensor:
    """Normally distributed bfloat16 numbers: 2^largest numbers, or more than the caches hold if that is larger."""
    count = 1 << max(largest, math.ceil(math.log2(cold_cache_bytes(device) / 2)))
    numbers = torch.randn(
        min(count, _DRAWN), generator=torch.Generator(device).manual_seed(0), device=device, dtype=torch.bfloat16
    )
    return numbers.repeat(count // len(numbers))


def _peak(call: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes allocated by torch within a call, above the bytes before the call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler of torch 2.13 prints a line at each start and stop.
    with silence_stderr(), torch.autograd.profiler.profile(profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0))
