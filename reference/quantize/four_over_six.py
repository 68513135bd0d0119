"""4over6: the block amax maps to 6, or to 4 if the elements then have a smaller error.

Source: docs/numerics.md#4over6. A fused multiply-add would change choices, so the functions have none.
"""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.blocks import of_rows, over_tiles, pad_columns
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.slabs import by_slabs
from narrowgauge.reference.quantize.scaling import element_factors, unrounded_scales
from narrowgauge.spec.recipes import Recipe


def choose_scales(
    x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Stored block scales of `x` (M, K), uint8 (M, ⌈K/16⌉): s6, or s4 if its error is strictly smaller.

    `blocks`: block amaxes (M, ⌈K/16⌉). `amax`, `encode_scale`: gamax and S_enc, (1,) or (M,).
    """
    # Step 2: the scale under which the block amax maps to 6, and the scale under which it maps to 4.
    base = unrounded_scales(blocks, encode_scale, recipe)
    six, four = (encode(scale, recipe.scale) for scale in (base, base * 1.5))

    # Steps 3 and 4: the error of each block, or of each tile, under either scale.
    errors = [_errors(x, scales, amax, encode_scale, recipe) for scales in (six, four)]
    if recipe.block[0] > 1:
        errors = [over_tiles(error, recipe.block[0], _tree) for error in errors]

    # Step 5: s4 if its error is strictly smaller, else s6. A comparison with NaN is false.
    return torch.where(errors[1] < errors[0], four, six)


def _errors(
    x: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Steps 3 and 4: the error of each block of `x` under `scales`, float32 (M, ⌈K/16⌉)."""
    factors, decoded = element_factors(scales, encode_scale, recipe), decode(scales, recipe.scale)
    if decoded.numel() == 0:
        return torch.zeros_like(decoded)
    return by_slabs(x, lambda rows: _error_of_rows(x[rows], factors[rows], decoded[rows], of_rows(amax, rows), recipe))


def _error_of_rows(
    x: torch.Tensor, factors: torch.Tensor, decoded: torch.Tensor, amax: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    width = recipe.block[1]
    values = pad_columns(x.float(), width)
    values = values.view(values.shape[0], -1, width)

    # Step 3: δ = fl(fl(fl(fl(q·s)·gamax)/fl(6E)) − x).
    codes = encode(values * factors.unsqueeze(2), recipe.element)
    products = decode(codes, recipe.element) * decoded.unsqueeze(2) * amax.view(-1, 1, 1)
    differences = products.div_(products.new_full((), recipe.max_product)).sub_(values)

    # Step 4: |δ| or δ·δ, added in the order of the elements.
    terms = differences.abs_() if recipe.candidates == "4-or-6-mae" else differences.square_()
    error = torch.zeros_like(decoded)
    for term in terms.unbind(2):
        error += term
    return error


def _tree(rows: torch.Tensor) -> torch.Tensor:
    """Step 4 of tiles: sums of rows in a tree, row i + 8 to row i, then i + 4, i + 2, i + 1: (T, 16, B) to (T, B)."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
