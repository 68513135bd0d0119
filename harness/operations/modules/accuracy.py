"""What quantizing costs: outputs and gradients of a module beside those in float64. It decides no verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from narrowgauge.harness.backends.module_driver import Plan, Step
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table


def accuracy(plan: Plan, step: Step) -> list[dict[str, Any]]:
    """Figures of y, dx and dw of one step, those of all weights together: tensor, sqnr_db, relative_error, cosine.

    Against the same formulas of the same unquantized inputs in float64. sqnr_db: 10·log10 of Σ true² over Σ
    difference²; relative_error: its root inverted, the relative Frobenius error; cosine: of the angle between the two.
    None where a figure is not finite: of zeros, of what is equal, of NaN.
    """
    truth = _truth(plan, step)
    found = {name: [step.last(name)] for name in ("y", "dx")}
    found["dw"] = [_without_start(step, layer, plan) for layer in plan.layers]
    return [{"tensor": name, **_figures(_together(found[name]), _together(truth[name]))} for name in ("y", "dx", "dw")]


def _truth(plan: Plan, step: Step) -> dict[str, list[torch.Tensor]]:
    """y, dx and the gradients of all weights, float64."""
    x = step.x.double().requires_grad_()
    parameters = {name: tensor.double().requires_grad_() for name, tensor in step.parameters.items()}
    y = _forward(plan, x, parameters, step.routing)
    dx, *dw = torch.autograd.grad(y, [x, *(parameters[name] for name in plan.weights)], step.dy.double())
    return {"y": [y.detach()], "dx": [dx], "dw": dw}


def _forward(
    plan: Plan, x: torch.Tensor, parameters: dict[str, torch.Tensor], routing: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The module in high precision, of x (…, K)."""

    def linear(layer: Layer, given: torch.Tensor) -> torch.Tensor:
        if layer.norm:
            shape, gamma = (layer.inner,), parameters[layer.gamma]
            if layer.norm == "rms":
                given = F.rms_norm(given, shape, gamma, plan.eps)
            else:
                given = F.layer_norm(given, shape, gamma, parameters[layer.beta], plan.eps)
        sections = torch.split(given, list(plan.sections)) if layer.groups else (given,)
        names = zip(layer.weights, layer.biases, strict=True)
        parts = [
            F.linear(part, parameters[weight], parameters.get(bias))
            for part, (weight, bias) in zip(sections, names, strict=True)
        ]
        return torch.cat(parts) if layer.groups else parts[0]

    if plan.kind == "MoELayer":
        ids, probabilities = routing["expert_ids"], routing["probabilities"]
        order = ids.flatten().argsort(stable=True)[(ids < 0).sum() :]  # choices by their experts
        gate, up = linear(plan.layers[0], x[order // ids.shape[1]]).chunk(2, -1)
        rows = linear(plan.layers[1], F.silu(gate) * up) * probabilities.double().flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], rows)
    if plan.kind != "TransformerLayer":
        return linear(plan.layers[0], x)
    qkv, proj, fc1, fc2 = plan.layers
    batch, sequence = x.shape[:2]
    q, k, v = linear(qkv, x).view(batch, sequence, 3, plan.heads, -1).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = x + linear(proj, attended.transpose(1, 2).flatten(2))
    return h + linear(fc2, F.gelu(linear(fc1, h), approximate="tanh"))


def _without_start(step: Step, layer: Layer, plan: Plan) -> torch.Tensor | None:
    """The gradients of a layer's weights, without the gradients before; None if a gradient is missing."""
    found = step.last(f"{layer.prefix}dw")
    parts = found if layer.groups else [found]
    if any(part is None for part in parts):
        return None
    zero = torch.zeros((), dtype=torch.float64)
    before = [step.before.get(name, zero).to(part.device) for name, part in zip(layer.weights, parts, strict=True)]
    return torch.cat([(part.double() - c.double()).flatten() for part, c in zip(parts, before, strict=True)])


def _together(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [part.double().flatten() for part in parts if part is not None]
    return torch.cat(given) if len(given) == len(parts) else None


def _figures(found: torch.Tensor | None, true: torch.Tensor | None) -> dict[str, float | None]:
    if found is None or true is None:
        return {"sqnr_db": None, "relative_error": None, "cosine": None}
    noise, signal = float((found - true).norm()), float(true.norm())
    relative = noise / signal if signal else math.nan
    length = signal * float(found.norm())
    figures = {
        "sqnr_db": -20 * math.log10(relative) if relative > 0 else math.nan, "relative_error": relative,
        "cosine": float(found @ true) / length if length else math.nan,
    }  # fmt: skip
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def accuracy_table(_: Inputs, outcome: Outcome, __: Place | None) -> Table:
    """Accuracy cost of quantizing a module, which has no single element to show."""
    table = Table("beside float64, of the last step", ("tensor", "SQNR, dB", "relative error", "cosine"))
    for entry in outcome.accuracy:
        figures = (entry[name] for name in ("sqnr_db", "relative_error", "cosine"))
        table.add_row(entry["tensor"], *("" if figure is None else f"{figure:.4g}" for figure in figures))
    return table
