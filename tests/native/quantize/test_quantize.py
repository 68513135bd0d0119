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
from tests.native.devices import ON_EVERY_DEVICE, ON_EVERY_DEVICE_CPU_LONG, on_every_device, ops
from tests.native.samples import (
    DTYPES,
    FAMILIES,
    NAMES,
    RECIPES,
    ROTATED,
    TWO_LEVELS,
    VIEWS,
    assert_both_same,
    assert_equal,
    assert_same,
    dtype_in_turn,
    matrix,
    nearly_tied,
    options_of,
    sample,
    words_for,
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


@ON_EVERY_DEVICE_CPU_LONG
@EVERY_RECIPE
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_every_family(name: str, nan: str) -> None:
    """In several tiles, with tails in M and K. The matrix of cases has the families too."""
    recipe = replace(find_recipe(name), nan=nan)  # type: ignore[arg-type]
    for family in FAMILIES:
        assert_as_reference(sample(recipe, family, 131, 140, dtype_in_turn(name, family)), recipe)


@ON_EVERY_DEVICE_CPU_LONG
@EVERY_RECIPE
def test_any_shape_of_any_recipe(name: str) -> None:
    for rows, columns in TAILS:
        assert_as_reference(sample(find_recipe(name), "outliers", rows, columns, torch.bfloat16), find_recipe(name))


@pytest.mark.sampled(3)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["nvfp4", *fp8.KINDS])
def test_every_number_of_columns(name: str, dtype: torch.dtype) -> None:
    recipe = find_recipe(name)
    widths = (*range(1, 34), 47, 63, 65, 4097) if name == "nvfp4" else (1, 127, 128, 129, 300)
    for rows, columns in product((1, 17, 129), widths):
        for nan in ("ignore", "propagate"):
            x = matrix("outliers" if nan == "ignore" else "nan", rows, columns, dtype)
            r = replace(recipe, nan=nan)  # type: ignore[arg-type]
            assert_same(ops.quantize(x, r, **options_of(r)), reference.quantize(x, r, **options_of(r)))


@pytest.mark.sampled(3)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", NAMES)
def test_swizzled_scales(name: str) -> None:
    for rows, columns in ((129, 260), (64, 65), (1, 1)):
        x = sample(find_recipe(name), "outliers", rows, columns, torch.bfloat16)
        assert_as_reference(x, find_recipe(name), swizzled=True)


@pytest.mark.sampled(3)
@ON_EVERY_DEVICE
@EVERY_RECIPE
def test_an_empty_matrix_gives_empty_codes(name: str) -> None:
    recipe = find_recipe(name)
    for rows, columns in ((0, 0), (0, 128), (128, 0)):
        x = torch.empty(rows, columns, dtype=torch.bfloat16)
        for swizzled in (False, True) if name in NAMES else (False,):
            assert_as_reference(x, recipe, **({"swizzled": True} if swizzled else {}))
        q = ops.quantize(x, recipe, **options_of(recipe))
        assert q.codes.numel() == 0
        if recipe.whole and recipe.tensor_scale != "given" and not recipe.smallest_amax:
            assert (q.scales.tolist(), q.tensor_scale.tolist(), q.amax.tolist()) == ([[1.0]], [1.0], [0.0])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", ROTATED)
def test_a_rowwise_half_of_a_rotated_recipe_takes_any_dtype(name: str) -> None:
    options = {"columnwise": False, **options_of(find_recipe(name))}
    for x in (matrix("normal", 33, 77, torch.float32), matrix("normal", 7, 3, torch.float16)):
        assert_both_same(ops.quantize_both(x, name, **options), reference.quantize_both(x, name, **options))


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
@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["te", "te-2.8", "te-propagate"])
def test_a_given_amax_of_nvfp4(recipe: str, dtype: torch.dtype) -> None:
    for value, family in product(AMAXES, ("normal", "nan", "subnormal", "huge", "any bits")):
        x, options = matrix(family, 9, 45, dtype), {"amax": torch.tensor([value])}
        assert_same(ops.quantize(x, RECIPES[recipe], **options), reference.quantize(x, RECIPES[recipe], **options))


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


@ON_EVERY_DEVICE_CPU_LONG
@pytest.mark.parametrize("name", NAMES)
def test_whole_tiles_of_every_family_by_any_amax(name: str) -> None:
    """The kernel of whole tiles treats blocks of finite numbers, and of products below 7, separately."""
    for number, family in enumerate(FAMILIES):
        recipe = replace(find_recipe(name), nan=("ignore", "propagate")[number % 2])  # type: ignore[arg-type]
        x = sample(recipe, family, 128, 256, torch.bfloat16)
        assert_as_reference(x, recipe)
        for value in AMAXES if name in TWO_LEVELS and recipe.granularity == "tensor" else ():
            assert_as_reference(x, recipe, amax=(torch.tensor([value]),) * 2)


# Choices of 4over6.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", TILES_OF_4OVER6)
def test_the_rows_of_a_tile_choose_its_scale(name: str) -> None:
    x = nearly_tied()
    assert_as_reference(x, find_recipe(name))
    assert_same(ops.quantize(x.T, name), reference.quantize(x.T, name))
    six = ops.quantize(x, replace(find_recipe(name), candidates="6"))
    assert 0.001 < (ops.quantize(x, name).scales != six.scales).float().mean() < 0.999, "both scales are chosen"


