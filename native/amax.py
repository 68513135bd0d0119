"""Largest magnitudes: of tensors, rows, columns and sections, before and after a rotation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np
import torch

from native.arguments import DTYPES, STRIP, THREADS, blocks_for, check_tensor, suffix
from native.launch import launch

_PER_THREAD = 16
_ANY_THREADS = {"cuda": 256, "cpu": 8}
"""Of the kernel that takes any tensor in blocks."""
_BLOCKS = 1024
"""Blocks that fill any present GPU; the grid strides over the rest."""
_BLOCKS_A_CORE = 4
"""The same of a CPU, where every block costs its warps' exchanges: 1024x2048 bf16 takes two cores 2.4 ms with 64 blocks
and 1.1 ms with 8."""
_WIDE = 128
"""Columns of a tile of bfloat16."""
_LONGEST = 2**24
"""Rows or columns from which on a grid has no room for their tiles."""
_MOST = 2**36
"""Elements from which on blocks of 16 have no numbers of 32 bits."""
_SMALL = 2**17
"""Elements up to which a CPU takes the kernels of whole tiles, too, so that cases and tests run what a GPU runs; of
1024x2048 bf16 both halves of nvfp4-2d take one core 21 ms with them and 11 ms with the kernel of any matrix, both of
mxfp8-e4m3 15 and 8 ms, and amaxes before and after a rotation of columns 16 and 3 ms."""
_TILES_EACH = 8
"""Tiles that a block of threads takes for amaxes: those before and after a rotation of 16384² take an H200 0.142 ms
with 2, 0.133 with 4, 0.131 with 8 and 0.135 with 16."""
_ABREAST = 8
"""Strips of rows that neighbouring blocks take: both halves of nvfp4-2d of 16384² take an H200 0.258 ms with 8, 0.266
with 4, and no less with 16."""

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
    check_tensor(x, "x", DTYPES)
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    most = _BLOCKS if x.device.type == "cuda" else _BLOCKS_A_CORE * torch.get_num_threads()
    most = 3 if _other_grid.get() else most
    grid = min(most, blocks_for(x.numel(), THREADS * _PER_THREAD))
    arguments = (x, out, np.int64(x.numel()), np.int32(propagate_nan))
    launch("amax", f"amax_{suffix(x.dtype)}", (grid,), (THREADS,), arguments, device=x.device)
    return out


def in_tiles(x: torch.Tensor) -> bool:
    """Whether a matrix lies in memory as the kernels want it that work on whole tiles."""
    whole = x.shape[0] % STRIP == x.shape[1] % _WIDE == 0 and max(x.shape) < _LONGEST and 0 < x.numel() < _MOST
    return x.dtype == torch.bfloat16 and whole and x.is_contiguous() and x.data_ptr() % 16 == 0


def prefers_tiles(x: torch.Tensor) -> bool:
    """Whether kernels that work on whole tiles are to take `x`, where they can: on a CPU, where others are faster, only
    what is small."""
    return x.device.type != "cpu" or x.numel() <= _SMALL


def tiles_each(x: torch.Tensor, each: int) -> tuple[tuple[int, int], int]:
    """The grid of blocks of threads that take `each` tiles of `x`, and how far from each other those of a block are."""
    each = 3 if _other_grid.get() else each
    apart, bands = blocks_for(x.shape[1] // _WIDE, each), blocks_for(x.shape[0] // STRIP, _ABREAST)
    return (_ABREAST * apart, bands), apart


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
    if sizes is None and not each and in_tiles(x) and prefers_tiles(x):
        grid, apart = tiles_each(x, _TILES_EACH)
        arguments = (x, np.int64(rows), np.int64(columns), np.int32(apart), out, out_rotated, np.int32(along_rows),
                     np.int32(signs), np.int32(propagate_nan))  # fmt: skip
        launch("amax_blocks", "amax_tiles_bf16", grid, (THREADS,), arguments, device=x.device)
        return out, out_rotated
    launch(
        "amax_blocks",
        f"amax_blocks_{suffix(x.dtype)}",
        (max(1, strips(rows, sizes)) * parts,),
        (_ANY_THREADS.get(x.device.type, 1),),
        (x, np.int64(x.stride(0)), np.int64(x.stride(1)), np.int64(rows), np.int64(columns), sizes, np.int32(sections),
         out, out_rotated, np.int32(parts), np.int32(along_rows), np.int32(each), np.int32(signs),
         np.int32(propagate_nan)),
        device=x.device,
    )  # fmt: skip
    return out, out_rotated
