"""Amaxes (largest magnitudes) of tensors, rows, columns and sections, before and after a rotation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import GENERAL_THREADS, STRIP, THREADS, blocks_for, check_tensor, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.dtypes import INPUT_DTYPES

_PER_THREAD = 16
_BLOCKS = 1024
"""Thread blocks that fill any present GPU. A grid-stride loop covers the rest of the tensor."""
_BLOCKS_A_CORE = 4
"""Thread blocks for each core of a CPU, where every thread block costs the shuffles of its warps: 1024x2048 bf16 takes
two cores 2.4 ms with 64 thread blocks and 1.1 ms with 8."""
_WIDE = 128
"""Columns of a tile of bfloat16."""
_LONGEST = 2**23
"""Rows or columns from which on the tiles of a matrix exceed the limits of a grid."""
_MOST = 2**36
"""Elements from which on the index of a block of 16 exceeds 32 bits."""
_SMALL = 2**17
"""Elements up to which also a CPU runs the kernels for whole tiles, so that cases and tests run the same kernels as a
GPU. They are slower there: both outputs of nvfp4-2d of 1024x2048 bf16 take one core 21 ms, and 11 ms with the general
kernel, both of mxfp8-e4m3 15 and 8 ms, and amaxes before and after a rotation of columns 16 and 3 ms."""
_DEEP = 4
"""Tiles of a thread block, vertically adjacent, for amaxes: those before and after a rotation of 8192² take an H200 42
µs with 4, 44 µs with 2 and 48 µs with 8."""
_TAIL_DEEP, _TAIL_STRIPS = 2, 16
"""Tiles of a thread block in the last strips, and the least number of these strips."""
_FEWEST = 256
"""A smaller grid gets fewer tiles per thread block: both outputs of nvfp4-2d of 2048² take an H200 8.2 µs with 256
thread blocks of 2 tiles, 8.9 µs with 512 of 1 or 128 of 4, and 12.8 µs with 64 of 8."""

_AMAX_BLOCKS = KernelStruct("quantize/amax_blocks.cu", "AmaxBlocksParameters")
NO_SCHEDULE: dict[str, Value] = {"deep": 0, "full_blocks": 0, "tail_deep": 0}
"""Fields of the kernels' struct TileSchedule, for kernels that do not use it."""

_other_grid: ContextVar[bool] = ContextVar("other_grid", default=False)


@contextlib.contextmanager
def another_grid() -> Iterator[None]:
    """Within the context, kernels of this module run with another number of thread blocks and must give the same
    bytes."""
    token = _other_grid.set(True)
    try:
        yield
    finally:
        _other_grid.reset(token)


def amax(x: torch.Tensor, *, propagate_nan: bool = False) -> torch.Tensor:
    """max|x| of a contiguous tensor, float32 (1,), 0 for an empty tensor. NaN is left out unless `propagate_nan` is
    set."""
    check_tensor(x, "x", INPUT_DTYPES)
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    most = _BLOCKS if x.device.type == "cuda" else _BLOCKS_A_CORE * torch.get_num_threads()
    most = 3 if _other_grid.get() else most
    grid = min(most, blocks_for(x.numel(), THREADS * _PER_THREAD))
    arguments = (x, out, np.int64(x.numel()), np.int32(propagate_nan))
    launch("amax", f"amax_{suffix(x.dtype)}", (grid,), (THREADS,), arguments, device=x.device)
    return out


def in_tiles(x: torch.Tensor, rows: int = STRIP) -> bool:
    """Whether kernels for whole tiles of `rows`×128 are to process `x`.

    They need contiguous bfloat16, aligned to 16 bytes. On a CPU they process small matrices only, because the general
    kernels are faster there.
    """
    whole = x.shape[0] % rows == x.shape[1] % _WIDE == 0 and x.numel() > 0
    aligned = x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % 16 == 0
    return whole and aligned and (x.device.type != "cpu" or x.numel() <= _SMALL)


def in_32_bits(x: torch.Tensor) -> bool:
    """Whether the tiles of `x` fit into a grid, and the indices of its blocks of 16 into 32 bits."""
    return max(x.shape) < _LONGEST and x.numel() < _MOST


def tile_schedule(x: torch.Tensor, deep: int) -> tuple[tuple[int, int], dict[str, Value]]:
    """Grid of a kernel for whole tiles of `x`, and the fields of its TileSchedule (shared_tile.cuh).

    A thread block has `deep` tiles, vertically adjacent, or fewer if the matrix is small.
    """
    across, strips_of_x = x.shape[1] // _WIDE, x.shape[0] // STRIP
    deep = 5 if _other_grid.get() else deep
    while True:
        full_blocks = max(strips_of_x - _TAIL_STRIPS, 0) // deep
        tail_deep = min(deep, _TAIL_DEEP)
        down = full_blocks + blocks_for(strips_of_x - full_blocks * deep, tail_deep)
        if deep == 1 or across * down >= _FEWEST or _other_grid.get():
            return (across, down), {"deep": deep, "full_blocks": full_blocks, "tail_deep": tail_deep}
        deep //= 2


def strips(rows: int, sizes: torch.Tensor | None) -> int:
    """Number of strips of 64 rows; with sections, which may end with short strips, an upper bound."""
    return blocks_for(rows, STRIP) if sizes is None else rows // STRIP + len(sizes)


def oriented_amax(
    x: torch.Tensor,
    *,
    plain: bool,
    rotated: bool,
    along_rows: bool,
    per_line: bool = False,
    sizes: torch.Tensor | None = None,
    signs: int = 0,
    propagate_nan: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Amaxes of `x` (M, K), any strides, in one read: of `x` itself (`plain`), and of its rotated groups of 16
    (`rotated`).

    float32 (1,), or a value per section of `sizes` rows, int64 (G,). With `per_line`, `plain` has an amax for each
    row, (M,), or, without `along_rows`, for each column, (K,). Groups extend along K with `along_rows`, else along M.
    An amax that the caller does not ask for is None.
    """
    rows, columns = x.shape
    sections = 1 if sizes is None else len(sizes)
    lines = (rows if along_rows else columns) if per_line else sections
    out = torch.zeros(lines, dtype=torch.float32, device=x.device) if plain else None
    out_rotated = torch.zeros(sections, dtype=torch.float32, device=x.device) if rotated else None
    # On a GPU, one thread block for a strip of 64 rows would leave multiprocessors idle. A CPU takes twice as long with
    # 16 parts.
    parts = 3 if _other_grid.get() else min(16 if x.device.type == "cuda" else 1, blocks_for(columns, STRIP))
    grid: tuple[int, ...]
    schedule = NO_SCHEDULE
    if sizes is None and not per_line and in_tiles(x) and in_32_bits(x):
        name, threads = "amax_tiles_bf16", THREADS
        grid, schedule = tile_schedule(x, _DEEP)
    else:
        name, threads = f"amax_blocks_{suffix(x.dtype)}", GENERAL_THREADS["amax_blocks"].get(x.device.type, 1)
        grid = (max(1, strips(rows, sizes)) * parts,)
    parameters = _AMAX_BLOCKS(
        x=x, row_stride=x.stride(0), column_stride=x.stride(1), rows=rows, columns=columns, sizes=sizes,
        sections=sections, plain=out, rotated=out_rotated, schedule=schedule, parts=parts, along_rows=along_rows,
        per_line=per_line, signs=signs, propagate_nan=propagate_nan,
    )  # fmt: skip
    launch("amax_blocks", name, grid, (threads,), (parameters,), device=x.device)
    return out, out_rotated
