"""Kernels of the contracts of the package, in plain torch. A subclass changes one method."""

from __future__ import annotations

from typing import Any

import torch

import narrowgauge

Tensor = torch.Tensor


class Kernels:
    """Right kernels: float32 between the casts of the default fields."""

    def quantize(self, y: Tensor, recipe: Any) -> tuple[Tensor | None, ...]:
        q = narrowgauge.quantize(y, recipe)
        return q.codes, q.scales, q.amax

    def mean_square(self, z: Tensor) -> Tensor:
        return z.square().mean(-1, keepdim=True)

    def factor(self, weight: Tensor, zero_centered: bool) -> Tensor:
        return weight.float() + 1 if zero_centered else weight.float()

    def silu(self, g: Tensor) -> Tensor:
        return g / (1 + torch.exp(-g))

    def gelu(self, g: Tensor, approximate: str) -> Tensor:
        return torch.nn.functional.gelu(g, approximate="none" if approximate == "erf" else approximate)

    def rmsnorm(self, z: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        return z * torch.rsqrt(self.mean_square(z) + eps) * self.factor(weight, zero_centered)

    def rmsnorm_quantize(self, x, weight, recipe, *, eps=1e-6, zero_centered=False):
        return self.quantize(self.rmsnorm(x.float(), weight, eps, zero_centered).to(x.dtype), recipe)

    def add_rmsnorm_quantize(self, x, residual, weight, recipe, *, eps=1e-6, zero_centered=False):
        z = (x.float() + residual.float()).to(x.dtype)
        codes, scales, amax = self.quantize(self.rmsnorm(z.float(), weight, eps, zero_centered).to(x.dtype), recipe)
        return {"residual": z, "codes": codes, "scales": scales, "amax": amax}

    def layernorm_quantize(self, x, weight, bias, recipe, *, eps=1e-5, zero_centered=False):
        z = x.float()
        d = z - z.mean(-1, keepdim=True)
        y = d * torch.rsqrt(self.mean_square(d) + eps) * self.factor(weight, zero_centered) + bias.float()
        return self.quantize(y.to(x.dtype), recipe)

    def silu_mul_quantize(self, x, recipe):
        gate, up = x.float().chunk(2, -1)
        return self.quantize((self.silu(gate) * up).to(x.dtype), recipe)

    def gelu_mul_quantize(self, x, recipe, *, approximate="tanh"):
        gate, up = x.float().chunk(2, -1)
        return self.quantize((self.gelu(gate, approximate) * up).to(x.dtype), recipe)

    def rope_quantize(self, x, cos, sin, recipe):
        (a, b), cos, sin = x.float().chunk(2, -1), cos.float(), sin.float()
        return self.quantize(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype), recipe)
