"""How a given tensor lies in memory: the views of a case."""

from __future__ import annotations

import torch

PAD = 8
"""Elements behind each row of a strided view."""


def laid_out(x: torch.Tensor, view: str) -> torch.Tensor:
    """`x` (…, K), its values unchanged, as a `contiguous`, `strided` or `transposed` view of other memory.

    strided: every second element of rows that are 8 elements longer than twice K. transposed: the last dimension is
    the outermost in memory, as that of a (K, M) matrix seen as (M, K).
    """
    if view == "strided":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + PAD)
        return wide[..., : 2 * x.shape[-1] : 2].copy_(x)
    if view == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    return x
