"""LayerNormLinear and TransformerLayer: compositions of layers and operations in high precision, each rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from narrowgauge.reference.high_precision.attention import attention_backward, attention_forward
from narrowgauge.reference.high_precision.gelu import gelu_backward, gelu_forward
from narrowgauge.reference.high_precision.norm import norm_backward, norm_forward
from narrowgauge.reference.modules import LayerNormLinear, Linear, TransformerLayer
from tests.reference.passes import INNER, OUTER, ROWS, Pass, made, normal, same

HIDDEN, FFN, HEADS = 32, 48, 4
SHAPE = (2, 16, HIDDEN)
RECIPE = "NVFP4BlockScaling"


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_runs_before_a_linear_layer(norm: Any) -> None:
    layer = made(LayerNormLinear, INNER, OUTER, norm=norm, eps=0.25)
    found = Pass(layer, RECIPE)
    x, gamma, beta = normal(ROWS, INNER, seed=1), layer.layer_norm_weight, layer.layer_norm_bias
    assert (beta is None) == (norm == "rms")
    normed = norm_forward(x, gamma, beta, norm, 0.25).value.bfloat16()
    linear = Linear(INNER, OUTER)
    own = set(linear.state_dict())  # before the first backward pass
    linear.load_state_dict({name: value for name, value in layer.state_dict().items() if name in own})
    alone = Pass(linear, RECIPE, normed)
    assert same(found.seen["norm"], normed)
    assert same([found.y, found.seen["dnorm"]], [alone.y, alone.dx])
    dx, *rest = norm_backward(alone.seen["dx"], x, gamma, norm, 0.25)
    expected = [part.value.bfloat16() for part in (dx, *rest) if part is not None]
    gradients = [found.gradients[name] for name in ("layer_norm_weight", "layer_norm_bias") if name in found.gradients]
    assert same([found.dx, *gradients], expected)
    assert same([found.seen[name] for name in ("dx", "dgamma", "dbeta") if name in found.seen], expected)
    assert all(same(found.seen[name], value) for name, value in alone.seen.items() if name != "dx")


def expected_names(*, biases: bool = True) -> set[str]:
    """Everything that a transformer layer tells an observer under a recipe without a history."""
    halves = {f"{half}{usage}" for half in ("x", "w", "dy") for usage in ("", " columnwise")}
    linear = halves | {"y", "dw", "dx"} | ({"dbias"} if biases else set())
    normed = linear | {"norm", "dnorm", "dgamma", "dbeta"}
    children = {"qkv": normed, "proj": linear, "fc1": normed, "fc2": linear}
    own = {"attention", "h", "gelu", "y", "dgelu", "dqkv", "dh", "dx"}
    return own | {f"{child}.{name}" for child, names in children.items() for name in names}


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*SHAPE[:2], HEADS, HIDDEN // HEADS).transpose(1, 2)


def test_a_transformer_layer_is_composed_of_what_it_reports() -> None:
    layer = made(TransformerLayer, HIDDEN, FFN, HEADS)
    x, dy = normal(*SHAPE, seed=1), normal(*SHAPE, seed=2)
    found = Pass(layer, RECIPE, x, dy)
    seen = {name: value for name, value in found.seen.items() if isinstance(value, torch.Tensor)}
    assert found.seen.keys() == expected_names()
    assert len(found.names) == len(set(found.names))

    def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one.float() + other.float().view(one.shape)).bfloat16()

    def merged(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.bfloat16().transpose(1, 2).flatten(2) for part in parts], 2)

    qkv = [heads(part) for part in seen["qkv.y"].view(*SHAPE[:2], -1).chunk(3, 2)]
    fc1 = seen["fc1.y"].view(*SHAPE[:2], FFN)
    assert same(seen["attention"], merged(attention_forward(*qkv).value))
    assert same(seen["h"], add(x, seen["proj.y"]))
    assert same(seen["gelu"], gelu_forward(fc1).value.bfloat16())
    assert same([seen["y"], found.y], [add(seen["h"], seen["fc2.y"])] * 2)
    assert same(seen["dgelu"], gelu_backward(seen["fc2.dx"].view(fc1.shape), fc1).value.bfloat16())
    assert same(seen["dh"], add(dy, seen["fc1.dx"]))
    gradient = heads(seen["proj.dx"].view(SHAPE))
    assert same(seen["dqkv"], merged(*(part.value for part in attention_backward(gradient, *qkv))))
    assert same([seen["dx"], found.dx], [add(seen["dh"], seen["qkv.dx"])] * 2)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_without_a_recipe_a_transformer_layer_is_torchs(norm: Any) -> None:
    """In float32 against torch in float64: a wrong formula differs by far more than 2^-16."""
    layer = made(TransformerLayer, HIDDEN, FFN, HEADS, norm=norm, dtype=torch.float32)
    x, dy = normal(*SHAPE, seed=1, dtype=torch.float32), normal(*SHAPE, seed=2, dtype=torch.float32)
    found = Pass(layer, None, x, dy)
    leaf = x.double().requires_grad_()
    given = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        gamma, beta = given[f"{name}.layer_norm_weight"], given.get(f"{name}.layer_norm_bias")
        if beta is None:
            return functional.rms_norm(x, (HIDDEN,), gamma, 1e-5)
        return functional.layer_norm(x, (HIDDEN,), gamma, beta, 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, given[f"{name}.weight"], given[f"{name}.bias"])

    q, k, v = (heads(part) for part in linear(normed(leaf, "qkv"), "qkv").chunk(3, 2))
    attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    h = leaf + linear(attention, "proj")
    y = h + linear(functional.gelu(linear(normed(h, "fc1"), "fc1"), approximate="tanh"), "fc2")
    torch.autograd.backward(y, dy.double())
    pairs = [(found.y, y.detach()), (found.dx, leaf.grad), *((found.gradients[n], p.grad) for n, p in given.items())]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).norm() / theirs.norm()) < 2.0**-16
    assert len(pairs) == 2 + len(dict(layer.named_parameters()))
