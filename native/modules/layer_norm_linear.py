"""Normalisation followed by a linear layer."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.native.modules.layer import Options
from narrowgauge.native.modules.linear import Linear
from narrowgauge.spec.modules.arguments import check_norm

Norm = Literal["layer", "rms"]


class LayerNormLinear(Linear):
    """`Linear` of the normalised x, LayerNorm ("layer") or RMSNorm ("rms") over the last dimension, `eps` in the root.

    The norm is computed in float32 and cast once, forward and backward. `layer_norm_weight` (K,) and `layer_norm_bias`
    (K,) have `dtype`; RMSNorm has no bias. In addition to the results of `Linear`, an observer gets `norm`, the
    normalised x, its gradient `dnorm`, and `dgamma` and `dbeta`; `dx` is the gradient of the layer's input.

    Raises as `Linear` does, and ValueError for an unknown norm or an eps that is not positive.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: Norm = "layer",
        eps: float = 1e-5,
        amax_group: torch.distributed.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_features, out_features, bias, amax_group=amax_group, **options)
        check_norm(type(self).__name__, norm, eps)
        self.norm, self.eps = norm, eps
        tensor_options: dict[str, Any] = {"dtype": self.dtype, "device": options.get("device")}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **tensor_options))
        self.layer_norm_bias = (
            torch.nn.Parameter(torch.zeros(in_features, **tensor_options)) if norm == "layer" else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y (…, N) of x (…, K)."""
        self.check_input(x)
        return self.multiply(
            _Normalised.apply(self, x, self.layer_norm_weight, self.layer_norm_bias),  # type: ignore[no-untyped-call]
            dx="dnorm",
        )


class _Normalised(torch.autograd.Function):
    """The norm. The backward pass computes the norm again: the forward pass saves x only, no float32 tensor."""

    @staticmethod
    def forward(
        ctx: Any, layer: LayerNormLinear, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, gamma, beta)
        y = _normalise(layer, x.float(), gamma.float(), None if beta is None else beta.float()).to(x.dtype)
        layer.report("norm", y.reshape(-1, layer.in_features))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # torch's backward pass in bfloat16 is not used: on a CPU it rounds mean, deviation and partial sums of dgamma
        # to bfloat16.
        layer: LayerNormLinear = ctx.layer
        wants = ctx.needs_input_grad[1:]
        wide = [
            None if tensor is None else tensor.detach().float().requires_grad_(wanted)
            for tensor, wanted in zip(ctx.saved_tensors, wants, strict=True)
        ]
        x, gamma, beta = wide
        assert x is not None
        assert gamma is not None
        with torch.enable_grad():
            y = _normalise(layer, x, gamma, beta)
        computed = iter(torch.autograd.grad(y, [t for t in wide if t is not None and t.requires_grad], dy.float()))
        gradients = [next(computed).to(layer.dtype) if wanted else None for wanted in wants]
        for name, gradient in zip(("dx", "dgamma", "dbeta"), gradients, strict=True):
            if gradient is not None:
                layer.report(name, gradient.reshape(-1, layer.in_features) if name == "dx" else gradient)
        return None, *gradients


def _normalise(layer: LayerNormLinear, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    if layer.norm == "layer":
        return torch.nn.functional.layer_norm(x, (layer.in_features,), gamma, beta, layer.eps)
    return torch.nn.functional.rms_norm(x, (layer.in_features,), gamma, layer.eps)
