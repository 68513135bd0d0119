"""quantize_both: each half is the result of `quantize`."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.ops import quantize, quantize_both, transform
from narrowgauge.spec.quantized import amax_shape
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.reference.samples import MATRICES, matrix, words
from tests.reference.twins import assert_same

NAMES = [name for name in recipe_names() if "@" not in name and name.startswith("nvfp4")]
TRANSPOSED = [name for name in NAMES if not ("-2d" in name and "4over6" in name)]  # test_two_dimensional.py has those
SHAPE = (128, 48)


def source(name: str, family: str = "normal") -> torch.Tensor:
    """(128, 48) in a dtype that the recipe takes: whole groups of every transform along M."""
    x = matrix(family, 1, *SHAPE)
    return x if find_recipe(name).transform is None else x.bfloat16()


def random_of(name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (words(1, *SHAPE), words(2, *SHAPE[::-1])) if find_recipe(name).rounding == "stochastic" else None


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", MATRICES)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_each_half_is_what_quantize_gives(name: str, family: str) -> None:
    x, random = source(name, family), random_of(name)
    row, column = quantize_both(x, name, random=random)
    first, second = random or (None, None)
    assert_same(row, quantize(x, find_recipe(name).rowwise, random=first))
    assert_same(column, quantize(x.T.contiguous(), name, random=second))
    assert row is not None
    assert column is not None
    assert (row.recipe, column.recipe) == (find_recipe(name).rowwise, find_recipe(name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
def test_a_half_alone_is_that_of_both(name: str, seeded: bool, swizzled: bool) -> None:
    x, random = source(name), random_of(name)
    given = (5, 6) if seeded and random is not None else random
    both = quantize_both(x, name, random=given, swizzled=swizzled)
    row, nothing = quantize_both(x, name, columnwise=False, random=given, swizzled=swizzled)
    assert nothing is None
    assert_same(row, both[0])
    nothing, column = quantize_both(x, name, rowwise=False, random=given, swizzled=swizzled)
    assert nothing is None
    assert_same(column, both[1])
    if random is not None and not seeded:  # the words of the other half are not needed
        assert_same(quantize_both(x, name, columnwise=False, random=(random[0], None), swizzled=swizzled)[0], row)
        assert_same(quantize_both(x, name, rowwise=False, random=(None, random[1]), swizzled=swizzled)[1], column)


def test_a_rotation_turns_the_columnwise_half_alone() -> None:
    x = source("nvfp4-rht")
    row, column = quantize_both(x, "nvfp4-rht")
    assert_same(row, quantize(x, "nvfp4"))
    assert_same(column, quantize(transform(x.T, "nvfp4-rht"), "nvfp4"))
    assert row is not None
    assert column is not None
    assert row.recipe.transform is None
    assert str(row.recipe) == "nvfp4"
    assert column.recipe.transform is not None
    assert not torch.equal(row.amax, column.amax)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_given_amax_is_that_of_its_half(name: str) -> None:
    x, random = source(name), random_of(name)
    amax = tuple(
        torch.full(amax_shape(shape, find_recipe(name)), 4.0 + i) for i, shape in enumerate((SHAPE, SHAPE[::-1]))
    )
    halves = quantize_both(x, name, amax=amax, random=random)  # type: ignore[arg-type]
    for half, each in zip(halves, amax, strict=True):
        assert half is not None
        assert torch.equal(half.amax, each)
    alone = quantize(x, find_recipe(name).rowwise, amax=amax[0], random=None if random is None else random[0])
    assert_same(halves[0], alone)
    if name in TRANSPOSED:
        alone = quantize(x.T, name, amax=amax[1], random=None if random is None else random[1])
        assert_same(halves[1], alone)
