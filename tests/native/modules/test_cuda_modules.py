"""Layers on a GPU: byte for byte what the reference gives on the CPU, twice the same, and without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.native.modules import Linear, autocast, checkpoint
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.layers import (
    OPERANDS,
    RECIPES,
    SOME,
    assert_norm_right,
    assert_products_right,
    assert_reports_same,
    assert_transformer_right,
    assert_value_same,
    beside,
    lattice,
    run,
    steps,
)
from tests.native.quantize.test_cuda_variants import without_waiting
from tests.native.samples import assert_equal

pytestmark = needs_gpu

EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
SOME_RECIPES = pytest.mark.parametrize("recipe", SOME)


@EVERY_RECIPE
def test_a_linear_layer_gives_the_references_bytes_wherever_no_sum_can_round(recipe: str) -> None:
    layer, expected = beside("Linear", 144, 80, device=DEVICE, seed=7)
    given = steps(3, 48, 144, 80)
    got = run(layer, given, recipe, device=DEVICE)
    assert set(OPERANDS) < got.keys()
    assert got["y"][0].device.type == DEVICE
    assert_reports_same(got, run(expected, given, recipe))


@EVERY_RECIPE
def test_operands_are_the_references_and_products_those_of_the_operands_where_sums_round(recipe: str) -> None:
    layer, expected = beside("Linear", 144, 48, device=DEVICE, seed=3)
    given = steps(1, 80, 144, 48, family="outliers", shape=(5, 16))
    got, theirs = run(layer, given, recipe, device=DEVICE), run(expected, given, recipe)
    assert_reports_same(got, theirs, but=frozenset(got.keys() - {*OPERANDS, "history", "scale", "y.shape"}))
    assert_products_right(got, layer)


@EVERY_RECIPE
def test_groups_give_the_references_bytes_also_where_some_are_empty(recipe: str) -> None:
    given = [*steps(1, 50, 64, 48, splits=(20, 0, 30)), *steps(1, 37, 64, 48, splits=(0, 37, 0))]
    layer, expected = beside("GroupedLinear", 3, 64, 48, device=DEVICE, seed=4)
    assert_reports_same(run(layer, given, recipe, device=DEVICE), run(expected, given, recipe))


@SOME_RECIPES
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_lie_in_their_proved_bounds_and_products_are_those_of_the_operands(norm: str, recipe: str) -> None:
    layer, expected = beside("LayerNormLinear", 48, 32, device=DEVICE, norm=norm)
    given = steps(1, 32, 48, 32, family="normal", shape=(2, 16))
    got = run(layer, given, recipe, device=DEVICE)
    assert got.keys() == run(expected, given, recipe).keys()
    assert_norm_right(got, layer, given[0].x)
    assert_products_right(got, layer, dx="dnorm")


@SOME_RECIPES
def test_a_transformer_layer_is_right_at_every_stage_and_gives_the_same_bytes_again(recipe: str) -> None:
    given = steps(1, 128, 64, 64, family="normal", shape=(2, 64))
    first, second = (
        (layer := beside("TransformerLayer", 64, 96, 4, device=DEVICE)[0], run(layer, given, recipe, device=DEVICE))
        for _ in range(2)
    )
    assert_transformer_right(first[1], first[0], given[0])
    assert_reports_same(first[1], second[1])


@SOME_RECIPES
def test_recomputation_gives_the_same_bytes(recipe: str) -> None:
    given = steps(3, 32, 48, 32, family="normal")
    layer, _ = beside("LayerNormLinear", 48, 32, device=DEVICE)
    twin, _ = beside("LayerNormLinear", 48, 32, device=DEVICE)
    expected = run(layer, given, recipe, device=DEVICE)
    got = run(twin, given, recipe, device=DEVICE, forward=lambda x: checkpoint(twin, x))
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        seen = got[name] if len(got[name]) == len(values) else got[name][1::2]
        assert_value_same(seen, values, name)


@SOME_RECIPES
def test_options_give_the_references_bytes(recipe: str) -> None:
    given = steps(2, 32, 48, 32)
    options: dict[str, Any]
    for options in ({"accumulate": True}, {"delay_wgrad": True}, {"accumulate": True, "quantized_parameters": True}):
        pair = beside("Linear", 48, 32, device=DEVICE, **options)
        if "quantized_parameters" in options:
            for layer, device in zip(pair, (DEVICE, "cpu"), strict=True):
                layer.write_weight(lattice(32, 48, torch.float32).to(device), recipe)
        got, expected = run(pair[0], given, recipe, device=DEVICE), run(pair[1], given, recipe)
        assert_reports_same(got, expected)
        found = []
        for layer in pair:
            if "delay_wgrad" in options:
                layer.backward_dw()
                found.append(layer.weight.grad)
            else:
                found.append(layer.main_grad if layer.weight is None else layer.weight.main_grad)
        assert_equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_layers_of_other_dtypes_give_the_references_bytes(dtype: torch.dtype) -> None:
    for recipe in ("NVFP4BlockScaling-norht", "MXFP8BlockScaling", "Float8BlockScaling", "DelayedScaling"):
        layer, expected = beside("Linear", 32, 16, device=DEVICE, dtype=dtype)
        given = steps(1, 16, 32, 16, dtype=dtype)
        assert_reports_same(run(layer, given, recipe, device=DEVICE), run(expected, given, recipe))


@pytest.mark.parametrize("recipe", [*SOME, None])
def test_a_step_does_not_wait(recipe: str | None) -> None:
    (step,) = steps(1, 64, 96, 32)
    layer = Linear(96, 32, device=DEVICE)
    x, dy = step.x.to(DEVICE).requires_grad_(), step.dy.to(DEVICE)

    def train() -> None:
        with autocast(recipe):
            y = layer(x)
        y.backward(dy)

    train()  # kernels are loaded, and the history is there
    torch.cuda.synchronize()
    with without_waiting():
        train()
