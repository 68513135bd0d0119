"""Collectives in plain torch, right and wrong, which processes of a group run in kernel hosts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

import narrowgauge
from narrowgauge.spec.quantized import Quantized


def gathered(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


class Kernels:
    """Each rank gathers the codes and scales of all, and computes everything. Parts of it are methods, which wrong
    kernels change."""

    declares: ClassVar[dict[str, Any]] = {}

    def quantized(self, x, recipe, group):
        """Codes and scales of all ranks."""
        q = narrowgauge.quantize(x, recipe)
        return list(zip(gathered(q.codes, group), gathered(q.scales, group), strict=True))

    def decoded(self, parts, recipe, shape, group):
        return [narrowgauge.dequantize(Quantized(c, s, None, recipe, shape)) for c, s in parts]

    def summed(self, values, group):
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    def requantized(self, total, x, recipe, group):
        return narrowgauge.quantize(total, recipe)

    def total(self, x, recipe, group):
        shape = (x.shape[0], x.shape[1])
        return self.summed(self.decoded(self.quantized(x, recipe, group), recipe, shape, group), group)

    def all_gather(self, q, group):
        return torch.cat(gathered(q.codes, group)), torch.cat(gathered(q.scales, group))

    def all_reduce(self, x, recipe, group):
        total = self.total(x, recipe, group)
        return self.output(narrowgauge.dequantize(self.requantized(total, x, recipe, group)).to(x.dtype), total, group)

    def output(self, y, total, group):
        return y

    def reduce_scatter(self, x, recipe, group):
        rows, ranks, rank = x.shape[0], dist.get_world_size(group), self.stripe(group)
        height = -(-rows // ranks)
        return self.total(x, recipe, group)[rank * height : (rank + 1) * height].to(x.dtype)

    def stripe(self, group):
        return dist.get_rank(group)

    def all_reduce_norm_quantize(self, x, weight, recipe, group, *, residual, eps=1e-6, bias=0.0, scale=None):
        z = self.summed([v.float() for v in gathered(x, group)], group).to(x.dtype).float() + residual.float()
        stored = z.to(x.dtype)
        z = stored.float()
        y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * (weight.float() + bias)
        if scale is not None:
            return stored, narrowgauge.quantize(y.to(x.dtype), recipe, scale=scale).codes
        q = narrowgauge.quantize(y.to(x.dtype), recipe)
        return stored, q.codes, q.scales


class Right(Kernels):
    """Another name for the right kernels."""
