"""Sections of the rows of experts: where they lie in a buffer, and checks of the arguments of routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def permuted_rows(choices: int, experts: int, alignment: int, capacity: int) -> int:
    """Rows of the buffer of permuted rows: experts·capacity, or enough for any sizes of the sections, a multiple of
    `alignment`. `choices`: of all tokens."""
    if capacity:
        return experts * capacity
    return -(-(choices + experts * (alignment - 1)) // alignment) * alignment


def check_routing(x: torch.Tensor, expert_ids: torch.Tensor, experts: int, alignment: int, capacity: int) -> None:
    """Raises TypeError or ValueError unless `x` is (T, K) and `expert_ids` are int32 or int64 (T, k), on a CPU below
    `experts`, and the numbers are positive; a capacity of 0 is none."""
    import torch

    from narrowgauge.spec.arguments import check_rows

    check_rows(x, "x")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert_ids is {expert_ids.dtype}; it can be int32 or int64")
    if expert_ids.dim() != 2 or len(expert_ids) != len(x):
        raise ValueError(f"expert_ids has shape {tuple(expert_ids.shape)}; for x {tuple(x.shape)} it is ({len(x)}, k)")
    for name, number, least in (("experts", experts, 1), ("alignment", alignment, 1), ("capacity", capacity, 0)):
        if number < least:
            raise ValueError(f"{name} is {number}; it is at least {least}")
    if expert_ids.device.type == "cpu" and expert_ids.numel() and int(expert_ids.max()) >= experts:
        raise ValueError(f"expert_ids holds {int(expert_ids.max())}; there are the experts 0 to {experts - 1}")


def check_choices(x: torch.Tensor, expert_ids: torch.Tensor, probabilities: torch.Tensor, experts: int) -> None:
    """Raises TypeError or ValueError unless ids and probabilities of the choices fit the rows of `x` (…, K): int32 or
    int64 (T, k), as `check_routing`, and float32 of the same shape, on the device of x."""
    import torch

    from narrowgauge.spec.arguments import check_tensor

    check_routing(x.reshape(-1, x.shape[-1]), expert_ids, experts, 1, 0)
    check_tensor(probabilities, "probabilities", (torch.float32,), tuple(expert_ids.shape))
    for name, tensor in (("expert_ids", expert_ids), ("probabilities", probabilities)):
        if tensor.device != x.device:
            raise ValueError(f"{name} lies on {tensor.device}, and x on {x.device}; move it")


def positions_of(source_rows: torch.Tensor, tokens: int, choices: int) -> torch.Tensor:
    """The row of each choice, int64 (T, k), −1 of a choice without a row. `source_rows`: t·k + j of each row, −1 of
    none."""
    import torch

    places = torch.arange(len(source_rows), device=source_rows.device)
    behind = torch.where(source_rows >= 0, source_rows, tokens * choices)  # one more, for rows of no choice
    found = torch.full((tokens * choices + 1,), -1, dtype=torch.int64, device=source_rows.device)
    return found.scatter_(0, behind, places)[:-1].view(tokens, choices)


Grouping = Literal["contiguous", "psum", "indptr", "masked", "sorted-ids"]
"""How the rows of experts lie in a buffer, and the index that a kernel gets, int32:

- "contiguous": a section begins behind the section before it, at a multiple of the alignment. The index (M,) has the
  expert of each row, −1 of rows between sections (m_indices of DeepGEMM);
- "psum": the same sections. The index (G,) has the end of each;
- "indptr": the same sections. The index (G + 1,) has the first row of each, and the number of rows: rows between
  sections belong to the section before them (m_indptr of FlashInfer);
- "masked": a section begins at g times the rows of each, (G, most, K). The index (G,) has the rows of each;
- "sorted-ids": rows have any order. The index has rows in blocks of the alignment, each of one expert, and the number
  of rows in places of no row; a second index has the expert of each block (fused_moe of vLLM).
"""
ALIGNMENT = 128
"""Rows of which the first row of a section is a multiple, unless told (DeepGEMM)."""


@dataclass(frozen=True)
class Arrangement:
    """Where the rows of sections lie in a buffer."""

    rows: list[int]
    """The row of the buffer for each row of the sections, one section behind another."""
    height: int
    """Rows of the buffer."""
    index: list[int]
    """The index that a kernel gets."""
    experts: list[int]
    """The second index of "sorted-ids"; empty for other groupings."""


def arrange(grouping: Grouping, sizes: Sequence[int], alignment: int, order: Sequence[int] = ()) -> Arrangement:
    """Rows of sections of these sizes. `order`: rows of the buffer of "sorted-ids" for the rows of the sections."""
    aligned = [-(-size // alignment) * alignment for size in sizes]
    if grouping == "masked":
        most = max([alignment, *aligned])
        rows = [number * most + row for number, size in enumerate(sizes) for row in range(size)]
        return Arrangement(rows, most * len(sizes), list(sizes), [])
    starts = list(accumulate(aligned, initial=0))
    if grouping == "sorted-ids":
        ids = [sum(sizes)] * starts[-1]
        places = [start + row for start, size in zip(starts, sizes, strict=False) for row in range(size)]
        for place, row in zip(places, order, strict=True):
            ids[place] = row
        experts = [number for number, rows in enumerate(aligned) for _ in range(rows // alignment)]
        return Arrangement(list(order), sum(sizes), ids, experts)
    rows = [start + row for start, size in zip(starts, sizes, strict=False) for row in range(size)]
    if grouping == "contiguous":
        index = [-1] * starts[-1]
        for row, number in zip(rows, (n for n, size in enumerate(sizes) for _ in range(size)), strict=True):
            index[row] = number
        return Arrangement(rows, starts[-1], index, [])
    ends = [start + size for start, size in zip(starts, sizes, strict=False)]
    return Arrangement(rows, starts[-1], ends if grouping == "psum" else starts, [])


def rows_of_experts(
    grouping: Grouping, index: Sequence[int], height: int, alignment: int, experts: Sequence[int] = ()
) -> dict[int, list[int]]:
    """The rows of each expert that has rows, by the index of a grouping but "masked". `height`: rows of the buffer.
    `experts`: the second index of "sorted-ids"."""
    pairs: list[tuple[int, int]]
    if grouping == "contiguous":
        pairs = [(expert, row) for row, expert in enumerate(index) if expert >= 0]
    elif grouping == "sorted-ids":
        pairs = [(experts[place // alignment], row) for place, row in enumerate(index) if row < height]
    else:
        ends = list(index) if grouping == "psum" else list(index[1:])
        starts = [-(-end // alignment) * alignment for end in (0, *ends[:-1])] if grouping == "psum" else list(index)
        pairs = [(g, row) for g, end in enumerate(ends) for row in range(starts[g], end)]
    found: dict[int, list[int]] = {}
    for expert, row in pairs:
        found.setdefault(expert, []).append(row)
    return found
