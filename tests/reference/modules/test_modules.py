"""Linear: every operand is the half of its role, and every product multiplies these operands."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.modules import Linear, autocast
from narrowgauge.reference.ops import gemm, quantize, quantize_both
from narrowgauge.spec.modules.training import training_names, training_recipe
from narrowgauge.spec.quantized import Quantized
from tests.reference.passes import INNER, OUTER, ROWS, Pass, made, normal, same

SEED = 5


@pytest.mark.parametrize("name", training_names())
def test_each_product_is_of_the_halves_that_the_table_says(name: str) -> None:
    """In the second backward, with the offsets 2 and 3; delayed scaling uses the scales of the first step."""
    recipe = training_recipe(name)
    layer = made(Linear, INNER, OUTER, seed=SEED)
    before = {name: gradient.clone() for name, gradient in Pass(layer, recipe).gradients.items()}
    scales = [layer.scale[i : i + 1].clone() if recipe.history else None for i in range(3)]
    x, dy, w = normal(ROWS, INNER, seed=3), normal(ROWS, OUTER, seed=4), layer.weight.detach()
    found = Pass(layer, recipe, x, dy)
    words = [(SEED, 2), (SEED, 3)] if recipe.grad.rounding == "stochastic" else [None, None]

    def columnwise(tensor: torch.Tensor, role: int, **options: object) -> Quantized:
        kind = (recipe.input, recipe.weight, recipe.grad)[role]
        half = quantize_both(tensor, kind, rowwise=False, scale=scales[role], **options)[1]  # type: ignore[arg-type]
        assert half is not None
        return half

    expected = {
        "x": quantize(x, recipe.input.rowwise, scale=scales[0]),
        "x columnwise": columnwise(x, 0),
        "w": quantize(w, recipe.weight, scale=scales[1]),
        "w columnwise": columnwise(w, 1),
        "dy": quantize(dy, recipe.grad.rowwise, scale=scales[2], random=words[0]),
        "dy columnwise": columnwise(dy, 2, random=words[0]),
    }
    if words[1] is not None:  # the very bits, not those of `quantize_both` alone
        assert same(quantize(dy.T.contiguous(), recipe.grad, random=words[1]), expected["dy columnwise"])
    operands = {key: value for key, value in found.seen.items() if isinstance(value, Quantized)}
    assert found.names[:3] == ["x", "w", "y"]
    assert same(operands, expected)
    assert same(found.y, gemm(operands["x"], operands["w"], out_dtype=torch.bfloat16, bias=layer.bias.detach()))
    assert same(found.dx, gemm(operands["dy"], operands["w columnwise"], out_dtype=torch.bfloat16))
    dw = gemm(operands["dy columnwise"], operands["x columnwise"], out_dtype=torch.bfloat16)
    dbias = dy.double().sum(0).bfloat16()
    assert same([found.seen[key] for key in ("y", "dx", "dw", "dbias")], [found.y, found.dx, dw, dbias])
    assert same(found.gradients, {"weight": before["weight"] + dw, "bias": before["bias"] + dbias})


def test_without_a_recipe_it_is_torchs_own_linear_layer() -> None:
    """Small integers: every sum is exact."""
    x, dy = (normal(4, ROWS, size, seed=size, dtype=torch.float32).mul(2).round() for size in (INNER, OUTER))
    ours, theirs = made(Linear, INNER, OUTER, dtype=torch.float32), torch.nn.Linear(INNER, OUTER)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(getattr(ours, name).mul_(2).round_())
    leaf = x.clone().requires_grad_()
    y = theirs(leaf)
    y.backward(dy)
    found = Pass(ours, None, x, dy)
    assert found.names == ["y", "dx", "dbias", "dw"]
    assert torch.equal(found.y, y)
    assert found.dx is not None
    assert leaf.grad is not None
    assert torch.equal(found.dx, leaf.grad)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found.gradients[name], parameter.grad)


def test_the_rotations_cancel_in_the_gradient_of_the_weight() -> None:
    rotated, plain = (
        Pass(made(Linear, INNER, OUTER), f"NVFP4BlockScaling{off}-nosr").gradients["weight"] for off in ("", "-norht")
    )
    dy, x = normal(ROWS, OUTER, seed=2).double(), normal(ROWS, INNER, seed=1).double()
    exact = dy.T @ x
    errors = [float((found.double() - exact).norm() / exact.norm()) for found in (rotated, plain)]
    assert not torch.equal(rotated, plain)
    assert max(errors) < 0.2  # of one operand rotated alone the error is about √2


def test_what_needs_no_gradient_is_not_computed() -> None:
    layer = made(Linear, INNER, OUTER)
    x = normal(ROWS, INNER)
    with torch.no_grad():
        assert not layer(x).requires_grad
    seen: list[str] = []
    layer.observer = lambda name, _: seen.append(name)
    with autocast("MXFP8BlockScaling"):
        layer(x).sum().backward()
    assert seen == ["x", "w", "y", "dbias", "dy columnwise", "x columnwise", "dw"]
    seen.clear()
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    with autocast("MXFP8BlockScaling"):
        layer(x.requires_grad_()).sum().backward()
    assert seen == ["x", "w", "y", "dy", "w columnwise", "dx"]


def test_an_input_without_rows_gives_gradients_of_zeros() -> None:
    found = Pass(made(Linear, INNER, OUTER), "NVFP4BlockScaling", torch.zeros(0, INNER).bfloat16())
    assert found.y.shape == (0, OUTER)
    assert all(not gradient.any() for gradient in found.gradients.values())
