"""Layers: operands byte for byte the reference's, products in the declared order of the kernels, every option."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.guard import Guard
from narrowgauge.native.modules import Linear, TransformerLayer, autocast, checkpoint
from narrowgauge.native.modules import layer as layer_module
from narrowgauge.spec.recipes import Recipe
from tests.native.devices import on_every_device
from tests.native.layers import (
    OPERANDS,
    SOME,
    Seen,
    assert_reports_same,
    assert_value_same,
    beside,
    lattice,
    observing,
    run,
    steps,
)
from tests.native.samples import assert_equal

SOME_RECIPES = pytest.mark.parametrize("recipe", SOME)


# Linear.


@pytest.mark.long
def test_in_high_precision_a_layer_is_torchs() -> None:
    layer, _ = beside("Linear", 48, 32, dtype=torch.float32)
    layer.weight.data.copy_(lattice(32, 48, torch.float32, seed=9))  # no sum of a gradient rounds
    (step,) = steps(1, 24, 48, 32, dtype=torch.float32)
    plain = torch.nn.Linear(48, 32)
    plain.load_state_dict(layer.state_dict())
    x = step.x.clone().requires_grad_()
    plain(x).backward(step.dy)
    got = run(layer, [step], None)
    assert set(OPERANDS).isdisjoint(got)
    for name, value in (("x.grad", x.grad), ("weight.grad", plain.weight.grad), ("bias.grad", plain.bias.grad)):
        assert_equal(got[name][0], value)
    assert_equal(got["y"][0], plain(step.x).detach())


def test_only_needed_halves_are_quantized() -> None:
    (step,) = steps(1, 16, 32, 16)
    layer, _ = beside("Linear", 32, 16)
    without_x = run(layer, [step], "NVFP4BlockScaling", x_grad=False)
    assert {"dy columnwise", "x columnwise"} < without_x.keys()
    assert not {"dy", "w columnwise", "dx"} & without_x.keys()
    layer.weight.requires_grad_(False)
    frozen = run(layer, [step], "NVFP4BlockScaling")
    assert {"dy", "w columnwise", "dbias"} < frozen.keys()
    assert not {"dy columnwise", "x columnwise", "dw"} & frozen.keys()
    seen: Seen = {}
    layer.observer = observing(seen)
    with torch.no_grad(), autocast("NVFP4BlockScaling"):
        layer(step.x)
    assert seen.keys() == {"x", "w", "y"}


def test_x_is_not_kept_and_a_gradient_may_have_any_strides() -> None:
    layer, _ = beside("Linear", 32, 16)
    kept: list[torch.Tensor] = []
    x = steps(1, 16, 32, 16)[0].x.requires_grad_()
    with (
        autocast("MXFP8BlockScaling"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),  # type: ignore[func-returns-value]
    ):
        y = layer(x)
    assert {t.dtype for t in kept} == {torch.uint8}
    y.sum().backward()  # its gradient has strides of 0
    assert_equal(layer.bias.grad, torch.full((16,), 16.0, dtype=torch.bfloat16))
    assert x.grad is not None
    assert x.grad.isfinite().all()


# Delayed scaling.


def test_a_step_with_several_passes_has_one_update() -> None:
    layer, _ = beside("Linear", 32, 16)
    (step,) = steps(1, 16, 32, 16)
    histories: list[Any] = []
    layer.observer = lambda name, value: histories.append(value) if name == "history" else None
    with autocast("DelayedScaling-history3"):
        with autocast("DelayedScaling-history3"):
            layer(step.x)
        layer(2 * step.x)
        assert not histories
    assert len(histories) == 1
    assert histories[0][2].tolist() == [6, 0.75, 0], "the last row is the largest amax of the step"
    with pytest.raises(TypeError, match="of that dtype"), autocast("DelayedScaling-history3"):
        layer(torch.cat([layer(step.x)] * 2, 1).float())
    assert len(histories) == 1, "what an exception ends is not updated"


# Recomputation.


@pytest.mark.sampled(12)
@on_every_device("recipe", ("NVFP4BlockScaling", "MXFP8BlockScaling", "DelayedScaling"), 1)
def test_recomputation_gives_the_same_bytes(recipe: str) -> None:
    given = steps(3, 32, 48, 32, family="normal")
    for kind in ("LayerNormLinear", "Linear") if recipe == SOME[0] else ("LayerNormLinear",):
        layer, _ = beside(kind, 48, 32)
        twin = copy.deepcopy(layer)
        expected = run(layer, given, recipe)
        kept: list[int] = []

        def forward(x: torch.Tensor, layer: Any = twin, kept: list[int] = kept) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
                return checkpoint(layer, x)  # type: ignore[no-any-return]

        got = run(twin, given, recipe, forward=forward)
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            seen = got[name] if len(got[name]) == len(values) else got[name][1::2]  # the second of each two forwards
            for one, other in zip(seen, values, strict=True):
                assert_value_same(one, other, name)
        assert sum(kept) <= len(given) * given[0].x.numel()


def test_a_checkpoint_ignores_a_weight_written_later() -> None:
    x, dy = (lattice(32, 32, torch.bfloat16) for _ in range(2))
    given = []
    for between in (False, True):
        layer = Linear(32, 32, accumulate=True, quantized_parameters=True)
        layer.write_weight(lattice(32, 32, torch.bfloat16), "MXFP8BlockScaling")
        leaf = x.clone().requires_grad_()
        with autocast("MXFP8BlockScaling"):
            y = checkpoint(layer, leaf)
        if between:
            layer.write_weight(torch.zeros(32, 32), "MXFP8BlockScaling")
        y.backward(dy)
        given.append(leaf.grad)
    assert bool(given[0].any())
    assert torch.equal(*given)


# Options.


@SOME_RECIPES
def test_quantized_parameters_are_those_of_the_master(recipe: str) -> None:
    given = steps(2, 32, 48, 32)
    ordinary, _ = beside("Linear", 48, 32, accumulate=True)
    master = ordinary.weight.detach().clone()
    held, expected = beside("Linear", 48, 32, accumulate=True, quantized_parameters=True)
    for layer in (held, expected):
        layer.bias.data.copy_(ordinary.bias.data)
        layer.write_weight(master, recipe)
    got = run(held, given, recipe)
    assert held.weight is None
    assert_reports_same(got, run(expected, given, recipe))
    assert_equal(held.main_grad, expected.main_grad)
    if recipe != "DelayedScaling":  # which quantizes an ordinary weight by the scale of its last step
        plain = run(ordinary, given, recipe)
        assert_reports_same({name: got[name] for name in OPERANDS}, {name: plain[name] for name in OPERANDS})
        assert_equal(held.main_grad, ordinary.weight.main_grad)
    fresh = Linear(48, 32, accumulate=True, quantized_parameters=True)
    fresh.load_state_dict(held.state_dict())
    assert_value_same(run(fresh, given[:1], recipe)["w"], got["w"][:1], "w after loading")
    other, _ = beside("Linear", 48, 32, accumulate=True, quantized_parameters=True)
    other.load_state_dict(expected.state_dict())
    assert_value_same(run(other, given[:1], recipe)["w"], got["w"][:1], "w of the reference's state")


def test_a_conversion_leaves_scales_and_amaxes_float32() -> None:
    layer = Linear(32, 16, accumulate=True, quantized_parameters=True)
    layer.write_weight(lattice(16, 32, torch.float32) / 7, "DelayedScaling-history2")
    given = steps(2, 16, 32, 16)
    expected = run(copy.deepcopy(layer), given, "DelayedScaling-history2")
    assert_reports_same(run(layer.bfloat16(), given, "DelayedScaling-history2"), expected)
    assert layer.bias.dtype == torch.bfloat16


def test_the_amax_of_every_half_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake reduction with the result 64; tests/test_parallel.py has a group of processes."""
    asked: list[tuple[str, bool, bool]] = []

    def reduced(x: torch.Tensor, recipe: Recipe, group: object, *, rowwise: bool, columnwise: bool) -> Any:
        assert group == "the group"
        asked.append((str(recipe), rowwise, columnwise))
        return torch.tensor([64.0]), torch.tensor([64.0])

    monkeypatch.setattr(layer_module, "sharded_amax", reduced)
    (step,) = steps(1, 16, 32, 16)
    seen = run(Linear(32, 16, amax_group="the group"), [step], "NVFP4BlockScaling")
    assert asked == [(name, True, True) for name in ("nvfp4-rht", "nvfp4-2d", "nvfp4-rht-sr")]
    assert [float(seen[name][0].amax) for name in OPERANDS] == [64.0] * 6
    delayed = run(Linear(32, 16, amax_group="the group"), [step], "DelayedScaling-history2")
    assert delayed["history"][-1].tolist() == [[0.0] * 3, [64.0] * 3]


