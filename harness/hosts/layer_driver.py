"""Layers of a training: their forward and backward as calls of a judge, which keeps and trains the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.backends.module_driver import Caller, Step
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.spec.modules.autocast import autocast

Tensors = dict[str, torch.Tensor]


@dataclass
class _Layer:
    """A layer, with its forward before the backward."""

    module: Any
    recipe: str | None
    observed: bool
    x: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    y: Any = None
    seen: dict[str, list[Any]] = field(default_factory=dict)
    """Reported values of the last step."""


class LayerDriver:
    """Transformer layers of a backend, by number."""

    def __init__(self, backend: Caller, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._layers: list[_Layer] = []

    def start(
        self, hidden: int, ffn: int, heads: int, *, dtype: torch.dtype, seed: int, recipe: str | None, observed: bool
    ) -> int:
        """Make a layer, and give its number. `observed`: whether its reported values are kept for `backward`.

        Raises Unsupported and BackendError as the backend does.
        """
        options = {"dtype": dtype, "device": self._device, "seed": seed}
        module = self._backend.call("TransformerLayer", hidden, ffn, heads, **options)
        self._layers.append(_Layer(module, recipe, observed))
        return len(self._layers) - 1

    def forward(self, number: int, x: torch.Tensor, weights: Tensors) -> dict[str, Any]:
        """The output `y` of a layer with these weights, and its `state`: its buffers before the forward.

        Raises BackendError if the parameters of the layer have other names or shapes than the weights.
        """
        layer = self._layers[number]
        parameters = dict(layer.module.named_parameters())
        if {name: tensor.shape for name, tensor in parameters.items()} != {n: w.shape for n, w in weights.items()}:
            found, expected = (
                ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())) or "none"
                for tensors in (parameters, weights)
            )
            raise BackendError(f"TransformerLayer has the parameters {found}; expected: {expected}")
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(weight)
                parameters[name].grad = None
        buffers = {name: value for name, value in layer.module.state_dict().items() if name not in parameters}
        state = {name: value.clone() for name, value in buffers.items() if isinstance(value, torch.Tensor)}
        # The shared memory of the input is in use again before the backward.
        layer.x = x.detach().clone().requires_grad_()
        step = Step(0, layer.x, layer.x, {})
        layer.seen = step.seen
        layer.module.observer = step.report if layer.observed else None
        with autocast(layer.recipe):
            layer.y = self._backend.run("forward of TransformerLayer", layer.module, layer.x)
        return {"y": layer.y, "state": state}

    def backward(self, number: int, dy: torch.Tensor) -> dict[str, Any]:
        """The gradient `dx` of the input, the `gradients` of the weights by name, and the values `seen` by the
        observer. Raises as the backend does."""
        layer = self._layers[number]
        self._backend.run("backward of TransformerLayer", layer.y.backward, dy)
        layer.module.observer = None
        gradients = {name: parameter.grad for name, parameter in layer.module.named_parameters()}
        return {"dx": layer.x.grad, "gradients": gradients, "seen": layer.seen}
