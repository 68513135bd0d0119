"""Scopes: a hidden number, computed once for a row, explains every result of the row; a single form of a division by
hidden numbers explains every result of a call.

Every element has an interval of its own: elements of a row may lie inside with different hidden numbers. With a single
number h of the hidden interval the ends of an element are much nearer, and move with h in a single direction. An
element outside of its ends at h shows if h is too small or too large, and halving finds a number for all elements of a
row, or two elements without a common number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.reference.contracts.accepted import Ends, Part, order_of
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.spec.program import ONCE, ROTATED, TRANSPOSED, Axes, Program, Step

_MONOTONE = (
    "float32", "cast", "multiply", "divide", "add", "subtract", "negative", "maximum", "minimum", TRANSPOSED,
)  # fmt: skip
"""Steps that move in a single direction with an operand, for every number of the second operand's interval."""
_LIMIT = 2.0**100
"""Rows with a hidden number beyond, or below its reciprocal, are judged by their intervals alone."""


@dataclass(frozen=True)
class Scope(Part):
    """The rows of a result, and whether a single hidden number explains a row: tensors (M, 1).

    `actual`, `lower` and `upper` are the ends of the hidden number, float32; `wrong`: rows without a number.
    """

    line: int = 0
    """Line of the step of the hidden number."""
    function: str = ""
    """Function of the step with the hidden number, such as "rsqrt"; "divide" if the number is a divisor."""
    form: str = ""
    """The form of a division with all results of the call."""


def scopes_of(program: Program, number: int) -> Iterator[int]:
    """The steps `once` with an influence on the result of a step.

    A number before a rotation of the result has no scope. Raises ValueError, with the line, for a number that reaches
    the result by a further step without a single direction.
    """
    for once, step in enumerate(program.steps):
        if step.function == ONCE:
            found = dependent(program, once)
            if number not in found:
                continue
            later = _turn(program, once, number)
            if later is not None and later.function == ROTATED:
                continue  # a sum of rounded numbers with different directions
            if later is not None:
                raise ValueError(
                    f"{program.file}:{step.line}: the number of c.once reaches {later.function} (line {later.line})"
                    f", where no one direction is known; leave out c.once"
                )
            yield once


def divisions_of(program: Program, number: int) -> Iterator[int]:
    """The divisions of a matrix by a number per row or by a single number, in no declared form, with a single direction
    of the result of a step. In further divisions every element may have a reciprocal of its own."""
    rows = {("1",), (), (program.arguments[0].axes[0], "1")} if program.arguments[0].axes else set[Axes]()
    for division, step in enumerate(program.steps):
        if step.function == "divide" and "form" not in step.options and len(step.axes) == 2 and step.axes[1] != "1":
            divisor = program.steps[step.operands[1]]
            reached = number in dependent(program, division) and _turn(program, division, number) is None
            if reached and divisor.axes in rows and divisor.function != ONCE:
                yield division


def with_form(program: Program, division: int, form: str) -> Program:
    """The program with a division in a given form; "approximate" is the product with the same reciprocal for equal
    divisors, the last step, as by rcp.approx. PTX documents 2 ulps for div.approx and div.full; all of 2^32 measured
    pairs equal fl(a·rcp.approx(b)). A kernel with a different approximation declares this form of its division."""
    steps, step = list(program.steps), program.steps[division]
    if form == "approximate":
        dividend, divisor = step.operands
        axes, last = program.steps[divisor].axes, len(steps)
        steps.append(Step("constant", (), {"value": 1.0}, (), "float32", step.line))
        steps.append(Step("divide", (last, divisor), {"form": form}, axes, "float32", step.line))
        steps.append(Step(ONCE, (last + 1,), {}, axes, "float32", step.line))
        steps[division] = replace(step, function="multiply", operands=(dividend, last + 2))
    else:
        steps[division] = replace(step, options={"form": form})
    return replace(program, steps=tuple(steps))


def _turn(program: Program, start: int, number: int) -> Step | None:
    """The first step between two steps whose result has no single direction with the number of the first step."""
    found = dependent(program, start)
    for other in sorted(found & _before(program, number)):
        step = program.steps[other]
        several = sum(operand in found for operand in step.operands) > 1
        if other != start and (step.function not in _MONOTONE or several):
            return step
    return None


def dependent(program: Program, once: int) -> set[int]:
    """The steps after a step that depend on its result, and the step itself."""
    found = {once}
    for number, step in enumerate(program.steps):
        if found.intersection(step.operands):
            found.add(number)
    return found


def _before(program: Program, number: int) -> set[int]:
    """The steps with an influence on a step, and the step itself."""
    found = {number}
    for earlier in range(number, -1, -1):
        if earlier in found:
            found.update(program.steps[earlier].operands)
    return found


def judge_scope(
    hidden: Interval, rows: torch.Tensor, ends_at: Callable[[torch.Tensor, torch.Tensor], Ends],
    judge: Callable[[torch.Tensor, Ends], Part], wrong: torch.Tensor,
) -> Scope:  # fmt: skip
    """The rows of a result explained by a single number of `hidden` (M, 1), judged on the elements with several
    results.

    `rows`: the rows of these elements (N,), int64. `ends_at(h, some)`: the ends of elements `some` with hidden
    numbers h, float64. `judge(some, ends)`: their accepted results. `wrong`: bool (M,), rows with elements outside of
    their intervals.
    """
    low, high = (end.flatten().clone() for end in (hidden.low, hidden.high))
    size = torch.maximum(low.abs(), high.abs())
    usual = (size <= _LIMIT) & (torch.minimum(low.abs(), high.abs()) >= 1 / _LIMIT) & (low.sign() == high.sign())
    open_rows = usual & ~hidden.may_be_nan.flatten() & ~wrong
    every = torch.arange(len(rows), device=rows.device)
    first, last = (ends_at(end[rows], every) for end in (low, high))
    at_low, at_high = judge(every, first), judge(every, last)
    fmt = at_low.fmt
    moves = [order_of(b, fmt).long() - order_of(a, fmt).long()
             for a, b in ((at_low.lower, at_high.lower), (at_low.upper, at_high.upper))]  # fmt: skip
    rises, falls = ((moves[0] * sign >= 0) & (moves[1] * sign >= 0) for sign in (1, -1))
    known = rises ^ falls  # an element that stays has no say
    for ends in (first, last):
        if ends.nan is not None:
            known &= ~ends.nan
    kept = known & open_rows[rows]
    some, failed = every[kept], torch.zeros_like(wrong)
    while some.numel():
        middle = low + (high - low) / 2
        part = judge(some, ends_at(middle[rows[some]], some))
        above = order_of(part.actual, fmt) > order_of(part.upper, fmt)
        more = above == rises[some]  # a larger number, if the element is wrong
        wanted = [torch.zeros_like(wrong).index_fill_(0, rows[some[part.wrong & side]], True) for side in (more, ~more)]
        low = torch.where(wanted[0], middle.nextafter(low.new_tensor(torch.inf)), low)
        high = torch.where(wanted[1], middle.nextafter(low.new_tensor(-torch.inf)), high)
        failed |= (wanted[0] | wanted[1]) & (low > high)
        open_rows &= (wanted[0] | wanted[1]) & ~failed
        some = some[open_rows[rows[some]]]
    lower, upper = (end.float().view(-1, 1) for end in (hidden.low, hidden.high))
    return Scope(lower, lower, upper, failed.view(-1, 1), int((~failed).count_nonzero()), 0)
