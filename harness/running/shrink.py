"""Shrinking: the smallest part of the inputs of a failing case that still fails in the same way.

Inputs are cropped, never generated again, along the axes of the operation: in whole blocks, tiles and rotated groups,
with a short last block only at the end of the inputs. Failing need not be monotone in the shape, so the search is a
bisection that accepts only parts that were judged and failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.gemm import ProductCase, QuantizedGemmCase
from narrowgauge.harness.cases.modules import ModuleCase
from narrowgauge.harness.cases.quantize import GroupedQuantizeCase, QuantizeCase, SwizzleCase, UpdateScaleCase
from narrowgauge.harness.inputs.inputs import Inputs, ProductInputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.running.judging import explained, judge
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.recipes import Recipe, find_recipe

CALLS = 40
"""Limit of the number of times that a case is judged."""
WORK = 8.0
"""Limit of the cost of all these times together, where judging the whole case costs 1; a part that costs more than the
rest is not tried. The cost is counted, not timed, so that a failure shrinks to the same shape on a busy machine."""
LARGEST = 1 << 22
"""Elements of the inputs of a case that is shrunk."""
COARSE = (128, 64, 32, 16)
"""Multiples that kernels require beyond those of the recipe: sizes are searched in these steps first."""

Window = tuple[int, int]
"""First index, and the last index plus 1."""


@dataclass(frozen=True)
class Axis:
    """A direction in which inputs can be cropped."""

    extent: int
    unit: int = 1
    """A window begins at a multiple of the unit, and ends at a multiple or at the end of the axis."""


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
    larger than `LARGEST`, and for modules: their steps and stages follow from all inputs.

    A part fails in the same way if its first wrong stage is that of `outcome` and, with a `cause`, its first
    explanation has this cause. A part that the backend refuses, or that cannot be judged, fails in another way.
    """
    if isinstance(case, ModuleCase):
        return None
    search = _Search(case, inputs, outcome, backend, cause)
    size = sum(tensor.numel() for tensor in inputs.tensors())
    if size > LARGEST or not all(axis.extent for axis in search.axes.values()):
        return None
    search.run()
    return None if search.found is case else Shrunk(search.found, search.inputs, search.outcome, search.calls)


# ---- cropping --------------------------------------------------------------------------------------------------------


def axes_of(case: Case, inputs: Inputs) -> dict[str, Axis]:
    """The axes of a case: rows and columns are those of x, of a product those of the output, and depth is its K.

    Of grouped operations `sections` are counted, and rows are those of each section.
    """
    if isinstance(case, SwizzleCase | UpdateScaleCase):
        return {"rows": Axis(inputs.x.shape[0]), "columns": Axis(inputs.x.shape[1])}
    grouped = {}
    rows = math.prod(inputs.x.shape[:-1])
    if case.section_sizes:
        rows, grouped = max(case.section_sizes), {"sections": Axis(len(case.section_sizes))}
    if isinstance(case, ProductCase):
        return grouped | _product_axes(case, rows)
    recipe = find_recipe(case.recipe_names[0])
    along, across = _along(recipe), _across(recipe)
    if _usage(case) != "rowwise" and _physical(case):  # quantized along M, by itself or beside the rowwise half
        along, across = (math.lcm(along, across),) * 2 if _usage(case) == "both" else (across, along)
    return grouped | {"rows": Axis(rows, across), "columns": Axis(inputs.x.shape[-1], along)}


def _product_axes(case: ProductCase, rows: int) -> dict[str, Axis]:
    down, across = map(_across, case.operand_recipes)
    if isinstance(case, QuantizedGemmCase):
        out = find_recipe(case.out_recipe)
        down, across = math.lcm(down, _across(out)), math.lcm(across, _along(out))
    return {
        "rows": Axis(rows, down), "columns": Axis(case.shape[2], across),
        "depth": Axis(case.shape[1], math.lcm(*map(_along, case.operand_recipes))),
    }  # fmt: skip


def _along(recipe: Recipe) -> int:
    """Elements of a row that cannot be cropped apart: a block or a rotated group."""
    width = 1 if recipe.spans_k else recipe.block[1]
    return math.lcm(width, recipe.transform.group) if recipe.transform else width


def _across(recipe: Recipe) -> int:
    """Rows that cannot be cropped apart: those of a block."""
    return 1 if recipe.whole else recipe.block[0]


def _usage(case: Case) -> str:
    """The usage of a quantize case; `rowwise` of any other."""
    return case.usage if isinstance(case, QuantizeCase | GroupedQuantizeCase) else "rowwise"


def _physical(case: Case) -> bool:
    """Whether x of a columnwise quantize is the matrix as it is given, and not the transpose that is quantized."""
    in_place = any(find_recipe(name).columnwise == "in-place" for name in case.recipe_names)
    return _usage(case) == "both" or bool(case.section_sizes) or in_place


