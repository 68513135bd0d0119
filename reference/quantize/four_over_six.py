"""4over6: a block's amax maps to 6, or to 4 where that brings its elements nearer.

Source: docs/numerics.md#4over6. No multiply-add is fused: contraction changes choices.
"""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.blocks import of_rows, over_tiles, pad_columns, slabs
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import element_factors, unrounded_scales
from narrowgauge.spec.recipes import Recipe


def choose_scales(
    x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Stored block scales, uint8 (M, ⌈K/16⌉), of `x` (M, K): that of 6, or of 4 where its error is strictly smaller.

    `blocks` are the block amaxes (M, ⌈K/16⌉), `amax` the tensor's and `encode_scale` S_enc, both (1,) or (M,).
    """
    base = unrounded_scales(blocks, encode_scale, recipe)
    six, four = (encode(scale, recipe.scale) for scale in (base, base * 1.5))
    errors = [_errors(x, scales, amax, encode_scale, recipe) for scales in (six, four)]
    if recipe.block[0] > 1:
        errors = [over_tiles(error, recipe.block[0], _tree) for error in errors]
    return torch.where(errors[1] < errors[0], four, six)


def _errors(
    x: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Each block's error under `scales`, float32 (M, ⌈K/16⌉): |fl(fl(fl(q·s)·gamax)/fl(6E)) − x| or its square.

    Summed in the order of the elements.
    """
    width = recipe.block[1]
    factors, decoded = element_factors(scales, encode_scale, recipe), decode(scales, recipe.scale)
    total = torch.zeros_like(decoded)
    if total.numel() == 0:
        return total
    for rows in slabs(x):
        values = pad_columns(x[rows].float(), width)
        values = values.view(values.shape[0], -1, width)
        codes = encode(values * factors[rows].unsqueeze(2), recipe.element)
        back = decode(codes, recipe.element) * decoded[rows].unsqueeze(2) * of_rows(amax, rows).view(-1, 1, 1)
        error = back.div_(back.new_full((), recipe.max_product)).sub_(values)
        error = error.abs_() if recipe.candidates == "4-or-6-mae" else error.square_()
        for element in error.unbind(2):
            total[rows] += element
    return total


def _tree(rows: torch.Tensor) -> torch.Tensor:
    """(T, 16, B) to (T, B): sums in a tree, 8 to 8, then 4, 2 and 1."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
