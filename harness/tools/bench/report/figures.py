"""The figures of a bench, as numbers for an SVG: what was attained under its roofs, and how cost grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrowgauge.harness.tools.bench.growth import Growth, Point
from narrowgauge.harness.tools.bench.operations import COPY, MATMUL
from narrowgauge.harness.tools.bench.report import cells
from narrowgauge.harness.tools.bench.row import Row

WIDTH, HEIGHT = 640, 300
"""Of a plot, in the units of its SVG."""


@dataclass(frozen=True)
class Mark:
    """A point: where, whose, and what it is."""

    x: float
    y: float
    kind: str
    """Its class in the page: backend, reference, or missed."""
    title: str


@dataclass(frozen=True)
class Curve:
    """A line, its class in the page, and its name."""

    points: str
    kind: str
    title: str


@dataclass
class Figure:
    """A plot with logarithmic axes."""

    title: str
    across: str
    up: str
    marks: list[Mark] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    x_ticks: list[tuple[str, float]] = field(default_factory=list)
    y_ticks: list[tuple[str, float]] = field(default_factory=list)


class _Axis:
    """A logarithmic axis over these values, `length` long; from the far end where `falling`, as in an SVG."""

    def __init__(self, values: Sequence[float], length: int, *, falling: bool = False) -> None:
        self._low, self._high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
        self._length, self._falling = length, falling

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(self._length * (1 - share if self._falling else share), 1)

    def ticks(self, unit: str) -> list[tuple[str, float]]:
        """Every power of ten, of a long axis every other."""
        powers = range(math.ceil(self._low), math.floor(self._high) + 1)
        powers = powers[:: max(1, -(-len(powers) // 8))]
        return [
            (cells.rate(10.0**power, unit) if unit else f"{10.0**power:g}", self.at(10.0**power)) for power in powers
        ]


def roofline(rows: Sequence[Row]) -> Figure | None:
    """Arithmetic a second against arithmetic a byte, under the roofs that this run measured. None without a point.

    A product does 2·M·N·K. For what memory bounds the arithmetic is nominal: quantize a comparison and a product an
    element and orientation, a rotation four additions, dequantize a product; what only moves bytes has none.
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
    x = _Axis([low, max(high, ridge if products else high)], WIDTH)
    y = _Axis([*rates, min(top, slope * low), top], HEIGHT, falling=True)
    figure = Figure("Roofline", "FLOP a byte", "FLOP a second", x_ticks=x.ticks(""), y_ticks=y.ticks("FLOP/s"))
    ends = [(low, slope * low), (min(high, ridge), min(slope * high, top))]
    figure.curves.append(_curve(x, y, ends, "floor", f"copy: {cells.rate(slope, 'B/s')}"))
    if products:
        flat = [(ridge, top), (max(high, ridge), top)]
        figure.curves.append(_curve(x, y, flat, "floor", f"torch's matmul: {cells.rate(top, 'FLOP/s')}"))
    for row, intensity, rate in zip(timed, intensities, rates, strict=True):
        kind = "reference" if row.who == "reference" else "missed" if row.met is False or row.red else "backend"
        title = f"{row.id}: {cells.rate(rate, 'FLOP/s')}, {cells.ceiling(row)} of {row.ceiling}"
        figure.marks.append(Mark(x.at(intensity), y.at(rate), kind, title))
    return figure


def growths(found: Sequence[Growth]) -> list[Figure]:
    """Time against elements, and memory, of both sides. None for what was not measured."""
    figures = []
    costs: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
        ("Time", "ns an element", lambda point: point.nanoseconds),
        ("Memory", "bytes an element", lambda point: point.memory_each),
    )
    for title, up, cost in costs:
        lines = [(growth, [(p.elements, cost(p)) for p in growth.points if cost(p) > 0]) for growth in found]
        every = [pair for _, line in lines for pair in line]
        if not every:
            continue
        x = _Axis([elements for elements, _ in every], WIDTH)
        y = _Axis([value for _, value in every], HEIGHT, falling=True)
        figure = Figure(title, "elements", up, x_ticks=x.ticks(""), y_ticks=y.ticks(""))
        for growth, line in lines:
            kind = "reference" if growth.who == "reference" else "backend"
            figure.curves.append(_curve(x, y, line, kind, growth.who))
            for elements, value in line:
                words_of = f"{growth.who}, 2^{elements.bit_length() - 1} elements: {value:.3g} {up}"
                figure.marks.append(Mark(x.at(elements), y.at(value), kind, words_of))
        figures.append(figure)
    return figures


def _curve(x: _Axis, y: _Axis, line: Sequence[tuple[float, float]], kind: str, title: str) -> Curve:
    return Curve(" ".join(f"{x.at(a)},{y.at(b)}" for a, b in line), kind, title)
