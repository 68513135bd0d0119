"""`by_slabs` serves speed alone: the steps on the whole matrix and on slabs of rows give the same bytes."""

from __future__ import annotations

import math

import pytest
import torch

from narrowgauge.reference.numbers import slabs
from narrowgauge.reference.quantize.steps import quantize_matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe, recipe_names

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-40, 3e38, 6.0])


def matrix(recipe: Recipe, rows: int, columns: int) -> torch.Tensor:
    """Normal numbers, each row with its own power of two; if the recipe has no refused amax, also special values."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** (torch.arange(rows) % 9 - 4).view(-1, 1)
    if recipe.tensor_limit != "refuse" and rows % 2:
        chosen = torch.randint(len(SPECIAL), x.shape, generator=generator)
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.02, SPECIAL[chosen], x)
    return x.bfloat16()


def quantized(x: torch.Tensor, recipe: Recipe) -> Quantized:
    random = (3, 5) if recipe.rounding == "stochastic" else None
    scale = torch.tensor([2.5]) if recipe.tensor_scale == "given" else None
    return quantize_matrix(x, recipe, scale=scale, random=random, first=2)


def raw(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous().view(torch.uint8)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize(("shape", "elements"), [((19, 128), 1), ((131, 256), 1 << 13)])
def test_the_size_of_a_slab_changes_no_byte(
    name: str, shape: tuple[int, int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs of one row or of 32 rows, and one slab of all rows."""
    recipe = find_recipe(name)
    x = matrix(recipe, *shape)
    monkeypatch.setitem(slabs.SLAB_ELEMENTS, "cpu", 1 << 40)
    whole = quantized(x, recipe)
    monkeypatch.setitem(slabs.SLAB_ELEMENTS, "cpu", elements)
    parts = quantized(x, recipe)
    for field in ("codes", "scales", "amax", "tensor_scale"):
        first, second = raw(getattr(whole, field)), raw(getattr(parts, field))
        assert (first is None and second is None) or torch.equal(first, second), field  # type: ignore[arg-type]
