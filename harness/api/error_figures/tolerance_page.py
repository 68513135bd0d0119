"""The page of `narrowgauge tolerance`: a plot and a table for each recipe, shape and output dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.harness.api.error_figures.tolerance import Interval, Tolerance
from narrowgauge.harness.report.page import template

WIDTH, ROW = 170, 22
"""Width of a plot and height of its rows in SVG units. With labels a plot fits a page of 390 px."""
_POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def render(found: Sequence[Tolerance]) -> str:
    """The page."""
    tables: dict[str, list[tuple[Tolerance, Interval]]] = {}
    for each in found:
        title = f"{each.recipe} {'×'.join(map(str, each.shape))} {each.out_dtype}"
        tables.setdefault(title, []).extend((each, interval) for interval in each.intervals)
    combinations = "1 combination" if len(tables) == 1 else f"{len(tables)} combinations"
    intervals = [interval for each in found for interval in each.intervals]
    largest = max(ulp for one in intervals for ulp in (one.largest_ulp, *(library.ulp for library in one.libraries)))
    powers = max(1, math.ceil(math.log10(max(largest, 1))))
    step = -(-powers // 4)
    shown = [0, *(10**power for power in range(0, powers + 1, step))]
    return template.render(
        Path(__file__).with_name("tolerance.html"), name="narrowgauge tolerance", verdict="",
        sentence=f"Error and tolerance of a GEMM: {combinations} of recipe, shape and output dtype", tables=tables,
        plots={title: [_row(*pair, powers) for pair in pairs] for title, pairs in tables.items()},
        ticks=[(_label(ulp), _place(ulp, powers)) for ulp in shown], width=WIDTH, height=ROW,
        libraries=[library.library for library in intervals[0].libraries],
    )  # fmt: skip


def _place(ulp: int, powers: int) -> float:
    """Place on a logarithmic axis from 1 to a power of 10. 0 is as far left of 1 as 10 is right of it."""
    return round(WIDTH * (1 + math.log10(ulp)) / (powers + 1), 1) if ulp else 0.0


def _label(ulp: int) -> str:
    return str(ulp) if ulp < 100 else f"10{str(len(str(ulp)) - 1).translate(_POWERS)}"


def _row(each: Tolerance, one: Interval, powers: int) -> dict[str, Any]:
    """An interval in a plot: its label, places of its median and largest width, and of what libraries accept."""
    return {
        "name": f"{each.family}, {'any' if one.order == 'any' else 'given'} order",
        "proved": (_place(one.median_ulp, powers), _place(one.largest_ulp, powers)),
        "ulps": (one.median_ulp, one.largest_ulp),
        "libraries": [(library.library, _place(library.ulp, powers), library.ulp) for library in one.libraries],
    }
