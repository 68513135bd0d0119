"""Largest magnitudes: of tensors, rows, columns and sections, before and after a rotation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import ANY_THREADS, STRIP, THREADS, blocks_for, check_tensor, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.dtypes import INPUT_DTYPES

_PER_THREAD = 16
_BLOCKS = 1024
"""Blocks that fill any present GPU; the grid strides over the rest."""
_BLOCKS_A_CORE = 4
"""The same of a CPU, where every block costs its warps' exchanges: 1024x2048 bf16 takes two cores 2.4 ms with 64 blocks
and 1.1 ms with 8."""
_WIDE = 128
"""Columns of a tile of bfloat16."""
_LONGEST = 2**23
"""Rows or columns from which on a grid has no room for their tiles."""
_MOST = 2**36
"""Elements from which on blocks of 16 have no numbers of 32 bits."""
_SMALL = 2**17
"""Elements up to which a CPU takes the kernels of whole tiles, too, so that cases and tests run what a GPU runs; of
1024x2048 bf16 both halves of nvfp4-2d take one core 21 ms with them and 11 ms with the kernel of any matrix, both of
mxfp8-e4m3 15 and 8 ms, and amaxes before and after a rotation of columns 16 and 3 ms."""
_DEEP = 4
"""Tiles, one below the other, that a block of threads takes for amaxes: those before and after a rotation of 8192² take
an H200 42 µs with 4, 44 µs with 2 and 48 µs with 8."""
_FEW, _LAST = 2, 16
"""Tiles that it takes of the last strips, and how many strips those are at least."""
_FEWEST = 256
"""Blocks below which each takes fewer tiles: both halves of nvfp4-2d of 2048² take an H200 8.2 µs with 256 blocks of 2,
8.9 µs with 512 of 1 or 128 of 4, and 12.8 µs with 64 of 8."""

_other_grid: ContextVar[bool] = ContextVar("other_grid", default=False)


@contextlib.contextmanager
def another_grid() -> Iterator[None]:
    """Within the context the kernels here are launched with other numbers of blocks, and must give the same bytes."""
    token = _other_grid.set(True)
    try:
        yield
    finally:
        _other_grid.reset(token)


def amax(x: torch.Tensor, *, propagate_nan: bool = False) -> torch.Tensor:
    """max|x| of a contiguous tensor, float32 (1,); NaN is left out unless `propagate_nan`. 0 for an empty tensor."""
    check_tensor(x, "x", INPUT_DTYPES)
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    most = _BLOCKS if x.device.type == "cuda" else _BLOCKS_A_CORE * torch.get_num_threads()
    most = 3 if _other_grid.get() else most
    grid = min(most, blocks_for(x.numel(), THREADS * _PER_THREAD))
    arguments = (x, out, np.int64(x.numel()), np.int32(propagate_nan))
    launch("amax", f"amax_{suffix(x.dtype)}", (grid,), (THREADS,), arguments, device=x.device)
    return out


def in_tiles(x: torch.Tensor, rows: int = STRIP) -> bool:
    """Whether kernels that work on whole tiles of `rows`×128 are to take `x`: bfloat16 that lies in memory as they want
    it; on a CPU, where others are faster, only what is small."""
    whole = x.shape[0] % rows == x.shape[1] % _WIDE == 0 and x.numel() > 0
    known = x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % 16 == 0
    return whole and known and (x.device.type != "cpu" or x.numel() <= _SMALL)


def in_32_bits(x: torch.Tensor) -> bool:
    """Whether a grid has room for the tiles of `x`, and its blocks of 16 have numbers of 32 bits."""
    return max(x.shape) < _LONGEST and x.numel() < _MOST


def deal(x: torch.Tensor, deep: int) -> tuple[tuple[int, int], tuple[np.int32, np.int32, np.int32]]:
    """The grid of blocks of threads that take tiles of `x`, and shared_tile.cuh's Deal: how many of them, one below the
    other, each takes, `deep`, or fewer of a small matrix; how many blocks do below each other; what the last ones take.
    """
    across, strips_of_x = x.shape[1] // _WIDE, x.shape[0] // STRIP
    deep = 5 if _other_grid.get() else deep
    while True:
        whole = max(strips_of_x - _LAST, 0) // deep
        few = min(deep, _FEW)
        down = whole + blocks_for(strips_of_x - whole * deep, few)
        if deep == 1 or across * down >= _FEWEST or _other_grid.get():
            return (across, down), (np.int32(deep), np.int32(whole), np.int32(few))
        deep //= 2


def strips(rows: int, sizes: torch.Tensor | None) -> int:
    """Strips of rows that `rows` rows are worked on in, an upper bound where they are split into sections."""
    return blocks_for(rows, STRIP) if sizes is None else rows // STRIP + len(sizes)


def oriented_amax(
    x: torch.Tensor,
    *,
    plain: bool,
    rotated: bool,
    along_rows: bool,
    each: bool = False,
    sizes: torch.Tensor | None = None,
    signs: int = 0,
    propagate_nan: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Amaxes of `x` (M, K), any strides, in one read: as it is (`plain`), and of groups of 16 rotated (`rotated`).

    float32 (1,), or one for each section of `sizes` rows, int64 (G,); `plain` with `each` (M,) or, not `along_rows`,
    (K,). Groups lie along K where `along_rows`, else along M. None for what is not wanted.
    """
    rows, columns = x.shape
    sections = 1 if sizes is None else len(sizes)
    lines = (rows if along_rows else columns) if each else sections
    out = torch.zeros(lines, dtype=torch.float32, device=x.device) if plain else None
    out_rotated = torch.zeros(sections, dtype=torch.float32, device=x.device) if rotated else None
    # On a GPU a strip of 64 rows alone would leave it idle; a CPU reads on: 16 parts take it twice as long.
    parts = 3 if _other_grid.get() else min(16 if x.device.type == "cuda" else 1, blocks_for(columns, STRIP))
    if sizes is None and not each and in_tiles(x) and in_32_bits(x):
        grid, dealt = deal(x, _DEEP)
        arguments = (x, np.int64(rows), np.int64(columns), *dealt, out, out_rotated, np.int32(along_rows),
                     np.int32(signs), np.int32(propagate_nan))  # fmt: skip
        launch("amax_blocks", "amax_tiles_bf16", grid, (THREADS,), arguments, device=x.device)
        return out, out_rotated
    launch(
        "amax_blocks",
        f"amax_blocks_{suffix(x.dtype)}",
        (max(1, strips(rows, sizes)) * parts,),
        (ANY_THREADS["amax_blocks"].get(x.device.type, 1),),
        (x, np.int64(x.stride(0)), np.int64(x.stride(1)), np.int64(rows), np.int64(columns), sizes, np.int32(sections),
         out, out_rotated, np.int32(parts), np.int32(along_rows), np.int32(each), np.int32(signs),
         np.int32(propagate_nan)),
        device=x.device,
    )  # fmt: skip
    return out, out_rotated
