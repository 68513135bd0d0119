"""Plots of a bench as numbers for an SVG: roofline, and cost by size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrowgauge.harness.tools.bench.bench_row import BenchRow
from narrowgauge.harness.tools.bench.cost_growth import CostCurve, CostPoint
from narrowgauge.harness.tools.bench.operations import COPY, MATMUL
from narrowgauge.harness.tools.bench.report import cells

WIDTH, HEIGHT = 640, 300
"""Size of a plot in SVG units."""


@dataclass(frozen=True)
class Mark:
    """A point with its label."""

    x: float
    y: float
    kind: str
    """CSS class: backend, reference, or missed."""
    title: str


@dataclass(frozen=True)
class Curve:
    """A line with its CSS class and label."""

    points: str
    kind: str
    title: str


@dataclass
class Plot:
    """A plot with logarithmic axes."""

    title: str
    across: str
    up: str
    marks: list[Mark] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    x_ticks: list[tuple[str, float]] = field(default_factory=list)
    y_ticks: list[tuple[str, float]] = field(default_factory=list)


class _LogAxis:
    """A logarithmic axis over these values with this length. `falling`: the axis points against the SVG coordinate."""

    def __init__(self, values: Sequence[float], length: int, *, falling: bool = False) -> None:
        self._low, self._high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
        self._length, self._falling = length, falling

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(self._length * (1 - share if self._falling else share), 1)

    def ticks(self, unit: str) -> list[tuple[str, float]]:
        """Powers of ten; every second power, or fewer, on a long axis."""
        powers = range(math.ceil(self._low), math.floor(self._high) + 1)
        powers = powers[:: max(1, -(-len(powers) // 8))]
        return [
            (cells.rate(10.0**power, unit) if unit else f"{10.0**power:g}", self.at(10.0**power)) for power in powers
        ]


def roofline(rows: Sequence[BenchRow]) -> Plot | None:
    """FLOP per second against FLOP per byte, below the measured ceilings. None without a point.

    A product has 2·M·N·K FLOP. For memory-bound operations the FLOP are nominal: quantize has a comparison and a
    product for each element and orientation, a rotation four additions, dequantize a product. Operations that only move
    bytes have none.
    """
    timed = [row for row in rows if row.seconds and row.flop and row.moved and row.share is not None]
    copies = [row.moved / row.seconds for row in rows if row.who == COPY and row.seconds]
    if not timed or not copies:
        return None
    products = [row.flop / row.seconds for row in rows if row.who == MATMUL and row.seconds]
    intensities = [row.flop / row.moved for row in timed]
    rates = [row.flop / row.seconds for row in timed if row.seconds]
    slope = sorted(copies)[len(copies) // 2]
    low, high = min(intensities), max(intensities)
    top = max(products, default=slope * high)
    ridge = top / slope
    x = _LogAxis([low, max(high, ridge if products else high)], WIDTH)
    y = _LogAxis([*rates, min(top, slope * low), top], HEIGHT, falling=True)
    figure = Plot("Roofline", "FLOP a byte", "FLOP a second", x_ticks=x.ticks(""), y_ticks=y.ticks("FLOP/s"))
    ends = [(low, slope * low), (min(high, ridge), min(slope * high, top))]
    figure.curves.append(_curve(x, y, ends, "floor", f"copy: {cells.rate(slope, 'B/s')}"))
    if products:
        flat = [(ridge, top), (max(high, ridge), top)]
        figure.curves.append(_curve(x, y, flat, "floor", f"torch's matmul: {cells.rate(top, 'FLOP/s')}"))
    for row, intensity, rate in zip(timed, intensities, rates, strict=True):
        kind = "reference" if row.who == "reference" else "missed" if row.met is False or row.failed else "backend"
        title = f"{row.id}: {cells.rate(rate, 'FLOP/s')}, {cells.ceiling(row)} of {row.ceiling}"
        figure.marks.append(Mark(x.at(intensity), y.at(rate), kind, title))
    return figure


def growths(curves: Sequence[CostCurve]) -> list[Plot]:
    """Time and memory against elements, for kernels and reference. A plot without points is omitted."""
    figures = []
    costs: tuple[tuple[str, str, Callable[[CostPoint], float]], ...] = (
        ("Time", "ns an element", lambda point: point.nanoseconds),
        ("Memory", "bytes an element", lambda point: point.memory_each),
    )
    for title, up, cost in costs:
        lines = [(growth, [(p.elements, cost(p)) for p in growth.points if cost(p) > 0]) for growth in curves]
        points = [pair for _, line in lines for pair in line]
        if not points:
            continue
        x = _LogAxis([elements for elements, _ in points], WIDTH)
        y = _LogAxis([value for _, value in points], HEIGHT, falling=True)
        figure = Plot(title, "elements", up, x_ticks=x.ticks(""), y_ticks=y.ticks(""))
        for growth, line in lines:
            kind = "reference" if growth.who == "reference" else "backend"
            figure.curves.append(_curve(x, y, line, kind, growth.who))
            for elements, value in line:
                label = f"{growth.who}, 2^{elements.bit_length() - 1} elements: {value:.3g} {up}"
                figure.marks.append(Mark(x.at(elements), y.at(value), kind, label))
        figures.append(figure)
    return figures


def _curve(x: _LogAxis, y: _LogAxis, line: Sequence[tuple[float, float]], kind: str, title: str) -> Curve:
    return Curve(" ".join(f"{x.at(a)},{y.at(b)}" for a, b in line), kind, title)
