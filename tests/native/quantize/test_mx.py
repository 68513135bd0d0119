"""MX quantize against its definition: every rule of the exponent, every half-precision number, both layouts.

test_quantize.py compares families, shapes, views and options with the reference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native import exact_mx
from tests.native.devices import ON_EVERY_DEVICE, on_every_device, ops
from tests.native.samples import DTYPES, FAMILIES, MX_DIALECTS, MX_NAMES, assert_equal, assert_same, matrix, options_of

ELEMENTS = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
RULES = [f"{name}@{dialect}" for name, dialect in product(ELEMENTS, MX_DIALECTS)]
EVERY_RULE = pytest.mark.parametrize("recipe", RULES)
EVERY_ELEMENT = pytest.mark.parametrize("name", ELEMENTS)


def assert_exact(x: torch.Tensor, recipe: Recipe) -> None:
    """Codes and scales of `x`, rowwise, are those of the definition."""
    q = ops.quantize(x, recipe)
    codes, scales = exact_mx.quantize(x.float().numpy(), recipe)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(q.codes.numpy(), codes)
    assert q.amax is q.tensor_scale is None


def amaxes(recipe: Recipe) -> np.ndarray:
    """Powers of two, times the largest element and the borders of every rule, ± 1 ulp, and special values."""
    borders = [
        1.0,
        recipe.element.max / 2.0 ** math.floor(math.log2(recipe.element.max)),
        1.5,
        1.75,
        math.sqrt(2),
        1.9375,
        2.0,
    ]
    borders.append(2 - 2.0 ** -(recipe.element.mantissa_bits + 1))
    exact = np.ldexp(np.array(borders)[:, None], np.arange(-149, 128)).ravel()
    with np.errstate(over="ignore"):
        bits = exact.astype(np.float32).view(np.uint32)
    near = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]).view(np.float32)
    special = np.array([0.0, np.inf, np.finfo(np.float32).max], np.float32)
    return np.unique(np.concatenate([near[np.isfinite(near)], special]))


# Scales.


@pytest.mark.sampled(7)
@ON_EVERY_DEVICE
@EVERY_RULE
def test_every_border_at_every_exponent_is_rounded_as_defined(recipe: str) -> None:
    """As the amax of a block, at every place of the block."""
    r = find_recipe(recipe)
    numbers = amaxes(r)
    x = np.zeros((len(numbers), 32), np.float32)
    x[np.arange(len(numbers)), np.arange(len(numbers)) % 32] = numbers * np.where(np.arange(len(numbers)) % 3, 1, -1)
    scales = ops.quantize(torch.from_numpy(x), r).scales.ravel().tolist()
    assert scales == [exact_mx.scale_code(number, r) for number in numbers]
    assert set(scales) >= set(range(240))


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@EVERY_ELEMENT
def test_rules_that_no_dialect_combines(name: str) -> None:
    roundings, forms = (
        {find_recipe(f"mxfp8-e4m3@{dialect}").scale_rounding for dialect in MX_DIALECTS},
        {find_recipe(f"mxfp8-e4m3@{dialect}").block_scale for dialect in MX_DIALECTS},
    )
    for rounding, form in product(sorted(roundings), sorted(forms)):
        recipe = replace(find_recipe(name), scale_rounding=rounding, block_scale=form)  # type: ignore[arg-type]
        numbers = amaxes(recipe)[::7]
        x = torch.from_numpy(numbers).unsqueeze(1)
        assert ops.quantize(x, recipe).scales.ravel().tolist() == [
            exact_mx.scale_code(number, recipe) for number in numbers
        ]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp8-e5m2"])
def test_every_two_rules_differ_on_some_amax(name: str) -> None:
    x = torch.from_numpy(amaxes(find_recipe(name))).unsqueeze(1)
    scales = [ops.quantize(x, f"{name}@{dialect}").scales for dialect in MX_DIALECTS]
    for number, one in enumerate(scales):
        assert not any(torch.equal(one, other) for other in scales[:number])


@ON_EVERY_DEVICE
@EVERY_ELEMENT
def test_a_scale_of_te_is_the_smallest_without_saturation(name: str) -> None:
    recipe = find_recipe(name)
    numbers = amaxes(recipe)
    numbers = numbers[(numbers / recipe.element.max > 2.0**-126) & (numbers / recipe.element.max < 2.0**127)]
    codes = ops.quantize(torch.from_numpy(numbers).unsqueeze(1), recipe).scales.ravel().tolist()
    for number, code in zip(numbers.tolist(), codes, strict=True):
        assert 2.0 ** (code - 128) < number / recipe.element.max <= 2.0 ** (code - 127)


# Elements.


# On a CPU, `make test` has every element in bfloat16, and all dialects but one.
@pytest.mark.sampled(5)
@on_every_device("rule", list(product(RULES, (torch.bfloat16, torch.float16))), 12)
def test_every_half_precision_number_is_rounded_as_defined(rule: tuple[str, torch.dtype]) -> None:
    """In blocks of neighbours, and as the largest element of a block; NaN and infinities too."""
    r, dtype = find_recipe(rule[0]), rule[1]
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_exact(patterns.view(-1, 32), r)
    alone = torch.zeros(1 << 12, 32, dtype=dtype)
    alone[:, 5] = patterns[3::16]
    assert_exact(alone, r)


@ON_EVERY_DEVICE
@EVERY_ELEMENT
@pytest.mark.parametrize("exponent", [0, -100, 100])
def test_every_midpoint_of_the_grid_and_its_neighbours(name: str, exponent: int) -> None:
    """Under a scale of 2^exponent, at the largest element; ties go to even codes, −0 keeps its sign."""
    recipe = find_recipe(name)
    points = np.array(recipe.element.values[: recipe.element.max_code + 1])
    decisions = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    bits = decisions.view(np.uint32)
    near = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]).view(np.float32)
    near = np.clip(np.concatenate([near, -near]), -recipe.element.max, recipe.element.max)
    x = np.zeros((len(near), 32), np.float32)
    x[:, 0] = recipe.element.max
    x[:, 17] = near
    x = np.ldexp(x, exponent)
    q = ops.quantize(torch.from_numpy(x), recipe)
    assert set(q.scales.ravel().tolist()) == {127 + exponent}
    codes, _ = exact_mx.quantize(x, recipe)
    np.testing.assert_array_equal(q.codes.numpy(), codes)


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", [*ELEMENTS, "mxfp8-2d", "mxfp4-2d"])
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_every_family_is_quantized_as_defined(name: str, nan: str) -> None:
    for family, dtype in zip(FAMILIES, DTYPES * 4, strict=False):
        assert_exact(matrix(family, 37, 77, dtype), replace(find_recipe(name), nan=nan))  # type: ignore[arg-type]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", [*ELEMENTS, "mxfp8-2d"])
def test_special_values(name: str) -> None:
    """−0 keeps its sign; infinity saturates under the largest scale; a NaN has its code and its block another amax."""
    recipe = find_recipe(name)
    x = torch.zeros(3, 96)
    x[:, 0] = 1.0
    x[0, 1], x[0, 40], x[0, 70] = -0.0, -torch.inf, torch.nan
    q = ops.quantize(x, recipe)
    codes = q.codes if recipe.element.bits != 4 else torch.stack([q.codes & 0xF, q.codes >> 4], 2).flatten(1)
    assert codes[0, [1, 40, 70]].tolist() == [
        recipe.element.sign_code,
        recipe.element.sign_code | recipe.element.max_code,
        recipe.nan_code,
    ]
    assert q.scales[0, 1:].tolist() == [254, 0]
    spread = ops.quantize(x, replace(recipe, nan="propagate"))
    assert spread.scales[0].tolist() == [*q.scales[0, :2].tolist(), 255]
    last = spread.codes[0, -(32 * recipe.element.bits // 8 if recipe.element.bits == 4 else 32) :]
    assert set(last.tolist()) == {
        recipe.nan_code | recipe.nan_code << 4 if recipe.element.bits == 4 else recipe.nan_code
    }


@ON_EVERY_DEVICE
@pytest.mark.parametrize("columns", [1, 33, 35])
def test_padding_of_a_short_block_stays_zero_with_a_nan_scale(columns: int) -> None:
    x = torch.full((2, columns), torch.nan)
    q = ops.quantize(x, replace(find_recipe("mxfp4"), nan="propagate"))
    assert (q.scales == 255).all()
    assert (q.codes[:, -1] == 0x07).all()


# Both orientations.


@pytest.mark.sampled(7)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", MX_NAMES)
def test_a_columnwise_half_is_the_transpose(name: str) -> None:
    recipe = find_recipe(name)
    x, options = matrix("outliers", 70, 77, torch.bfloat16), options_of(recipe)
    alone = ops.quantize(x.T, recipe, **{key: (seed, offset + 1) for key, (seed, offset) in options.items()})
    for stored in ("transposed", "in-place") if recipe.element.bits != 4 else ("transposed",):
        column = ops.quantize_both(x, replace(recipe, columnwise=stored), rowwise=False, **options)[1]  # type: ignore[arg-type]
        assert column is not None
        assert column.transposed == (stored == "in-place")
        assert column.shape == alone.shape == (77, 70)
        assert_equal(column.codes.T if column.transposed else column.codes, alone.codes)
        assert_equal(column.scales.T if column.transposed else column.scales, alone.scales)
        assert_equal(ops.dequantize(column), ops.dequantize(alone))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", ["mxfp8-2d", "mxfp6-e2m3-2d", "mxfp4-2d"])
def test_a_tile_has_one_scale_in_either_half(name: str) -> None:
    x = matrix("outliers", 100, 70, torch.float32)
    row, column = ops.quantize_both(x, name)
    assert row is not None
    assert column is not None
    tiles = column.scales.T if not column.transposed else column.scales
    assert torch.equal(row.scales[::32], tiles[:, ::32])
    assert torch.equal(row.scales, row.scales[::32].repeat_interleave(32, 0)[:100])
    assert_equal(ops.dequantize(row).T, ops.dequantize(column))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", MX_NAMES)
def test_the_plain_kernel_gives_the_bytes_of_the_general_kernel(name: str) -> None:
    """The general kernel reads a view of every second column."""
    options = options_of(find_recipe(name))
    x = matrix("any bits", 67, 320, torch.float16)
    for columns in (160, 101):
        part = x[:, : 2 * columns : 2]
        assert_same(ops.quantize(part.contiguous(), name, **options), ops.quantize(part, name, **options))


# Random bits.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", ["mxfp8-e4m3-sr", "mxfp8-e5m2-sr", "mxfp6-e3m2-sr", "mxfp6-e2m3-sr", "mxfp4-sr"])
def test_random_bytes_choose_a_neighbour_and_keep_grid_numbers(name: str) -> None:
    """Scales do not depend on random bits; zero bits round down."""
    recipe = find_recipe(name)
    values = torch.tensor(recipe.element.values[: recipe.element.max_code + 1])
    for number, x in enumerate((values, (values[1:] + values[:-1]) / 2)):
        block = torch.zeros(len(x), 32)
        block[:, 0], block[:, 9] = recipe.element.max, x
        nearest = ops.dequantize(ops.quantize(block, recipe.name.removesuffix("-sr")))
        for bits in (0, 0x7F7F7F7F, -1):
            words = torch.full((len(x), 8), bits, dtype=torch.int32)
            got = ops.dequantize(ops.quantize(block, recipe, random=words))
            lower, upper = values[: len(x)], values[number:]
            wanted = upper if bits == -1 else lower
            assert torch.equal(got[:, 9], wanted)
            assert torch.equal(got[:, 0], nearest[:, 0])
