"""Delayed scaling in the layers: histories and scales of several steps, also with recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.reference.modules import GroupedLinear, Linear, TransformerLayer, autocast, checkpoint
from narrowgauge.reference.ops import update_scale
from narrowgauge.spec.modules.training import training_recipe
from tests.reference.passes import INNER, OUTER, ROWS, Pass, assert_same_pass, made, normal, same

NAMES = ["DelayedScaling-history2", "DelayedScaling-recent-margin1-history3"]


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_history_and_scales_are_those_of_update_scale(name: str) -> None:
    recipe = training_recipe(name)
    layer = made(Linear, INNER, OUTER)
    rows = recipe.history
    history, scale = torch.zeros(rows, 3), torch.ones(3)
    for step, size in enumerate((1.0, 100.0, 0.01)):
        x, dy = normal(ROWS, INNER, seed=step) * size, normal(ROWS, OUTER, seed=10 + step) * size
        found = Pass(layer, recipe, x, dy)
        used = [found.seen[half].tensor_scale for half in ("x", "x columnwise", "w", "w columnwise")]
        assert same(used, [scale[0:1], scale[0:1], scale[1:2], scale[1:2]])
        assert same([found.seen[half].tensor_scale for half in ("dy", "dy columnwise")], [scale[2:3]] * 2)
        amaxes = [largest(x), largest(layer.weight.detach()), largest(dy)]
        history[0] = torch.tensor(amaxes)
        updates = []
        for columns, rule in ((slice(0, 2), recipe.input), (slice(2, 3), recipe.grad)):
            history[:, columns], scale[columns] = update_scale(history[:, columns], scale[columns], rule)
            updates.append(scale.clone())
        assert same([found.seen["history"], found.seen["scale"]], [history, scale])
        assert same([layer.amax_history, layer.scale], [history, scale])
        assert found.names.count("history") == found.names.count("scale") == 2
    assert float(scale[0]) != 1.0


def test_a_step_records_the_largest_of_its_inputs() -> None:
    layer = made(Linear, INNER, OUTER)
    small, large = normal(ROWS, INNER, seed=1), 8 * normal(ROWS, INNER, seed=2)
    with autocast(NAMES[0]):
        for x in (small, large, small):
            layer(x)
        assert layer.amax_history[0, 0] == largest(large)
        assert torch.equal(layer.scale, torch.ones(3))
    assert layer.amax_history[-1, 0] == largest(large)
    assert layer.scale[0] == torch.tensor(448.0) / layer.amax_history[-1, 0]


def test_the_gradients_scale_moves_in_each_backward() -> None:
    layer = made(Linear, INNER, OUTER)
    x = normal(ROWS, INNER, seed=1).requires_grad_()
    with autocast(NAMES[0]):
        outputs = [layer(x), layer(x)]
    scales, used = [], []
    layer.observer = lambda name, value: used.append(float(value.tensor_scale)) if name == "dy" else None
    for size, y in enumerate(outputs, 1):
        y.backward(size * normal(ROWS, OUTER, seed=2))
        scales.append(layer.scale.clone())
    assert same(scales[0][:2], scales[1][:2])
    assert scales[0][2] == 2 * scales[1][2]
    assert used == [1.0, float(scales[0][2])]  # the present recipe, not the recipe of the forward


def test_a_forward_that_fails_leaves_the_scales() -> None:
    layer = made(Linear, INNER, OUTER)

    def fail() -> None:
        layer(normal(ROWS, INNER))
        raise KeyError

    with pytest.raises(KeyError), autocast(NAMES[0]):
        fail()
    assert torch.equal(layer.scale, torch.ones(3))


def test_a_held_weights_amax_is_recorded_where_it_is_written() -> None:
    layer = Linear(INNER, OUTER, accumulate=True, quantized_parameters=True)
    weight = normal(OUTER, INNER)
    layer.write_weight(weight, NAMES[0])
    assert layer.amax_history is not None
    assert float(layer.amax_history[0, 1]) == largest(weight)
    Pass(layer, NAMES[0])
    assert layer.scale is not None
    assert float(layer.scale[1]) == torch.tensor(448.0) / largest(weight)
    Pass(layer, NAMES[0])
    assert float(layer.amax_history[0, 1]) == 0  # nothing was written since


# ---- recomputation ---------------------------------------------------------------------------------------------------


KINDS: list[tuple[type[torch.nn.Module], tuple[int, ...], tuple[int, ...], list[Any]]] = [
    (Linear, (INNER, OUTER), (ROWS, INNER), []),
    (GroupedLinear, (2, INNER, OUTER), (ROWS, INNER), [[20, 12]]),
    (TransformerLayer, (16, 32, 2), (1, 16, 16), []),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("NVFP4BlockScaling", KINDS[0]), *((NAMES[0], kind) for kind in KINDS)],
    ids=["stochastic", *(kind[0].__name__ for kind in KINDS)],
)
def test_recomputation_gives_the_same_bytes(recipe: str, kind: tuple[Any, ...]) -> None:
    door, sizes, shape, rest = kind
    kept, again = made(door, *sizes), made(door, *sizes)
    for step in range(2):  # the second under scales that have moved
        x = (1 + step) * normal(*shape, seed=step)
        one, other = Pass(kept, recipe, x, None, *rest), Pass(again, recipe, x, None, *rest, again=True)
        assert_same_pass(one, other)
        assert len(other.names) > len(one.names)
    assert same(dict(kept.named_buffers()), dict(again.named_buffers()))


def test_the_second_forward_is_by_the_scale_of_the_first() -> None:
    layer = made(Linear, INNER, OUTER)
    x = normal(ROWS, INNER, seed=1).requires_grad_()
    seen: list[torch.Tensor] = []
    layer.observer = lambda name, value: seen.append(value.tensor_scale) if name == "x" else None
    with autocast(NAMES[0]):
        y = checkpoint(layer, x)
    assert float(layer.scale[0]) != 1.0
    moved = layer.amax_history.clone()
    y.sum().backward()
    assert [float(scale) for scale in seen] == [1.0, 1.0]
    assert same(layer.amax_history[:, :2], moved[:, :2])
