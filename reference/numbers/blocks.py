"""Blocks along a row: padding and the largest magnitude of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_INF_BITS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

# Slabs of 2^18 elements stay in a core's cache: ten times faster than whole-matrix passes on two cores. On a GPU 2^26
# fill it, and temporaries of a few hundred MiB leave room for other processes.
_SLAB = {"cpu": 1 << 18}
_SLAB_ELSEWHERE = 1 << 26
_VECTORS = 128


def pad_columns(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x` (M, K) with zeros appended until K is a multiple of `block`."""
    tail = -x.shape[1] % block
    return torch.nn.functional.pad(x, (0, tail)) if tail else x


def slabs(x: torch.Tensor) -> Iterator[slice]:
    """Row ranges of `x` (M, K), each of a size that stays in cache on a CPU, or that fills a GPU."""
    rows, columns = x.shape
    step = max(1, _SLAB.get(x.device.type, _SLAB_ELSEWHERE) // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def by_slabs(x: torch.Tensor, make: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """What `make` gives for each of the `slabs` of `x`, (m, …) of m rows, one below the other."""
    some = list(slabs(x))
    if len(some) < 2:
        return make(slice(0, x.shape[0]))
    first = make(some[0])
    out = first.new_empty(x.shape[0], *first.shape[1:])
    out[some[0]] = first
    for rows in some[1:]:
        out[rows] = make(rows)
    return out


def tiles(x: torch.Tensor, each: int = 1) -> Iterator[tuple[slice, slice]]:
    """Row and column ranges of `x` (M, N), as high as wide where it is large enough, of such a size.

    `each`: numbers that belong to an element.
    """
    rows, columns = x.shape
    size = max(1, _SLAB.get(x.device.type, _SLAB_ELSEWHERE) // each)
    width = max(math.isqrt(size), size // max(1, rows))
    for left in range(0, columns, width):
        some = slice(left, min(left + width, columns))
        height = max(1, size // (some.stop - some.start))
        for top in range(0, rows, height):
            yield slice(top, min(top + height, rows)), some


def block_amax(x: torch.Tensor, block: int, *, propagate_nan: bool = False) -> torch.Tensor:
    """max|x| over runs of `block` along K: (M, K) of float32, bfloat16 or float16 to (M, ⌈K/block⌉) float32.

    Works on the bits, whose order is the order of magnitudes, so it is exact and the same on every device. A NaN
    is left out (docs/numerics.md#nvfp4), or makes its block NaN where `propagate_nan`.
    """
    amax = torch.zeros(x.shape[0], -(-x.shape[1] // block), dtype=_BITS[x.dtype], device=x.device)
    if amax.numel() == 0:
        return amax.float()
    nan_above = _INF_BITS[x.dtype]
    for rows in slabs(x):
        amax[rows] = _magnitudes(x[rows], block).amax(2)
    if not propagate_nan and bool(amax.amax() > nan_above):  # rare, so it costs a second look only then
        for rows in slabs(x):
            magnitudes = _magnitudes(x[rows], block)
            amax[rows] = magnitudes.masked_fill_(magnitudes > nan_above, 0).amax(2)
    return amax.view(x.dtype).float()


def _magnitudes(x: torch.Tensor, block: int) -> torch.Tensor:
    """The bits of |x| in blocks: (M, K) to (M, ⌈K/block⌉, block), a new tensor of integers.

    On a CPU they are wide enough for a block of 128 bytes, whose amax torch finds with vectors, three times faster.
    """
    bits = pad_columns(x.contiguous().view(_BITS[x.dtype]), block) & ((1 << (x.element_size() * 8 - 1)) - 1)
    if bits.device.type == "cpu" and block * bits.element_size() < _VECTORS:
        bits = bits.to(torch.int32 if block * 4 >= _VECTORS else torch.int64)
    return bits.view(bits.shape[0], -1, block)


def over_tiles(
    blocks: torch.Tensor, height: int, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows.amax(1)
) -> torch.Tensor:
    """(M, B) to (M, B): what `reduce` makes of `height` rows, (T, height, B) to (T, B), once for each of them.

    Zeros are added below the last rows.
    """
    if height == 1:
        return blocks
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, -blocks.shape[0] % height))
    return reduce(padded.view(padded.shape[0] // height, height, blocks.shape[1])).repeat_interleave(height, 0)[
        : blocks.shape[0]
    ]


def of_rows(each: torch.Tensor, rows: slice) -> torch.Tensor:
    """Of a number for each row (M,) those of `rows`; of one for the whole tensor (1,) that one."""
    return each if each.shape[0] == 1 else each[rows]


def tensor_amax(blocks: torch.Tensor) -> torch.Tensor:
    """The largest of the block amaxes, float32 (1,); 0 for an empty tensor, NaN where a block is NaN."""
    return blocks.amax().view(1) if blocks.numel() else torch.zeros(1, device=blocks.device)
