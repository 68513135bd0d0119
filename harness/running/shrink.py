"""Shrinking: the smallest part of a failing case's own inputs that still fails in the same way.

Inputs are cropped, never made anew, along the axes of the operation: whole blocks, tiles and rotated groups, with a
short last one only where the inputs end so. Failing need not be monotone in the shape, so the search is a bisection
that keeps nothing but what was judged and failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.running.judging import explained, judge
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.recipes import Recipe, find_recipe

CALLS = 40
"""Times that a case is judged at most."""
WORK = 8.0
"""What all of them may cost, judging the whole once being 1; a part that costs more than is left is not tried. Counted
and not timed, so that a failure shrinks to the same shape on a busy machine."""
LARGEST = 1 << 22
"""Elements of the inputs of a case that is shrunk."""
COARSE = (128, 64, 32, 16)
"""Multiples that kernels ask for beyond what their recipe does: sizes are searched in these steps first."""

Window = tuple[int, int]
"""First index, and the one behind the last."""


@dataclass(frozen=True)
class Axis:
    """A direction in which inputs can be cropped."""

    extent: int
    unit: int = 1
    """A window begins at a multiple of it, and ends at one or at the end."""


@dataclass(frozen=True)
class Shrunk:
    """What is left of a case."""

    case: Case
    """The case with its shape, and its sections, replaced."""
    inputs: Inputs
    outcome: Outcome
    calls: int
    """Times that it was judged."""


def shrink(case: Case, inputs: Inputs, outcome: Outcome, backend: Backend, *, cause: str = "") -> Shrunk | None:
    """The smallest part found of the inputs of a failing case; None where no part fails as the whole does, or the whole
    is larger than `LARGEST`, and of modules, whose steps and stages follow from all of what is given.

    In the same way: the first wrong stage is that of `outcome`, and where a `cause` is given the first explanation has
    it. A part that the backend refuses, or that cannot be judged, fails in another way.
    """
    if case.is_module:
        return None
    search = _Search(case, inputs, outcome, backend, cause)
    size = sum(tensor.numel() for tensor in inputs.tensors())
    if size > LARGEST or not all(axis.extent for axis in search.axes.values()):
        return None
    search.run()
    return None if search.found is case else Shrunk(search.found, search.inputs, search.outcome, search.calls)


# ---- cropping --------------------------------------------------------------------------------------------------------


def axes_of(case: Case, inputs: Inputs) -> dict[str, Axis]:
    """The axes of a case. rows and columns are those of x, of a gemm those of the output, and depth is its K.

    Of grouped operations `sections` are counted, and rows are those of every section by itself.
    """
    if case.operation in ("swizzle", "update-scale"):
        return {"rows": Axis(inputs.x.shape[0]), "columns": Axis(inputs.x.shape[1])}
    grouped = {}
    rows = math.prod(inputs.x.shape[:-1])
    if "grouped" in case.operation:
        rows, grouped = max(case.sections), {"sections": Axis(len(case.sections))}
    rules = [find_recipe(name) for name in case.recipes]
    if inputs.w is None:
        along, across = _along(rules[0]), _across(rules[0])
        if case.usage != "rowwise" and _physical(case):  # quantized along M, alone or too
            along, across = (math.lcm(along, across),) * 2 if case.usage == "both" else (across, along)
        return grouped | {"rows": Axis(rows, across), "columns": Axis(inputs.x.shape[-1], along)}
    down, across = map(_across, rules)
    if case.operation == "gemm-quantized":
        out = find_recipe(case.out_recipe)
        down, across = math.lcm(down, _across(out)), math.lcm(across, _along(out))
    return grouped | {
        "rows": Axis(rows, down), "columns": Axis(case.shape[2], across),
        "depth": Axis(case.shape[1], math.lcm(*map(_along, rules))),
    }  # fmt: skip


def _along(rule: Recipe) -> int:
    """Elements that go together along a row."""
    width = 1 if rule.whole else rule.block[1]
    return math.lcm(width, rule.transform.group) if rule.transform else width


def _across(rule: Recipe) -> int:
    """Rows that go together."""
    return 1 if rule.whole else rule.block[0]


def _physical(case: Case) -> bool:
    """Whether x of a columnwise quantize is the matrix as it is given, and not the transpose that is quantized."""
    return case.usage == "both" or "grouped" in case.operation or find_recipe(case.recipe).columnwise == "in-place"


def crop(case: Case, inputs: Inputs, windows: Mapping[str, Window]) -> tuple[Case, Inputs]:
    """The case and its inputs within a window for each of its axes. More dimensions than two become rows."""
    rows, columns = (slice(*windows[name]) for name in ("rows", "columns"))
    x, w, c, bias = inputs.x, inputs.w, inputs.c, inputs.bias
    scale, flags = dict(inputs.scale), case.flags
    if "sections" in windows:
        sections = slice(*windows["sections"])
        starts, sizes = _sections(case.sections, sections, rows)
        taken = torch.cat([torch.arange(s, s + n, device=x.device) for s, n in zip(starts, sizes, strict=True)])
        flags = (f"rows:{','.join(map(str, sizes))}", *flags[1:])
        scale = {name: numbers[sections] for name, numbers in scale.items()}
        if w is not None:
            matrices = w.view(len(case.sections), -1, w.shape[1])[sections, columns, slice(*windows["depth"])]
            w = matrices.reshape(-1, matrices.shape[2])
        bias = None if bias is None else bias[sections, columns].contiguous()
    else:
        taken = torch.arange(math.prod(x.shape[:-1]), device=x.device)[rows]
        w = None if w is None else w[columns, slice(*windows["depth"])].contiguous()
        bias = None if bias is None else bias[columns].contiguous()
    if case.operation == "update-scale":
        scale["x"] = scale["x"][columns].contiguous()
    inner = columns if inputs.w is None else slice(*windows["depth"])
    x = x.flatten(0, -2)[taken, inner].contiguous()
    c = None if c is None else c[taken, columns].contiguous()
    shape: tuple[int, ...] = (x.shape[0], x.shape[1])
    if w is not None:
        shape = (*shape, columns.stop - columns.start)
    elif case.usage == "columnwise" and not _physical(case):
        shape = shape[::-1]
    random = {name: _cropped_random(name, bits, rows, columns) for name, bits in inputs.random.items()}
    return replace(case, shape=shape, flags=flags), Inputs(x, w, c, bias, random, scale)


def _sections(sizes: tuple[int, ...], kept: slice, rows: slice) -> tuple[list[int], list[int]]:
    """First row and number of rows of what is left of every section that is kept."""
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    ends = [(min(rows.start, size), min(rows.stop, size)) for size in sizes[kept]]
    starts = [begin + first for begin, (first, _) in zip(begins[kept], ends, strict=True)]
    return starts, [last - first for first, last in ends]


def _cropped_random(name: str, bits: Random, rows: slice, columns: slice) -> Random:
    """Words of four elements each; seed and offset stay, and count the blocks of what is left."""
    if not isinstance(bits, torch.Tensor):
        return bits
    one, other = (columns, rows) if name == "xT" else (rows, columns)
    return bits[one, other.start // 4 : -(-other.stop // 4)].contiguous()


# ---- searching -------------------------------------------------------------------------------------------------------


class _Enough(Exception):
    """No call is left."""


class _Search:
    def __init__(self, case: Case, inputs: Inputs, outcome: Outcome, backend: Backend, cause: str) -> None:
        self.whole, self.backend, self.cause = (case, inputs), backend, cause
        self.axes = axes_of(case, inputs)
        self.windows: dict[str, Window] = {name: (0, axis.extent) for name, axis in self.axes.items()}
        self.found, self.inputs, self.outcome = case, inputs, outcome
        self.stage = _first_wrong(outcome)
        self.calls = 0
        self.work = 0.0

    def run(self) -> None:
        """Crop as far as it goes, and again while that helps: all axes to the block of the first wrong element, at once
        or one by one, then all by bisection, in large steps first, which make the smaller ones cheap."""
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
            outcome = judge(case, inputs, self.backend)
        except Exception:  # the backend refuses or raises, or gives what no check can read: that is another failure
            return False
        if _first_wrong(outcome) != self.stage:
            return False
        if self.cause and next((found["cause"] for found in explained(outcome, self.backend)), "") != self.cause:
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
        """Bisect for the fewest units of an axis that fail, first or last ones, where so many elements are too few.

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
    return next((stage.stage for stage in outcome.stages if not stage.right), "")


