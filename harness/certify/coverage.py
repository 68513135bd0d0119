"""Coverage of numbers: scales, codes and sides of rounding boundaries in the inputs of cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowgauge.harness.backends.results import matrix_shape
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.certify.compare import over_elements
from narrowgauge.harness.certify.proof import SIDES, boundaries
from narrowgauge.harness.certify.space import Numbers, Outer, Space
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.report.text import number, share
from narrowgauge.reference.numbers.blocks import pad_columns
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.reference.quantize.scaling import scale_elements
from narrowgauge.reference.quantize.steps import block_amaxes, row_factors
from narrowgauge.spec.formats import E2M1, FP32, Format
from narrowgauge.spec.recipes import Recipe

_SIDES = len(SIDES) - 1
"""Sides of a boundary; NaN has no side."""


@dataclass
class Reached:
    """Sets reached by the inputs of a recipe: bool by number."""

    cells: torch.Tensor
    """By (scale code · codes of the element + code at or below) · sides + side of the midpoint above."""
    pairs: torch.Tensor
    """By first code + 16 · second code of a byte; empty for elements of 8 bits."""
    places: torch.Tensor
    """Columns of the amax of a block."""
    tails: torch.Tensor
    """Columns of the last block, 0 for a full block."""

    @staticmethod
    def nothing(recipe: Recipe) -> Reached:
        """Empty sets."""
        sizes = (
            recipe.scale.codes * recipe.element.codes * _SIDES, 256 if recipe.element is E2M1 else 0,
            recipe.block[1], recipe.block[1],
        )  # fmt: skip
        return Reached(*(torch.zeros(size, dtype=torch.bool) for size in sizes))

    def parts(self) -> list[torch.Tensor]:
        """The sets."""
        return [self.cells, self.pairs, self.places, self.tails]

    def add(self, other: Reached) -> None:
        """Add further sets."""
        for mine, more in zip(self.parts(), other.parts(), strict=True):
            mine.logical_or_(more)


def has_coverage(recipe: Recipe) -> bool:
    """Whether coverage is defined: byte scales, no rotation, rounding to nearest."""
    return recipe.scale is not FP32 and recipe.transform is None and recipe.rounding != "stochastic"


def _cells(scales: torch.Tensor, scaled: torch.Tensor, element: Format) -> torch.Tensor:
    """Numbers of the cells of scaled elements under codes of scales, both of one shape: int64 (n,)."""
    lower, side = boundaries(scaled, element)
    found = (scales.long() * element.codes + lower) * _SIDES + side
    return found[side < _SIDES]


def reached(x: torch.Tensor, recipe: Recipe) -> Reached:
    """Sets reached by a matrix `x` (M, K) under a recipe with `has_coverage`. Raises as the reference does."""
    found = Reached.nothing(recipe)
    q = quantize(x, recipe)
    shape, width = q.shape, recipe.block[1]
    found.tails[shape[1] % width] = True
    if not x.numel():
        return found
    factors = row_factors(q.scales, q.tensor_scale, recipe, x, block_amaxes(x, recipe))
    scaled = scale_elements(x, factors, q.tensor_scale, recipe)
    found.cells[_cells(over_elements(q.scales, shape, recipe), scaled, recipe.element)] = True
    magnitudes = pad_columns(x.float().abs().nan_to_num(nan=0.0), width).view(-1, width)
    found.places[magnitudes.argmax(1)] = True
    if found.pairs.numel():
        codes = elements(q.codes, shape[1] // 2 * 2, recipe).long()
        found.pairs[(codes[:, 0::2] + 16 * codes[:, 1::2]).flatten()] = True
    return found


@lru_cache(maxsize=64)
def reachable(recipe: Recipe) -> torch.Tensor:
    """The cells of all bfloat16 numbers, with two levels of scales under the tensor amax `recipe.max_product`: the
    tensor scale is then 1, and ties are possible."""
    numbers = Numbers(torch.bfloat16)
    top = int(numbers.bits(torch.tensor([recipe.max_product], dtype=torch.bfloat16)))
    space = Space(recipe, numbers, Outer() if recipe.tensor_scale == "none" else Outer(amax=top))
    found = Reached.nothing(recipe).cells
    width = recipe.block[1]
    for owner in range(len(space.tops)):
        index = torch.arange(int(space.lengths[owner]))
        values = numbers.tensor(space.number(torch.tensor([owner]), index.view(1, -1)))
        scaled = space.scaled(pad_columns(values, width), torch.tensor([owner]))
        found[_cells(space.scales[owner : owner + 1].expand(scaled.shape), scaled, recipe.element)] = True
    return found


def by_family(cases: Iterable[Case], seed: int = 0) -> dict[Recipe, dict[str, Reached]]:
    """Sets reached by the rowwise cases of quantize, by recipe and input family."""
    found: dict[Recipe, dict[str, Reached]] = {}
    made = set[tuple[object, ...]]()
    for case in cases:
        if case.operation != QuantizeCase.operation or not isinstance(getattr(case, "dtype", None), str):
            continue
        (recipe, *_) = case.recipes
        key = (recipe, case.shape, getattr(case, "dtype", ""), case.inputs)
        plain = getattr(case, "usage", "") == "rowwise" and not getattr(case, "bands", False)
        if not plain or not has_coverage(recipe) or key in made:
            continue
        made.add(key)
        x = make_inputs(case, seed=seed).x
        of_recipe = found.setdefault(recipe, {})
        of_recipe.setdefault(case.inputs, Reached.nothing(recipe)).add(reached(x.reshape(matrix_shape(x)), recipe))
    return found


def lines(cases: Iterable[Case]) -> Iterator[str]:
    """For every recipe a line with the shares, and a line for every family with cells of its own."""
    found = by_family(cases)
    if not found:
        yield "no rowwise case of quantize has byte scales, rounding to nearest and no rotation"
    for recipe, families in found.items():
        union = Reached.nothing(recipe)
        for part in families.values():
            union.add(part)
        yield f"{recipe}: {_shares(union, recipe)}"
        yield from (f"    {line}" for line in _of_families(families, reachable(recipe)))


def _shares(union: Reached, recipe: Recipe) -> str:
    possible = reachable(recipe)
    cells = union.cells & possible
    by_scale = (part.view(recipe.scale.codes, -1).any(1) for part in (cells, possible))
    scales, scales_of = (int(part.sum()) for part in by_scale)
    text = f"{share(int(cells.sum()) / int(possible.sum()))} of {number(int(possible.sum()))} pairs of a scale and a "
    text += f"side of a boundary, {scales} of {scales_of} scales"
    names = {"pairs of codes": union.pairs, "columns of the amax": union.places, "tails of K": union.tails}
    return text + "".join(f", {int(part.sum())} of {len(part)} {name}" for name, part in names.items() if len(part))


def _of_families(families: Mapping[str, Reached], possible: torch.Tensor) -> Iterator[str]:
    """Families with cells of their own, the most first."""
    counts = torch.stack([part.cells & possible for part in families.values()]).int()
    alone = (counts.sum(0) == 1) & counts.bool()
    order = sorted(zip(families, counts.sum(1).tolist(), alone.sum(1).tolist(), strict=True), key=lambda row: -row[2])
    for family, some, own in order:
        if own:
            yield f"{family}: {number(some)}, {number(own)} of these alone"
