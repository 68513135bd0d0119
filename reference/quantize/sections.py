"""Sections of rows: padded to the alignment that a grouped GEMM takes, and back."""

from __future__ import annotations

import torch

from narrowgauge.spec.arguments import check_rows, padded_rows, section_rows
from narrowgauge.spec.recipes import Recipe, find_recipe


def pad_sections(x: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (M, K) with rows of zeros behind each section, up to the recipe's `row_alignment`, and the sizes with them.

    `sizes`: int64 (G,), rows of each section; one without rows stays without. The dtype is any. Waits for the device
    that holds `sizes`. Raises ValueError where they are not those of M rows.
    """
    check_rows(x, "x")
    rows = section_rows(sizes, x.shape[0])
    alignment = find_recipe(recipe).row_alignment
    aligned = [-(-count // alignment) * alignment for count in rows]
    out = x.new_zeros(sum(aligned), *x.shape[1:])
    for part, section in zip(torch.split(out, aligned), torch.split(x, rows), strict=True):
        part[: section.shape[0]] = section
    return out, torch.tensor(aligned, dtype=torch.int64, device=sizes.device)


def unpad_sections(y: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    """`y` (M', N), sections padded as by `pad_sections`, without the padding: (M, N), M the sum of `sizes`.

    `sizes` are those before the padding. Raises ValueError where they are no sizes, or where sections of those sizes,
    padded, are not M' rows.
    """
    check_rows(y, "y")
    rows, aligned = padded_rows(sizes, y.shape[0], find_recipe(recipe).row_alignment)
    return torch.cat([part[:count] for part, count in zip(torch.split(y, aligned), rows, strict=True)])
