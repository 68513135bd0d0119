"""GroupedLinear: each group is a separate linear layer, and a group without rows has no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.reference.modules import GroupedLinear, Linear
from narrowgauge.reference.ops import quantize_grouped
from narrowgauge.spec.modules.training import training_recipe
from tests.reference.passes import INNER, OUTER, Pass, made, normal, same

SPLITS = [48, 0, 20]
ROWS = sum(SPLITS)
NAMES = [
    "NVFP4BlockScaling", "NVFP4BlockScaling-norht-nosr", "MXFP8BlockScaling", "Float8BlockScaling",
    "Float8CurrentScaling", "DelayedScaling-history2",
]  # fmt: skip


def grouped_pass(layer: Any, recipe: str | None, splits: list[int] = SPLITS) -> Pass:
    rows = sum(splits)
    return Pass(layer, recipe, normal(rows, INNER, seed=1), normal(rows, OUTER, seed=2), splits)


def linear_of(grouped: Any, group: int) -> Any:
    """A linear layer with the parameters of a group."""
    layer = Linear(INNER, OUTER)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(getattr(grouped, f"{name}{group}"))
    return layer


@pytest.mark.parametrize("name", [*NAMES[1:-1], None])
def test_each_group_is_a_linear_layer_of_its_rows_padded(name: str | None) -> None:
    """Rows of zeros at the end change no other row."""
    layer = made(GroupedLinear, 3, INNER, OUTER)
    found = grouped_pass(layer, name)
    assert found.dx is not None
    whole = (normal(ROWS, INNER, seed=1), normal(ROWS, OUTER, seed=2), found.y, found.dx)
    x, dy, y, dx = (torch.split(tensor, SPLITS) for tensor in whole)
    alignment = 1 if name is None else training_recipe(name).input.row_alignment
    for group, rows in enumerate(SPLITS):
        pad = (0, 0, 0, -rows % alignment)
        parts = [torch.nn.functional.pad(part[group], pad) for part in (x, dy)]
        alone = Pass(linear_of(layer, group), name, *parts)
        assert same([y[group], dx[group]], [alone.y[:rows], alone.dx[:rows] if alone.dx is not None else None])
        for kind in ("weight", "bias"):
            assert same(found.gradients[f"{kind}{group}"], alone.gradients[kind])
        for half in ("x", "x columnwise", "w", "w columnwise", "dy", "dy columnwise"):
            assert same(found.seen[half][group] if name else None, alone.seen.get(half))
        assert same([found.seen[kind][group] for kind in ("dw", "dbias")], [alone.seen["dw"], alone.seen["dbias"]])
    assert same([found.seen["y"], found.seen["dx"]], [found.y, found.dx])


def test_bits_of_all_sections_are_drawn_through() -> None:
    recipe = training_recipe("NVFP4BlockScaling")
    layer = made(GroupedLinear, 3, INNER, OUTER, seed=5)
    found = grouped_pass(layer, "NVFP4BlockScaling", [128, 0, 128])
    dy, sizes = normal(256, OUTER, seed=2), torch.tensor([128, 0, 128])
    rowwise = quantize_grouped(dy, sizes, recipe.grad.rowwise, random=(5, 0)).sections()
    columnwise = quantize_grouped(dy, sizes, recipe.grad, columnwise=True, random=(5, 1)).sections()
    assert same([found.seen["dy"], found.seen["dy columnwise"]], [rowwise, columnwise])


def test_groups_share_the_scales_and_the_largest_amax_counts() -> None:
    layer = made(GroupedLinear, 3, INNER, OUTER)
    found = grouped_pass(layer, NAMES[-1])
    weights = torch.stack([layer.weight0, layer.weight1, layer.weight2]).detach()
    amaxes = [float(t.abs().max()) for t in (normal(ROWS, INNER, seed=1), weights, normal(ROWS, OUTER, seed=2))]
    assert layer.amax_history.tolist() == [[0.0] * 3, amaxes]
    second = grouped_pass(layer, NAMES[-1])
    used = [float(q.tensor_scale) for half in ("x", "w", "dy") for q in second.seen[half]]
    assert used == [float(scale) for scale in found.seen["scale"] for _ in SPLITS]


def test_gradients_and_held_weights_are_those_of_each_group() -> None:
    plain = made(GroupedLinear, 3, INNER, OUTER)
    held: Any = GroupedLinear(
        3, INNER, OUTER, seed=plain.seed, accumulate=True, delay_wgrad=True, quantized_parameters=True
    )
    with torch.no_grad():
        for name, parameter in held.named_parameters():
            parameter.copy_(getattr(plain, name))
    held.write_weight(torch.stack([plain.weight0, plain.weight1, plain.weight2]), NAMES[0])
    one, other = grouped_pass(plain, NAMES[0]), grouped_pass(held, NAMES[0])
    assert same([one.y, one.dx], [other.y, other.dx])
    assert not held.main_grad0.any()
    held.backward_dw()
    for group in range(3):
        assert same(getattr(held, f"main_grad{group}").bfloat16(), one.gradients[f"weight{group}"])
