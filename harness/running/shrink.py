"""Shrinking: the smallest part of the inputs of a failing case that still fails in the same way.

Inputs are cropped, never generated again, along the axes of the operation: in whole blocks, tiles and rotated groups,
with a short last block only at the end of the inputs. Failing need not be monotone in the shape: the bisection accepts
only parts that were judged and failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.running.judging import BETWEEN_RUNS, explained, judge

CALLS = 40
"""Limit of the number of times that a case is judged."""
WORK = 8.0
"""Limit of the cost of all these times together, where judging the whole case costs 1; a part that costs more than the
rest is not tried. The cost is counted, not timed: a failure shrinks to the same shape on a busy machine."""
LARGEST = 1 << 22
"""Elements of the inputs of a case that is shrunk."""
COARSE = (128, 64, 32, 16)
"""Multiples required by kernels beyond the recipe's: sizes are searched in these steps first."""

Window = tuple[int, int]
"""First index, and the last index plus 1."""


@dataclass(frozen=True)
class Shrunk:
    """The smallest part of a case."""

    case: Case
    """The case with the shape and the sections of the part."""
    inputs: Inputs
    outcome: Outcome
    calls: int
    """Number of parts that were judged."""


def shrink(case: Case, inputs: Inputs, outcome: Outcome, backend: Backend, *, cause: str = "") -> Shrunk | None:
    """The smallest part found of the inputs of a failing case. None if no part fails as the whole does, if the whole is
    larger than `LARGEST`, and for a case without axes: its stages follow from all inputs.

    A part fails in the same way if its first wrong stage is that of `outcome` and, with a `cause`, its first
    explanation has this cause. A part refused by the backend, or without a judgement, counts as a different failure.
    """
    if not case.axes:
        return None
    search = _Search(case, inputs, outcome, backend, cause)
    size = sum(tensor.numel() for tensor in inputs.tensors.values())
    if size > LARGEST or not all(axis.extent for axis in search.axes.values()):
        return None
    search.run()
    return None if search.found is case else Shrunk(search.found, search.inputs, search.outcome, search.calls)


# ---- cropping --------------------------------------------------------------------------------------------------------


def crop(case: Case, inputs: Inputs, windows: Mapping[str, Window]) -> tuple[Case, Inputs]:
    """The case and its inputs within a window for each of its axes. More dimensions than two become rows.

    A tensor is cropped along its named axes (`harness.cases.axes`). M of a case with sections
    is cropped within each section. Seed and offset of random bits stay, and count the blocks of the part.
    """
    kept = {name: torch.arange(*windows.get(name, (0, extent))) for name, extent in case.sizes.items()}
    changes: dict[str, Any] = {}
    if "B" in windows:
        changes["batch"] = len(kept["B"])
    if "G" in windows:
        sections = slice(*windows["G"])
        kept["G"] = torch.arange(sections.start, sections.stop)
        starts, sizes = _sections(case.section_sizes, sections, slice(*windows["M"]))
        kept["M"] = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])
        changes["sections"] = f"rows:{','.join(map(str, sizes))}"
    axes = case.tensors
    cropped = {name: _cropped(tensor, axes[name], case, kept) for name, tensor in inputs.tensors.items()}
    shape = tuple(len(kept[name]) for name in case.extents)
    return replace(case, shape=shape, **changes), Inputs(cropped, inputs.counters)


