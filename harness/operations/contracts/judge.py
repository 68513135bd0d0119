"""The outcome of a contract: a stage per shown result of the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.results import Unsupported
from narrowgauge.harness.checks.distance import Comparison, measure
from narrowgauge.harness.checks.finding import float_view, make_finding, sentence
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.causes.search import changed_causes, confirmed
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import code_view
from narrowgauge.harness.operations.stages.table import Place, Table, neighbours, place_in
from narrowgauge.reference.contracts.accepted import Part, order_of
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import Shown, judged
from narrowgauge.reference.contracts.functions import FUNCTIONS, function_of
from narrowgauge.reference.contracts.products import NARROW
from narrowgauge.reference.contracts.scopes import Scope
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.program import DECODE, FLUSHED, GEMM, SUBNORMALS, Program
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import SMALLEST_NORMAL


class UndeterminedError(ValueError):
    """Almost any bytes are right on these inputs: no verdict is possible. The message has the necessary declaration."""


_PAGE = "docs/contracts.md"
FREE = 0.01
"""Share of undetermined elements that makes a judgement impossible: docs/contracts.md#what-an-interval-cannot-see."""


def judge_contract(program: Program, tensors: Mapping[str, torch.Tensor], shown: Shown) -> Outcome:
    """Judge results of a kernel, made by `harness.operations.contracts.results.named_results`.

    Raises ValueError and UndeterminedError as `judge_batch` does.
    """
    return judge_batch(program, [(tensors, shown)])


def judge_batch(
    program: Program,
    calls: Sequence[tuple[Mapping[str, torch.Tensor], Shown]],
    outcome: Outcome | None = None,
    others: Sequence[Change] = (),
) -> Outcome:
    """Judge arguments and results of each product of a batch, or of a single call, together.

    Causes are those of the first call with a wrong result. `outcome`: gets the stages; None: a new one. `others`:
    causes beside the changes of the steps; flushed subnormals are added.
    Raises ValueError for tensors that do not fit the contract, and UndeterminedError if no element is wrong and more
    than `FREE` of the elements of a result on finite inputs may be almost anything.
    """
    several = [dict(judged(program, *call)) for call in calls]
    names = dict.fromkeys(name for found in several for name in found)
    parts = {name: Part.joined([found[name] for found in several if name in found]) for name in names}
    pairs = zip(calls, several, strict=True)
    failing = next((call for call, found in pairs if any(bool(p.wrong.any()) for p in found.values())), calls[0])
    others = [*others, *_flushed(program)]
    ordinary = all(_is_ordinary(tensor, program) for tensors, _ in calls for tensor in tensors.values())
    judged_parts = {name: part for name, part in parts.items() if not isinstance(part, Scope)}
    if outcome is None:
        outcome = Outcome(outputs={name: part.actual for name, part in judged_parts.items()})
    free = [name for name, part in parts.items() if ordinary and part.undetermined > FREE * part.actual.numel()]
    if free and not any(bool(part.wrong.any()) for part in parts.values()):
        part = parts[free[0]]
        raise UndeterminedError(
            f"{free[0]}: {part.undetermined} of {part.actual.numel()} elements may be almost anything under this "
            "contract on these inputs, and no other element is wrong, so nothing would be judged; give the depth of "
            "sums and the form of divisions and functions, or return the result of an earlier step"
        )
    for name, part in parts.items():
        stage = stage_of_scope(name, part) if isinstance(part, Scope) else stage_of(name, part)
        if stage.rule == "bound":
            stage.assumes = "; ".join(filter(None, [assumed(program), _narrow_sums(program, part)]))
        outcome.stages.append(stage)
        outcome.causes[stage.stage] = partial(changed_causes, program, *failing, others)
    outcome.parts = judged_parts
    outcome.subject = program.name
    outcome.confirms = partial(confirmed, program, *failing, others)
    _add_figures(outcome)
    return outcome


