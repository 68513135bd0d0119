"""Calls of modules in conventional tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.operations.stages.sample import COLUMNS, SEED, SIZES, SUM, Parts, SampleInputs
from narrowgauge.spec.modules.autocast import autocast


def trained(
    ops: Any,
    inputs: SampleInputs,
    *,
    kind: str,
    sizes: tuple[int, ...] = (),
    hidden: int = 0,
    sections: bool = False,
    experts: int = 0,
    steps: int = 1,
) -> tuple[torch.Tensor, Parts]:
    """Output and gradients of a module's steps. Gradients of the weights accumulate over several steps in float32.

    `sizes`: arguments of the module, by default K and N. `hidden`: columns of x and dy if they are batches
    (B, S, hidden). `sections`: whether the module takes the rows of sections. `experts`: number of experts of a module
    with two experts per token, with their probabilities.
    """
    x, dy = inputs.x, inputs.c
    sizes = sizes or (SUM, COLUMNS)
    if hidden:
        x, dy = (matrix[:, :hidden].reshape(-1, SIZES[0], hidden) for matrix in (x, dy))
    layer = getattr(ops, kind)(*sizes, accumulate=steps > 1)
    draw = torch.Generator().manual_seed(SEED)
    parameters = dict(sorted(layer.named_parameters()))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 16 + ("norm_weight" in name))
    further: list[Any] = [list(SIZES)] if sections else []
    if experts:
        ids = torch.arange(sum(SIZES)).unsqueeze(1) + torch.arange(2)
        further = [ids % experts, torch.rand(ids.shape, generator=draw)]
    results: list[torch.Tensor] = []
    for number in range(steps):
        leaf = (x * 2.0**number).requires_grad_()
        with autocast(inputs.training):
            y = layer(leaf, *further)
        y.backward(dy)
        assert leaf.grad is not None
        results += [y.detach(), leaf.grad]
    results += [p.main_grad if p.grad is None else p.grad for p in parameters.values()]
    return torch.cat([result.flatten().float() for result in results]), {
        f"end {number}": result for number, result in enumerate(results)
    }
