"""Delayed scaling: the next scale, from a history of amaxes."""

from __future__ import annotations

import torch

from narrowgauge.spec.arguments import check_history
from narrowgauge.spec.recipes import Recipe, find_recipe

FLT_MAX = torch.finfo(torch.float32).max


def update_scale(history: torch.Tensor, scale: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The history and the scales after a step: float32 (H, N) amaxes, the latest first, and (N,) scales of N tensors.

    The history is rolled: its first row becomes the last, every other moves one up, and the first is 0. The amax is
    that first row (`most-recent`) or the largest of the history (`max`, which leaves NaN out). Where it is finite and
    above 0 the scale is fl(fl(max·2^−margin)/amax), else it stays; FLT_MAX where either is infinite. `bulk` leaves a
    tensor whose first amax is 0 as it is. Source: docs/numerics.md#delayed-scaling.

    Raises ValueError for a recipe that is not of delayed scaling, ValueError or TypeError for another shape or dtype.
    """
    recipe = find_recipe(recipe)
    rule = check_history(history, scale, recipe)
    last = history[0]
    rolled = torch.cat([history[1:], last.unsqueeze(0)])
    rolled[0] = 0.0
    amax = last
    if rule.algorithm == "max":
        amax = torch.where(history.isnan(), 0.0, history).amax(0)
    largest = torch.full_like(amax, recipe.element.max * 2.0**-rule.margin)
    updates = amax.isfinite() & (amax > 0)
    if rule.update == "bulk":
        rolled, updates = torch.where(last == 0, history, rolled), updates & (last != 0)
    found = torch.where(updates, largest / amax, scale)
    return rolled, torch.where(found.isinf(), FLT_MAX, found)
