"""Transformer layer: attention and GELU in high precision between quantizing linear layers."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
from torch.nn import functional

from narrowgauge.native.modules.history import Observer
from narrowgauge.native.modules.layer import Options
from narrowgauge.native.modules.layer_norm_linear import LayerNormLinear, Norm
from narrowgauge.native.modules.linear import Linear
from narrowgauge.spec.modules.arguments import check_batch, check_heads


class TransformerLayer(torch.nn.Module):
    """h = x + proj(attention(qkv(x))), y = h + fc2(gelu(fc1(h))) of x (B, S, hidden), causal, without dropout.

    `qkv` and `fc1` are LayerNormLinear, `proj` and `fc2` Linear, with seeds seed, seed + 1, … in the order qkv, proj,
    fc1, fc2. The output of qkv is the concatenation of q, k and v, all of size heads × head size. Attention is
    softmax(q·kᵀ/√d)·v, GELU is the tanh approximation; attention, GELU and the residual additions are computed in
    float32 and cast once. `norm`, `eps`, `bias` and options: see LayerNormLinear and Linear.

    An observer gets the results of the children with the prefix `qkv.`, `proj.`, `fc1.` or `fc2.`, `attention`, `h`,
    `gelu` and `y`, and the gradients `dgelu` (of the output of fc1), `dh`, `dqkv` (of the output of qkv) and `dx`.

    Raises ValueError if heads do not divide hidden, in the forward pass for an x of wrong shape, and as the children.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        heads: int,
        *,
        norm: Norm = "layer",
        eps: float = 1e-5,
        bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        check_heads(hidden, heads)
        self.hidden, self.heads = hidden, heads
        first, second, third, fourth = (Options(**{**options, "seed": options.get("seed", 0) + n}) for n in range(4))
        self.qkv = LayerNormLinear(hidden, 3 * hidden, bias, norm=norm, eps=eps, **first)
        self.proj = Linear(hidden, hidden, bias, **second)
        self.fc1 = LayerNormLinear(hidden, ffn, bias, norm=norm, eps=eps, **third)
        self.fc2 = Linear(ffn, hidden, bias, **fourth)
        self._observer: Observer | None = None

    @property
    def observer(self) -> Observer | None:
        """Called with the name and the value of every result, including the results of the children."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        for name, child in self.named_children():
            child.observer = None if observer is None else partial(_report_below, observer, name)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y (B, S, hidden) of x."""
        check_batch(x, self.hidden)
        x = self._watched(x, "dx")
        attention = self._attend(self._watched(self.qkv(x), "dqkv"))
        self._report("attention", attention)
        h = self._watched(x + self.proj(attention), "dh")
        self._report("h", h)
        gelu = functional.gelu(self._watched(self.fc1(h), "dgelu"), approximate="tanh")
        self._report("gelu", gelu)
        y: torch.Tensor = h + self.fc2(gelu)
        self._report("y", y)
        return y

    def backward_dw(self) -> None:
        """`Linear.backward_dw` of the four layers, in the order of their backward passes."""
        for layer in (self.fc2, self.fc1, self.proj, self.qkv):
            layer.backward_dw()

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).float()
        # scaled_dot_product_attention is not used: on a GPU the backward pass of its fused kernels adds in no fixed
        # order.
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
        out: torch.Tensor = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return out.transpose(1, 2).reshape(batch, length, self.hidden).to(qkv.dtype)

    def _report(self, name: str, value: torch.Tensor) -> None:
        if self._observer is not None:
            self._observer(name, value.detach())

    def _watched(self, tensor: torch.Tensor, gradient: str) -> torch.Tensor:
        """An alias of the tensor. The observer gets the gradient of the alias."""
        if self._observer is None or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        alias = tensor.view_as(tensor)  # the gradient of x itself may have other contributions
        alias.register_hook(partial(self._report, gradient))  # type: ignore[no-untyped-call]
        return alias


def _report_below(observer: Observer, child: str, name: str, value: Any) -> None:
    observer(f"{child}.{name}", value)
