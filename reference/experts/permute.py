"""Rows of tokens copied to the sections of their experts."""

from __future__ import annotations

import torch

from narrowgauge.spec.modules.routing import check_routing, permuted_rows


def permute(
    x: torch.Tensor, expert_ids: torch.Tensor, *, experts: int, alignment: int = 1, capacity: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the rows of `x` (T, K) for each choice of a token, ordered by expert, then by token and choice.

    `expert_ids`: int32 or int64 (T, k); a negative id is no choice. Section e begins behind section e − 1, at a
    multiple of `alignment`; with a `capacity` at e·capacity, and choices beyond the capacity are left out. Returns the
    rows (R, K), with zeros in rows of no choice, `source_rows` int64 (R,), t·k + j of choice j of token t, −1 of no
    choice, and the sizes of the sections, int64 (experts,). R: `spec.modules.routing.permuted_rows`. Raises TypeError
    or ValueError for ids of another dtype or shape, and ids beyond the experts.
    """
    check_routing(x, expert_ids, experts, alignment, capacity)
    tokens, choices = expert_ids.shape
    rows = permuted_rows(tokens * choices, experts, alignment, capacity)
    source_rows, sizes, start = torch.full((rows,), -1), [], 0
    flat = expert_ids.flatten().cpu()
    for expert in range(experts):
        own = (flat == expert).nonzero()[:, 0]
        own = own[:capacity] if capacity else own
        start = expert * capacity if capacity else start
        source_rows[start : start + len(own)] = own
        start += -(-len(own) // alignment) * alignment
        sizes.append(len(own))
    source_rows = source_rows.to(x.device)
    taken = x[source_rows.clamp(min=0) // max(1, choices)] if tokens else x.new_zeros(rows, x.shape[1])
    return taken.masked_fill((source_rows < 0).unsqueeze(1), 0), source_rows, torch.tensor(sizes, device=x.device)
