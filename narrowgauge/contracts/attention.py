"""Attention over a quantized cache in pages: decode, prefill and batches of both.

The fields say how libraries differ. p are the weights of the softmax, l their sum:

- `p`: dtype of the weights of the second product; "e4m3" is a code of 2⁸·p, "e5m2" of 2⁷·p, "any" is any dtype;
- `l`: the sum of the weights before ("exact") or after they are rounded ("rounded"), or "any" of the two;
- `exponential`: exp within 2 ulp ("accurate"), or "any" form, such as the polynomial of FlashAttention-4;
- `decode`: the scale of k multiplies the logits ("folded"), or each k, rounded to the dtype of q ("rounded");
- `output`: one rounding of the result, or "two": R(R(Σ p·v/l)·v_scale);
- `base` of the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from narrowgauge import contract as c

Weights = Literal["any", "float32", "bfloat16", "float16", "e4m3", "e5m2"]
SCALE = 0.08664339756999316
"""fl(ln 2)/8, near 1/√128: logits of small integers are integers in base 2, so that their exponentials are exact."""


@c.contract
def attention(
    q: c.Heads, k_cache: c.Cache, v_cache: Annotated[c.Cache, ("N", "P", "G", "E")], pages: c.Pages,
    lengths: c.Lengths, q_lengths: c.Lengths, k_scale: c.Scale, v_scale: c.Scale, *,
    scale: float = SCALE, causal: c.Flag = True,
    p: Weights = "any", l: Literal["any", "exact", "rounded"] = "any",  # noqa: E741  # its name in all sources
    exponential: Literal["any", "accurate"] = "any", decode: Literal["folded", "rounded"] = "folded",
    output: Literal["one", "two"] = "one", base: Literal["e", "2"] = "e",
):  # fmt: skip
    """softmax(scale·q·kᵀ)·v of each row and head of q (M, H, D), bfloat16 or float16, and the tokens of its request:
    "output" (M, H, E), and "lse" (M, H), float32, the logarithm of the sum of exponentials.

    Request b has q_lengths[b] rows of q, one request behind the other, and lengths[b] tokens in the caches, E4M3 codes
    k (N, P, G, D) and v (N, P, G, E) with the scales k_scale and v_scale: token t is pages[b, t // P], t % P
    (`narrowgauge.contract.paged`). H/G heads of q share a head of the caches. causal: the last row of a request sees
    all its tokens, and each row before it one token less. A kernel may leave out "lse".
    """
    request, place = c.segments(q_lengths, q)
    k, v = (c.paged(cache, pages, lengths) for cache in (k_cache, v_cache))
    factor = k_scale * scale
    if decode == "rounded":
        k, factor = c.cast(k * k_scale, q.dtype), scale
    s = c.roundings(c.scores(q, k, request) * factor, 2)
    seen = lengths[request] - q_lengths[request] + place + 1.0 if causal else lengths[request]
    s = c.where(c.places(v) < seen, s, -math.inf)
    m = c.largest(s)
    d = c.roundings(s - m, 4, abs(s) + abs(m))
    exact = c.rescaled(c.exp(d, *(("expf", "exp2", "polynomial") if exponential == "any" else ())), d, m)
    rounded = c.weights(exact, d, p)
    sums = {"exact": c.sum(exact), "rounded": c.sum(rounded)}
    total = c.any_of(*sums.values()) if l == "any" else sums[l]
    y = c.weighted_sum(rounded, v, request, narrow=p in ("any", "e4m3", "e5m2")) / total
    y = c.float32(c.cast(y, q.dtype)) if output == "two" else y
    log = c.log(total)
    lse = c.roundings(m + log, 4, abs(m) + abs(log))
    if base == "2":
        lse = c.roundings(lse * math.log2(math.e), 2)
    return {"output": c.cast(c.roundings(y * v_scale, 2), q.dtype), "lse": c.squeezed(lse)}
