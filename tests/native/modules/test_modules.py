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
from tests.native import declared
from tests.native.devices import ON_EVERY_DEVICE, on_every_device, ops
from tests.native.layers import (
    OPERANDS,
    RECIPES,
    SOME,
    Seen,
    Step,
    assert_norm_right,
    assert_products_right,
    assert_reports_same,
    assert_transformer_right,
    assert_value_same,
    beside,
    lattice,
    observing,
    run,
    steps,
)
from tests.native.samples import assert_equal

# `make test` on a CPU has a recipe of every kind; cases/modules.toml has all recipes.
EVERY_RECIPE = on_every_device("recipe", RECIPES, quick=SOME)
SOME_RECIPES = pytest.mark.parametrize("recipe", SOME)


# Linear.


@EVERY_RECIPE
def test_a_linear_layer_with_exact_sums_is_the_references(recipe: str) -> None:
    pair = beside("Linear", 48, 32, seed=7)
    got, expected = (run(layer, steps(2, 32, 48, 32), recipe) for layer in pair)
    assert set(OPERANDS) < got.keys()
    assert_reports_same(got, expected)
    assert_equal(got["x.grad"][0], got["dx"][1])
    assert_equal(got["weight.grad"][0], got["dw"][1])
    assert_equal(got["bias.grad"][0], got["dbias"][1])


@ON_EVERY_DEVICE
@SOME_RECIPES
def test_products_of_a_linear_layer_are_those_of_its_operands(recipe: str) -> None:
    layer, expected = beside("Linear", 144, 48, seed=3)
    given = steps(1, 80, 144, 48, family="outliers", shape=(5, 16))
    got, theirs = run(layer, given, recipe), run(expected, given, recipe)
    assert_reports_same(got, theirs, but=frozenset(got.keys() - {*OPERANDS, "history", "scale", "y.shape"}))
    assert_products_right(got, layer)
    if ops.device == "cpu":
        assert_equal(got["dbias"][0], given[0].dy.flatten(0, 1).double().sum(0).bfloat16())
    assert got["x.grad"][0].shape == (5, 16, 144)


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


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_layers_of_other_dtypes_give_the_references_bytes(dtype: torch.dtype) -> None:
    for recipe in ("NVFP4BlockScaling-norht", "MXFP8BlockScaling", "Float8BlockScaling", "DelayedScaling"):
        pair = beside("Linear", 32, 16, dtype=dtype)
        got, expected = (run(layer, steps(1, 16, 32, 16, dtype=dtype), recipe) for layer in pair)
        assert_reports_same(got, expected)
        assert got["y"][0].dtype == got["dw"][0].dtype == got["dbias"][0].dtype == dtype


def test_seeds_and_passes_draw_other_random_bits() -> None:
    (step,) = steps(1, 16, 32, 16, family="normal")
    one, other = (beside("Linear", 32, 16, seed=seed)[0] for seed in (1, 2))
    first, second = run(one, [step, step], "NVFP4BlockScaling"), run(other, [step], "NVFP4BlockScaling")
    codes = [q.codes for q in (*first["dy"], second["dy"][0])]
    assert not torch.equal(codes[0], codes[1]), "the second pass draws others"
    assert not torch.equal(codes[0], codes[2]), "another seed draws others"
    assert torch.equal(first["dy"][0].scales, second["dy"][0].scales)


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


@pytest.mark.parametrize("recipe", ["DelayedScaling-history2", "DelayedScaling-recent-margin1-history3"])
def test_scales_follow_the_amaxes_of_the_steps_before(recipe: str) -> None:
    given = steps(3, 16, 32, 16)
    given[1].x *= 8
    layer, expected = beside("Linear", 32, 16)
    got, theirs = run(layer, given, recipe), run(expected, given, recipe)
    assert_reports_same(got, theirs)
    assert len(got["history"]) == 6, "input and weight after the forward, the gradient after the backward"
    first, second, third = (float(scale[0]) for scale in got["scale"][::2])
    assert (first, second) == (8 * second, first / 8), "the second x is eight times the first"
    assert third == (first if "recent" in recipe else second)
    state = layer.state_dict()
    again, _ = beside("Linear", 32, 16)
    again.load_state_dict(state)
    for name in ("amax_history", "scale"):
        assert_equal(getattr(again, name), state[name])
    assert_value_same(run(again, given[:1], recipe)["x"], run(expected, given[:1], recipe)["x"], "x after loading")