@pytest.mark.parametrize("options", [{"accumulate": True}, {"delay_wgrad": True}, {"bias": False}], ids=str)
def test_options_of_groups_are_the_references(options: dict[str, bool]) -> None:
    given = steps(2, 50, 32, 16, splits=(20, 0, 30))
    for recipe in ("MXFP8BlockScaling", None):
        pair = beside("GroupedLinear", 3, 32, 16, **options)
        got, expected = (run(layer, given, recipe) for layer in pair)
        assert_reports_same(got, expected)
        if "delay_wgrad" in options:
            for layer in pair:
                assert layer.weight0.grad is None
                layer.backward_dw()
        for name in ("weight0", "weight1", "weight2"):
            found = [
                getattr(getattr(layer, name), "main_grad" if "accumulate" in options else "grad") for layer in pair
            ]
            assert_equal(*found, name)


def test_a_transformer_layer_hands_its_options_on() -> None:
    layer = TransformerLayer(32, 48, 4, norm="rms", bias=False, accumulate=True, delay_wgrad=True, dtype=torch.float32)
    for child in (layer.qkv, layer.proj, layer.fc1, layer.fc2):
        assert child.bias is None
        assert (child.accumulate, child.delay_wgrad, child.dtype) == (True, True, torch.float32)
    assert layer.qkv.layer_norm_bias is None
    run(layer, steps(1, 16, 32, 32, shape=(1, 16), dtype=torch.float32), "MXFP8BlockScaling")
    assert not layer.fc2.weight.main_grad.any()
    order: list[str] = []
    layer.observer = lambda name, _: order.append(name)
    layer.backward_dw()
    assert order == ["fc2.dw", "fc1.dw", "proj.dw", "qkv.dw"]
    assert layer.qkv.weight.main_grad.any()


