"""Known mistakes of permute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.permute.case import PermuteCase
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause

Placed = tuple[torch.Tensor, torch.Tensor]
"""Source rows (R,) and sizes of the sections (experts,)."""


@dataclass(frozen=True)
class Routing:
    """The choices of tokens, and where their rows have to lie."""

    case: PermuteCase
    expert_ids: torch.Tensor
    source_rows: torch.Tensor
    sizes: torch.Tensor
    stable: bool
    """Whether the kernel declares that the rows of a section lie in the order of tokens and choices."""

    def borders(self, sizes: torch.Tensor, alignment: int | None = None) -> list[int]:
        """First rows of sections of these sizes, and of the rows behind them."""
        case, alignment = self.case, self.case.alignment if alignment is None else alignment
        aligned = (sizes + alignment - 1) // alignment * alignment
        each = torch.full_like(sizes, case.capacity) if case.capacity else aligned
        return [0, *each.cumsum(0).tolist()]

    def comparable(self, sources: torch.Tensor) -> torch.Tensor:
        """Source rows with the choices of a kernel left out: ascending in each section, and the right ones in a section
        that holds as many choices of its expert as fit, if the kernel is not stable."""
        if self.stable:
            return sources
        found, flat = sources.clone(), self.expert_ids.flatten()
        for expert, (start, size) in enumerate(zip(self.borders(self.sizes), self.sizes.tolist(), strict=False)):
            rows = slice(start, start + size)
            own = found[rows] = found[rows].sort()[0]
            known = bool(((own >= 0) & (own < len(flat))).all()) and len(set(own.tolist())) == size
            if size and size == self.case.capacity and known and bool((flat[own] == expert).all()):
                found[rows] = self.source_rows[rows]
        return found

    def placed(self, ids: torch.Tensor, starts: list[int] | None = None, *, alignment: int | None = None) -> Placed:
        """Source rows and sizes for wrong experts (T, k), first rows of sections, or a wrong alignment."""
        flat, case = ids.flatten(), self.case
        sizes = torch.stack([(flat == expert).sum() for expert in range(case.experts)])
        sizes = sizes.clamp(max=case.capacity) if case.capacity else sizes
        found = torch.full_like(self.source_rows, -1)
        starts = self.borders(sizes, alignment) if starts is None else starts
        for expert, (start, size) in enumerate(zip(starts, sizes.tolist(), strict=False)):
            own = (flat == expert).nonzero()[:, 0][:size]
            room = found[start : start + size]
            room[:] = own[: len(room)]
        return found, sizes

    def without(self, left_out: torch.Tensor) -> Placed:
        """Without the choices of a mask (T, k)."""
        return self.placed(self.expert_ids.masked_fill(left_out, -1))

    def repeated(self) -> torch.Tensor:
        """Choices whose expert an earlier choice of the token names, bool (T, k)."""
        ids = self.expert_ids
        same = ids.unsqueeze(2) == ids.unsqueeze(1)
        return same.tril(-1).any(2)


WITHOUT_ID: tuple[Deviation[Routing], ...] = (
    Deviation("none-is-first-expert", "a choice with the id −1 goes to expert 0", "routing",
              lambda r: r.placed(r.expert_ids.clamp(min=0))),
    Deviation("none-is-last-expert", "a choice with the id −1 goes to the last expert", "routing",
              lambda r: r.placed(torch.where(r.expert_ids < 0, r.case.experts - 1, r.expert_ids))),
)  # fmt: skip
ROUTINGS: tuple[Deviation[Routing], ...] = (
    *WITHOUT_ID,
    Deviation("equal-experts-once", "choices of a token with one expert have one row together", "routing",
              lambda r: r.without(r.repeated())),
    Deviation("last-choice-left-out", "the last choice of every token is left out", "routing",
              lambda r: r.without(torch.arange(r.case.choices).expand_as(r.expert_ids) == r.case.choices - 1)),
    Deviation("first-choice-alone", "the first choice of every token alone is placed", "routing",
              lambda r: r.without(torch.arange(r.case.choices).expand_as(r.expert_ids) > 0)),
    Deviation("next-expert", "rows lie in the section of the next expert", "routing",
              lambda r: r.placed(torch.where(r.expert_ids < 0, -1, (r.expert_ids + 1) % r.case.experts))),
    Deviation("alignment-ignored", "sections lie one behind another without the alignment", "routing",
              lambda r: r.placed(r.expert_ids, alignment=1)),
    Deviation("section-begins-at-its-end", "the start of a section is the end of this section", "routing",
              lambda r: r.placed(r.expert_ids, r.borders(r.sizes)[1:])),
    Deviation("choices-in-columns", "source row j·T + t is stored for choice j of token t", "routing",
              lambda r: (torch.where(r.source_rows < 0, r.source_rows,
                                     r.source_rows % r.case.choices * len(r.expert_ids)
                                     + r.source_rows // r.case.choices), r.sizes)),
    Deviation("tokens-for-choices", "source rows are numbers of tokens", "routing",
              lambda r: (torch.where(r.source_rows < 0, r.source_rows, r.source_rows // r.case.choices), r.sizes)),
    Deviation("gap-named-first", "rows of no choice name choice 0", "routing",
              lambda r: (r.source_rows.clamp(min=0), r.sizes)),
)  # fmt: skip
"""Wrong source rows and sizes."""
ROWS: tuple[Deviation[Routing], ...] = (
    Deviation("row-of-choice", "a row is that of the token with the number of the choice", "x",
              lambda r, sources, x: x[sources % len(x)]),
    Deviation("row-modulo-choices", "choice j of token t takes the row of token j", "x",
              lambda r, sources, x: x[sources % r.case.choices % len(x)]),
    Deviation("row-of-next-token", "a row is that of the next token", "x",
              lambda r, sources, x: x[(sources // r.case.choices + 1) % len(x)]),
    Deviation("row-rounded-to-bfloat16", "rows are rounded to bfloat16", "x",
              lambda r, sources, x: x[sources // r.case.choices].bfloat16().to(x.dtype)),
)  # fmt: skip
"""Wrong rows."""


def wrong_routing(
    routing: Routing, sources: torch.Tensor, sizes: torch.Tensor, _: StageResult, limit: Limit
) -> Iterator[Cause]:
    """Mistakes that give the source rows and sizes of a kernel."""
    for row in rows_of(ROUTINGS, routing):
        if limit.may_try(float(sources.numel())):
            placed = row.result(routing)
            if torch.equal(routing.comparable(placed[0]), sources) and torch.equal(placed[1], sizes):
                yield row.cause, row.sentence


def wrong_rows(
    routing: Routing, x: torch.Tensor, found: dict[str, torch.Tensor], _: StageResult, limit: Limit
) -> Iterator[Cause]:
    """Mistakes that give the rows of a kernel from its own source rows."""
    sources = found["source_rows"]
    named = ((sources >= 0) & (sources < routing.expert_ids.numel())).nonzero()[:, 0]
    for row in rows_of(ROWS, routing):
        may_try = limit.may_try(float(named.numel() * x.shape[1])) and len(x) > 0
        if may_try and equal_bits(row.result(routing, sources[named], x), found["x"][named]):
            yield row.cause, row.sentence
