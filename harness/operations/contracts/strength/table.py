"""Strength of inputs: which changes of a contract would the inputs show?

A contract and the changed contract have a set of bytes per element of the results. If the sets of an
element are disjoint, then the inputs surely show the change: no kernel is right under both contracts. If every set of
the change lies inside the plain one, no right kernel of the change is ever refused. Else kernels of the change are
sampled. The sets come from `narrowgauge.reference.contracts`, for results judged given earlier results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.machine.process import one_thread
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.inputs import FAMILIES, contract_inputs
from narrowgauge.harness.operations.contracts.judge import FREE
from narrowgauge.harness.operations.contracts.results import named_results
from narrowgauge.harness.operations.contracts.strength.kernel import Kernel, wrong_programs
from narrowgauge.harness.operations.contracts.strength.sets import Sets, compared
from narrowgauge.reference.contracts.evaluate import Tensors, judged
from narrowgauge.spec.program import ONCE, Program

SAMPLES = 32
"""Number of sampled kernels of a change if the sets do not decide."""
SHAPES = ((16, 136), (4, 4096))
"""Rows and columns of the table: a tail behind blocks of 16, 32 and 128 elements, and long rows."""
SPECIAL = ("subnormal", "zeros", "negative-zeros", "nan", "inf", "amax-largest-first")
"""Families tried at the first shape alone: a longer row shows no further change."""


_FIRST = ("position", "ladder", "normal")
"""Families with the most changes shown."""
_SAMPLED, _FEW = 2, 8
"""Number of families, and of sampled kernels per family, for a table that is not whole."""


@dataclass(frozen=True)
class Cell:
    """Whether inputs show a change."""

    verdict: Literal["surely", "perhaps", "no", "none"]
    """none: the inputs give no verdict on kernels of this contract, or no kernel of the change takes them."""
    caught: int | None = None
    """Number of refused kernels, of `SAMPLES`, if the verdict is perhaps. None: not counted."""

    @property
    def seen(self) -> bool:
        """Whether at least one kernel of the change is refused."""
        return self.verdict == "surely" or bool(self.caught)

    @property
    def text(self) -> str:
        """The cell in the table: yes, no, the number of refused kernels, `?` if not counted, or `-`."""
        words = {"surely": "yes", "no": "no", "none": "-"}
        return words.get(self.verdict, "?" if self.caught is None else str(self.caught))


# ---- verdicts --------------------------------------------------------------------------------------------------------


def judges(plain: Sets) -> bool:
    """Whether the inputs give a verdict on kernels of the contract: as `harness.operations.contracts.judge`."""
    finite = all(bool(tensor.isfinite().all()) for tensor in plain.tensors.values())
    try:
        shown = Kernel(plain.program).results(plain.tensors)
        parts = [part for _, part in judged(plain.program, plain.tensors, shown)]
    except ValueError:
        return False
    return not finite or all(part.undetermined <= FREE * part.actual.numel() for part in parts)


def decided(plain: Sets, change: Change) -> Cell | None:
    """The comparison of the sets under a change. None: nothing."""
    inside = alone = True
    try:
        changed = Sets.of(change.program, plain.tensors, plain)
        for name in plain.program.outputs:
            found = compared(plain, changed, name)
            if found.apart:
                return Cell("surely")
            inside &= alone and found.inside
            alone &= found.determined
    except ValueError:  # the sets of the change are not known: a hidden amax under a rule that does not increase
        return None
    scoped = any(step.function == ONCE for step in plain.program.steps)  # one number has to explain a row
    return Cell("no") if inside and not scoped else None


def outside(plain: Sets, change: Change) -> float:
    """The share of numbers that a change moves out of the ends of the contract, before a quantization."""
    try:
        changed = Sets.of(change.program, plain.tensors, plain)
    except ValueError:
        return 0.0
    shares = []
    for name, a in plain.ends.items():
        b = changed.ends[name]
        shares.append(float(((b.low.double() < a.low.double()) | (b.high.double() > a.high.double())).double().mean()))
    return max(shares)


def sampled(plain: Sets, change: Change, samples: int = SAMPLES) -> Cell:
    """How many kernels with a change are refused."""
    calls = samples if plain.stackable else 1  # one judgement of many rows takes the time of a few
    tensors, evaluation = plain.stacked(calls)
    caught = 0
    try:
        for first in range(0, samples, calls):
            results = [
                Kernel(change.program, seed, plain.of_kernels)(**plain.tensors) for seed in range(first, first + calls)
            ]
            stacked = {name: torch.cat([result[name] for result in results]) for name in results[0]}
            shown = named_results(plain.program, tensors, stacked)
            wrong = torch.zeros(calls, dtype=torch.bool)
            for _, part in judged(plain.program, tensors, shown, evaluation):
                wrong |= part.wrong.reshape(calls, -1).any(1)
            caught += int(wrong.count_nonzero())
    except ValueError:
        return Cell("none")
    return Cell("perhaps", caught)


# ---- table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StrengthRow:
    """The verdicts of the inputs of a shape about a change."""

    step: str
    """The changed step, for example `mean-4`."""
    change: str
    """The change, for example `by-k-minus-1`."""
    sentence: str
    sum: str
    """Orders of sums admitted by the contract: any, depth 40; empty without sums."""
    shape: str
    """Sizes of the axes, such as `4x4096`."""
    cells: Mapping[str, Cell]
    """By family."""
    remark: str = ""

    @property
    def name(self) -> str:
        """The name of the change."""
        return f"{self.step}:{self.change}"


def strength_table(
    program: Program,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    families: Sequence[str] = tuple(FAMILIES),
    *,
    whole: bool = True,
) -> list[StrengthRow]:
    """A row per change of a contract and shape: would a family show the change?

    shapes: rows and columns; all axes of the arguments but the first have as many elements as there are columns.
    families: also aimed ones. whole: as in `table_of`. Raises ValueError for a shape refused by the contract.
    """
    inputs: dict[str, dict[str, Tensors]] = {}
    for place, (height, columns) in enumerate(shapes):
        sizes = sizes_of(program, height, columns)
        inputs["x".join(map(str, sizes.values()))] = {
            family: contract_inputs(program, sizes, family, Draw(f"strength|{family}"))
            for family in families
            if place == 0 or family not in SPECIAL
        }
    return table_of(program, inputs, whole=whole)


@one_thread()
def table_of(program: Program, inputs: Mapping[str, Mapping[str, Tensors]], *, whole: bool = True) -> list[StrengthRow]:
    """A row per change of a contract and shape: would these inputs show the change?

    inputs: the tensors by family by shape. Kernels are sampled if no family surely shows a change at this or an earlier
    shape. whole: whether all changes have all cells; else only until a family surely shows it, and `_FEW` kernels are
    sampled for `_SAMPLED` families of the first shape.
    """
    wrong, found, sure = wrong_programs(program), list[StrengthRow](), set[str]()
    samples = SAMPLES if whole else _FEW
    for place, (shape, given) in enumerate(inputs.items()):
        families = sorted(given, key=lambda family: not whole and family not in _FIRST)
        plain = {family: Sets.of(program, given[family]) for family in families}
        judging = {family for family, sets in plain.items() if judges(sets)}
        for change in wrong:
            cells: dict[str, Cell | None] = {}
            for family, sets in plain.items():
                if change.name in sure and not whole:
                    break
                cells[family] = cell = decided(sets, change) if family in judging else Cell("none")
                if cell is not None and cell.verdict == "surely":
                    sure.add(change.name)
            unknown = [family for family, cell in cells.items() if cell is None]
            counted = () if change.name in sure else unknown if whole else unknown[:_SAMPLED] if not place else ()
            full = {
                family: cell or (sampled(plain[family], change, samples) if family in counted else Cell("perhaps"))
                for family, cell in cells.items()
            }
            step, _, name = change.name.partition(":")
            found.append(StrengthRow(step, name, change.sentence, _sums(change.program), shape, full))
    order = {change.name: place for place, change in enumerate(wrong)}
    found.sort(key=lambda row: order[row.name])
    hidden = unseen(found)
    return [replace(row, remark=_remark(row, hidden)) for row in found]


def unseen(rows: Sequence[StrengthRow]) -> dict[str, bool]:
    """The changes not shown by any inputs of a table; bool: the change is invisible on these inputs, because its
    kernels are never refused. Further inputs may show the change (`harness.operations.contracts.strength.aim`)."""
    found: dict[str, list[Cell]] = {}
    for row in rows:
        found.setdefault(row.name, []).extend(row.cells.values())
    return {
        name: all(cell.verdict in ("no", "none") for cell in cells)
        for name, cells in found.items()
        if not any(cell.seen for cell in cells)
    }


def strength_text(rows: Sequence[StrengthRow]) -> str:
    """The table as text: yes (surely), no, `?` or the number of 32 sampled kernels that were refused (perhaps), or `-`
    (no verdict)."""
    families = list(dict.fromkeys(family for row in rows for family in row.cells))
    left = ("step", "change", "sum", "shape")
    lines = [(row.step, row.change, row.sum, row.shape) for row in rows]
    widths = [max(map(len, column)) for column in zip(left, *lines, strict=True)]

    def line(values: Sequence[str]) -> str:
        return "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True))

    margin = " " * len(line(left))
    header = [f"{margin}{'    |' * number}    {family}" for number, family in enumerate(families)]
    header.append(line(left) + "    |" * len(families))
    body = [
        line(values)
        + "".join(f"{row.cells[f].text if f in row.cells else '':>5}" for f in families)
        + f"  {row.remark}"
        for row, values in zip(rows, lines, strict=True)
    ]
    return "\n".join(text.rstrip() for text in [*header, *body])


def strength_json(rows: Sequence[StrengthRow]) -> str:
    """The rows as JSON: a list of objects with the fields of `StrengthRow`."""
    return json.dumps([asdict(row) for row in rows], indent=1)


def sizes_of(program: Program, height: int, columns: int) -> dict[str, int]:
    """Sizes of the named axes: the axis of rows has `height` elements, every further axis `columns`."""
    matrix = next((argument for argument in program.arguments if len(argument.axes) > 1), program.arguments[0])
    names = dict.fromkeys(axis for argument in (matrix, *program.arguments) for axis in argument.axes if axis != "1")
    rows = matrix.axes[0] if len(matrix.axes) > 1 else ""
    return {name: height if name == rows else columns for name in names}


def _sums(program: Program) -> str:
    """Orders of the sums of a contract."""
    depths = [step.options.get("depth") for step in program.steps if step.function in ("sum", "mean", "sum_of")]
    return ", ".join(dict.fromkeys("any" if depth is None else f"depth {depth}" for depth in depths))


def _remark(row: StrengthRow, hidden: Mapping[str, bool]) -> str:
    if row.name in hidden:
        return "invisible here: within the bound" if hidden[row.name] else "not shown: aim at it"
    surely = any(cell.verdict == "surely" for cell in row.cells.values())
    return "" if surely else "none surely"