# The norm.


# Groups.


# A transformer layer.


# Surroundings.


def test_the_backward_has_the_recipe_of_the_forward() -> None:
    (step,) = steps(1, 16, 32, 16)
    layer, twin = (beside("Linear", 32, 16)[0] for _ in range(2))
    expected = run(twin, [step], "NVFP4BlockScaling")
    seen: Seen = {}
    layer.observer = observing(seen)
    x = step.x.clone().requires_grad_()
    with autocast("NVFP4BlockScaling"):
        y = layer(x)
    with autocast("MXFP8BlockScaling"):
        thread = threading.Thread(target=y.backward, args=(step.dy,))
        thread.start()
        thread.join()
    for name in ("dy", "dy columnwise", "dx", "dw"):
        assert_value_same(seen[name], expected[name], name)


def test_layers_allocate_through_torch_and_write_nothing_beside() -> None:
    for kind, sizes, splits in (("LayerNormLinear", (32, 16), ()), ("GroupedLinear", (2, 32, 16), (20, 12))):
        found: list[Seen] = []
        for poison in (0xFF, 0x3C):
            layer, _ = beside(kind, *sizes)
            given = steps(1, 32, 32, 16, splits=splits)
            with Guard(poison) as guard:
                found.append(run(layer, given, "NVFP4BlockScaling"))
            assert guard.violations() == ([], [])
        assert_reports_same(*found)
