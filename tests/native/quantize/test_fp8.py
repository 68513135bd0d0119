"""FP8 with float32 scales against exact fractions, and its options; test_quantize.py compares it with the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.native.quantize import fp8
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits
from tests.native.devices import ON_EVERY_DEVICE, ON_EVERY_DEVICE_CPU_LONG, ops
from tests.native.fp8 import (
    KINDS,
    NAMES,
    amaxes_of_every_exponent,
    encode_scale,
    inverse,
    model,
    threads,
)
from tests.native.quantize.test_quantize import TAILS
from tests.native.samples import (
    FAMILIES,
    VIEWS,
    assert_both_same,
    assert_same,
    dtype_in_turn,
    matrix,
    options_of,
)

__all__ = ["threads"]

EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
EVERY_KIND = pytest.mark.parametrize("name", KINDS)


@ON_EVERY_DEVICE_CPU_LONG
@EVERY_RECIPE
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_every_family_has_the_bytes_of_exact_arithmetic(name: str, nan: str) -> None:
    recipe = replace(find_recipe(name), nan=nan)  # type: ignore[arg-type]
    for family in FAMILIES:
        x = matrix(family, 3, 133, dtype_in_turn(name, family))
        codes, scales = model(x, recipe, **options_of(recipe))
        got = ops.quantize(x, recipe, **options_of(recipe))
        np.testing.assert_array_equal(got.codes, codes, err_msg=family)
        np.testing.assert_array_equal(bits(got.scales), scales.view("i4"), err_msg=family)


@pytest.mark.sampled(2)
@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", [name for name in NAMES if find_recipe(name).tensor_scale != "given"])
def test_every_exponent_of_an_amax_has_the_exact_scale(name: str) -> None:
    """Powers of two, also times the largest element, ± 1 ulp; a row for each tile or tensor."""
    recipe = find_recipe(name)
    x = amaxes_of_every_exponent(recipe)
    amaxes = x.abs().amax(1)
    if recipe.whole:
        for amax in amaxes[:: len(amaxes) // 40]:
            q = ops.quantize(torch.zeros(1, 1), recipe, amax=amax.view(1))
            assert_scale(q, 0, float(amax), recipe)
        return
    if recipe.block[0] > 1:  # a tile for every row
        padded = torch.zeros(len(x), 128, 128)
        padded[:, 5] = x
        x = padded.view(-1, 128)[: 128 * 200]
    q = ops.quantize(x, recipe)
    for row in range(len(q.scales)):
        assert_scale(q, row, float(amaxes[row]), recipe)


def assert_scale(q: Quantized, row: int, amax: float, recipe: Recipe) -> None:
    """The stored scale of a block of float32 of this amax, bit for bit."""
    got, expected = q.scales[row, 0].numpy(), np.float32(inverse(encode_scale(amax, recipe, torch.float32)))
    assert got.tobytes() == expected.tobytes(), (amax, got, expected)


@ON_EVERY_DEVICE
@EVERY_RECIPE
def test_every_exponent_of_an_amax(name: str) -> None:
    x, options = amaxes_of_every_exponent(find_recipe(name)), options_of(find_recipe(name))
    assert_both_same(ops.quantize_both(x, name, **options), reference.quantize_both(x, name, **options))


@pytest.mark.sampled(9)
@EVERY_KIND
def test_kernels_in_the_shape_of_a_gpu(name: str, threads: int) -> None:
    """Shapes and views."""
    plain, options = matrix("outliers", 256, 512, torch.bfloat16), options_of(find_recipe(name))
    for x in [plain[:rows, :columns] for rows, columns in TAILS] + [view(plain) for view in VIEWS.values()]:
        expected = reference.quantize_both(x, name, **options)
        assert_both_same(ops.quantize_both(x, name, **options), expected)
        assert_same(ops.quantize(x, name, **options), expected[0])


def test_delayed_scaling_reads_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All further recipes need the amax before the scaling of an element."""

    def read_before(*_: object, **__: object) -> None:
        raise AssertionError("a separate amax kernel runs")

    for function in ("tensor_amax", "oriented_amax"):
        monkeypatch.setattr(fp8, function, read_before)
    x, options, name = matrix("outliers", 130, 140, torch.bfloat16), {"scale": torch.tensor([2.0])}, "fp8-delayed-e4m3"
    for view in (x, x.T, x[:, ::2]):
        assert_both_same(ops.quantize_both(view, name, **options), reference.quantize_both(view, name, **options))
    sizes = torch.tensor([100, 0, 30])
    got, expected = (side.quantize_grouped(x, sizes, name, scale=torch.ones(3)) for side in (ops, reference))
    assert torch.equal(got.amax, expected.amax)
    with pytest.raises(AssertionError, match="amax kernel"):
        ops.quantize(x, "fp8-current-e4m3")


def test_every_choice_of_a_recipe_changes_some_byte() -> None:
    """The test above shows the largest scale, of the input's dtype and of float32."""
    x = matrix("nan", 140, 150, torch.float32)
    base, current = find_recipe("fp8-block-1x128-e4m3-fp32"), find_recipe("fp8-current-e4m3")
    changes = [
        (base, find_recipe("fp8-block-1x128-e4m3-pow2")), (base, find_recipe("fp8-block-1x128-e5m2-fp32")),
        (base, find_recipe("fp8-block-128x128-e4m3-fp32")), (base, replace(base, smallest_amax=20.0)),
        (base, replace(base, nan="propagate")), (current, replace(current, smallest_amax=20.0)),
        (current, replace(current, nan="propagate")), (current, find_recipe("fp8-current-e4m3-pow2")),
    ]  # fmt: skip
    for one, other in changes:
        for left, right in zip(*(ops.quantize_both(x, recipe) for recipe in (one, other)), strict=True):
            assert not torch.equal(left.codes, right.codes), (str(one), str(other))