def judge_calls(
    program: Program, calls: Sequence[tuple[Mapping[str, torch.Tensor], Shown]], outcome: Outcome,
    others: Sequence[Change],
) -> Outcome:  # fmt: skip
    """`judge_batch`. Raises Unsupported if the contract determines too little, and no earlier stage is wrong."""
    try:
        return judge_batch(program, calls, outcome, others)
    except UndeterminedError as error:
        if any(stage.mismatches for stage in outcome.stages):
            return outcome
        raise Unsupported(f"the contract determines too little: {error}") from error


def _flushed(program: Program) -> Iterator[Change]:
    """The contract with flushed subnormals, for a contract without the option too."""
    if not program.flushes and not any(step.function == GEMM for step in program.steps):
        sentence = f"subnormal numbers are flushed, which the option {SUBNORMALS} of a contract can say ({_PAGE})"
        yield Change(f"field:{SUBNORMALS}={FLUSHED}", sentence, replace(program, subnormals=FLUSHED))


def _is_ordinary(tensor: torch.Tensor, program: Program) -> bool:
    """Whether a contract has to determine results of these inputs: they are finite, and no square is flushed."""
    if not bool(tensor.isfinite().all()):
        return False
    size = tensor.float().abs()
    return not program.flushes or not bool(((size > 0) & (size < SMALLEST_NORMAL**0.5)).any())


def _add_figures(outcome: Outcome) -> None:
    """The share of elements with a single right code, and the widths, of the stages with a bound."""
    bound = [stage for stage in outcome.stages if stage.rule == "bound" and stage.stage in outcome.parts]
    if not bound:
        return
    parts = [outcome.parts[stage.stage] for stage in bound]
    widths = [width_of(part) for part in parts]
    count = sum(width.numel() for width in widths)
    bound[-1].figures = {
        "exact_share": sum(part.determined for part in parts) / count, "ordered_share": 0.0,
        "interval_ulps_max": max(int(width.amax()) for width in widths),
        "interval_ulps_mean": sum(float(width.double().sum()) for width in widths) / count,
    }  # fmt: skip


def assumed(program: Program) -> str:
    """The errors of functions behind the intervals of a contract, with their sources."""
    found = []
    for step in program.steps:
        if step.function in FUNCTIONS:
            function = function_of(step.function)
            forms = step.options.get("forms") or function.default
            found.append(
                f"{step.function} as {' or '.join(f'{form} ({function.forms[form].source})' for form in forms)}"
            )
    return "; ".join(dict.fromkeys(found))


def _narrow_sums(program: Program, part: Part) -> str:
    """The note that a result rests on the fewest bits of FP8 tensor cores, with the number of accepted numbers; else
    empty."""
    products = [step for step in program.steps if step.function == GEMM and step.options["order"] is None]
    if not any(all(_is_narrow(program, number) for number in step.operands) for step in products):
        return ""
    width = int(width_of(part).amax())
    return (
        f"sums of {NARROW[0]} fraction bits, as FP8 tensor cores of Hopper and Ada keep: intervals of up to {width} "
        "ulps, which a declared accumulator narrows"
    )


def _is_narrow(program: Program, number: int) -> bool:
    """Whether an operand of a product has 8-bit elements that are not rounded and no whole numbers."""
    step = program.steps[number]
    if step.function != DECODE or step.dtype in DTYPES:
        return False
    recipe = find_recipe(program.steps[step.operands[0]].options["recipe"])
    return recipe.element.bits <= 8 and not recipe.integer


def width_of(part: Part) -> torch.Tensor:
    """Steps from the least to the greatest accepted number or code of each element, int64."""
    fmt = None if part.fmt is FP32 else part.fmt
    return (order_of(part.upper, fmt).long() - order_of(part.lower, fmt).long()).clamp_(min=0)


