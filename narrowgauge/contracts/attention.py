"""Attention over a quantized cache in pages: decode, prefill and batches of both.

The fields say how libraries differ. p are the weights of the softmax, l their sum:

- `p`: dtype of the weights of the second product; "e4m3" is a code of 2⁸·p, "e5m2" of 2⁷·p, "any" is any dtype;
- `l`: the sum of the weights before ("exact") or after they are rounded ("rounded"), or "any" of the two;
- `exponential`: exp within 2 ulp ("accurate"), or "any" form, such as the polynomial of FlashAttention-4;
- `decode`: the scale of k multiplies the logits ("folded"), or each k, which is rounded to the dtype of q ("rounded");
- `output`: one rounding of the result, or "two": R(R(Σ p·v/l)·v_scale);
- `base` of the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Literal

from narrowgauge import contract as c
from narrowgauge.contracts.cache import PageLayout

Weights = Literal["any", "float32", "bfloat16", "float16", "e4m3", "e5m2"]
SCALE = 0.08664339756999316
"""fl(ln 2)/8, near 1/√128: logits of small integers are integers in base 2, so that their exponentials are exact."""


@c.contract
def attention(
    q: c.Heads, cache: c.Cache, pages: c.Pages, lengths: c.Lengths, q_lengths: c.QueryLengths, recipe: c.Recipe, *,
    k_scale: c.Scale | None = None, v_scale: c.Scale | None = None, page_layout: PageLayout = "nhd",
    scale: float = SCALE, causal: c.Flag = True,
    p: Weights = "any", l: Literal["any", "exact", "rounded"] = "any",  # noqa: E741  # its name in all sources
    exponential: Literal["any", "accurate"] = "any", decode: Literal["folded", "rounded"] = "folded",
    output: Literal["one", "two"] = "one", base: Literal["e", "2"] = "e",
):  # fmt: skip
    """softmax(scale·q·kᵀ)·v of each row and head of q (queries, q_heads, dim), bfloat16 or float16, and the tokens of
    its request: "output" (queries, q_heads, v_dim), and "lse" (queries, q_heads), float32, the logarithm of the sum of
    exponentials, which a kernel may leave out.

    Request b has q_lengths[b] rows of q, one request behind another, and lengths[b] tokens in the cache. q_heads/heads
    of q share a head of the cache. causal: the last row of a request sees all its tokens, and each row before it one
    token less. recipe, k_scale and v_scale: those of the cache.
    """
    slots, given = c.slots_of(pages, lengths), c.takes_scale(recipe)
    k, v = (
        c.read(half, slots, number if given else None)
        for half, number in ((cache.keys, k_scale), (cache.values, v_scale))
    )
    request, place = c.segments(q_lengths, q)
    keys, factor = (c.decode(k), c.factor(k) * scale) if decode == "folded" else (c.dequantize(k, q.dtype), scale)
    s = c.roundings(c.scores(q, keys, request, lengths) * factor, 2)
    seen = lengths[request] - q_lengths[request] + place + 1.0 if causal else lengths[request]
    s = c.where(c.places(s) < seen, s, -math.inf)
    m = c.largest(s)
    d = c.roundings(s - m, 4, abs(s) + abs(m))
    exact = c.rescaled(c.exp(d, *(("expf", "exp2", "polynomial") if exponential == "any" else ())), d, m)
    rounded = c.weights(exact, d, p)
    sums = {"exact": c.sum(exact), "rounded": c.sum(rounded)}
    total = c.any_of(*sums.values()) if l == "any" else sums[l]
    narrow = p in ("any", "e4m3", "e5m2")
    y = c.weighted_sum(rounded, c.decode(v), request, lengths, narrow=narrow) / total
    y = c.float32(c.cast(y, q.dtype)) if output == "two" else y
    log = c.log(total)
    lse = c.roundings(m + log, 4, abs(m) + abs(log))
    lse = c.roundings(lse * math.log2(math.e), 2) if base == "2" else lse
    return {"output": c.cast(c.roundings(y * c.factor(v), 2), q.dtype), "lse": c.squeezed(lse)}
