"""Attention kernels in float32 on the CPU: right ones of many schedules, and hooks for wrong ones.

The schedule is that of decode kernels: splits of the keys, a running maximum in tiles of each split, and a merge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.contracts.attention import SCALE

POWERS = {torch.float8_e4m3fn: 2.0**8, torch.float8_e5m2: 2.0**7}
"""Factors of 8-bit weights."""


def polynomial(x: torch.Tensor) -> torch.Tensor:
    """2ˣ by the polynomial of FlashAttention-4, flash_attn/cute/utils.py at 0251105."""
    x = x.clamp(min=-127.0)
    whole = x.floor()
    f = x - whole
    p = 1.0 + f * (0.6951461434364319 + f * (0.2275643348693848 + f * 0.0771189033985138))
    return torch.ldexp(p, whole.int())


def exp2(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x)


def noisy(x: torch.Tensor) -> torch.Tensor:
    """2ˣ, off by up to 2 ulp, but exact at integers."""
    found = torch.exp2(x)
    noise = (torch.arange(x.numel()).view(x.shape) * 7919 % 5 - 2) * 2.0**-23
    return torch.where(x == x.round(), found, found * (1 + noise))


@dataclass
class Attention:
    """A right kernel. Its methods are what a wrong kernel does in another way."""

    splits: int = 1
    tile: int = 16
    p: torch.dtype = torch.float32
    rounded_sum: bool = False
    """Whether l is the sum of the rounded weights."""
    lag: float = 0.0
    """The maximum grows only if it does so by more, in base 2."""
    backward: bool = False
    """Whether tiles run from the last to the first."""
    two_passes: bool = False
    power: Any = exp2
    dtype: torch.dtype = torch.float32
    by_lse: bool = False
    """Whether splits are merged by their log-sum-exps, else by their sums and maxima."""
    rounded_keys: bool = False

    def attention(
        self, q, cache, pages, lengths, q_lengths, recipe, *, k_scale=None, v_scale=None, scale=SCALE, causal=True
    ):
        first = (q_lengths.cumsum(0) - q_lengths).tolist()
        out = torch.zeros(*q.shape[:2], cache.values.shape[3], dtype=q.dtype)
        lse = torch.zeros(q.shape[:2])
        for request, (length, rows) in enumerate(zip(lengths.tolist(), q_lengths.tolist(), strict=True)):
            k, v = (
                self.tokens(half, pages, request, self.length(length))
                for half in (self.keys(cache), self.values(cache))
            )
            k, v = k * 1.0, v * 1.0
            k_factor, v_factor = (s.to(self.dtype) for s in self.scales(k_scale, v_scale))
            if self.rounded_keys:
                k, k_factor = (k * k_factor).to(q.dtype).to(self.dtype), torch.ones(1, dtype=self.dtype)
            for row in range(rows):
                seen = self.seen(row, rows, length) if causal else length
                for head in range(q.shape[1]):
                    of = self.kv_head(head, q.shape[1], k.shape[1])
                    x = q[self.row(first[request] + row, len(q)), head].to(self.dtype)
                    s = (k[:, of] @ x) * (k_factor * self.factor(scale, len(x)) * math.log2(math.e))
                    s = self.masked(s, seen)
                    o, total, m = self.weighted(s, v[:, self.value_head(of, v.shape[1])])
                    out[first[request] + row, head] = self.result(o, total, v_factor).to(q.dtype)
                    lse[first[request] + row, head] = (m + torch.log2(total)) * math.log(2)
        return out, lse

    # ---- what is read ------------------------------------------------------------------------------------------------

    def keys(self, cache):
        return cache.keys

    def values(self, cache):
        return cache.values

    def tokens(self, half, pages, request, length):
        cells = half.view(torch.float8_e4m3fn)[self.table(pages, request)].flatten(0, 1)
        return cells[:length].to(self.dtype)

    def table(self, pages, request):
        return pages[request]

    def length(self, length):
        return length

    def row(self, row, rows):
        return row

    def kv_head(self, head, q_heads, heads):
        return head // (q_heads // heads)

    def value_head(self, head, heads):
        return head

    def scales(self, k_scale, v_scale):
        return k_scale, v_scale

    def factor(self, scale, dim):
        return scale

    def seen(self, row, rows, length):
        return length - rows + row + 1

    def masked(self, s, seen):
        return s[:seen]

    # ---- softmax -----------------------------------------------------------------------------------------------------

    def weighted(self, s, v):
        parts = torch.arange(len(s)).chunk(self.splits)
        return self.merged([self.split(s[part], v[part]) for part in parts])

    def split(self, s, v):
        """(O, total, m) of some keys, O not divided by total."""
        o, total, m = v.new_zeros(v.shape[1]), v.new_zeros(()), v.new_full((), -math.inf)
        if self.two_passes:
            m = s.amax()
        tiles = list(torch.arange(len(s)).split(self.tile))
        for tile in reversed(tiles) if self.backward else tiles:
            largest = torch.maximum(m, s[tile].amax())
            new = largest if m == -math.inf or largest - m > self.lag else m
            alpha = self.power(m - new) if m > -math.inf else torch.zeros_like(m)
            p = self.power(s[tile] - new)
            rounded = self.to_p(p)
            o, total = self.rescaled(o, total, alpha)
            o = o + rounded @ v[tile]
            total = total + (rounded if self.rounded_sum else p).sum()
            m = new
        return o, total, m

    def to_p(self, p):
        power = POWERS.get(self.p, 1.0)
        return (p * power).to(self.p).to(self.dtype) / power

    def rescaled(self, o, total, alpha):
        return o * alpha, total * alpha

    def merged(self, parts):
        if len(parts) == 1:
            return parts[0]
        if self.by_lse:
            lse = torch.stack([m + torch.log2(total) for _, total, m in parts])
            weights = self.power(lse - lse.amax())
            o = sum((w * o / total for w, (o, total, _) in zip(weights, parts, strict=True)), torch.zeros(()))
            return o, weights.sum(), lse.amax()
        m = torch.stack([m for _, _, m in parts]).amax()
        weights = [self.power(part[2] - m) for part in parts]
        o = sum((w * o for w, (o, _, _) in zip(weights, parts, strict=True)), torch.zeros(()))
        return o, sum((w * total for w, (_, total, _) in zip(weights, parts, strict=True)), torch.zeros(())), m

    def result(self, o, total, v_factor):
        return o / total * v_factor


E4M3, E5M2, BF16, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16
RIGHT = {
    "plain": Attention(),
    "two passes": Attention(two_passes=True),
    "one tile": Attention(tile=1 << 20),
    "tiles of 32": Attention(tile=32),
    "tiles of 64": Attention(tile=64),
    "from the last tile": Attention(backward=True),
    "from the last tile of 32, bf16": Attention(backward=True, tile=32, p=BF16),
    "two splits": Attention(splits=2),
    "three splits": Attention(splits=3),
    "seven splits": Attention(splits=7, tile=1 << 20),
    "two splits by lse": Attention(splits=2, by_lse=True),
    "five splits by lse, bf16": Attention(splits=5, by_lse=True, p=BF16, tile=1 << 20),
    "bf16": Attention(p=BF16),
    "bf16, sum of rounded": Attention(p=BF16, rounded_sum=True),
    "fp16": Attention(p=FP16),
    "fp16, sum of rounded": Attention(p=FP16, rounded_sum=True),
    "e4m3": Attention(p=E4M3),
    "e4m3, sum of rounded, splits": Attention(p=E4M3, rounded_sum=True, splits=2, tile=1 << 20),
    "e5m2": Attention(p=E5M2, tile=32),
    "lag 8": Attention(lag=8.0),
    "lag 8, bf16": Attention(lag=8.0, p=BF16, backward=True),
    "lag 8, polynomial, fp16": Attention(lag=8.0, p=FP16, power=polynomial),
    "polynomial": Attention(power=polynomial),
    "polynomial, bf16, splits": Attention(power=polynomial, p=BF16, splits=4),
    "noisy exp2": Attention(power=noisy),
    "noisy exp2, bf16, splits by lse": Attention(power=noisy, p=BF16, splits=3, by_lse=True),
    "float64": Attention(dtype=torch.float64),
    "float64, bf16, from the last tile": Attention(dtype=torch.float64, p=BF16, backward=True),
    "rounded keys": Attention(rounded_keys=True),
}  # fmt: skip
"""Right kernels. No tile is smaller than 16 keys, and each begins at a multiple of 16 in its split."""
