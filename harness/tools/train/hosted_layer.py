"""Layers of a backend in a kernel host. This process keeps the weights, and sends them to the host in every step."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.results import type_name
from narrowgauge.harness.cases.layers import transformer


class HostedLayers:
    """Makes the layers of a training, in place of a backend."""

    def __init__(self, backend: Backend, recipe: str | None, *, observed: bool) -> None:
        """`recipe`: name of the training recipe, None for high precision. `observed`: whether reported values are
        wanted."""
        self._backend, self._recipe, self._observed = backend, recipe, observed

    def call(self, method: str, hidden: int, ffn: int, heads: int, **options: Any) -> HostedLayer:
        """A layer. Raises Unsupported, BackendError and HostLost."""
        if not self._backend.has(method):
            raise Unsupported(f"backend {self._backend.name} has no {method}")
        device, dtype = options.pop("device"), options["dtype"]
        number = self._backend.host.call(
            "start_layer", hidden, ffn, heads, **options, recipe=self._recipe, observed=self._observed
        )
        return HostedLayer(self._backend, number, hidden, ffn, dtype, device)


class HostedLayer(torch.nn.Module):
    """A transformer layer: its weights are here, its forward and backward run in the host."""

    def __init__(
        self, backend: Backend, number: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._host, self._number = backend.host, number
        self.state: dict[str, torch.Tensor] = {}
        """Buffers of the host's layer before the last forward."""
        self.seen: dict[str, list[Any]] = {}
        """Values that the host's layer reported in the last step."""
        for linear in transformer(hidden, ffn, "layer"):
            child = torch.nn.Module()
            for name, shape in linear.shapes(bias=True).items():
                weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
                child.register_parameter(name.removeprefix(linear.prefix), weight)
            self.add_module(linear.prefix.rstrip("."), child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names, weights = zip(*self.named_parameters(), strict=True)
        y: torch.Tensor = _Call.apply(self, names, x, *weights)  # type: ignore[no-untyped-call]
        return y

    def run_forward(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The output of the host's layer. Raises BackendError if its form is wrong."""
        answer = _mapping(self._host.call("forward_layer", self._number, x, weights))
        self.state = {name: value for name, value in _mapping(answer.get("state")).items() if torch.is_tensor(value)}
        return _like("y", answer.get("y"), x)

    def run_backward(
        self, dy: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The gradients of the input and of the weights. Raises BackendError if their form is wrong."""
        answer = _mapping(self._host.call("backward_layer", self._number, dy))
        seen = _mapping(answer.get("seen"))
        self.seen = {name: values for name, values in seen.items() if isinstance(values, list)}
        found = _mapping(answer.get("gradients"))
        gradients = {name: _like(f"the gradient of {name}", found.get(name), weights[name]) for name in weights}
        return _like("the gradient of x", answer.get("dx"), dy), gradients


class _Call(torch.autograd.Function):
    """Forward and backward of a layer in its host."""

    @staticmethod
    def forward(ctx: Any, layer: HostedLayer, names: tuple[str, ...], x: torch.Tensor, *weights: Any) -> torch.Tensor:
        ctx.layer, ctx.weights = layer, {name: w.detach() for name, w in zip(names, weights, strict=True)}
        return layer.run_forward(x.detach(), ctx.weights)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx, gradients = ctx.layer.run_backward(dy, ctx.weights)
        return None, None, dx, *gradients.values()


def _mapping(value: Any) -> dict[str, Any]:
    """A part of an answer of a host. Raises BackendError if it is no mapping."""
    if not isinstance(value, dict):
        raise BackendError(f"the host of TransformerLayer sent {type_name(value)}, not a mapping")
    return value


def _like(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor of an answer. Raises BackendError if its shape or dtype is not that of `like`."""
    if not isinstance(value, torch.Tensor):
        raise BackendError(f"TransformerLayer gave {name} as {type_name(value)}, not a tensor")
    if value.shape != like.shape or value.dtype != like.dtype:
        raise BackendError(
            f"TransformerLayer gave {name} as {value.dtype} of shape {tuple(value.shape)}, not {like.dtype} of shape "
            f"{tuple(like.shape)}"
        )
    return value
