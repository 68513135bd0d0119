"""Options of the layers: each option has its effect, and keeps all other bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.reference.modules import Linear, autocast, quantized_layer
from narrowgauge.reference.ops import gemm
from narrowgauge.spec.modules.training import training_recipe
from tests.reference.passes import INNER, OUTER, ROWS, Pass, assert_same_pass, made, normal, same

MX = "MXFP8BlockScaling"
NVFP4 = "NVFP4BlockScaling"


def test_seed_and_backward_pass_draw_the_random_bits() -> None:
    one, other = (made(Linear, INNER, OUTER, seed=seed) for seed in (0, 1))
    first, second, third = Pass(one, NVFP4), Pass(one, NVFP4), Pass(other, NVFP4)
    for half in ("dy", "dy columnwise"):
        codes = [found.seen[half].codes for found in (first, second, third)]
        assert not torch.equal(codes[0], codes[1])
        assert not torch.equal(codes[0], codes[2])
    assert same(first.seen["x"], second.seen["x"])


def test_a_loaded_layer_draws_the_next_bits() -> None:
    layer, again = made(Linear, INNER, OUTER), made(Linear, INNER, OUTER)
    assert "backward_passes" not in layer.state_dict()
    Pass(layer, NVFP4)
    again.load_state_dict(layer.state_dict())
    assert same(Pass(again, NVFP4).seen["dy"], Pass(layer, NVFP4).seen["dy"])
    assert layer.state_dict()["backward_passes"] == 2


# ---- accumulate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [MX, "Float8BlockScaling", None])
def test_gradients_accumulate_in_float32(recipe: str | None) -> None:
    layer = made(Linear, INNER, OUTER, accumulate=True)
    once = Pass(layer, recipe)
    first = layer.weight.main_grad.clone()
    twice = Pass(layer, recipe)
    assert first.dtype == torch.float32
    assert layer.weight.grad is None
    assert same([once.seen["dw"], twice.seen["dw"]], [first, layer.weight.main_grad])
    if recipe is None:
        dy, x = normal(ROWS, OUTER, seed=2).float(), normal(ROWS, INNER, seed=1).float()
        assert torch.equal(layer.weight.main_grad, dy.T @ x + dy.T @ x)
        return
    dy, x = once.seen["dy columnwise"], once.seen["x columnwise"]
    assert same(first, gemm(dy, x, out_dtype=torch.float32))
    assert same(layer.weight.main_grad, gemm(dy, x, out_dtype=torch.float32, c=first))


# ---- delay_wgrad -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [NVFP4, "DelayedScaling-history4", None])
@pytest.mark.parametrize("accumulate", [False, True])
def test_delayed_gradients_of_weights_are_those_of_a_backward(recipe: str | None, accumulate: bool) -> None:
    """Of two backward passes, the older first: in float32 their sum on a main gradient shows the order."""
    options: dict[str, Any] = {"accumulate": accumulate}
    now, later = made(Linear, INNER, OUTER, **options), made(Linear, INNER, OUTER, delay_wgrad=True, **options)
    dws = []
    for seed in (7, 8):
        x = normal(ROWS, INNER, seed=seed)
        one, other = Pass(now, recipe, x), Pass(later, recipe, x)
        assert same([one.y, one.dx, one.gradients["bias"]], [other.y, other.dx, other.gradients["bias"]])
        assert "dw" not in other.names
        dws.append(one.seen["dw"])
    assert later.weight.grad is None
    waiting: list[torch.Tensor] = []
    later.observer = lambda _, value: waiting.append(value)
    later.backward_dw()
    assert same(waiting, dws)
    main = ("main_grad",) if accumulate else ("grad",)
    assert same(*(getattr(layer.weight, *main) for layer in (now, later)))
    later.backward_dw()
    assert len(waiting) == 2


# ---- quantized parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [NVFP4, MX, "Float8BlockScaling", "Float8CurrentScaling", "DelayedScaling-history4"])
def test_a_quantized_weight_equals_a_weight_in_high_precision(recipe: str) -> None:
    plain = made(Linear, INNER, OUTER, accumulate=True)
    held: Any = Linear(INNER, OUTER, accumulate=True, quantized_parameters=True)
    held.bias.data.copy_(plain.bias.data)
    held.write_weight(plain.weight, recipe)
    assert held.weight is None
    assert [name for name, _ in held.named_parameters()] == ["bias"]
    one, other = Pass(plain, recipe), Pass(held, recipe)
    one.gradients.pop("weight")
    assert_same_pass(one, other)
    assert same(held.main_grad, plain.weight.main_grad)
    state = {name: value for name, value in held.state_dict().items() if isinstance(value, torch.Tensor)}
    assert max(value.dtype.itemsize for value in state.values() if value.numel() >= INNER * OUTER // 2) == 1
    again = Linear(INNER, OUTER, accumulate=True, quantized_parameters=True)
    again.load_state_dict(held.state_dict())
    one, other = Pass(again, recipe), Pass(held, recipe)
    assert same([one.y, one.seen["w columnwise"]], [other.y, other.seen["w columnwise"]])


def test_a_backward_uses_the_weight_of_its_forward() -> None:
    layer = Linear(INNER, OUTER, accumulate=True, quantized_parameters=True)
    layer.write_weight(normal(OUTER, INNER, seed=3), MX)
    expected = Pass(layer, MX).dx
    x = normal(ROWS, INNER, seed=1).requires_grad_()
    with autocast(MX):
        y = layer(x)
    layer.write_weight(normal(OUTER, INNER, seed=4), MX)
    y.backward(normal(ROWS, OUTER, seed=2))
    assert same(x.grad, expected)


def test_a_conversion_leaves_scales_and_amaxes_in_float32() -> None:
    layer = Linear(INNER, OUTER, accumulate=True, quantized_parameters=True)
    layer.write_weight(normal(OUTER, INNER), "DelayedScaling-history2")
    before = {name: found.dtype for name, found in layer.named_buffers()}
    layer.to("meta", torch.bfloat16)
    after = {name: found.dtype for name, found in layer.named_buffers()}
    assert before.items() <= after.items()
    assert set(before.values()) == {torch.uint8, torch.float32}
    assert {found.device.type for found in layer.buffers()} == {"meta"}
    assert layer.bias is not None
    layer = Linear(INNER, OUTER).float()
    assert layer.weight is not None
    assert layer.weight.dtype == torch.float32


# ---- amax_group ------------------------------------------------------------------------------------------------------


def test_the_amax_of_every_half_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake reduction with the result 64; `test_parallel` has a group of processes."""
    asked: list[tuple[str, bool]] = []

    def reduced(x: torch.Tensor, recipe: Any, group: object, *, rowwise: bool, columnwise: bool) -> Any:
        assert group == "the group"
        assert rowwise is not columnwise
        asked.append((recipe.name, columnwise))
        return (torch.tensor([64.0]), None) if rowwise else (None, torch.tensor([64.0]))

    monkeypatch.setattr(quantized_layer, "sharded_amax", reduced)
    recipe = training_recipe(NVFP4)
    found = Pass(made(Linear, INNER, OUTER, amax_group="the group"), recipe)
    roles = {"x": recipe.input.name, "w": recipe.weight.name, "dy": recipe.grad.name}
    assert sorted(asked) == sorted((name, columnwise) for name in roles.values() for columnwise in (False, True))
    halves = [found.seen[f"{role}{half}"] for role in roles for half in ("", " columnwise")]
    assert [float(half.amax) for half in halves] == [64.0] * 6
    delayed = made(Linear, INNER, OUTER, amax_group="the group")
    history = Pass(delayed, "DelayedScaling-history2").seen["history"]
    assert history.tolist() == [[0.0] * 3, [64.0] * 3]
    Pass(made(Linear, INNER, OUTER, amax_group="the group"), MX)  # no tensor amax: asks nobody
    assert len(asked) == 12
