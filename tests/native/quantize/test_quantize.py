"""quantize and quantize_both of every recipe of the kernels: golden bytes, and the bytes of the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import assert_golden, golden
from tests.native import fp8
from tests.native.devices import ON_EVERY_DEVICE, on_every_device, ops
from tests.native.samples import (
    DTYPES,
    NAMES,
    RECIPES,
    TWO_LEVELS,
    assert_both_same,
    assert_same,
    nearly_tied,
    options_of,
    sample,
)

ALL = (*NAMES, *fp8.NAMES)
EVERY_RECIPE = pytest.mark.parametrize("name", ALL)
STOCHASTIC = tuple(name for name in NAMES if find_recipe(name).rounding == "stochastic")
TILES_OF_4OVER6 = tuple(name for name in NAMES if "-2d-4over6" in name)
TAILS = [
    (1, 1), (1, 64), (2, 31), (15, 17), (16, 16), (17, 15), (31, 2), (33, 33), (63, 65), (65, 63), (129, 47), (1, 129),
    (3, 127), (64, 128), (128, 128), (130, 257), (257, 130),
]  # fmt: skip
AMAXES = [0.0, -0.0, 1e-45, 1e-40, 7.8e-36, 0.1, 65.0, 2688.0, 3.4028235e38, math.inf, math.nan]


def assert_as_reference(x: torch.Tensor, recipe: Recipe, **options: Any) -> None:
    """Both halves, and each half alone, are the reference's; without a rotation, `quantize` gives the rowwise half."""
    options = {**options_of(recipe), **options}
    expected = reference.quantize_both(x, recipe, **options)
    assert_both_same(ops.quantize_both(x, recipe, **options), expected)
    assert_both_same(ops.quantize_both(x, recipe, rowwise=False, **options), (None, expected[1]))
    first = {
        name: value[0] if isinstance(value, tuple) and isinstance(value[0], torch.Tensor) else value
        for name, value in options.items()
    }
    alone = expected[0] if recipe.transform is None else reference.quantize(x, recipe, **first)
    assert_same(ops.quantize(x, recipe, **first), alone)


def halves(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a half precision."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_golden_bytes_of_every_recipe(path: Path) -> None:
    assert_golden(path, ops.quantize_both)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["te", "te-2.8"])
def test_every_half_precision_number_in_nvfp4(recipe: str, dtype: torch.dtype) -> None:
    """In blocks of neighbours, and as the largest element of a block."""
    alone = torch.zeros(1 << 16, 16, dtype=dtype)
    alone[:, 3] = halves(dtype)
    for value, x in product((448.0, 65.0, 1.0), (halves(dtype).view(-1, 64), alone)):
        options = {"amax": torch.tensor([value])}
        assert_same(ops.quantize(x, RECIPES[recipe], **options), reference.quantize(x, RECIPES[recipe], **options))


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["nvfp4-2d", "nvfp4-4over6-448-mae", "nvfp4-4over6-256-mse", "nvfp4-rowscaled", *fp8.NAMES],
)
def test_every_half_precision_number(name: str, dtype: torch.dtype) -> None:
    """In blocks of neighbours, and in blocks of numbers of different size."""
    options = options_of(find_recipe(name))
    for x in (halves(dtype).view(512, 128), halves(dtype).view(128, 512).T):
        assert_both_same(ops.quantize_both(x, name, **options), reference.quantize_both(x, name, **options))


@ON_EVERY_DEVICE
def test_every_exponent_of_an_amax_of_nvfp4() -> None:
    pattern = torch.tensor([[1.0, -0.75, 0.5, 0.31, 0.25, -0.1, 0.04, 0.01, 1e-3, 0.0]])
    for exponent, factor in product(range(-149, 128), (1.0, 1 - 2.0**-24)):
        x = (pattern.double() * math.ldexp(factor, exponent)).float()
        assert_same(ops.quantize(x, "nvfp4"), reference.quantize(x, "nvfp4"))


@pytest.mark.sampled(2)
@on_every_device("name", (*TWO_LEVELS, *fp8.WHOLE), 3)
def test_a_given_amax_replaces_the_amax_of_the_tensor(name: str) -> None:
    """An amax of the tensor, or of each row; a different amax for each half."""
    recipe = find_recipe(name)
    x = sample(recipe, "any bits", 20, 45, torch.bfloat16)
    amaxes = fp8.AMAXES if name in fp8.WHOLE else AMAXES
    for number, value in enumerate(amaxes):
        each = torch.tensor(AMAXES * (1 + max(x.shape) // len(AMAXES))).roll(number)
        amax = (torch.tensor([value]), torch.tensor([amaxes[number - 3]]))
        if recipe.granularity == "row":
            amax = (each[: x.shape[0]].clone(), each[-x.shape[1] :].clone())
        assert_as_reference(x, recipe, amax=amax)


# Choices of 4over6.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", TILES_OF_4OVER6)
def test_the_rows_of_a_tile_choose_its_scale(name: str) -> None:
    x = nearly_tied()
    assert_as_reference(x, find_recipe(name))
    assert_same(ops.quantize(x.T, name), reference.quantize(x.T, name))
    six = ops.quantize(x, replace(find_recipe(name), candidates="6"))
    assert 0.001 < (ops.quantize(x, name).scales != six.scales).float().mean() < 0.999, "both scales are chosen"


# Random bits.


@on_every_device("name", STOCHASTIC, 3)
def test_seeds_and_offsets_of_64_bits(name: str) -> None:
    """The offset of the columnwise half is one more, and 2^64 is 0."""
    x = sample(find_recipe(name), "normal", 33, 40, torch.bfloat16)
    seeds = (0, -1, 1 << 32, -(1 << 63), (1 << 64) - 1)
    for random in product(seeds, (0, -1, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)):
        assert_as_reference(x, find_recipe(name), random=random)


# Views.


# amax.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 4096, 4097, 300_001])
def test_the_amax_is_found_at_every_place(count: int, dtype: torch.dtype) -> None:
    """Up to more elements than all threads of the grid on a CPU take in one stride."""
    x = torch.zeros(count, dtype=dtype)
    places = {0, 1, 15, 16, 4095, 4096, 262_143, 262_144, count // 2, count - 2, count - 1}
    for place in sorted(place for place in places if 0 <= place < count):
        x[place] = -1.5
        assert ops.amax(x).tolist() == [1.5], place
        x[place] = 0.5
