"""Checks of large tensors in chunks of rows: temporaries have the size of a chunk, results are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

CHUNK = 1 << 25
"""Elements of a chunk. A check has up to 20 temporaries with 8 bytes per element: 5 GB."""
CPU_CHUNK = 1 << 18
"""Elements of a chunk of a function on rows, on a CPU: its temporaries fit into the cache."""


def cached_chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices as of `row_chunks`, on a CPU of at most `CPU_CHUNK` elements. For results that do not depend on chunks."""
    return row_chunks(x, min(CHUNK, CPU_CHUNK) if x.device.type == "cpu" else CHUNK)


def row_chunks(x: torch.Tensor, elements: int | None = None) -> Iterator[slice]:
    """Slices of the first dimension of `x`, each of about `elements` elements, or `CHUNK`.

    An empty tensor has a single slice.
    """
    rows = max(1, (elements or CHUNK) // max(1, x[0].numel())) if len(x) else 1
    for start in range(0, max(1, len(x)), rows):
        yield slice(start, start + rows)


def map_row_chunks(
    function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Apply `function` to tensors with equal numbers of rows, in chunks of rows, and join its results.

    Each result of `function` has the rows of its arguments, and a row of the result depends only on the same row of
    the arguments.
    """
    first_tensor = tensors[0]
    chunks = list(cached_chunks(first_tensor))
    if len(chunks) == 1:
        return function(*tensors)
    results: tuple[torch.Tensor, ...] = ()
    for rows in chunks:
        parts = function(*(tensor[rows] for tensor in tensors))
        results = results or tuple(part.new_empty(first_tensor.shape[:1] + part.shape[1:]) for part in parts)
        for result, part in zip(results, parts, strict=True):
            result[rows] = part
    return results
