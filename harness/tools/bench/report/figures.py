"""Plots of a bench as numbers for an SVG: roofline, and cost by size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrowgauge.harness.operations.timing.operation_bench import COPY, MATMUL
from narrowgauge.harness.tools.bench.bench_row import BenchRow
from narrowgauge.harness.tools.bench.cost_growth import CostCurve, CostPoint
from narrowgauge.harness.tools.bench.report import cells

WIDTH, HEIGHT = 640, 300
"""Size of a plot in SVG units."""


LABEL_WIDTH, LABEL_HEIGHT = 6.5, 11
"""Width of a character and height of a label in SVG units, at a font size of 11 px."""


@dataclass
class Mark:
    """A point with its label."""

    x: float
    y: float
    kind: str
    """CSS class: backend, reference, or missed."""
    title: str
    row: str = ""
    """Id of the row in the table, or empty."""
    bar: tuple[float, float] | None = None
    """Ends of the error bar in SVG units: the quartiles of the rounds."""
    label: str = ""
    label_x: float = 0.0
    label_y: float = 0.0
    leader: str = ""
    """SVG path from the point to a distant label."""


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

    def ticks(self, unit: str | None) -> list[tuple[str, float]]:
        """Powers of ten; every second power, or fewer, on a long axis; 1, 2 and 5 times powers of ten on a short axis.
        `unit`: of labels with SI prefixes. None: plain numbers."""
        powers = range(math.ceil(self._low), math.floor(self._high) + 1)
        powers = powers[:: max(1, -(-len(powers) // 8))]
        values = [10.0**power for power in powers]
        if len(values) < 3:
            decades = range(math.floor(self._low), math.floor(self._high) + 1)
            values = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
            values = [value for value in values if self._low <= math.log10(value) <= self._high]
        return [(f"{value:g}" if unit is None else cells.rate(value, unit).strip(), self.at(value)) for value in values]


def roofline(rows: Sequence[BenchRow]) -> Plot | None:
    """FLOP per second against FLOP per byte, below the measured ceilings. None without a point.

    A product has 2·M·N·K FLOP. For memory-bound operations the FLOP are nominal: quantize has a comparison and a
    product for each element and orientation, a rotation four additions, dequantize a product. Operations that only move
    bytes have no figure.
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
    figure = Plot(
        "Roofline", "arithmetic intensity (FLOP/byte)", "rate (FLOP/s)", x_ticks=x.ticks(None),
        y_ticks=y.ticks("FLOP/s"),
    )  # fmt: skip
    ends = [(low, slope * low), (min(high, ridge), min(slope * high, top))]
    figure.curves.append(_curve(x, y, ends, "floor", f"copy: {cells.rate(slope, 'B/s')}"))
    if products:
        flat = [(ridge, top), (max(high, ridge), top)]
        figure.curves.append(_curve(x, y, flat, "floor", f"torch's matmul: {cells.rate(top, 'FLOP/s')}"))
    for row, intensity, rate in zip(timed, intensities, rates, strict=True):
        kind = "reference" if row.who == "reference" else "missed" if row.failed else "backend"
        title = f"{row.id}: {cells.rate(rate, 'FLOP/s')}, {cells.ceiling(row)} of {row.ceiling}"
        bar = None
        if row.seconds_q1 and row.seconds_q3:
            bar = y.at(row.flop / row.seconds_q3), y.at(row.flop / row.seconds_q1)
        figure.marks.append(Mark(x.at(intensity), y.at(rate), kind, title, row.id, bar))
    for number, mark in enumerate(figure.marks, 1):
        mark.label = str(number)
    _place_labels(figure.marks)
    return figure


def growths(curves: Sequence[CostCurve]) -> list[Plot]:
    """Time and memory against elements, for kernels and reference. A plot without points is omitted."""
    figures = []
    costs: tuple[tuple[str, str, Callable[[CostPoint], float]], ...] = (
        ("Time", "ns/element", lambda point: point.nanoseconds),
        ("Memory", "bytes/element", lambda point: point.memory_each),
    )
    for title, unit, cost in costs:
        lines = [(growth, [(p.elements, cost(p)) for p in growth.points if cost(p) > 0]) for growth in curves]
        points = [pair for _, line in lines for pair in line]
        if not points:
            continue
        x = _LogAxis([elements for elements, _ in points], WIDTH)
        y = _LogAxis([value for _, value in points], HEIGHT, falling=True)
        figure = Plot(title, "elements", f"{title.lower()} ({unit})", x_ticks=x.ticks(""), y_ticks=y.ticks(None))
        for growth, line in lines:
            kind = "reference" if growth.who == "reference" else "backend"
            figure.curves.append(_curve(x, y, line, kind, growth.who))
            for elements, value in line:
                label = f"{growth.who}, 2^{elements.bit_length() - 1} elements: {value:.3g} {unit}"
                figure.marks.append(Mark(x.at(elements), y.at(value), kind, label))
            if line:
                figure.marks[-1].label = growth.who
        _place_labels(figure.marks)
        figures.append(figure)
    return figures


def _place_labels(marks: Sequence[Mark]) -> None:
    """Place the labels beside their points without an overlap with points and labels. A label without a free place
    is removed; the title of the point stays."""
    taken = [(mark.x - 5, mark.y - 5, mark.x + 5, mark.y + 5) for mark in marks]
    for mark in marks:
        width = LABEL_WIDTH * len(mark.label)
        for right, down in _PLACES:
            left = mark.x + (right if right >= 0 else right - width)
            top = mark.y + down - LABEL_HEIGHT / 2
            box = (left, top, left + width, top + LABEL_HEIGHT)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= WIDTH + _MARGIN and box[3] <= HEIGHT
            if inside and not any(_overlap(box, other) for other in taken):
                mark.label_x, mark.label_y = round(left, 1), round(top + LABEL_HEIGHT - 2, 1)
                if (right, down) not in _PLACES[:2]:
                    end = (box[0] if right >= 0 else box[2], mark.y + down)
                    mark.leader = f"M{mark.x} {mark.y}L{end[0]:.1f} {end[1]:.1f}"
                taken.append(box)
                break
        else:
            mark.label = ""


_MARGIN = 60
"""Width beside the plot that labels may use."""
_PLACES = [(right, down) for down in (0, -9, 9, -16, 16) for right in (7, -7, 20, -20, 34, -34)]
"""Distances of a label from its point, the nearest first."""


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _curve(x: _LogAxis, y: _LogAxis, line: Sequence[tuple[float, float]], kind: str, title: str) -> Curve:
    return Curve(" ".join(f"{x.at(a)},{y.at(b)}" for a, b in line), kind, title)
