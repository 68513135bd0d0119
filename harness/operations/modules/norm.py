"""A linear layer behind a norm: the norm forward and backward, and the layer between."""

from __future__ import annotations

import torch

from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.operations.modules.linear import Ground, LinearStages, States
from narrowgauge.harness.operations.stages.oracle import norm_backward, norm_forward


class NormStages:
    """The stages of a LayerNormLinear in one step, as those of `LinearStages`."""

    def __init__(self, ground: Ground, layer: Layer, states: States) -> None:
        self.ground, self.layer = ground, layer
        self.linear = LinearStages(ground, layer, states)
        self._x: torch.Tensor | None = None

    def forward(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Judge the norm of `x` (M, K), or of an input that nobody knows, and the layer on what came of it."""
        self._x = x
        gamma, beta = self._parameters
        expected = None if x is None else norm_forward(x, gamma, beta, self.layer.norm, self.ground.plan.eps)  # type: ignore[arg-type]
        given = {"x": x, "gamma": gamma, "added": beta, "kind": self.layer.norm, "eps": self.ground.plan.eps}
        normalized = self.ground.high_precision(f"{self.layer.prefix}norm", self._shape, expected, "norm", **given)
        return self.linear.forward(normalized)

    def backward(self, dy: torch.Tensor | None) -> torch.Tensor | None:
        """Judge the layer's backward, and the norm's on what came of it. Gives dx (M, K), where it was reported."""
        ground, prefix = self.ground, self.layer.prefix
        dnorm = self.linear.backward(dy, "dnorm")
        gamma, beta = self._parameters
        dx = dgamma = dbeta = None
        if dnorm is not None and self._x is not None:
            dx, dgamma, dbeta = norm_backward(dnorm, self._x, gamma, self.layer.norm, ground.plan.eps)  # type: ignore[arg-type]
        given = {"dy": dnorm, "x": self._x, "gamma": gamma, "kind": self.layer.norm, "eps": ground.plan.eps}
        found = None
        if ground.plan.use != "frozen-input" or prefix not in ("", "qkv."):
            found = ground.high_precision(f"{prefix}dx", self._shape, dx, "norm-backward", **given, part=0)
        ground.high_precision(f"{prefix}dgamma", (self.layer.inner,), dgamma, "norm-backward", **given, part=1)
        if beta is not None:
            ground.high_precision(f"{prefix}dbeta", (self.layer.inner,), dbeta)
        return found

    def end_forward(self) -> None:
        """`LinearStages.end_forward` of the layer."""
        self.linear.end_forward()

    def end(self) -> None:
        """Judge the end of the step, as the layer itself does."""
        self.linear.end()

    @property
    def _parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        parameters = self.ground.step.parameters
        return parameters[self.layer.gamma], parameters.get(self.layer.beta)

    @property
    def _shape(self) -> tuple[int, int]:
        return sum(self.linear.sizes), self.layer.inner
