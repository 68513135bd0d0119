"""Scopes: a hidden number that a kernel computes once for each row explains every result of the row.

Each element has an interval of its own, so a row whose elements took different numbers may lie inside. With one number
h of the hidden interval the ends of an element are much nearer, and they move with h in one direction. So an element
outside of its ends at h says whether h is too small or too large, and halving finds a number that fits all elements of
a row, or two elements without a common number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from narrowgauge.reference.contracts.accepted import Ends, Part, order_of
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.spec.program import ONCE, Program

_MONOTONE = ("float32", "cast", "multiply", "divide", "add", "subtract", "negative", "maximum", "minimum")
"""Steps that move in one direction with an operand, whatever number of its interval the other operand is."""
_LIMIT = 2.0**100
"""Rows with a hidden number beyond, or below its reciprocal, are judged by their intervals alone."""


@dataclass(frozen=True)
class Scope(Part):
    """The rows of a result, and whether one hidden number explains each of them: tensors (M, 1).

    `actual`, `lower` and `upper` are the ends of the hidden number, float32; `wrong`: rows without a number.
    """

    line: int = 0
    """Line of the step of the hidden number."""
    function: str = ""
    """The step that computes it, such as "rsqrt"."""


def scopes_of(program: Program, number: int) -> Iterator[int]:
    """The steps `once` whose numbers the result of a step depends on.

    Raises ValueError, with the line, for a number that reaches the result by a step of no one direction.
    """
    for once, step in enumerate(program.steps):
        if step.function == ONCE:
            found = dependent(program, once)
            if number not in found:
                continue
            for other in found & _before(program, number):
                later = program.steps[other]
                operands = [operand for operand in later.operands if operand in found]
                if other != once and (later.function not in _MONOTONE or len(operands) > 1):
                    raise ValueError(
                        f"{program.file}:{step.line}: the number of c.once reaches {later.function} (line {later.line})"
                        f", where no one direction is known; leave out c.once"
                    )
            yield once


def dependent(program: Program, once: int) -> set[int]:
    """The steps that depend on a step, and this step."""
    found = {once}
    for number, step in enumerate(program.steps):
        if found.intersection(step.operands):
            found.add(number)
    return found


def _before(program: Program, number: int) -> set[int]:
    """The steps that a step depends on, and this step."""
    found = {number}
    for earlier in range(number, -1, -1):
        if earlier in found:
            found.update(program.steps[earlier].operands)
    return found


def judge_scope(
    hidden: Interval, rows: torch.Tensor, ends_at: Callable[[torch.Tensor, torch.Tensor], Ends],
    judge: Callable[[torch.Tensor, Ends], Part], wrong: torch.Tensor,
) -> Scope:  # fmt: skip
    """The rows of a result that one number of `hidden` (M, 1) explains, by the elements with more than one result.

    `rows`: the row of each of these elements (N,), int64. `ends_at(h, some)`: the ends of elements `some` with hidden
    numbers h, float64. `judge(some, ends)`: what is accepted of them. `wrong`: bool (M,), rows that are wrong by
    themselves.
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
    return Scope(lower, lower, upper, failed.view(-1, 1), int((~failed).sum()), 0)