def _cropped(tensor: torch.Tensor, axes: Sequence[str], case: Case, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor at the kept indices of its axes. Leading dimensions beyond the axes are rows."""
    if tensor.dim() > len(axes):
        tensor = tensor.flatten(0, tensor.dim() - len(axes))
    for dimension, axis in enumerate(axes):
        tensor = tensor.index_select(dimension, _indices(axis, case, kept).to(tensor.device))
    return tensor.contiguous()


def _indices(axis: str, case: Case, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Kept indices along an axis of a tensor."""
    if "*" in axis:
        outer, inner = axis.split("*")
        return (kept[outer].unsqueeze(1) * case.extents[inner] + kept[inner]).flatten()
    name, _, divisor = axis.partition("/")
    if name.isdecimal():
        return torch.arange(int(name))
    return torch.unique(kept[name] // int(divisor)) if divisor else kept[name]


def _sections(sizes: tuple[int, ...], kept: slice, rows: slice) -> tuple[list[int], list[int]]:
    """First row and number of rows of the cropped part of each section in the window `kept`."""
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    ends = [(min(rows.start, size), min(rows.stop, size)) for size in sizes[kept]]
    starts = [begin + first for begin, (first, _) in zip(begins[kept], ends, strict=True)]
    return starts, [last - first for first, last in ends]


# ---- searching -------------------------------------------------------------------------------------------------------


class _Enough(Exception):
    """No call is left."""


class _Search:
    def __init__(self, case: Case, inputs: Inputs, outcome: Outcome, backend: Backend, cause: str) -> None:
        self.whole, self.backend, self.cause = (case, inputs), backend, cause
        self.axes = case.axes
        self.windows: dict[str, Window] = {name: (0, axis.extent) for name, axis in self.axes.items()}
        self.found, self.inputs, self.outcome = case, inputs, outcome
        self.stage = _first_wrong(outcome)
        self.calls = 0
        self.work = 0.0

    def run(self) -> None:
        """Crop as far as possible, and again while the shape shrinks: all axes to the block of the first wrong element,
        at once or one by one, then all by bisection, in large steps first, which make the smaller steps cheap."""
        before = None
        try:
            while before != self.windows:
                before = dict(self.windows)
                for names in ((), *((name,) for name in self.axes)):
                    self._try(**self._around(*names))
                self._bisect()
        except _Enough:
            pass

    def _bisect(self) -> None:
        too_few = {(name, front): 0 for name in self.axes for front in (True, False)}
        done: set[tuple[str, int]] = set()
        for step in (*COARSE, 1):
            for name, axis in self.axes.items():
                unit = math.lcm(axis.unit, step)
                if (name, unit) not in done:
                    done.add((name, unit))
                    for front in (True, False):
                        too_few[name, front] = self._shorten(name, unit, too_few[name, front], front=front)

    def _try(self, **windows: Window) -> bool:
        """Whether the case still fails in the same way within these windows, which are kept then."""
        wanted = self.windows | windows
        if wanted == self.windows or any(stop <= start for start, stop in wanted.values()):
            return False
        if self.calls == CALLS:
            raise _Enough
        share = math.prod((stop - start) / self.axes[name].extent for name, (start, stop) in wanted.items())
        if self.work + share > WORK:
            return False
        self.calls += 1
        self.work += share
        try:
            case, inputs = crop(*self.whole, wanted)
            outcome = judge(case, inputs, self.backend, brief=self.stage not in BETWEEN_RUNS)
        except HostLost:
            raise
        except Exception:  # the backend refuses or raises, or gives what no check can read: that is another failure
            return False
        if _first_wrong(outcome) != self.stage:
            return False
        if self.cause and outcome.confirms is not None:
            if not outcome.confirms(self.cause):
                return False
        elif self.cause:
            explanations = explained(outcome, self.backend, part=True)
            if self.cause not in [entry["cause"] for entry in explanations if entry["exact"]]:
                return False
        self.windows, self.found, self.inputs, self.outcome = wanted, case, inputs, outcome
        return True

    def _around(self, *names: str) -> dict[str, Window]:
        """The block of the first wrong element along the axes of these names, or of all on which it has a place."""
        found = {}
        for name, index in _place(self.found, self.outcome).items():
            if names and name not in names:
                continue
            (start, stop), unit = self.windows[name], self.axes[name].unit
            first = start + index // unit * unit
            found[name] = (first, min(first + unit, stop))
        return found

    def _shorten(self, name: str, unit: int, too_few: int, *, front: bool) -> int:
        """Bisect for the fewest failing units of an axis, first or last units; `too_few` elements are too few.

        Gives how many elements are now known to be too few.
        """
        start, stop = self.windows[name]
        enough = -(-(stop - start) // unit)
        short = 0 if front else enough * unit - (stop - start)  # what the last unit lacks
        least = (too_few + short) // unit + 1
        middle = least  # most failures need no more
        while least < enough:
            kept = (start, start + middle * unit) if front else (stop + short - middle * unit, stop)
            if self._try(**{name: kept}):
                enough = middle
            else:
                least = middle + 1
            middle = (least + enough) // 2
        return max(too_few, (least - 1) * unit - short)


def _first_wrong(outcome: Outcome) -> str:
    return next((stage.stage for stage in outcome.stages if not stage.passed), "")


def _place(case: Case, outcome: Outcome) -> dict[str, int]:
    """The place of the first wrong element on the axes of a case, as far as its finding tells."""
    wrong = next((stage for stage in outcome.stages if not stage.passed), None)
    if wrong is None or wrong.finding is None:
        return {}
    element = wrong.finding["elements"][0]
    prefix = wrong.stage.partition(".")[0] if "." in wrong.stage else ""
    # A tensor with a single number for each column has no row.
    row, column = element.get("row"), element.get("column", element.get("tensor"))
    block = element.get("block")
    if column is None and block is not None:
        column = block * case.recipe_of_stage(prefix).block[1]
    names = case.axes_of_stage(prefix)
    place = {name: index for name, index in zip(names, (row, column), strict=False) if index is not None}
    section = element.get("section", element.get("matrix"))
    if section is not None:
        place["G"] = section
    elif case.section_sizes and "M" in place:
        place["G"], place["M"] = _within(case.section_sizes, place["M"])
    return {name: index for name, index in place.items() if name in case.axes}


def _within(sizes: tuple[int, ...], row: int) -> tuple[int, int]:
    """The section of a row that is counted through all sections, and the number of the row in its section."""
    for number, size in enumerate(sizes):
        if row < size:
            return number, row
        row -= size
    return len(sizes) - 1, row