def crop(case: Case, inputs: Inputs, windows: Mapping[str, Window]) -> tuple[Case, Inputs]:
    """The case and its inputs within a window for each of its axes. More dimensions than two become rows."""
    rows, columns = (slice(*windows[name]) for name in ("rows", "columns"))
    sections = slice(*windows["sections"]) if "sections" in windows else None
    scale = dict(inputs.scale)
    changes: dict[str, Any] = {}
    if sections is not None:
        starts, sizes = _sections(case.section_sizes, sections, rows)
        indices = torch.cat(
            [torch.arange(s, s + n, device=inputs.x.device) for s, n in zip(starts, sizes, strict=True)]
        )
        changes["sections"] = f"rows:{','.join(map(str, sizes))}"
        scale = {name: numbers[sections] for name, numbers in scale.items()}
    else:
        indices = torch.arange(math.prod(inputs.x.shape[:-1]), device=inputs.x.device)[rows]
    if isinstance(case, UpdateScaleCase):
        scale["x"] = scale["x"][columns].contiguous()
    random = {name: _cropped_random(name, bits, rows, columns) for name, bits in inputs.random.items()}
    inner = slice(*windows.get("depth", windows["columns"]))
    x = inputs.x.flatten(0, -2)[indices, inner].contiguous()
    cropped, shape = Inputs(x, random, scale), tuple(x.shape)
    if isinstance(inputs, ProductInputs):
        w, bias = _cropped_matrices(case, inputs, sections, columns, inner)
        c = None if inputs.c is None else inputs.c[indices, columns].contiguous()
        cropped, shape = ProductInputs(x, random, scale, w=w, c=c, bias=bias), (*shape, columns.stop - columns.start)
    elif _usage(case) == "columnwise" and not _physical(case):
        shape = shape[::-1]
    return replace(case, shape=shape, **changes), cropped


def _cropped_matrices(
    case: Case, inputs: ProductInputs, sections: slice | None, columns: slice, depth: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """w and bias of a product within these windows."""
    w, bias = inputs.w, inputs.bias
    if sections is None:
        return w[columns, depth].contiguous(), None if bias is None else bias[columns].contiguous()
    matrices = w.view(len(case.section_sizes), -1, w.shape[1])[sections, columns, depth]
    return matrices.reshape(-1, matrices.shape[2]), None if bias is None else bias[sections, columns].contiguous()


def _sections(sizes: tuple[int, ...], kept: slice, rows: slice) -> tuple[list[int], list[int]]:
    """First row and number of rows of the cropped part of each section in the window `kept`."""
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    ends = [(min(rows.start, size), min(rows.stop, size)) for size in sizes[kept]]
    starts = [begin + first for begin, (first, _) in zip(begins[kept], ends, strict=True)]
    return starts, [last - first for first, last in ends]


def _cropped_random(name: str, bits: Random, rows: slice, columns: slice) -> Random:
    """The words of the cropped part, one for four elements; seed and offset stay, and count the blocks of the part."""
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
        except HostLost:
            raise
        except Exception:  # the backend refuses or raises, or gives what no check can read: that is another failure
            return False
        if _first_wrong(outcome) != self.stage:
            return False
        if self.cause:
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
    return next((stage.stage for stage in outcome.stages if not stage.passed), "")


def _place(case: Case, outcome: Outcome) -> dict[str, int]:
    """The place of the first wrong element on the axes of a case, as far as its finding tells."""
    wrong = next((stage for stage in outcome.stages if not stage.passed), None)
    if wrong is None or wrong.finding is None:
        return {}
    element = wrong.finding["elements"][0]
    prefix = wrong.stage.partition(".")[0] if "." in wrong.stage else ""
    row, column = element.get("row"), element.get("column", element.get("tensor"))
    block = element.get("block")
    if column is None and block is not None:
        column = block * _recipe_of(case, prefix).block[1]
    if isinstance(case, ProductCase):
        names = {"x": ("rows", "depth"), "w": ("columns", "depth")}.get(prefix, ("rows", "columns"))
    else:
        transposed = prefix == "columnwise" or (bool(case.section_sizes) and _usage(case) == "columnwise")
        in_place = transposed and _recipe_of(case, prefix).columnwise == "in-place"
        names = ("columns", "rows") if transposed and not in_place else ("rows", "columns")
    place = {name: index for name, index in zip(names, (row, column), strict=True) if index is not None}
    section = element.get("section", element.get("matrix"))
    if section is not None:
        place["sections"] = section
    elif case.section_sizes and "rows" in place:
        place["sections"], place["rows"] = _within(case.section_sizes, place["rows"])
    return place


def _recipe_of(case: Case, prefix: str) -> Recipe:
    """The recipe of the matrix whose stages have this prefix."""
    if isinstance(case, QuantizedGemmCase) and prefix in ("output", "fused"):
        return find_recipe(case.out_recipe)
    return find_recipe(case.recipe_names[int(prefix == "w")])


def _within(sizes: tuple[int, ...], row: int) -> tuple[int, int]:
    """The section of a row that is counted through all sections, and the number of the row in its section."""
    for number, size in enumerate(sizes):
        if row < size:
            return number, row
        row -= size
    return len(sizes) - 1, row
