"""quantize and quantize_both of every recipe that the kernels have: byte for byte what the reference gives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits, golden, load, quantize_input
from tests.native.samples import (
    FAMILIES,
    NAMES,
    ROTATED,
    TWO_LEVELS,
    assert_both_same,
    assert_equal,
    assert_same,
    dtype_in_turn,
    dtypes,
    matrix,
    nearly_tied,
    sample,
    seeded,
    words_for,
)
from tests.thinned import thinned

EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
STOCHASTIC = tuple(name for name in NAMES if find_recipe(name).rounding == "stochastic")
TAILS = [(1, 1), (1, 64), (2, 31), (15, 17), (16, 16), (17, 15), (31, 2), (33, 33), (63, 65), (65, 63), (129, 47)]


def assert_as_reference(x: torch.Tensor, recipe: Recipe, **options: Any) -> None:
    """Both halves, and one orientation alone, which without a rotation is the rowwise half."""
    expected = reference.quantize_both(x, recipe, **options)
    assert_both_same(ops.quantize_both(x, recipe, **options), expected)
    first = {
        name: value if name == "random" and isinstance(value[0], int) else value[0] for name, value in options.items()
    }
    alone = expected[0] if recipe.transform is None else reference.quantize(x, recipe, **first)
    assert_same(ops.quantize(x, recipe, **first), alone)


def random_of(recipe: Recipe) -> dict[str, Any]:
    """The option of a stochastic recipe; none where it takes none."""
    return {} if seeded(recipe) is None else {"random": seeded(recipe)}


# Golden bytes of Transformer Engine.


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_both_halves_of_every_golden_recipe_have_transformer_engines_bytes(path: Path) -> None:
    """`@te-2.8` has a rowwise half alone there."""
    arrays = load(path)
    x = quantize_input(path, arrays)
    names = {key.removesuffix(".codes") for key in arrays if key.startswith("nvfp4") and key.endswith(".codes")}
    assert {"nvfp4", "nvfp4-2d", "nvfp4-rowscaled", "nvfp4-4over6-448-mae", "nvfp4-2d-4over6-256-mae"} <= names
    assert ("nvfp4-rht" in names) == (x.dtype == torch.bfloat16)
    for name in names:
        for q, suffix in zip(ops.quantize_both(x, name), ("", "_t"), strict=True):
            if f"{name}.codes{suffix}" not in arrays:
                assert name.endswith("@te-2.8")
                continue
            assert q is not None
            np.testing.assert_array_equal(q.scales, arrays[f"{name}.scales{suffix}"], err_msg=name)
            np.testing.assert_array_equal(q.codes, arrays[f"{name}.codes{suffix}"], err_msg=name)
            if f"{name}.amax{suffix}" in arrays:
                found, expected = bits(q.amax), arrays[f"{name}.amax{suffix}"].view(np.int32)
                np.testing.assert_array_equal(found, expected.reshape(-1), err_msg=name)


# Every recipe against the reference.


@pytest.mark.long
@EVERY_RECIPE
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantized_as_the_reference_does(name: str, family: str) -> None:
    """In several tiles, with tails in M and K."""
    recipe = find_recipe(name)
    assert_as_reference(sample(recipe, family, 70, 77, dtype_in_turn(name, family)), recipe, **random_of(recipe))


@pytest.mark.long
@EVERY_RECIPE
def test_any_shape_is_quantized_as_the_reference_does(name: str) -> None:
    recipe = find_recipe(name)
    for rows, columns in TAILS:
        assert_as_reference(sample(recipe, "outliers", rows, columns, torch.bfloat16), recipe, **random_of(recipe))


@EVERY_RECIPE
def test_swizzled_scales_are_the_linear_ones_in_tiles_with_zeros_for_padding(name: str) -> None:
    recipe = find_recipe(name)
    for rows, columns in ((129, 260), (64, 65), (1, 1)):
        x = sample(recipe, "outliers", rows, columns, torch.bfloat16)
        linear = [
            reference.quantize(x, recipe, **random_of(recipe)),
            *reference.quantize_both(x, recipe, **random_of(recipe)),
        ]
        got = [
            ops.quantize(x, recipe, swizzled=True, **random_of(recipe)),
            *ops.quantize_both(x, recipe, swizzled=True, **random_of(recipe)),
        ]
        for one, other in zip(got, linear, strict=True):
            assert other is not None
            assert_same(one, replace(other, scales=reference.swizzle(linear_scales(other)), swizzled=True))


@EVERY_RECIPE
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 128), (128, 0)])
def test_an_empty_matrix_gives_empty_codes_and_scales(name: str, rows: int, columns: int) -> None:
    x, random = torch.empty(rows, columns, dtype=torch.bfloat16), seeded(find_recipe(name))
    for swizzled in (False, True):
        q = ops.quantize(x, name, random=random, swizzled=swizzled)
        assert q.codes.numel() == q.scales.numel() == 0
        assert_same(q, reference.quantize(x, name, random=random, swizzled=swizzled))
        assert_both_same(
            ops.quantize_both(x, name, random=random, swizzled=swizzled),
            reference.quantize_both(x, name, random=random, swizzled=swizzled),
        )


@EVERY_RECIPE
def test_one_half_alone_is_the_half_of_both(name: str) -> None:
    recipe = find_recipe(name)
    x = sample(recipe, "outliers", 70, 77, torch.bfloat16)
    row, column = ops.quantize_both(x, recipe, **random_of(recipe))
    assert_both_same(ops.quantize_both(x, recipe, columnwise=False, **random_of(recipe)), (row, None))
    assert_both_same(ops.quantize_both(x, recipe, rowwise=False, **random_of(recipe)), (None, column))


@pytest.mark.parametrize("name", ROTATED)
def test_the_rowwise_half_of_a_rotated_recipe_takes_any_dtype_and_shape(name: str) -> None:
    for x in (matrix("normal", 33, 77, torch.float32), matrix("normal", 7, 3, torch.float16)):
        random = seeded(find_recipe(name))
        got = ops.quantize_both(x, name, columnwise=False, random=random)
        assert_both_same(got, reference.quantize_both(x, name, columnwise=False, random=random))


@EVERY_RECIPE
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_a_nan_is_left_out_or_spreads_as_in_the_reference(name: str, nan: str) -> None:
    recipe = find_recipe(name)
    x = sample(recipe, "normal", 33, 45, torch.bfloat16)
    x[1, 4] = torch.nan
    assert_as_reference(x, replace(recipe, nan=nan), **random_of(recipe))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["nvfp4-2d", "nvfp4-4over6-448-mae", "nvfp4-4over6-256-mse", "nvfp4-rowscaled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_quantized_as_the_reference_does(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    assert_both_same(ops.quantize_both(x, name), reference.quantize_both(x, name))


@pytest.mark.parametrize("name", [name for name in NAMES if "-2d-4over6" in name])
def test_a_tile_is_chosen_by_its_rows_whichever_half_is_made(name: str) -> None:
    x = nearly_tied()
    halves = ops.quantize_both(x, name)
    assert_both_same(halves, reference.quantize_both(x, name))
    assert_both_same(ops.quantize_both(x, name, rowwise=False), (None, halves[1]))
    assert_same(ops.quantize(x.T, name), reference.quantize(x.T, name))


@pytest.mark.parametrize("name", [name for name in NAMES if "-2d-4over6" in name])
def test_both_choices_are_seen(name: str) -> None:
    chosen, six = (
        ops.quantize(nearly_tied(), name),
        ops.quantize(nearly_tied(), replace(find_recipe(name), candidates="6")),
    )
    assert 0.001 < (chosen.scales != six.scales).float().mean() < 0.999


def test_the_order_of_that_sum_is_seen() -> None:
    _, column = ops.quantize_both(nearly_tied(), "nvfp4-2d-4over6-256-mae")
    assert column is not None
    assert not torch.equal(column.scales, ops.quantize(nearly_tied().T, "nvfp4-2d-4over6-256-mae").scales)


# Given amaxes.

AMAXES = [0.0, -0.0, 1e-45, 1e-40, 7.8e-36, 0.1, 65.0, 2688.0, 3.4028235e38, math.inf, math.nan]


@pytest.mark.parametrize("name", thinned(TWO_LEVELS, 3))
def test_a_given_amax_replaces_the_tensors_own(name: str) -> None:
    """One, or one for each row; another one for either half."""
    recipe = find_recipe(name)
    x = sample(recipe, "any bits", 20, 45, torch.bfloat16)
    for number, value in enumerate(AMAXES):
        if recipe.granularity == "row":
            each = torch.tensor(AMAXES * 5).roll(number)
            amax, amax_t = each[: x.shape[0]].clone(), each[-x.shape[1] :].clone()
        else:
            amax, amax_t = torch.tensor([value]), torch.tensor([AMAXES[number - 3]])
        assert_as_reference(x, recipe, amax=(amax, amax_t), **random_of(recipe))
        alone = ops.quantize_both(x, recipe, rowwise=False, amax=(amax, amax_t), **random_of(recipe))
        assert_both_same(alone, (None, ops.quantize_both(x, recipe, amax=(amax, amax_t), **random_of(recipe))[1]))


# Random bits.


@pytest.mark.parametrize("name", STOCHASTIC)
def test_elements_are_rounded_by_the_words_that_are_given(name: str) -> None:
    recipe = find_recipe(name)
    for rows, columns in TAILS:
        x = sample(recipe, "outliers", rows, columns, torch.bfloat16)
        assert_as_reference(x, recipe, random=(words_for(*x.shape), words_for(*x.T.shape, seed=1)))


@pytest.mark.parametrize("name", thinned(STOCHASTIC, 3))
def test_seed_and_offset_of_64_bits_give_the_references_words(name: str) -> None:
    """The columnwise half's offset is one more, and 2^64 is 0."""
    recipe = find_recipe(name)
    x = sample(recipe, "normal", 33, 40, torch.bfloat16)
    for seed in (0, 1, -1, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1):
        for offset in (0, -1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
            assert_as_reference(x, recipe, random=(seed, offset))


def test_other_seeds_and_offsets_round_otherwise_and_scales_stay() -> None:
    x = matrix("normal", 64, 64, torch.float32)
    runs = [
        ops.quantize(x, "nvfp4-sr", random=random) for random in ((0, 0), (1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32))
    ]
    for number, one in enumerate(runs):
        for other in runs[:number]:
            assert not torch.equal(one.codes, other.codes)
            assert torch.equal(one.scales, other.scales)


# Back to values.


@EVERY_RECIPE
def test_every_recipe_is_dequantized_as_the_reference_does(name: str) -> None:
    recipe = find_recipe(name)
    for dtype in dtypes(recipe):
        x = sample(recipe, "outliers", 131, 77, dtype)
        q, both = (
            reference.quantize(x, recipe, **random_of(recipe)),
            reference.quantize_both(x, recipe, **random_of(recipe)),
        )
        for half in (q, *both):
            assert half is not None
            expected = reference.dequantize(half, dtype)
            assert_equal(ops.dequantize(half, dtype), expected)
            swizzled = replace(half, scales=reference.swizzle(linear_scales(half)), swizzled=True)
            assert_equal(ops.dequantize(swizzled, dtype), expected)


def test_an_operand_of_a_row_each_uses_the_amax_of_its_row() -> None:
    one = reference.quantize(torch.ones(3, 16), "nvfp4-rowscaled", amax=torch.tensor([1.0, 2.0, 4.0]))
    q = Quantized(one.codes, torch.full_like(one.scales, 0x38), one.amax, one.recipe, one.shape)
    values = ops.dequantize(q)
    assert torch.equal(values[1], 2 * values[0])
    assert torch.equal(values[2], 4 * values[0])
