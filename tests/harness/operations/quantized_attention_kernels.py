"""Layers with FP8 attention in plain torch: right kernels, and kernels with a single mistake in one step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.native.modules.transformer import TransformerLayer
from narrowgauge.reference.ops import dequantize, quantize
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.recipes import Recipe, find_recipe

Tensor = torch.Tensor


class Kernel:
    """The steps of a right kernel. q, k, v, out and their gradients are (B, heads, S, d), float32."""

    decode: torch.dtype | None = None
    """Dtype to which operands are decoded; None: that of the layer."""
    hidden = False
    """Whether the softmax and the gradient of the scores stay in registers."""

    def operand(self, name: str, x: Tensor, recipe: Recipe) -> tuple[Any, Tensor]:
        """The report, and the values in the products."""
        q = quantize(x, recipe)
        return q, dequantize(q, dtype=self.decode or x.dtype)

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """S."""
        return self.masked(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def masked(self, scores: Tensor) -> Tensor:
        """Scores, −∞ behind the query."""
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)

    def weighted(self, s: Tensor, v: Tensor) -> Tensor:
        """O of the quantized S."""
        return s @ v

    def row(self, s: Tensor, ds: Tensor, do: Tensor, out: Tensor) -> Tensor:
        """Σ S∘dS of each row."""
        return (s * ds).sum(-1, keepdim=True)

    def dscores(self, s: Tensor, weights: Tensor, do: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """dP of S and of the quantized S, `weights`."""
        ds = do @ v.mT
        return s * (ds - self.row(s, ds, do, out))

    def dq(self, dp: Tensor, k: Tensor) -> Tensor:
        """Gradient of q."""
        return dp @ k / k.shape[-1] ** 0.5

    def dk(self, dp: Tensor, q: Tensor) -> Tensor:
        """Gradient of k."""
        return dp.mT @ q / q.shape[-1] ** 0.5

    def dv(self, s: Tensor, weights: Tensor, do: Tensor) -> Tensor:
        """Gradient of v."""
        return weights.mT @ do


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layer: Any, kernel: Kernel, recipe: Any) -> Tensor:
        heads, dtype = partial(_heads, layer), qkv.dtype

        def operand(name: str, x: Tensor, recipe: Recipe = recipe.input) -> Tensor:
            reported, values = kernel.operand(name, x.reshape(-1, x.shape[-1]), recipe)
            layer.attention.report(name, reported)
            return values.view(x.shape)

        ctx.saved, ctx.layer, ctx.kernel, ctx.recipe, ctx.operand = [], layer, kernel, recipe, operand
        q, k, v = (heads(part) for part in operand("qkv", qkv).chunk(3, -1))
        s = kernel.softmax(q, k)
        if not kernel.hidden:
            layer.report("softmax", s.to(dtype).flatten(0, 2))
        weights = operand("s", s.to(dtype)).float()
        out = _rows(kernel.weighted(weights, v)).to(dtype)
        layer.report("attention", out)
        ctx.saved = q, k, v, s, weights, out
        return operand("o", out).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, s, weights, out), layer, kernel = ctx.saved, ctx.layer, ctx.kernel
        heads, dtype, grad = partial(_heads, layer), dy.dtype, partial(ctx.operand, recipe=ctx.recipe.grad)
        do = heads(grad("do", dy))
        dscores = kernel.dscores(s, weights, do, v, heads(out)).to(dtype)
        if not kernel.hidden:
            layer.report("dscores", dscores.flatten(0, 2))
        dp = grad("dp", dscores).float()
        gradients = kernel.dq(dp, k), kernel.dk(dp, q), kernel.dv(s, weights, do)
        dqkv = torch.cat([_rows(gradient) for gradient in gradients], -1).to(dtype)
        layer.report("dqkv", dqkv)
        return grad("dqkv", dqkv).to(dtype), None, None, None


def _heads(layer: Any, x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], layer.heads, -1).transpose(1, 2).float()


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def layer_of(kernel: Kernel) -> type[TransformerLayer]:
    """The native layer with the attention of a kernel."""

    class Layer(TransformerLayer):
        def _attend(self, qkv: Tensor) -> Tensor:
            return _Attention.apply(qkv, self, kernel, current())

    return Layer


# Right kernels.


class Exact(Kernel):
    """Operands are decoded in float32."""

    decode = torch.float32


class RoundedGradient(Kernel):
    """S and dS are stored in the dtype of the layer, as by two separate products."""

    def dscores(self, s: Tensor, weights: Tensor, do: Tensor, v: Tensor, out: Tensor) -> Tensor:
        s, ds = s.bfloat16().float(), (do @ v.mT).bfloat16().float()
        return s * (ds - self.row(s, ds, do, out))


class Online(Exact):
    """A softmax over blocks of 4 keys with a running maximum, in powers of two."""

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.masked(q @ k.mT * (q.shape[-1] ** -0.5 * 1.4426950408889634))
        top = torch.full_like(scores[..., :1], -torch.inf)
        weights, total = torch.zeros_like(scores), torch.zeros_like(top)
        for first in range(0, scores.shape[-1], 4):
            block = scores[..., first : first + 4]
            new = torch.maximum(top, block.amax(-1, keepdim=True))
            factor = torch.exp2(top - new)
            weights, total, top = weights * factor, total * factor, new
            weights[..., first : first + 4] = torch.exp2(block - top)
            total = total + weights[..., first : first + 4].sum(-1, keepdim=True)
        return weights / total


class Reversed(Exact):
    """Sums in the reversed order of keys and of elements."""

    def weighted(self, s: Tensor, v: Tensor) -> Tensor:
        return s.flip(-1) @ v.flip(-2)

    def dq(self, dp: Tensor, k: Tensor) -> Tensor:
        return super().dq(dp.flip(-1), k.flip(-2))


class Fused(Online):
    """A fused kernel, which reports neither the softmax nor the gradient of the scores."""

    hidden = True


RIGHT: tuple[type[Kernel], ...] = (Kernel, Exact, RoundedGradient, Online, Reversed, Fused)


# Wrong kernels with their failing stage and cause.


class LeftOut(Kernel):
    """An operand is reported, and the products take the matrix that is not quantized."""

    def __init__(self, name: str) -> None:
        self.name = name

    def operand(self, name: str, x: Tensor, recipe: Recipe) -> tuple[Any, Tensor]:
        reported, values = super().operand(name, x, recipe)
        return reported, x if name == self.name else values


class OtherFormat(LeftOut):
    """An operand has the format of the other pass: E5M2 forward, E4M3 backward."""

    def operand(self, name: str, x: Tensor, recipe: Recipe) -> tuple[Any, Tensor]:
        if name == self.name:
            other = {"E4M3": "fp8-current-e5m2", "E5M2": "fp8-current-e4m3"}[recipe.element.name]
            q, values = Kernel.operand(self, name, x, find_recipe(other))
            return replace(q, recipe=recipe), values
        return Kernel.operand(self, name, x, recipe)


class OtherScale(Kernel):
    """An operand is decoded by the scale of the operand before."""

    def __init__(self, name: str) -> None:
        self.name, self.before = name, 1.0

    def operand(self, name: str, x: Tensor, recipe: Recipe) -> tuple[Any, Tensor]:
        q, values = super().operand(name, x, recipe)
        before, self.before = self.before, float(q.scales)
        return q, values * (before / self.before) if name == self.name else values


class NoScale(LeftOut):
    """The codes of an operand are taken for its values."""

    def operand(self, name: str, x: Tensor, recipe: Recipe) -> tuple[Any, Tensor]:
        q, values = Kernel.operand(self, name, x, recipe)
        return q, values / float(q.scales) if name == self.name else values


class InverseScale(LeftOut):
    """An operand reports its encode scale."""

    def operand(self, name: str, x: Tensor, recipe: Recipe) -> tuple[Any, Tensor]:
        q, values = Kernel.operand(self, name, x, recipe)
        return (replace(q, scales=1 / q.scales), values) if name == self.name else (q, values)


class Swapped(Kernel):
    """The gradient of k is made of k, that of q of k too."""

    def dq(self, dp: Tensor, k: Tensor) -> Tensor:
        self.k = k
        return super().dq(dp, k)

    def dk(self, dp: Tensor, q: Tensor) -> Tensor:
        return super().dk(dp, self.k)


class Wrong(Kernel):
    """A kernel with other steps, by name."""

    def __init__(self, **steps: Any) -> None:
        for name, step in steps.items():
            setattr(self, name, step)