def test_the_order_of_a_sum_of_errors_matters() -> None:
    _, column = ops.quantize_both(nearly_tied(), "nvfp4-2d-4over6-256-mae")
    assert column is not None
    assert not torch.equal(column.scales, ops.quantize(nearly_tied().T, "nvfp4-2d-4over6-256-mae").scales)


def test_two_orders_of_the_block_scale_differ_on_ties() -> None:
    for dtype in DTYPES:
        x = matrix("e4m3 ties", 64, 256, dtype)
        one, other = (ops.quantize(x, recipe) for recipe in ("nvfp4", "nvfp4@te-2.8"))
        assert not torch.equal(one.scales, other.scales)
        for q in (one, other):
            assert_same(q, reference.quantize(x, q.recipe))


@ON_EVERY_DEVICE
def test_a_nan_is_ignored_or_makes_every_scale_nan() -> None:
    """K is odd: the last high nibble stays 0, whatever the scale."""
    for dtype in DTYPES:
        x = torch.ones(3, 37, dtype=dtype)
        x[1, 4] = torch.nan
        ignored, propagated = (ops.quantize(x, RECIPES[recipe]) for recipe in ("te", "te-propagate"))
        assert ignored.amax.tolist() == [1.0]
        assert (ignored.scales == 0x7E).all()
        assert propagated.amax.isnan().all()
        assert (propagated.scales == 0x7F).all()
        for q in (ignored, propagated):
            assert (q.codes[:, -1] >> 4 == 0).all()


# Random bits.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", STOCHASTIC)
def test_given_words_round_the_elements(name: str) -> None:
    for rows, columns in TAILS[:11]:
        x = sample(find_recipe(name), "outliers", rows, columns, torch.bfloat16)
        assert_as_reference(x, find_recipe(name), random=(words_for(*x.shape), words_for(*x.T.shape, seed=1)))


@on_every_device("name", STOCHASTIC, 3)
def test_seeds_and_offsets_of_64_bits(name: str) -> None:
    """The offset of the columnwise half is one more, and 2^64 is 0."""
    x = sample(find_recipe(name), "normal", 33, 40, torch.bfloat16)
    seeds = (0, -1, 1 << 32, -(1 << 63), (1 << 64) - 1)
    for random in product(seeds, (0, -1, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)):
        assert_as_reference(x, find_recipe(name), random=random)


def test_seeds_and_offsets_change_codes_and_no_scale() -> None:
    x = matrix("normal", 64, 64, torch.float32)
    given = ((0, 0), (1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32))
    runs = [ops.quantize(x, "nvfp4-sr", random=random) for random in given]
    assert len({run.codes.numpy().tobytes() for run in runs}) == len(runs)
    assert len({run.scales.numpy().tobytes() for run in runs}) == 1


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("mx") and name.endswith("-sr")])
def test_the_words_of_an_absent_half_may_be_missing(name: str) -> None:
    x = matrix("normal", 33, 20, torch.float32)
    words = torch.arange(33 * 5, dtype=torch.int32).view(33, 5) * 0x01234567
    row, none = ops.quantize_both(x, name, columnwise=False, random=(words, None))
    assert none is None
    assert_same(row, reference.quantize(x, name, random=words))
    options = {"rowwise": False, "random": (None, words)}
    assert_both_same(ops.quantize_both(x.T, name, **options), reference.quantize_both(x.T, name, **options))


# Views.


@pytest.mark.sampled(20)
@on_every_device("name", (*NAMES, *fp8.KINDS), 3)
def test_views_are_quantized_like_their_copies(name: str) -> None:
    plain, recipe = matrix("outliers", 256, 512, torch.bfloat16), find_recipe(name)
    for what, view in VIEWS.items():
        x = view(plain)
        assert x.dim() > 2 or not x.is_contiguous(), what
        copy = x.flatten(0, -2).contiguous()
        options = options_of(recipe)
        both = reference.quantize_both(copy, recipe, **options)
        assert_both_same(ops.quantize_both(x, recipe, **options), both)
        assert_both_same(ops.quantize_both(x, recipe, rowwise=False, **options), (None, both[1]))
        assert_same(ops.quantize(x, recipe, **options), ops.quantize(copy, recipe, **options))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_other_dtypes(view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](matrix("outliers", 256, 512, dtype))
    for name in ("nvfp4", "nvfp4-rowscaled"):
        assert_both_same(ops.quantize_both(x, name), reference.quantize_both(x, name))


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


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_the_amax_is_the_largest_magnitude(dtype: torch.dtype) -> None:
    for family, propagate_nan in product(FAMILIES, (False, True)):
        x = matrix(family, 37, 45, dtype)
        magnitudes = x.abs().float().ravel()
        expected = magnitudes.max() if propagate_nan else magnitudes.nan_to_num(nan=0.0, posinf=math.inf).max()
        assert_equal(ops.amax(x, propagate_nan=propagate_nan), expected.view(1), family)


@ON_EVERY_DEVICE
def test_the_amax_of_a_tensor_of_any_rank() -> None:
    for shape in ((), (0,), (0, 5), (3, 4, 5)):
        x = torch.full(shape, -2.0)
        assert ops.amax(x).tolist() == [2.0 if x.numel() else 0.0]