def stage_of(name: str, part: Part) -> StageResult:
    """The stage of a result (…, K); a result (M,) is a column."""
    count = part.actual.numel()
    rule = "exact" if part.determined == count else "bound"
    unbounded = part.undetermined if rule == "bound" else None
    wrong = _matrix(part.wrong)
    if not bool(wrong.any()):
        return StageResult(name, rule, count, unbounded=unbounded)
    fmt = None if part.fmt is FP32 else part.fmt
    actual, lower, upper = (_matrix(x) for x in (part.actual, part.lower, part.upper))
    order, low, high = (order_of(x, fmt).long() for x in (actual, lower, upper))
    nearer = torch.where(order < low, lower, upper)
    distance = torch.maximum(low - order, order - high).clamp_(min=1).masked_fill_(~wrong, -1)
    distances = measure(wrong, distance, Comparison(nearer, actual, fmt))
    noun = name if name in ("codes", "scales") else f"elements of {name}"
    text = sentence(wrong, distances, noun)
    if part.place is not None:
        first = wrong.nonzero()[0].tolist()
        text += f"; first in {', '.join(f'{axis} {at}' for axis, at in part.place(*first).items())}"
    if rule == "bound":
        text += "; no order of summation and no rounding of hidden steps gives them"

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        views = [(label, view(x[here], fmt)) for label, x in (("lower", lower), ("upper", upper), ("actual", actual))]
        if views[0][1] == views[1][1]:
            views = [("expected", views[0][1]), views[2]]
        element: dict[str, Any] = {"row": row, "column": column}
        if part.place is not None:
            element |= part.place(row, column)
        for label, (value, raw) in views:
            element |= {label: value, f"{label}_bits": raw}
        return element

    finding = make_finding(name, rule, text, wrong, distances, describe=describe)
    return StageResult(
        name, rule, count, int(wrong.count_nonzero()), int(distance.amax()), text, finding,
        unbounded=unbounded, wrong_elements=wrong,
    )  # fmt: skip


_FORMS = {
    "quotient": "a quotient", "reciprocal": "a product with the rounded reciprocal",
    "approximate": "a product with an approximate reciprocal",
}  # fmt: skip


def stage_of_scope(name: str, scope: Scope) -> StageResult:
    """The stage of a hidden number, computed once per row."""
    wrong = scope.wrong
    if not bool(wrong.any()):
        form = f"that the division of line {scope.line} is {_FORMS[scope.form]}" if scope.form else ""
        return StageResult(name, "scope", wrong.numel(), assumes=form)
    count = int(wrong.count_nonzero())
    first = int(wrong.flatten().nonzero()[0])
    if scope.function == "divide":
        text = f"no single form of the division of line {scope.line} explains all bytes: neither a quotient, nor a "
        text += f"product with the rounded or with one approximate reciprocal of each divisor; first in row {first}"
    else:
        number = f"number of line {scope.line} ({scope.function})"
        text = f"no single {number} explains {'row' if count == 1 else f'{count} rows, the first is row'} {first}"
        text += "; its elements took different numbers, each within the bound"

    def describe(row: int, column: int) -> dict[str, Any]:
        ends = {label: float_view(x[row, 0]) for label, x in (("lower", scope.lower), ("upper", scope.upper))}
        element: dict[str, Any] = {"row": row, "column": column}
        for label, (value, bits) in ends.items():
            element |= {label: value, f"{label}_bits": bits}
        return element

    finding = make_finding(name, "scope", text, wrong, None, describe=describe)
    return StageResult(name, "scope", wrong.numel(), count, None, text, finding, wrong_elements=wrong)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() > 1 else x.reshape(-1, 1)


def view(x: torch.Tensor, fmt: Format | None) -> tuple[float | str, str]:
    """The value and the bits of a number, or of a code of a format."""
    return float_view(x) if fmt is None else code_view(int(x), fmt)


def accepted_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """A row of the first wrong result, or of the last result, beside its accepted values."""
    wrong = next((stage.stage for stage in outcome.stages if not stage.passed), "")
    name = wrong if wrong in outcome.parts else next(reversed(outcome.parts))
    part = outcome.parts[name]
    if not part.actual.numel():
        return None
    fmt = None if part.fmt is FP32 else part.fmt
    actual, lower, upper = (_matrix(x) for x in (part.actual, part.lower, part.upper))
    row, column = place_in(outcome, name, place, actual.shape)
    table = Table(f"{name}, row {row}", ("column", "lower", "", "upper", "", "actual", ""))
    accepted = ~_matrix(part.wrong)
    for here in neighbours(row, column, actual):
        cells = [cell for x in (lower, upper, actual) for cell in map(str, view(x[here], fmt))]
        table.add_row(str(here[1]), *cells, style="" if accepted[here] else "bold red")
    return table
