"""TransformerLayer: attention and a feed-forward network with four quantized products.

h = x + proj(attention(qkv(x))), y = h + fc2(gelu(fc1(h))); qkv and fc1 begin with a norm. Attention and GELU are
computed in high precision and rounded once to the dtype of the layer. A residual is a float32 sum and a cast.
A training recipe with `quantizes_attention` also quantizes the operands of the attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.reference.high_precision import quantized_attention as steps
from narrowgauge.reference.high_precision.additions import residual_sum
from narrowgauge.reference.high_precision.attention import attention_backward, attention_forward
from narrowgauge.reference.high_precision.bounded import Bounded, exactly
from narrowgauge.reference.high_precision.gelu import gelu_backward, gelu_forward
from narrowgauge.reference.high_precision.norm import Kind
from narrowgauge.reference.modules.amax_history import AmaxHistory
from narrowgauge.reference.modules.composed import Composed
from narrowgauge.reference.modules.layer_norm_linear import LayerNormLinear
from narrowgauge.reference.modules.linear import Linear
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.modules.arguments import check_batch, check_heads
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.modules.training import TrainingRecipe


class TransformerLayer(Composed):
    """A pre-norm layer with causal attention: children `qkv` (hidden → 3·hidden), `proj`, `fc1` (→ ffn) and `fc2`.

    The output of qkv is q, k and v in this order, each with `heads` heads of hidden/heads numbers. The seeds of the
    children are seed, seed + 1, seed + 2 and seed + 3. The layer has no dropout. Other options: `LayerNormLinear`.
    Raises the errors of `LayerNormLinear`, and ValueError if the heads do not divide the hidden size.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        heads: int,
        *,
        norm: Kind = "layer",
        eps: float = 1e-5,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
        accumulate: bool = False,
        quantized_parameters: bool = False,
        delay_wgrad: bool = False,
    ) -> None:
        super().__init__()
        check_heads(hidden, heads)
        self.hidden, self.heads, self.dtype = hidden, heads, dtype
        options: dict[str, Any] = {
            "dtype": dtype, "device": device, "accumulate": accumulate, "quantized_parameters": quantized_parameters,
            "delay_wgrad": delay_wgrad,
        }  # fmt: skip
        self.qkv = LayerNormLinear(hidden, 3 * hidden, bias, norm=norm, eps=eps, seed=seed, **options)
        self.proj = Linear(hidden, hidden, bias, seed=seed + 1, **options)
        self.fc1 = LayerNormLinear(hidden, ffn, bias, norm=norm, eps=eps, seed=seed + 2, **options)
        self.fc2 = Linear(ffn, hidden, bias, seed=seed + 3, **options)
        self.attention = AttentionOperands()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S, hidden) to the same shape, in the dtype of the layer.

        Raises ValueError for another shape, and the errors of the children.
        """
        check_batch(x, self.hidden)
        # Function.apply has no types; every call below returns tensors.
        residual, branch = _Fork.apply(x, self, "dx")  # type: ignore[no-untyped-call]
        recipe, qkv = current(), self.qkv(branch)
        if recipe is not None and recipe.quantizes_attention:
            attention = _QuantizedAttention.apply(qkv, self, recipe)  # type: ignore[no-untyped-call]
        else:
            attention = _Attention.apply(qkv, self)  # type: ignore[no-untyped-call]
        h = _Sum.apply(residual, self.proj(attention), self, "h")  # type: ignore[no-untyped-call]
        residual, branch = _Fork.apply(h, self, "dh")  # type: ignore[no-untyped-call]
        gelu = _Gelu.apply(self.fc1(branch), self)  # type: ignore[no-untyped-call]
        y: torch.Tensor = _Sum.apply(residual, self.fc2(gelu), self, "y")  # type: ignore[no-untyped-call]
        return y

    def backward_dw(self) -> None:
        """`Linear.backward_dw` of the four products, in the order of a backward pass."""
        for child in (self.fc2, self.fc1, self.proj, self.qkv):
            child.backward_dw()


class AttentionOperands(AmaxHistory):
    """The quantized operands of an attention, and under delayed scaling their history (H, 6) and scales (6,)."""

    columns = 6
    gradients = 3
    names = ("qkv", "s", "o", "do", "dp", "dqkv")
    """In the order of the columns."""

    def operand(
        self,
        name: str,
        x: torch.Tensor,
        recipe: TrainingRecipe,
        scales: torch.Tensor | None = None,
        amaxes: dict[int, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """The values of `x`, any shape: quantized as a matrix, reported, float32.

        `scales`: at the start of the forward, None for a gradient. `amaxes`: gets the amax of an operand of the
        forward.
        """
        column = self.names.index(name)
        of_gradient = column >= self.gradients
        if of_gradient and recipe.history:
            _, scales = self.delayed_state()
        scale = None if scales is None else scales[column : column + 1].clone()
        q = quantize(x.reshape(-1, x.shape[-1]), recipe.grad if of_gradient else recipe.input, scale=scale)
        self.observe(name, q)
        if amaxes is not None:
            amaxes[column] = q.amax
        elif recipe.history:
            self.record(column, q.required_amax)
        return dequantize(q, dtype=torch.float32).view(x.shape)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual_sum(a, b).value.to(a.dtype)


class _Sum(torch.autograd.Function):
    """A residual addition; both operands have the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, layer: TransformerLayer, name: str) -> torch.Tensor:
        y = _add(a, b)
        layer.observe(name, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return dy, dy, None, None


class _Fork(torch.autograd.Function):
    """Copies a tensor for the residual and for the branch; the two gradients are added like a residual."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: TransformerLayer, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.layer, ctx.name = layer, name
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx = _add(residual, branch)
        ctx.layer.observe(ctx.name, dx)
        return dx, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, layer: TransformerLayer) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(qkv)
        y = _joined(attention_forward(*_heads(qkv, layer.heads))).to(qkv.dtype)
        layer.observe("attention", y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (qkv,) = ctx.saved_tensors
        layer: TransformerLayer = ctx.layer
        (do,) = _heads(dy, layer.heads, parts=1)
        gradients = attention_backward(do, *_heads(qkv, layer.heads))
        dqkv = torch.cat([_joined(gradient) for gradient in gradients], dim=2).to(qkv.dtype)
        layer.observe("dqkv", dqkv)
        return dqkv, None


class _QuantizedAttention(torch.autograd.Function):
    """Attention of quantized q, k, v and S. Its output, and the gradients dO, dP and dqkv, are quantized as well."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, layer: TransformerLayer, recipe: TrainingRecipe) -> torch.Tensor:
        held, amaxes = layer.attention, dict[int, torch.Tensor | None]()
        operand = partial(
            held.operand, recipe=recipe, scales=held.present_scales(recipe, qkv.device), amaxes=amaxes
        )  # fmt: skip
        decoded = operand("qkv", qkv)
        q, k, v = (exactly(part) for part in _heads(decoded, layer.heads))
        s = steps.softmax(q, k).value.to(layer.dtype)
        layer.observe("softmax", s.flatten(0, 2))
        weights = operand("s", s)
        out = _joined(steps.weighted_values(exactly(weights), v)).to(layer.dtype)
        layer.observe("attention", out)
        ctx.layer, ctx.recipe = layer, recipe
        ctx.save_for_backward(decoded, s, weights)
        attended = operand("o", out).to(layer.dtype)
        held.record_forward(recipe, amaxes)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: TransformerLayer = ctx.layer
        decoded, s, weights = ctx.saved_tensors
        operand = partial(layer.attention.operand, recipe=ctx.recipe)
        q, k, v = (exactly(part) for part in _heads(decoded, layer.heads))
        (do,) = (exactly(part) for part in _heads(operand("do", dy), layer.heads, parts=1))
        dscores = steps.scores_gradient(do, v, exactly(s), layer.dtype).value.to(layer.dtype)
        layer.observe("dscores", dscores.flatten(0, 2))
        dp = exactly(operand("dp", dscores))
        gradients = steps.query_gradient(dp, k), steps.key_gradient(dp, q), steps.value_gradient(exactly(weights), do)
        dqkv = torch.cat([_joined(gradient) for gradient in gradients], dim=2).to(layer.dtype)
        layer.observe("dqkv", dqkv)
        dx = operand("dqkv", dqkv).to(layer.dtype)
        layer.attention.end_backward(ctx.recipe)
        return dx, None, None


def _joined(x: Bounded) -> torch.Tensor:
    """The values of (B, heads, S, d) as (B, S, heads·d)."""
    return x.value.transpose(1, 2).flatten(2)


def _heads(x: torch.Tensor, heads: int, parts: int = 3) -> list[torch.Tensor]:
    """The parts of `x` (B, S, parts·hidden), (B, heads, S, hidden/heads) each."""
    return [part.reshape(*part.shape[:2], heads, -1).transpose(1, 2) for part in x.chunk(parts, dim=2)]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: TransformerLayer) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        y = gelu_forward(x).value.to(x.dtype)
        layer.observe("gelu", y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = gelu_backward(dy, x).value.to(x.dtype)
        ctx.layer.observe("dgelu", dx)
        return dx, None
