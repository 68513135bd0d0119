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
    """Each rank gathers the codes and scales of all, and computes everything. Its parts are methods, overridden by
    wrong kernels."""

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


# ---- wrong kernels ---------------------------------------------------------------------------------------------------


class LastLeftOut(Kernels):
    """The last rank is not added."""

    def summed(self, values, group):
        return super().summed(values[:-1], group)


class FirstLeftOut(Kernels):
    """Rank 0 is not added."""

    def summed(self, values, group):
        return super().summed(values[1:], group)


class OwnTwice(Kernels):
    """Each rank adds its own contribution twice."""

    def summed(self, values, group):
        return super().summed(values, group) + values[dist.get_rank(group)]


class OwnTwiceInStripe(Kernels):
    """The rank that reduces rows adds its own contribution twice, and sends the sum to all."""

    def summed(self, values, group):
        total, ranks = super().summed(values, group), len(values)
        height = -(-len(total) // ranks)
        for rank in range(ranks):
            rows = slice(rank * height, (rank + 1) * height)
            total[rows] = total[rows] + values[rank][rows]
        return total


class OwnScales(Kernels):
    """The scales of the local rank for all slices."""

    def quantized(self, x, recipe, group):
        parts = super().quantized(x, recipe, group)
        return [(codes, parts[dist.get_rank(group)][1]) for codes, _ in parts]

    def all_gather(self, q, group):
        codes, _ = super().all_gather(q, group)
        return codes, torch.cat([q.scales] * dist.get_world_size(group))


class FirstScales(Kernels):
    """The scales of rank 0 for all slices."""

    def quantized(self, x, recipe, group):
        parts = super().quantized(x, recipe, group)
        return [(codes, parts[0][1]) for codes, _ in parts]


class StripesExchanged(Kernels):
    """Each rank takes the stripe of the next rank for its own."""

    def output(self, y, total, group):
        return y.roll(len(y) // dist.get_world_size(group), 0)

    def stripe(self, group):
        return (dist.get_rank(group) + 1) % dist.get_world_size(group)

    def all_gather(self, q, group):
        return tuple(part.roll(len(part) // dist.get_world_size(group), 0) for part in super().all_gather(q, group))


class SumOfCodes(Kernels):
    """Codes are added in place of values."""

    def decoded(self, parts, recipe, shape, group):
        ones = [torch.full_like(s, 127 if s.dtype == torch.uint8 else 1) for _, s in parts]
        return super().decoded([(c, one) for (c, _), one in zip(parts, ones, strict=True)], recipe, shape, group)


class OwnAmax(Kernels):
    """The sum is quantized by the amaxes of the rank's own input."""

    def requantized(self, total, x, recipe, group):
        from narrowgauge.reference.contracts.products import of_statistics
        from narrowgauge.spec.recipes import find_recipe

        return of_statistics(total, x, find_recipe(recipe) if isinstance(recipe, str) else recipe, None)


class FirstAmax(OwnAmax):
    """The sum is quantized by the amaxes of the input of rank 0."""

    def requantized(self, total, x, recipe, group):
        return super().requantized(total, gathered(x, group)[0], recipe, group)


class NotQuantized(Kernels):
    """The contributions are not quantized."""

    def total(self, x, recipe, group):
        return self.summed([v.float() for v in gathered(x, group)], group)


class NotRequantized(Kernels):
    """The sum is not quantized again."""

    def all_reduce(self, x, recipe, group):
        return self.total(x, recipe, group).to(x.dtype)


class Average(Kernels):
    """The average in place of the sum."""

    def summed(self, values, group):
        return super().summed(values, group) / len(values)


class Maximum(Kernels):
    """The maximum in place of the sum."""

    def summed(self, values, group):
        return torch.stack(values).amax(0)


class RoundedHops(Kernels):
    """A ring rounds to bfloat16 at each hop, without the declaration."""

    def summed(self, values, group):
        total = values[0]
        for value in values[1:]:
            total = (total + value).bfloat16().float()
        return total


class Stale(Kernels):
    """The stripes of the other ranks are those of the call before."""

    before: ClassVar[dict[Any, Any]] = {}

    def quantized(self, x, recipe, group):
        parts, key = super().quantized(x, recipe, group), tuple(x.shape)
        old = self.before.get(key, [(torch.zeros_like(c), torch.zeros_like(s)) for c, s in parts])
        self.before[key] = parts
        own = dist.get_rank(group)
        return [parts[rank] if rank == own else old[rank] for rank in range(len(parts))]


class OneRank(Kernels):
    """The last rank alone leaves the first out: ranks hold different bytes."""

    def summed(self, values, group):
        last = dist.get_rank(group) == len(values) - 1
        return super().summed(values[1:] if last else values, group)


class OwnFirst(Kernels):
    """Each rank begins its sum with its own contribution: the order differs from rank to rank."""

    def summed(self, values, group):
        rank = dist.get_rank(group)
        return super().summed(values[rank:] + values[:rank], group)


class ResidualTwice(Kernels):
    """The residual is added by each rank before the sum."""

    def all_reduce_norm_quantize(self, x, weight, recipe, group, *, residual, **options):
        zero = torch.zeros_like(residual)
        own = (x.float() + residual.float()).to(x.dtype)
        return super().all_reduce_norm_quantize(own, weight, recipe, group, residual=zero, **options)


class EpsLeftOut(Kernels):
    """eps is left out of the norm."""

    def all_reduce_norm_quantize(self, x, weight, recipe, group, *, residual, **options):
        return super().all_reduce_norm_quantize(x, weight, recipe, group, residual=residual, **options | {"eps": 0.0})


class ResidualLeftOut(Kernels):
    """The residual is not added."""

    def all_reduce_norm_quantize(self, x, weight, recipe, group, *, residual, **options):
        zero = torch.zeros_like(residual)
        return super().all_reduce_norm_quantize(x, weight, recipe, group, residual=zero, **options)


# ---- other right kernels ---------------------------------------------------------------------------------------------


class Reversed(Kernels):
    """The last rank first."""

    def summed(self, values, group):
        return super().summed(values[::-1], group)


class InFloat64(Kernels):
    """Sums in float64."""

    def summed(self, values, group):
        return super().summed([v.double() for v in values], group).float()


class Fused(Kernels):
    """Products of codes and scales that are added without a rounding, as a fused multiply-add does."""

    def decoded(self, parts, recipe, shape, group):
        from narrowgauge.reference.contracts.products import exact_values

        return [exact_values(Quantized(c, s, None, recipe, shape)).low for c, s in parts]

    def summed(self, values, group):
        total = values[0].float()
        for value in values[1:]:
            total = (total.double() + value.double()).float()
        return total


class OwnStripe(Kernels):
    """A rank keeps its reduced rows as the sum before quantization."""

    declares: ClassVar[dict[str, Any]] = {"all-reduce": {"own_stripe": True}}

    def output(self, y, total, group):
        height, rank = -(-len(y) // dist.get_world_size(group)), dist.get_rank(group)
        rows = slice(rank * height, (rank + 1) * height)
        y[rows] = total[rows].to(y.dtype)
        return y


class OwnStripeUndeclared(OwnStripe):
    """The same without the declaration."""

    declares: ClassVar[dict[str, Any]] = {}
