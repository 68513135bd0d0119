"""LayerNormLinear: a norm in high precision, followed by a quantized linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.reference.high_precision.norm import Kind, norm_backward, norm_forward
from narrowgauge.reference.modules.linear import Linear
from narrowgauge.spec.modules.arguments import check_norm
from narrowgauge.spec.modules.autocast import current


class LayerNormLinear(Linear):
    """`Linear` of the norm of its input: LayerNorm ("layer") or RMSNorm ("rms") over the features.

    `layer_norm_weight` (K,) and `layer_norm_bias` (K,), None for RMSNorm, have the dtype of the layer. eps is added to
    the variance. The output of the norm is rounded once to the dtype of the layer, then quantized; the gradients of the
    norm are rounded once as well. Other options: `Linear`. Raises the errors of `Linear`, and ValueError for an unknown
    norm.
    """

    layer_norm_bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: Kind = "layer",
        eps: float = 1e-5,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
        accumulate: bool = False,
        quantized_parameters: bool = False,
        delay_wgrad: bool = False,
        amax_group: Any = None,
    ) -> None:
        check_norm(type(self).__name__, norm, eps)
        super().__init__(
            in_features, out_features, bias, dtype=dtype, device=device, seed=seed, accumulate=accumulate,
            quantized_parameters=quantized_parameters, delay_wgrad=delay_wgrad, amax_group=amax_group,
        )  # fmt: skip
        self.norm: Kind = norm
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype, device=device))
        beta = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype, device=device)) if norm == "layer" else None
        self.register_parameter("layer_norm_bias", beta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`Linear.forward` of the norm of x (…, K)."""
        recipe = current()
        self.check(x, recipe)
        return self.multiply(_Norm.apply(x, self.layer_norm_weight, self.layer_norm_bias, self), recipe)  # type: ignore[no-untyped-call]

    def observe_input_gradient(self, dx: torch.Tensor) -> None:
        """Calls the observer with the gradient of the output of the norm."""
        self.observe("dnorm", dx)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, layer: LayerNormLinear
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, gamma)
        rows = x.reshape(-1, layer.in_features)
        y = norm_forward(rows, gamma, beta, layer.norm, layer.eps).value.to(layer.dtype)
        layer.observe("norm", y)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: LayerNormLinear = ctx.layer
        x, gamma = ctx.saved_tensors
        rows = x.reshape(-1, layer.in_features)
        bounded = norm_backward(dy.reshape(rows.shape), rows, gamma, layer.norm, layer.eps)
        shapes = (x.shape, gamma.shape, gamma.shape)
        gradients: list[torch.Tensor | None] = [None] * 3
        for number, (name, gradient) in enumerate(zip(("dx", "dgamma", "dbeta"), bounded, strict=True)):
            if ctx.needs_input_grad[number] and gradient is not None:
                value = gradient.value.to(layer.dtype)
                layer.observe(name, value)
                gradients[number] = value.view(shapes[number])
        return *gradients, None
