"""Padding of sections of rows to the alignment of a grouped GEMM. Source: docs/numerics.md#sections."""

from __future__ import annotations

import torch

from narrowgauge.spec.arguments import check_rows, padded_rows, section_rows
from narrowgauge.spec.recipes import Recipe, find_recipe


@torch.no_grad()  # autograd refuses writes to the parts of a split
def pad_sections(x: torch.Tensor, sizes: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (M, K) of any dtype with zero rows behind each section up to `Recipe.row_alignment`, and the padded sizes.

    `sizes`: int64 (G,), the rows of each section. An empty section stays empty. The call waits for the device of
    `sizes`. Raises ValueError if `sizes` do not sum to M.
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
    """`y` (M', N) without the rows that `pad_sections` added: (M, N), M the sum of `sizes`.

    `sizes`: int64 (G,), the rows of each section before the padding. Raises ValueError for a negative size, or if the
    padded sections do not have M' rows.
    """
    check_rows(y, "y")
    rows, aligned = padded_rows(sizes, y.shape[0], find_recipe(recipe).row_alignment)
    return torch.cat([part[:count] for part, count in zip(torch.split(y, aligned), rows, strict=True)])
