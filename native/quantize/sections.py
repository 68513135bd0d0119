"""Sections of rows: padded to the alignment that a grouped GEMM takes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import THREADS, blocks_for, check_contiguous
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.arguments import check_rows, check_sizes, padded_rows, section_rows
from narrowgauge.spec.recipes import Recipe, find_recipe

_WORD = 16
"""Bytes that a thread moves at once, or fewer where rows or addresses are not aligned to so many."""
_ROWS = THREADS // 32
"""That a block of threads moves at once. The grid strides over the rest: on a CPU every thread costs a stack."""
_BLOCKS = {"cuda": 1 << 16, "cpu": 16}


def check_sizes_of(sizes: torch.Tensor, rows: int) -> None:
    """Raises TypeError or ValueError unless `sizes` are int64 (G,) and, on a CPU, sum to so many rows.

    Sizes on a GPU are not read: the host would wait for them.
    """
    check_sizes(sizes)
    check_contiguous(sizes=sizes)
    if sizes.device.type == "cpu":
        section_rows(sizes, rows)


def pad_sections(x: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (M, K) with rows of zeros behind each section, up to the recipe's `row_alignment`, and the sizes with them.

    `sizes`: int64 (G,), rows of each section; one without rows stays without. The dtype is any. One launch for all
    sections. Waits for the device that holds `sizes`. Raises TypeError or ValueError where they are not those of M
    rows, ToolchainError where kernels cannot be compiled.
    """
    check_rows(x, "x")
    counts = section_rows(sizes, x.shape[0])
    alignment = find_recipe(recipe).row_alignment
    aligned = [-(-count // alignment) * alignment for count in counts]
    return _move(x, counts, aligned), torch.tensor(aligned, dtype=torch.int64, device=sizes.device)


def unpad_sections(y: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    """`y` (M', N), sections padded as by `pad_sections`, without the padding: (M, N), M the sum of `sizes`.

    `sizes` are those before the padding. One launch for all sections. Waits for the device that holds `sizes`. Raises
    ValueError where sections of those sizes, padded, are not M' rows, and as `pad_sections` does.
    """
    check_rows(y, "y")
    counts, aligned = padded_rows(sizes, y.shape[0], find_recipe(recipe).row_alignment)
    return _move(y, aligned, counts)


def _move(x: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Sections of `counts` rows of `x`, with zeros or cut to `wanted` rows."""
    x = x.contiguous()
    out = torch.empty((sum(wanted), *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = math.prod(x.shape[1:]) * x.element_size()
    if not out.numel():
        return out
    word = math.gcd(_WORD, width, x.data_ptr(), out.data_ptr())
    table = [*accumulate(wanted, initial=0), *accumulate(counts[:-1], initial=0), *counts]
    parts = [len(wanted) + 1, len(counts), len(counts)]
    starts, places, moved = torch.split(torch.tensor(table, dtype=torch.int64).to(x.device), parts)
    launch(
        "pad",
        f"pad_{word}",
        (min(blocks_for(len(out), _ROWS), _BLOCKS.get(x.device.type, 1)),),
        (THREADS,),
        (x, out, starts, places, moved, np.int32(len(counts)), np.int64(width // word)),
        device=x.device,
    )  # fmt: skip
    return out
