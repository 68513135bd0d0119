"""Steps of mixtures of experts: rows that positions name, and their sums; and the wrong ones that kernels compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from narrowgauge.reference.contracts import sums
from narrowgauge.reference.contracts.casts import DTYPES, cast
from narrowgauge.reference.contracts.interval import SIGNIFICAND_BITS, Interval, add, choose
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.program import CHOSEN, OF_EXPERT

OTHER_POSITIONS: Mapping[str, tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "first-choice": ("every choice takes the row of the first one", lambda p, rows: p[:, :1].expand_as(p)),
    "none-is-first": ("a choice of no row takes row 0", lambda p, rows: p.clamp(min=0)),
    "none-is-last": ("a choice of no row takes the last row", lambda p, rows: torch.where(p < 0, rows - 1, p)),
    "in-order": ("choice j of token t takes row t·k + j",
                 lambda p, rows: torch.where(p < 0, p, torch.arange(p.numel()).to(p).view_as(p) % rows)),
}  # fmt: skip
"""Positions (tokens, choices) in place of the right ones, with a sentence: from these, and the number of rows."""


OTHER_EXPERTS: Mapping[str, tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "next-expert": ("each choice takes the next expert", lambda p, count: torch.where(p < 0, p, (p + 1) % count)),
    "first-expert": ("every choice takes expert 0", lambda p, count: torch.where(p < 0, p, 0)),
    "expert-of-first-choice": ("every choice takes the expert of the first one",
                               lambda p, count: p[:, :1].expand_as(p)),
    "none-is-first-expert": ("a choice of no expert takes expert 0", lambda p, count: p.clamp(min=0)),
    "none-is-last-expert": ("a choice of no expert takes the last one",
                            lambda p, count: torch.where(p < 0, count - 1, p)),
    "expert-of-next-token": ("a token takes the experts of the next one", lambda p, count: p.roll(-1, 0)),
}  # fmt: skip
"""Experts (tokens, choices) in place of the right ones, with a sentence: from these, and the number of experts."""


RENUMBERINGS = {CHOSEN: OTHER_POSITIONS, OF_EXPERT: OTHER_EXPERTS}
"""Tables of wrong indexes by the step that takes them."""


def of_expert(
    x: Interval, experts: torch.Tensor, count: int, *, part: int | None = None, layout: str = "joined"
) -> Interval:
    """The columns of the expert of each choice, of the products `x` (tokens, count·N), or (tokens·choices, count·N):
    (tokens, choices, N). A choice of no expert has zeros. `part` of two parts of N columns each, in a `layout`."""
    tokens, choices = experts.shape
    none = (experts < 0).unsqueeze(-1)

    def columns(t: torch.Tensor) -> torch.Tensor:
        each = t.view(tokens, -1, count, t.shape[1] // count).expand(tokens, choices, -1, -1)
        index = experts.clamp(min=0).view(tokens, choices, 1, 1).expand(-1, -1, 1, each.shape[3])
        found = each.gather(2, index).squeeze(2).masked_fill(none, 0)
        if part is None:
            return found
        width = {"joined": found.shape[2] // 2, "interleaved": 1, "interleaved-8": 8}[layout]
        return found.view(tokens, choices, -1, 2, width)[:, :, :, part].flatten(2)

    return x.arranged(columns)


def chosen(x: Interval, positions: torch.Tensor) -> Interval:
    """The rows of `x` (rows, N) that positions name: (tokens, choices, N). A choice of no row has zeros."""
    if not x.shape[0]:
        return x.arranged(lambda t: t.new_zeros(*positions.shape, *t.shape[1:]))
    none = (positions < 0).unsqueeze(-1)
    return x.arranged(lambda t: t[positions.clamp(min=0)].masked_fill(none, 0))


def accumulated(
    x: Interval, positions: torch.Tensor, *, order: str, to: str | None = None, choices: str = "all",
    flushes: bool = False,
) -> Interval:  # fmt: skip
    """The sum over the choices of each token that name a row: (tokens, choices, N) to (tokens, N).

    `to`: each partial sum is rounded to this dtype. `choices`: a rule of `SOME_CHOICES`, in no contract. Source of the
    bound of any order: `reference.contracts.sums.total`.
    """
    counted = SOME_CHOICES[choices][1](positions >= 0)
    x = x.arranged(lambda t: t.masked_fill(~counted.unsqueeze(-1), 0))
    if order == "any":
        x = x.arranged(lambda t: t.movedim(1, -1).contiguous())
        found = sums.total(x, flushes=flushes) if to is None else _rounded_total(x, DTYPES[to])
        return found.arranged(lambda t: t.squeeze(-1))
    zero = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.float64, device=x.low.device)
    y = Interval(-zero, zero)  # a kernel may begin with the first term, which may be −0
    for number in range(x.shape[1]):
        term = x.arranged(lambda t, at=number: t[:, at])  # type: ignore[misc]
        more = add(y, term) if to is None else cast(add(y, term), to)
        here = counted[:, number].view(-1, *[1] * (term.low.dim() - 1)).expand(term.shape)
        y = choose((here, ~here), more, y)
    return y


def _rounded_total(x: Interval, dtype: torch.dtype) -> Interval:
    """Σ along the last dimension in any order, each partial sum rounded to a dtype: (…, n) to (…, 1).

    Error: ((1 + u)^(n − 1) − 1)·A, u half an ulp of 1 of the dtype, A the sum of the magnitudes, for numbers of the
    dtype: a sum of them that is no normal number is exact. Other numbers are rounded once more. Exact if no partial
    sum can round, as in `sums.total`.
    """
    bits, largest = SIGNIFICAND_BITS[dtype], torch.finfo(dtype).max
    further = int(x.bits > bits)
    size = torch.maximum(x.low.abs(), x.high.abs())
    together, terms = size.sum(-1, keepdim=True), (size != 0).sum(-1, keepdim=True)
    growth = (1 + 2.0**-bits) ** (terms - 1 + further).clamp(min=0).double() - 1 + 2.0**-40
    quantum = lowest_bit(size).unsqueeze(-1)
    exact = (together <= 2.0**bits * quantum) | (terms <= 1 - further)
    error = torch.where(
        exact, 0.0, growth * together + terms * further * torch.finfo(dtype).smallest_normal * 2.0**-bits
    )
    low, high = (end.sum(-1, keepdim=True) for end in (x.low, x.high))
    beyond = ~(together * (1 + growth) <= largest)
    low, high = (low - error).masked_fill(beyond, -torch.inf), (high + error).masked_fill(beyond, torch.inf)
    low = torch.where(low == 0, -0.0, low)
    return Interval(low, high, x.may_be_nan.any(-1, keepdim=True) | beyond)


def _alone(counted: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The choice of each token with the least number; choices that do not count are left out."""
    least = torch.where(counted, order, counted.shape[1]).amin(1, keepdim=True)
    return counted & (order == least)


def _numbers(counted: torch.Tensor) -> torch.Tensor:
    return torch.arange(counted.shape[1], device=counted.device).expand_as(counted)


SOME_CHOICES: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "all": ("every choice that names a row is added", lambda counted: counted),
    "not-last": ("the last choice is left out", lambda counted: counted & (_numbers(counted) < counted.shape[1] - 1)),
    "not-first": ("the first choice is left out", lambda counted: counted & (_numbers(counted) > 0)),
    "last-alone": ("choices overwrite one another, so that the last one is left",
                   lambda counted: _alone(counted, -_numbers(counted))),
    "first-alone": ("the first choice alone is taken", lambda counted: _alone(counted, _numbers(counted))),
}  # fmt: skip
"""Choices that are added, bool (tokens, choices), with a sentence: from those that name a row."""
