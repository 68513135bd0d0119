"""Axes of tensors, by name: what crop, shape checks and saved failures know of a tensor.

An axis is named after a size of the shape: `("M", "K")`. Further forms are `"G*N"`, G times an axis of N elements;
`"K/4"`, an element for four of K, the last perhaps for fewer; and `"1"`. G counts the sections of a case. In a case
with sections M is cropped within each section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.spec.recipes import Recipe

Tensors = Mapping[str, tuple[str, ...]]
"""Axes of tensors by the names of the tensors."""


@dataclass(frozen=True)
class Axis:
    """A direction in which inputs can be cropped."""

    extent: int
    unit: int = 1
    """A window begins at a multiple of the unit, and ends at a multiple or at the end of the axis."""


def size_of(axis: str, extents: Mapping[str, int]) -> int:
    """Elements along an axis of a tensor, for the sizes of a case by name. Raises ValueError for an unknown size."""
    if "*" in axis:
        return math.prod(size_of(part, extents) for part in axis.split("*"))
    name, *divisors = axis.split("/")
    if name.isdecimal():
        return int(name)
    if name not in extents:
        raise ValueError(f"axis {axis!r} names no size; the sizes of the case are {', '.join(extents)}")
    return -(-extents[name] // math.prod(map(int, divisors)))


def block_columns(recipe: Recipe) -> int:
    """Elements of a row that cannot be cropped apart: a block or a rotated group."""
    width = 1 if recipe.spans_k else recipe.block[1]
    return math.lcm(width, recipe.transform.group) if recipe.transform else width


def block_rows(recipe: Recipe) -> int:
    """Rows that cannot be cropped apart: those of a block."""
    return 1 if recipe.whole else recipe.block[0]