def test_a_loaded_layer_draws_the_next_bits() -> None:
    given = steps(2, 16, 32, 16)
    layer, expected = beside("Linear", 32, 16)
    first = run(layer, given[:1], "NVFP4BlockScaling")
    theirs = run(expected, given, "NVFP4BlockScaling")
    again, _ = beside("Linear", 32, 16)
    again.load_state_dict(layer.state_dict())
    assert layer.state_dict()["backward_passes"] == 1
    assert_value_same(first["dy"], theirs["dy"][:1], "dy of the first step")
    assert_value_same(run(again, given[1:], "NVFP4BlockScaling")["dy"], theirs["dy"][1:], "dy after loading")
    other, _ = beside("Linear", 32, 16)
    other.load_state_dict(expected.state_dict())
    assert other.state_dict()["backward_passes"] == 2, "the reference's state"


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


@pytest.mark.sampled(3)
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
def test_gradients_accumulate_in_float32(recipe: str) -> None:
    given = steps(2, 32, 48, 32, family="normal")
    pair = beside("Linear", 48, 32, accumulate=True)
    start = lattice(32, 48, torch.float32) / 1000
    for layer in pair:
        layer.weight.main_grad = start.clone()
    main = pair[0].weight.main_grad
    got, expected = run(pair[0], given, recipe), run(pair[1], given, recipe)
    assert got.keys() == expected.keys()
    assert "weight.grad" not in got
    before = start
    for number in range(2):
        left, right = got["dy columnwise"][number], got["x columnwise"][number]
        grown = declared.gemm(left, right, out_dtype=torch.float32, c=before)
        assert_equal(got["dw"][number], grown, "dw")
        before = grown
    assert pair[0].weight.main_grad is main, "it grows in place"
    assert_equal(main, before)


def test_a_missing_main_gradient_is_made() -> None:
    (step,) = steps(1, 16, 32, 16)
    for recipe in ("NVFP4BlockScaling-norht", None):
        pair = beside("Linear", 32, 16, accumulate=True)
        for layer in pair:
            run(layer, [step, step], recipe)
        assert_equal(pair[0].weight.main_grad, pair[1].weight.main_grad)
    assert_equal(pair[0].weight.main_grad, 2 * (step.dy.float().T @ step.x.float()))


def test_delayed_gradients_of_weights_are_the_same() -> None:
    given = steps(2, 16, 32, 16)
    for options in ({}, {"accumulate": True}):
        now, _ = beside("Linear", 32, 16, **options)
        late, _ = beside("Linear", 32, 16, delay_wgrad=True, **options)
        seen: Seen = {}
        for layer in (now, late):
            layer.observer = observing(seen)
            for step in given:
                x = step.x.clone().requires_grad_()
                with autocast("NVFP4BlockScaling"):
                    y = layer(x)
                y.backward(step.dy)
                assert x.grad is not None
                assert layer.bias.grad is not None
        assert late.weight.grad is None
        assert len(seen["dw"]) == 2
        late.backward_dw()
        found = [layer.weight.main_grad if options else layer.weight.grad for layer in (now, late)]
        assert_equal(found[1], found[0])
        assert_value_same(seen["dw"][2:], seen["dw"][:2], "the oldest first")
        late.backward_dw()
        assert len(seen["dw"]) == 4, "none is left"


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


def test_quantized_parameters_have_a_gradient_if_x_has_none() -> None:
    layer = Linear(32, 16, bias=False, accumulate=True, quantized_parameters=True)
    with autocast("MXFP8BlockScaling"):
        layer.write_weight(lattice(16, 32, torch.float32))
    run(layer, steps(1, 16, 32, 16), "MXFP8BlockScaling", x_grad=False)
    assert layer.main_grad.abs().sum() > 0


@on_every_device("recipe", SOME, len(SOME))
def test_options_give_the_references_bytes(recipe: str) -> None:
    given = steps(2, 32, 48, 32)
    options: dict[str, Any]
    for options in ({"accumulate": True}, {"delay_wgrad": True}, {"accumulate": True, "quantized_parameters": True}):
        pair, found = beside("Linear", 48, 32, **options), []
        for layer, device in zip(pair, (ops.device, "cpu"), strict=True):
            if "quantized_parameters" in options:
                layer.write_weight(lattice(32, 48, torch.float32).to(device), recipe)
        assert_reports_same(*(run(layer, given, recipe) for layer in pair))
        for layer in pair:
            if "delay_wgrad" in options:
                layer.backward_dw()
                found.append(layer.weight.grad)
            else:
                found.append(layer.main_grad if layer.weight is None else layer.weight.main_grad)
        assert_equal(*found)


