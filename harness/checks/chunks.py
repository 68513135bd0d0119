"""Large tensors, some rows at a time: the temporaries of a check are those of a part, its result that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

CHUNK = 1 << 25
"""Elements of a part. A check has up to 20 temporaries of 8 bytes: 5 GB."""


def chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of the first dimension of `x`, each of about `CHUNK` elements; one of an empty tensor."""
    rows = max(1, CHUNK // max(1, x[0].numel())) if len(x) else 1
    for start in range(0, max(1, len(x)), rows):
        yield slice(start, start + rows)


def by_rows(function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `function` makes of tensors that have as many rows, of some rows at a time.

    Each result of it has the rows that it was given, and none depends on another row.
    """
    first = tensors[0]
    if first.numel() <= CHUNK:
        return function(*tensors)
    made: tuple[torch.Tensor, ...] = ()
    for rows in chunks(first):
        parts = function(*(tensor[rows] for tensor in tensors))
        made = made or tuple(part.new_empty(first.shape[:1] + part.shape[1:]) for part in parts)
        for whole, part in zip(made, parts, strict=True):
            whole[rows] = part
    return made
