"""Attention kernels in float32 on the CPU: right kernels of many schedules, and hooks for wrong kernels.

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
    """A right kernel. A wrong kernel overrides its methods."""

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

    def attention_sinks(self, q, cache, pages, lengths, q_lengths, sinks, recipe, **options):
        return self.attention(q, cache, pages, lengths, q_lengths, recipe, sinks=sinks, **options)

    def attention(
        self, q, cache, pages, lengths, q_lengths, recipe, *, k_scale=None, v_scale=None, scale=SCALE, causal=True,
        window=0, softcap=0.0, sinks=None,
    ):  # fmt: skip
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
                    s = self.capped(s, softcap)
                    begin = self.begin(seen, window)
                    s, own = self.masked(s, seen)[begin:], v[begin:]
                    o, total, m = self.weighted(s, own[:, self.value_head(of, v.shape[1])])
                    if sinks is not None:
                        total = self.with_sink(total, m, sinks[head].to(self.dtype) * math.log2(math.e))
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

    def begin(self, seen, window):
        return max(0, seen - window) if window else 0

    def capped(self, s, softcap):
        if not softcap:
            return s
        return torch.tanh(s * math.log(2) / softcap) * softcap * math.log2(math.e)

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

    def with_sink(self, total, m, sink):
        return total + torch.exp2(sink - m)

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


# ---- wrong kernels ---------------------------------------------------------------------------------------------------


def wrong(**methods: Any) -> type[Attention]:
    """A kernel with other methods."""
    return type("Wrong", (Attention,), methods)


def _scales(function: Any) -> type[Attention]:
    return wrong(scales=lambda self, k, v: function(k, v))


def _head(function: Any) -> type[Attention]:
    return wrong(kv_head=lambda self, head, q_heads, heads: function(head, q_heads, heads))


def _seen(function: Any) -> type[Attention]:
    return wrong(seen=lambda self, row, rows, length: function(row, rows, length))


def _keys_out(function: Any) -> type[Attention]:
    """A kernel that leaves out keys, bool (S,), of a row that sees `seen`."""

    def masked(self: Attention, s: torch.Tensor, seen: int) -> torch.Tensor:
        # A finite logit: a tile without keys has no maximum of −∞, and the next tile rescales its sums to 0.
        return s[:seen].masked_fill(function(torch.arange(len(s[:seen])), len(s[:seen])), -1e30)

    return wrong(masked=masked)


def _table(function: Any) -> type[Attention]:
    return wrong(table=lambda self, pages, request: function(pages, request))


def _merged_equally(self, parts):
    _, total, m = Attention.merged(self, parts)
    return sum((o / own for o, own, _ in parts), torch.zeros(())) / len(parts) * total, total, m


def _merged_base(self, parts):
    """Log-sum-exps of base e that are read as base 2."""
    lse = torch.stack([(m + torch.log2(total)) * math.log(2) for _, total, m in parts])
    weights = exp2(lse - lse.amax())
    o = sum((w * o / total for w, (o, total, _) in zip(weights, parts, strict=True)), torch.zeros(()))
    return o, weights.sum(), lse.amax()


def _offset_0(self, half, pages, request, length):
    cells = half.view(torch.float8_e4m3fn)[self.table(pages, request)]
    return cells[:, :1].expand_as(cells).flatten(0, 1)[:length].to(self.dtype)


def _exchanged(self, half, pages, request, length):
    """Page and offset are exchanged."""
    count, page = half.shape[:2]
    place = torch.arange(pages.shape[1] * page)
    slot = place % page * count + pages[request][place // page]
    return half.view(torch.float8_e4m3fn).flatten(0, 1)[slot % (count * page)][:length].to(self.dtype)


def _pages_of(half: str, function: Any) -> type[Attention]:
    """A kernel that reads wrong pages for the keys, or for the values."""

    def of_cache(self, cache):
        self.other = getattr(cache, half)
        return self.other

    def tokens(self, held, pages, request, length):
        own = pages.clone()
        if held is self.other:
            own[request] = function(own[request])
        return Attention.tokens(self, held, own, request, length)

    return wrong(**{half: of_cache, "tokens": tokens})


def _next_page(own):
    return own + 1 - (own == own.max()).long()


def _dims(function: Any) -> type[Attention]:
    def tokens(self, half, pages, request, length):
        found = Attention.tokens(self, half, pages, request, length)
        return function(found)

    return wrong(tokens=tokens)


def _last_dims_out(x):
    x = x.clone()
    x[..., -16:] = 0
    return x


def _l_not_rescaled(self, o, total, alpha):
    return o * alpha, total


def _o_not_rescaled(self, o, total, alpha):
    return o, total * alpha


def _p_unscaled(self, p):
    return p.to(E4M3).to(self.dtype)


def _p_truncated(self, p):
    return torch.where(p < 2.0**-9, 0.0, p)


def _output_e4m3(self, o, total, v_factor):
    return (o / total * v_factor).to(E4M3).float()


WRONG: dict[str, tuple[Attention, str]] = {
    "k scale ignored": (_scales(lambda k, v: (k * 0 + 1, v))(), "given scale is left out"),
    "v scale ignored": (_scales(lambda k, v: (k, v * 0 + 1))(), "given scale is left out"),
    "scales exchanged": (_scales(lambda k, v: (v, k))(), "k_scale and v_scale are exchanged"),
    "k scale twice": (_scales(lambda k, v: (k * k, v))(), "given scale is a factor twice"),
    "v scale twice": (_scales(lambda k, v: (k, v * v))(), "given scale is a factor twice"),
    "v scale inverted": (_scales(lambda k, v: (k, 1 / v))(), "given scale is inverted"),
    "head modulo": (_head(lambda h, q, n: h % n)(), "modulo"),
    "head 0": (_head(lambda h, q, n: 0)(), "head 0 is read in place of"),
    "next head": (_head(lambda h, q, n: (h // (q // n) + 1) % n)(), "next head"),
    "heads reversed": (_head(lambda h, q, n: n - 1 - h // (q // n))(), "reverse order"),
    "head 0 for 1": (_head(lambda h, q, n: 0 if h // (q // n) == 1 else h // (q // n))(), "head 0 is read"),
    "next value head": (wrong(value_head=lambda self, head, heads: (head + 1) % heads)(), "next head"),
    "last key": (_seen(lambda i, n, length: length - n + i)(), "last key"),
    "one key more": (_seen(lambda i, n, length: min(length, length - n + i + 2))(), "1 more"),
    "first key": (_keys_out(lambda t, n: t < 1)(), "first key"),
    "key 17": (_keys_out(lambda t, n: t == 17)(), "key 17"),
    "keys 16 to 31": (_keys_out(lambda t, n: t // 16 == 1)(), "keys 16 to 31"),
    "to a border": (_keys_out(lambda t, n: t % 16 == 15)(), "last key of each tile of 16"),
    "from a border": (_keys_out(lambda t, n: (t > 0) & (t % 16 == 0))(), "first key of each tile of 16"),
    "last tile": (_keys_out(lambda t, n: (t >= (n - 1) // 16 * 16) & (t > 15))(), "last tile of 16"),
    "last split of 2": (_keys_out(lambda t, n: (t >= (n + 1) // 2) & (t > 0))(), "split 1 of 2"),
    "first split of 3": (_keys_out(lambda t, n: t < (n + 2) // 3)(), "split 0 of 3"),
    "mask aligned to the first": (_seen(lambda i, n, length: i + 1)(), "lengths"),
    "no mask": (_seen(lambda i, n, length: length)(), "not subtracted"),
    "next request's pages": (_table(lambda p, r: p[(r + 1) % len(p)])(), "pages is that of the next"),
    "pages of request 0": (_table(lambda p, r: p[0])(), "pages is that of"),
    "values of reversed pages": (_pages_of("values", lambda own: own.flip(0))(), "values of page"),
    "values of the next page": (_pages_of("values", _next_page)(), "values of page"),
    "keys of reversed pages": (_pages_of("keys", lambda own: own.flip(0))(), "run backwards in pages"),
    "keys of the next page": (_pages_of("keys", lambda own: (own + 1) % 9)(), "in the next page"),
    "keys of the next entry": (_pages_of("keys", lambda own: own.roll(-1))(), "next entry"),
    "values of the entry before": (_pages_of("values", lambda own: own[[0, *range(len(own) - 1)]])(), "entry before"),
    "offset ignored": (wrong(tokens=_offset_0)(), "first slot of its page"),
    "page and offset exchanged": (wrong(tokens=_exchanged)(), "exchanged"),
    "scale 1/dim": (wrong(factor=lambda self, scale, dim: 1 / dim)(), "0.015625 in place of"),
    "scale doubled": (wrong(factor=lambda self, scale, dim: 2 * scale)(), "in place of 0.0866434"),
    "scale left out": (wrong(factor=lambda self, scale, dim: 1.0)(), "1 in place of 0.0866434"),
    "o not rescaled": (wrong(rescaled=_o_not_rescaled)(), "not rescaled"),
    "l not rescaled": (wrong(rescaled=_l_not_rescaled)(), "not rescaled"),
    "nothing rescaled": (wrong(rescaled=lambda self, o, total, alpha: (o, total))(), "not rescaled"),
    "splits averaged": (wrong(merged=_merged_equally)(splits=2, tile=1 << 20), "averaged"),
    "three splits averaged": (wrong(merged=_merged_equally)(splits=3, tile=1 << 20), "averaged"),
    "base of a merge": (wrong(merged=_merged_base)(splits=2, tile=1 << 20), ""),
    "output in e4m3": (wrong(result=_output_e4m3)(), ""),
    "p in e4m3 without its factor": (wrong(to_p=_p_unscaled)(), ""),
    "not divided by l": (wrong(result=lambda self, o, total, v: o * v)(), "not divided"),
    "next row": (wrong(row=lambda self, row, rows: (row + 1) % rows)(), "q is that of the next row"),
    "row 0": (wrong(row=lambda self, row, rows: 0)(), "row 0"),
    "last dimensions": (_dims(_last_dims_out)(), ""),
    "next dimension": (wrong(tokens=lambda self, *a: Attention.tokens(self, *a).roll(-1, -1))(), ""),
    "keys for values": (wrong(values=lambda self, cache: cache.keys)(), "keys are in place"),
    "base 2 for e": (wrong(factor=lambda self, scale, dim: scale / math.log2(math.e))(), "exp2 in place"),
    "last 8 keys": (_keys_out(lambda t, n: (t >= n - 8) & (n > 8))(), "last 8 keys"),
}
"""Wrong kernels, and words of the cause."""