# The norm.


@ON_EVERY_DEVICE
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_lie_in_their_proved_bounds(norm: str) -> None:
    layer, expected = beside("LayerNormLinear", 48, 32, norm=norm, eps=1e-3)
    (step,) = steps(1, 32, 48, 32, family="normal", shape=(2, 16))
    got, theirs = run(layer, [step], "NVFP4BlockScaling"), run(expected, [step], "NVFP4BlockScaling")
    assert got.keys() == theirs.keys()
    assert_norm_right(got, layer, step.x)
    assert ("dbeta" in got) == (norm == "layer")
    again, _ = beside("Linear", 48, 32)
    own = set(again.state_dict())  # before the first backward pass
    again.load_state_dict({name: value for name, value in layer.state_dict().items() if name in own})
    alone = run(again, [Step(got["norm"][0], step.dy.flatten(0, 1))], "NVFP4BlockScaling")
    names = {"dnorm": "dx"}
    for name in (*OPERANDS, "y", "dnorm", "dw", "dbias"):
        assert_value_same(got[name], alone[names.get(name, name)], name)
    assert_products_right(got, layer, dx="dnorm")
    assert_equal(got["x.grad"][0].flatten(0, 1), got["dx"][0])
    assert_equal(got["layer_norm_weight.grad"][0], got["dgamma"][0])


# Groups.


@EVERY_RECIPE
def test_groups_give_the_references_bytes(recipe: str) -> None:
    given = [*steps(1, 50, 32, 16, splits=(20, 0, 30)), *steps(1, 37, 32, 16, splits=(0, 37, 0))]
    pair = beside("GroupedLinear", 3, 32, 16, seed=4)
    got, expected = (run(layer, given, recipe) for layer in pair)
    assert set(OPERANDS) < got.keys()
    assert_reports_same(got, expected)
    assert all(len(got[name][0]) == 3 for name in (*OPERANDS, "dw", "dbias"))
    assert not got["dw"][0][1].any(), "the gradient of an empty group"


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


def test_quantized_parameters_of_groups_are_the_references() -> None:
    given = steps(1, 50, 32, 16, splits=(20, 0, 30))
    masters = torch.stack([lattice(16, 32, torch.float32, seed=seed) for seed in range(3)])
    for recipe in ("NVFP4BlockScaling", "DelayedScaling"):
        pair = beside("GroupedLinear", 3, 32, 16, accumulate=True, quantized_parameters=True)
        for layer in pair:
            layer.write_weight(masters, recipe)
        got, expected = (run(layer, given, recipe) for layer in pair)
        assert_reports_same(got, expected)
        for name in ("main_grad0", "main_grad1", "main_grad2"):
            assert_equal(getattr(pair[0], name), getattr(pair[1], name))


# A transformer layer.


@on_every_device("recipe", SOME, len(SOME))
def test_a_transformer_layer_is_right_at_every_stage(recipe: str) -> None:
    layer, expected = beside("TransformerLayer", 32, 48, 4, seed=5)
    given = steps(1, 32, 32, 32, family="normal", shape=(2, 16))
    got, theirs = (run(each, given, recipe) for each in (layer, expected))
    assert got.keys() == theirs.keys()
    assert_transformer_right(got, layer, given[0])
    for name, child in layer.named_children():
        assert child.seed == getattr(expected, name).seed


def test_a_transformer_layer_in_high_precision() -> None:
    pair = beside("TransformerLayer", 32, 48, 4, norm="rms", dtype=torch.float32)
    given = steps(1, 32, 32, 32, family="normal", shape=(2, 16), dtype=torch.float32)
    got, expected = (run(each, given, None) for each in pair)
    assert got.keys() == expected.keys()
    for name, values in got.items():
        torch.testing.assert_close(values[0], expected[name][0], rtol=1e-4, atol=1e-4, msg=name)


def test_a_transformer_layer_hands_its_options_on() -> None:
    layer = TransformerLayer(32, 48, 4, norm="rms", bias=False, accumulate=True, delay_wgrad=True, dtype=torch.float32)
    for child in layer.children():
        assert isinstance(child, Linear)
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
