"""Inputs of modules."""

from __future__ import annotations

import torch

from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.inputs.inputs import Inputs, Maker, addend, exponents, growth
from narrowgauge.harness.operations.modules.case import ModuleCase
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import Recipe

BEFORE_ATTENTION = "qkv."
"""The layer that makes q and k."""


def module_inputs(make: Maker[ModuleCase], *, peak: float = 1.0) -> Inputs:
    """x (steps, B, S, K) or (steps, M, K), and under `given.` dy, the parameters, and the content of main gradients,
    float32 (N, K), before the first step.

    x and dy of every step are of the family; of a module that is one product the weights too, else normal numbers.
    `peak`: factor of gamma in the layer before the attention, whose square is a factor of the scores.
    """
    case = make.case
    dtype, training, layers = TORCH_DTYPES[case.dtype], case.training_recipe, case.layers
    inner, leading = case.shape[-2], case.shape[:-2]

    def steps(role: str, columns: int, recipe: Recipe) -> torch.Tensor:
        shape = (case.rows, columns)
        tensors = [make.matrix("x", shape, dtype, recipe, drawn_as=f"{role} of step {n}") for n in range(case.steps)]
        return torch.stack(tensors).view(case.steps, *leading, columns)

    x, dy = steps("x", inner, training.input.rowwise), steps("dy", case.outer, training.grad.rowwise)
    if case.use == "microbatches":  # the larger amax of an autocast is that of its first or of its second forward
        x[::4] *= 4
        x[3::4] *= 4
    given = {"dy": dy}
    for layer in layers:
        given |= _parameters(make, layer, x.view(-1, inner), peak)
    if case.accumulate:
        for name in (name for layer in layers for name in layer.weights):
            draw, (height, width) = make.draw(f"{name}.main_grad"), given[name].shape
            # As large as a sum over the rows of typical products: the addition rounds.
            given[f"{name}.main_grad"] = draw.normal(height, width) * 2.0 ** growth(case.rows)
    counters = {"dy": make.counter("dy")} if training.grad.rounding == "stochastic" else {}
    return Inputs({"x": x, **{f"given.{name}": tensor for name, tensor in given.items()}}, counters)


def _parameters(make: Maker[ModuleCase], layer: Layer, x: torch.Tensor, peak: float) -> dict[str, torch.Tensor]:
    """The parameters of a layer; `x` is the input of a layer that is a module by itself."""
    case = make.case
    dtype, alone = TORCH_DTYPES[case.dtype], not layer.prefix
    parameters = {}
    for name, shape in layer.shapes(bias=case.bias).items():
        draw = make.draw(name)
        if name in layer.weights:
            size = (shape[0], shape[1])
            if alone:
                parameters[name] = make.matrix("w", size, dtype, case.training_recipe.weight, drawn_as=name)
            else:  # a sum of as many products stays as large as one product
                parameters[name] = (draw.normal(*size) * 2.0 ** -growth(size[1])).to(dtype)
        elif name in layer.biases and alone and not layer.norm:
            of_x = exponents(x).amax(0, keepdim=True) if len(x) else torch.zeros(1, dtype=torch.int32)
            weight = parameters[layer.weights[layer.biases.index(name)]]
            parameters[name] = addend(draw, of_x + exponents(weight) + growth(layer.inner), dtype)
        else:
            numbers = 0.25 * draw.normal(*shape) + (name == layer.gamma)
            large = layer.prefix == BEFORE_ATTENTION and name == layer.gamma
            parameters[name] = (numbers * peak if large else numbers).to(dtype)
    return parameters