def _place(case: Case, outcome: Outcome) -> dict[str, int]:
    """Where on the axes of a case the first wrong element lies, as far as its finding tells."""
    wrong = next((stage for stage in outcome.stages if not stage.right), None)
    if wrong is None or wrong.finding is None:
        return {}
    element = wrong.finding["elements"][0]
    prefix = wrong.stage.partition(".")[0] if "." in wrong.stage else ""
    row, column = element.get("row"), element.get("column", element.get("tensor"))
    block = element.get("block")
    if column is None and block is not None:
        name = case.out_recipe if prefix in ("output", "fused") else case.recipes[int(prefix == "w")]
        column = block * find_recipe(name).block[1]
    if "gemm" in case.operation:
        names = {"x": ("rows", "depth"), "w": ("columns", "depth")}.get(prefix, ("rows", "columns"))
    else:
        transposed = prefix == "columnwise" or ("grouped" in case.operation and case.usage == "columnwise")
        in_place = transposed and find_recipe(case.recipe).columnwise == "in-place"
        names = ("columns", "rows") if transposed and not in_place else ("rows", "columns")
    found = {name: index for name, index in zip(names, (row, column), strict=True) if index is not None}
    part = element.get("section", element.get("matrix"))
    if part is not None:
        found["sections"] = part
    elif "grouped" in case.operation and "rows" in found:
        found["sections"], found["rows"] = _within(case.sections, found["rows"])
    return found


def _within(sizes: tuple[int, ...], row: int) -> tuple[int, int]:
    """The section of a row that is counted through all of them, and the row in it."""
    for number, size in enumerate(sizes):
        if row < size:
            return number, row
        row -= size
    return len(sizes) - 1, row
