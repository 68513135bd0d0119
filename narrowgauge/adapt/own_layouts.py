"""Layouts of scales that a user gives: a function from linear scales to packed ones, or a permutation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import torch

from narrowgauge.spec.scale_layouts import Layout

OwnLayout = Callable[[torch.Tensor], torch.Tensor] | torch.Tensor
"""A function from linear scales (R, C) of any integer dtype to packed ones, 0 in the padding; or int64, of each packed
cell the place of its scale among the linear ones, −1 for padding."""


def is_own(layout: object) -> TypeGuard[OwnLayout]:
    """Whether a layout is a function or a permutation; a `Layout` and a name are none."""
    return not isinstance(layout, str | Layout) and (callable(layout) or isinstance(layout, torch.Tensor))


def cells_of(layout: OwnLayout, shape: tuple[int, int]) -> torch.Tensor:
    """Place of the scale in each packed cell, int64 in the shape of packed scales, −1 for padding.

    Raises ValueError unless every one of the linear scales (R, C) of `shape` has one cell, TypeError for a function
    without an integer result.
    """
    count = math.prod(shape)
    if isinstance(layout, torch.Tensor):
        places = layout.long()
    else:
        packed = layout(torch.arange(1, count + 1, dtype=torch.int32).view(shape))
        if not isinstance(packed, torch.Tensor) or packed.dtype.is_floating_point:
            raise TypeError("the function of layout gives packed scales in the dtype of its argument; cast no scales")
        places = packed.long() - 1
    inside = places[places >= 0]
    found = torch.bincount(inside.clamp(max=count), minlength=count + 1)
    if bool(found[count]) or bool((found[:count] != 1).any()):
        place = int((found[:count] != 1).nonzero()[0]) if bool((found[:count] != 1).any()) else count
        where = f"scale {divmod(place, shape[1])}" if place < count else f"a place above {count - 1}"
        times = int(found[place])
        raise ValueError(f"layout packs {where} of scales {shape} {times} times; every scale has one cell")
    return places


def own_linear(stored: torch.Tensor, layout: OwnLayout, shape: tuple[int, int]) -> torch.Tensor:
    """Linear scales (R, C) of packed ones. Raises ValueError for another number of cells, and as `cells_of` does."""
    places = cells_of(layout, shape).flatten().to(stored.device)
    if len(places) != stored.numel():
        raise ValueError(f"layout packs scales {shape} into {len(places)} cells; these have {stored.numel()}")
    inside = places >= 0
    linear = stored.new_empty(math.prod(shape))
    linear[places[inside]] = stored.flatten()[inside]
    return linear.view(shape)


def own_packed(scales: torch.Tensor, layout: OwnLayout) -> torch.Tensor:
    """Linear scales (R, C) in the layout, 0 in the padding. Raises as `cells_of` does."""
    places = cells_of(layout, (scales.shape[0], scales.shape[1])).to(scales.device)
    cells = scales.flatten()[places.clamp(min=0).flatten()].view(places.shape)
    return cells.masked_fill(places < 0, 0)
