"""Delayed scaling: the next scale from a history of amaxes. Source: docs/numerics.md#delayed-scaling."""

from __future__ import annotations

import torch

from narrowgauge.spec.arguments import check_history
from narrowgauge.spec.recipes import Recipe, find_recipe

FLT_MAX = torch.finfo(torch.float32).max


def update_scale(history: torch.Tensor, scale: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """History and scales after a step: float32 (H, N), row 0 the newest amax, and float32 (N,), of N tensors.

    The scale is fl(fl(max·2^−margin)/amax) if amax is finite and above 0; amax is row 0 (`most-recent`) or the maximum
    of the history (`max`). Source: docs/numerics.md#delayed-scaling, steps 1 to 6.

    Raises ValueError for a recipe without delayed scaling, ValueError or TypeError for a wrong shape or dtype.
    """
    recipe = find_recipe(recipe)
    delayed = check_history(history, scale, recipe)

    # Step 1: the newest amax.
    last = history[0]

    # Step 3: the amax, ignoring NaN in a maximum.
    amax = last if delayed.algorithm == "most-recent" else torch.where(history.isnan(), 0.0, history).amax(0)

    # Step 4: the tensors with a new scale. Step 2: -bulk skips a tensor whose newest amax is 0.
    updates = amax.isfinite() & (amax > 0)
    if delayed.update == "bulk":
        updates &= last != 0
    largest = torch.full_like(amax, recipe.element.max * 2.0**-delayed.margin)
    next_scale = torch.where(updates, largest / amax, scale)

    # Step 5: the history moves by a row.
    rolled = torch.cat([history[1:], last.unsqueeze(0)])
    rolled[0] = 0.0
    if delayed.update == "bulk":
        rolled = torch.where(last == 0, history, rolled)

    # Step 6: no scale is infinite.
    return rolled, torch.where(next_scale.isinf(), FLT_MAX, next_scale)
