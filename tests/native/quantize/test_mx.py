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
from tests.native.samples import MX_DIALECTS, MX_NAMES, assert_same, matrix, options_of

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


@pytest.mark.sampled(98)
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


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(4)
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


# Both orientations.


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
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp8-e5m2"])
def test_every_two_rules_differ_on_some_amax(name: str) -> None:
    x = torch.from_numpy(amaxes(find_recipe(name))).unsqueeze(1)
    scales = [ops.quantize(x, f"{name}@{dialect}").scales for dialect in MX_DIALECTS]
    for number, one in enumerate(scales):
        assert not any(torch.equal(one, other) for other in scales[:number])
