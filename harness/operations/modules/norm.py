"""A linear layer behind a norm: the norm forward and backward, and the layer between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.operations.modules.delayed import States
from narrowgauge.harness.operations.modules.ground import Ground
from narrowgauge.harness.operations.modules.linear import LinearStages
from narrowgauge.harness.operations.stages.oracle import column_sum, norm_backward, norm_forward
from narrowgauge.reference.high_precision.bounded import Bounded


class NormStages:
    """The stages of a LayerNormLinear in a step, like `LinearStages`."""

    def __init__(self, ground: Ground, layer: Layer, states: States) -> None:
        self.ground, self.layer = ground, layer
        self.linear = LinearStages(ground, layer, states)
        self._x: torch.Tensor | None = None

    def forward(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Judge the norm of `x` (M, K), or of an unknown input (None), and the layer on the result."""
        self._x = x
        gamma, beta = self._parameters
        compute = partial(_norm, kind=self.layer.norm, eps=self.ground.plan.eps)
        operands = {"x": x, "gamma": gamma} | ({} if beta is None else {"beta": beta})
        given: dict[str, Any] = {
            "x": x,
            "gamma": gamma,
            "added": beta,
            "kind": self.layer.norm,
            "eps": self.ground.plan.eps,
        }
        normalized = self.ground.high_precision(
            f"{self.layer.prefix}norm", self._shape, compute, operands, "norm", **given
        )  # fmt: skip
        ends = None
        if normalized is None and x is not None:
            ends = partial(_ends, partial(compute, x, gamma, beta), self.ground.plan.dtype)
        return self.linear.forward(normalized, ends)

    def backward(self, dy: torch.Tensor | None) -> torch.Tensor | None:
        """Judge the layer's backward, and the norm's backward on the result. Returns dx (M, K), if reported."""
        ground, prefix = self.ground, self.layer.prefix
        dnorm = self.linear.backward(dy, "dnorm")
        dy_known = self.linear.unreported.get("dnorm") if dnorm is None else dnorm
        gamma, beta = self._parameters
        bounded: dict[str, Any] = {"dy": dy_known} if isinstance(dy_known, Bounded) else {}
        operands = {"x": self._x, "gamma": gamma} | ({} if bounded else {"dy": dnorm})
        results: Sequence[Bounded | None] = (None, None, None)
        if dy_known is not None and self._x is not None:
            results = norm_backward(dy_known, self._x, gamma, self.layer.norm, ground.plan.eps)  # type: ignore[arg-type]
        given: dict[str, Any] = {**operands, **bounded, "kind": self.layer.norm, "eps": ground.plan.eps}

        def judge(name: str, shape: tuple[int, ...], part: int) -> torch.Tensor | None:
            compute = partial(_norm_gradient, part=part, kind=self.layer.norm, eps=ground.plan.eps, **bounded)
            return ground.high_precision(
                prefix + name, shape, compute, operands, "norm-backward", expected=results[part], **given, part=part
            )

        found = None
        if ground.plan.use != "frozen-input" or prefix not in ("", "qkv."):
            found = judge("dx", self._shape, 0)
        judge("dgamma", (self.layer.inner,), 1)
        if beta is not None:
            sums: dict[str, Any] = {"formula": "column-sum", "rows": dnorm} if dnorm is not None else {}
            ground.high_precision(
                f"{prefix}dbeta", (self.layer.inner,), column_sum, {} if bounded else {"dy": dnorm},
                expected=results[2], **sums,
            )  # fmt: skip
        return found

    def end_forward(self, *, recorded: bool = False) -> None:
        """`LinearStages.end_forward` of the layer."""
        self.linear.end_forward(recorded=recorded)

    def share_forward(self, last: Any) -> None:
        """`LinearStages.share_forward` of the layer. `last`: stages of the same kind."""
        self.linear.share_forward(last.linear)

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


def _norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, **options: Any) -> Bounded:
    return norm_forward(x, gamma, beta, **options)


def _ends(compute: Callable[[], Bounded], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest number of each element in a dtype."""
    return compute().interval(dtype)


def _norm_gradient(
    dy: torch.Tensor | Bounded, x: torch.Tensor, gamma: torch.Tensor, *, part: int, **options: Any
) -> Bounded:
    """The gradient of x (part 0) or of gamma (1)."""
    found = norm_backward(dy, x, gamma, **options)[part]
    assert found is not None
    return found
