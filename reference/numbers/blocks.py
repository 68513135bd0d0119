"""Blocks of consecutive elements of a row: zero padding, slices, and the largest magnitude of each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

import torch

from narrowgauge.reference.numbers.slabs import by_slabs

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_INF_BITS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_VECTOR_BYTES = 128

OptionalTensor = TypeVar("OptionalTensor", torch.Tensor, torch.Tensor | None)


def pad_columns(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x` (M, K) with zeros appended to each row until K is a multiple of `block`."""
    tail = -x.shape[1] % block
    return torch.nn.functional.pad(x, (0, tail)) if tail else x


def split_columns(columns: int, step: int, slices: int | tuple[int, ...]) -> Iterator[slice]:
    """The nonempty slices of `columns` columns, or an empty slice if there are none: n slices of ⌈blocks/n⌉ blocks.

    Or slices that start at 0 and at the given columns, each moved up to the next block. A block has `step` columns.
    Source: docs/tolerance.md#declared-order, "split-<n>" and "split-at-<k>".
    """
    if isinstance(slices, tuple):
        starts = sorted({0, *(-(-cut // step) * step for cut in slices if -(-cut // step) * step < columns)})
        yield from (slice(*ends) for ends in pairwise([*starts, columns]))
        return
    blocks = -(-columns // step)
    width = max(1, -(-blocks // slices)) * step
    for start in range(0, max(1, columns), width):
        yield slice(start, min(start + width, columns))


def block_amax(x: torch.Tensor, block: int, *, propagate_nan: bool = False) -> torch.Tensor:
    """max|x| of blocks of `block` elements of a row: (M, K) of float32, bfloat16 or float16 to float32 (M, ⌈K/block⌉).

    The order of the bits of |x| is the order of the magnitudes, so the maximum of the bits is exact and the same on
    every device. NaN is ignored, or makes its block NaN if `propagate_nan`. Source: docs/numerics.md#nvfp4, step 1.
    """
    amax = by_slabs(x, lambda rows: _magnitudes(x[rows], block).amax(2).to(_BITS[x.dtype]))
    # The pass that removes NaN runs only if there is a NaN.
    if not propagate_nan and amax.numel() and bool(amax.amax() > _INF_BITS[x.dtype]):
        amax = by_slabs(x, lambda rows: _zero_for_nan(_magnitudes(x[rows], block), x.dtype).amax(2).to(_BITS[x.dtype]))
    return amax.view(x.dtype).float()


def _zero_for_nan(magnitudes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return magnitudes.masked_fill_(magnitudes > _INF_BITS[dtype], 0)


def _magnitudes(x: torch.Tensor, block: int) -> torch.Tensor:
    """The bits of |x| in blocks: (M, K) to (M, ⌈K/block⌉, block), a new tensor of integers.

    On a CPU the integers are so wide that a block has 128 bytes: torch then computes the maximum with vector
    instructions, three times faster.
    """
    bits = pad_columns(x.contiguous().view(_BITS[x.dtype]), block) & ((1 << (x.element_size() * 8 - 1)) - 1)
    if bits.device.type == "cpu" and block * bits.element_size() < _VECTOR_BYTES:
        bits = bits.to(torch.int32 if block * 4 >= _VECTOR_BYTES else torch.int64)
    return bits.view(bits.shape[0], -(-x.shape[1] // block), block)


def over_tiles(
    blocks: torch.Tensor, height: int, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows.amax(1)
) -> torch.Tensor:
    """One number for a tile of `height` rows, stored in each row of the tile: (M, B) to (M, B).

    `reduce` makes the numbers of the tiles: (T, height, B) to (T, B). Zeros pad the last tile.
    Source: docs/numerics.md#two-dimensional-blocks.
    """
    if height == 1:
        return blocks
    rows, columns = blocks.shape
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, -rows % height))
    return reduce(padded.view(padded.shape[0] // height, height, columns)).repeat_interleave(height, 0)[:rows]


def of_rows(numbers: OptionalTensor, rows: slice) -> OptionalTensor:
    """Numbers of a range of rows: `numbers[rows]` for shape (M,); `numbers` for (1,), one for the tensor, and None."""
    return numbers if numbers is None or numbers.shape[0] == 1 else numbers[rows]


def tensor_amax(blocks: torch.Tensor) -> torch.Tensor:
    """The largest block amax, float32 (1,): 0 for an empty tensor, NaN if a block is NaN.

    Source: docs/numerics.md#nvfp4, step 1.
    """
    return blocks.amax().view(1) if blocks.numel() else torch.zeros(1, device=blocks.device)
