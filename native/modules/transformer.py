"""Transformer layer: attention and GELU in high precision between quantizing linear layers, attention also in FP8."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from narrowgauge.native.modules.composed import Composed
from narrowgauge.native.modules.history import History
from narrowgauge.native.modules.layer import Options
from narrowgauge.native.modules.layer_norm_linear import LayerNormLinear, Norm
from narrowgauge.native.modules.linear import Linear
from narrowgauge.native.quantize.dequantize import dequantize
from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.spec.modules.arguments import check_batch, check_heads
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.modules.training import TrainingRecipe


class TransformerLayer(Composed):
    """h = x + proj(attention(qkv(x))), y = h + fc2(gelu(fc1(h))) of x (B, S, hidden), causal, without dropout.

    `qkv` and `fc1` are LayerNormLinear, `proj` and `fc2` Linear, with seeds seed, seed + 1, … in the order qkv, proj,
    fc1, fc2. The output of qkv is the concatenation of q, k and v, all of size heads × head size. Attention is
    softmax(q·kᵀ/√d)·v, GELU is the tanh approximation; attention, GELU and the residual additions are computed in
    float32 and cast once. `norm`, `eps`, `bias` and options: see LayerNormLinear and Linear. A training recipe with
    `quantizes_attention` quantizes q, k and v, the softmax, the output of the attention and their gradients.

    An observer gets the results of the children with the prefix `qkv.`, `proj.`, `fc1.` or `fc2.`, `attention`, `h`,
    `gelu` and `y`, and the gradients `dgelu` (of the output of fc1), `dh`, `dqkv` (of the output of qkv) and `dx`. Of
    quantized attention it also gets `softmax` and the gradient `dscores`, (B·heads·S, S), and the quantized
    `attention.qkv`, `attention.s` and `attention.o`, `attention.do`, `attention.dp` and `attention.dqkv`.

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
        self.attention = AttentionOperands()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y (B, S, hidden) of x."""
        check_batch(x, self.hidden)
        x = self.watched(x, "dx")
        attention = self._attend(self.qkv(x))
        h = self.watched(x + self.proj(attention), "dh")
        self.report("h", h)
        gelu = functional.gelu(self.watched(self.fc1(h), "dgelu"), approximate="tanh")
        self.report("gelu", gelu)
        y: torch.Tensor = h + self.fc2(gelu)
        self.report("y", y)
        return y

    def backward_dw(self) -> None:
        """`Linear.backward_dw` of the four layers, in the order of their backward passes."""
        for layer in (self.fc2, self.fc1, self.proj, self.qkv):
            layer.backward_dw()

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        recipe, dtype = current(), qkv.dtype
        if recipe is None or not recipe.quantizes_attention:
            q, k, v = self._heads(self.watched(qkv, "dqkv"))
            out = _joined(_scores(q, k).softmax(-1) @ v).to(dtype)
            self.report("attention", out)
            return out
        scales = None
        if recipe.history:
            scales = self.attention.present_scales(recipe, qkv.device)
            self.attention.end_forward_later(recipe)
        operand = partial(_Operand.apply, self, recipe, scales)
        q, k, v = self._heads(operand("qkv", "dqkv", qkv))
        weights = operand("", "dp", _scores(q, k)).softmax(-1).to(dtype)
        self.report("softmax", weights.flatten(0, 2))
        out = _joined(operand("s", "", weights).float() @ v).to(dtype)
        self.report("attention", out)
        attended: torch.Tensor = operand("o", "do", out)
        return attended

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v (batch, heads, S, d), float32."""
        batch, length, _ = qkv.shape
        return qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).float().unbind()


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores (batch, heads, S, S), −∞ for keys behind the query."""
    # scaled_dot_product_attention is not used: on a GPU the backward pass of its fused kernels adds in no fixed order.
    scores: torch.Tensor = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def _joined(heads: torch.Tensor) -> torch.Tensor:
    """(batch, heads, S, d) as (batch, S, heads·d)."""
    return heads.transpose(1, 2).flatten(2)


_NAMES = ("qkv", "s", "o", "do", "dp", "dqkv")
"""Quantized tensors of the attention, in the order of the columns of their history; the last three are gradients."""
_BEFORE = {"dp": "dscores", "dqkv": "dqkv"}
"""Names of gradients before their quantization."""


class AttentionOperands(History):
    """The quantized tensors of the attention, with a history (H, 6) and scales (6,) under delayed scaling."""

    roles = len(_NAMES)
    gradients = _NAMES.index("do")

    def values(
        self, name: str, x: torch.Tensor, recipe: TrainingRecipe, scales: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        """The values of `x`, quantized as a matrix and reported, in the dtype of `x`. `scales`: of the forward pass."""
        role = _NAMES.index(name)
        of_role = recipe.input if role < self.gradients else recipe.grad
        q = quantize(x.reshape(-1, x.shape[-1]), of_role, scale=self.scale_of(role, scales))
        self.report(name, q)
        if recipe.history:
            self.record(role, q.required_amax)
        return dequantize(q, x.dtype).view(x.shape)


class _Operand(torch.autograd.Function):
    """Quantizes an operand of the attention in the forward pass, and its gradient in the backward pass.

    An empty name stands for no quantization in this pass. The gradient passes the quantization of the operand
    unchanged.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: TransformerLayer,
        recipe: TrainingRecipe,
        scales: torch.Tensor | None,
        name: str,
        gradient: str,
        x: torch.Tensor,
    ) -> torch.Tensor:
        ctx.layer, ctx.recipe, ctx.scales, ctx.gradient = layer, recipe, scales, gradient
        return layer.attention.values(name, x, recipe, scales) if name else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: TransformerLayer = ctx.layer
        dx = dy
        if ctx.gradient:
            rounded = dy.to(layer.qkv.dtype)
            if ctx.gradient in _BEFORE:
                layer.report(_BEFORE[ctx.gradient], rounded.flatten(0, -2))
            dx = layer.attention.values(ctx.gradient, rounded, ctx.recipe, ctx.scales).to(dy.dtype)
        if ctx.gradient == _NAMES[-1] and ctx.recipe.history:
            layer.attention.end_backward(ctx.recipe)
        return None, None, None, None, None, dx
