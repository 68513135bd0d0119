"""Slabs: parts of a matrix that fit in a cache. They change the speed of an operation, never its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

SLAB_ELEMENTS = {"cpu": 1 << 18}
"""Elements of a slab by device type. On a CPU, 2^18 elements stay in the cache of a core, which is ten times faster
than passes over the whole matrix on two cores."""
SLAB_ELEMENTS_GPU = 1 << 26
"""Elements of a slab on a GPU. They fill the GPU, and temporary tensors of a few hundred MiB leave memory for other
processes."""


def slab_elements(x: torch.Tensor) -> int:
    """Elements of a slab on the device of `x`."""
    return SLAB_ELEMENTS.get(x.device.type, SLAB_ELEMENTS_GPU)


def slabs(x: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Row ranges of `x` (M, K) with about `slab_elements` elements each, in order.

    Each range but the last has a multiple of `multiple` rows. A matrix without rows has no range.
    """
    rows, columns = x.shape
    height = slab_elements(x) // max(1, columns)
    height = max(multiple, height - height % multiple)
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def by_slabs(x: torch.Tensor, function: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """The tensors `function(rows)`, shape (m, …) for m rows, of all `slabs` of `x`, stacked into one tensor (M, …)."""
    ranges = list(slabs(x))
    if len(ranges) < 2:
        return function(slice(0, x.shape[0]))
    first = function(ranges[0])
    out = first.new_empty(x.shape[0], *first.shape[1:])
    out[ranges[0]] = first
    for rows in ranges[1:]:
        out[rows] = function(rows)
    return out


def tiles(x: torch.Tensor, numbers: int = 1) -> Iterator[tuple[slice, slice]]:
    """Row and column ranges that cover `x` (M, N) with tiles of about `slab_elements` numbers.

    `numbers`: how many numbers an element stands for. Tiles are square if the matrix is large enough.
    """
    rows, columns = x.shape
    size = max(1, slab_elements(x) // numbers)
    width = max(math.isqrt(size), size // max(1, rows))
    for left in range(0, columns, width):
        across = slice(left, min(left + width, columns))
        height = max(1, size // (across.stop - across.start))
        for top in range(0, rows, height):
            yield slice(top, min(top + height, rows)), across
