"""Sections of rows: padding to the row alignment of a grouped GEMM, and its removal."""

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
"""Bytes of a thread's load or store, fewer if rows or addresses are not aligned to 16 bytes."""
_ROWS = THREADS // 32
"""Rows that a thread block copies at once. A grid-stride loop covers the rest: on a CPU every thread needs a stack."""
_BLOCKS = {"cuda": 1 << 16, "cpu": 16}


def check_sizes_of(sizes: torch.Tensor, rows: int) -> None:
    """Raises TypeError or ValueError unless `sizes` are int64 (G,) and, on a CPU, sum to `rows`.

    Sizes on a GPU are not read, because the host would have to wait for the GPU.
    """
    check_sizes(sizes)
    check_contiguous(sizes=sizes)
    if sizes.device.type == "cpu":
        section_rows(sizes, rows)


def pad_sections(x: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (M, K) with rows of zeros behind each section, up to the recipe's `row_alignment`, and the padded sizes.

    `sizes`: int64 (G,), rows of each section; an empty section stays empty. Any dtype. One launch pads all sections.
    Waits for the device of `sizes`. Raises TypeError or ValueError if the sizes do not sum to M, ToolchainError if
    kernels cannot be compiled.
    """
    check_rows(x, "x")
    counts = section_rows(sizes, x.shape[0])
    alignment = find_recipe(recipe).row_alignment
    aligned = [-(-count // alignment) * alignment for count in counts]
    return _resize(x, counts, aligned), torch.tensor(aligned, dtype=torch.int64, device=sizes.device)


def unpad_sections(y: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    """`y` (M', N), sections padded by `pad_sections`, without the padding: (M, N), M the sum of `sizes`.

    `sizes` are the sizes before the padding. One launch copies all sections. Waits for the device of `sizes`. Raises
    ValueError if the padded sections do not have M' rows, and as `pad_sections` does.
    """
    check_rows(y, "y")
    counts, aligned = padded_rows(sizes, y.shape[0], find_recipe(recipe).row_alignment)
    return _resize(y, aligned, counts)


def _resize(x: torch.Tensor, counts: Sequence[int], new_counts: Sequence[int]) -> torch.Tensor:
    """Sections of `counts` rows of `x`, cut or extended by zeros to `new_counts` rows."""
    x = x.contiguous()
    out = torch.empty((sum(new_counts), *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = math.prod(x.shape[1:]) * x.element_size()
    if not out.numel():
        return out
    word = math.gcd(_WORD, width, x.data_ptr(), out.data_ptr())
    table = [*accumulate(new_counts, initial=0), *accumulate(counts[:-1], initial=0), *counts]
    parts = [len(new_counts) + 1, len(counts), len(counts)]
    starts, first_rows, copied = torch.split(torch.tensor(table, dtype=torch.int64).to(x.device), parts)
    launch(
        "pad",
        f"pad_{word}",
        (min(blocks_for(len(out), _ROWS), _BLOCKS.get(x.device.type, 1)),),
        (THREADS,),
        (x, out, starts, first_rows, copied, np.int32(len(counts)), np.int64(width // word)),
        device=x.device,
    )  # fmt: skip
    return out
