"""Steps of sequences in pages: a cache that a page table names, and the softmax of attention in its parts.

This module does not import torch.
"""

from __future__ import annotations

from narrowgauge.contract.values import Value, in_float32
from narrowgauge.spec.program import (
    INDEX,
    PAGED,
    PLACES,
    RESCALED,
    SCORES,
    SEGMENTS,
    SQUEEZED,
    STORED,
    WEIGHT_DTYPES,
    WEIGHTED,
    WEIGHTS,
)


def paged(cache: Value, pages: Value, lengths: Value) -> Value:
    """The numbers (B, W·P, G, D) of the codes of a cache (N, P, G, D) that the table `pages` (B, W) names.

    Token t of request b has the page pages[b, t // P] and the place t % P in it. No token behind the length of its
    request is read.
    """
    if cache.dtype != STORED or pages.dtype != INDEX or len(pages.axes) != 2 or len(lengths.axes) != 1:
        cache.trace.fail("c.paged takes arguments of the types Cache, Pages and Lengths")
    _, page, *rest = cache.axes
    axes = (pages.axes[0], f"{pages.axes[1]}*{page}", *rest)
    return cache.trace.add(PAGED, (cache, pages, lengths), axes, "float32")


def places(x: Value) -> Value:
    """0, 1, … along the tokens of `paged`: (W·P,)."""
    return x.trace.add(PLACES, (x,), x.axes[1:2], "float32")


def segments(lengths: Value, rows: Value) -> tuple[Value, Value]:
    """The number of the request of each row of a batch, an index, and the place of the row in its request: (M, 1, 1).

    Rows of one request lie one behind the other: `lengths` (B,) says how many. `rows`: the batch (M, H, D).
    """
    found = []
    for part, dtype in (("request", INDEX), ("place", "float32")):
        found.append(rows.trace.add(SEGMENTS, (lengths,), (rows.axes[0], "1", "1"), dtype, part=part))
    return found[0], found[1]


def scores(q: Value, k: Value, request: Value, order: str | None = None) -> Value:
    """Σ q·k of each row and head of q (M, H, D) and the tokens of its request, k (B, S, G, D): (M, H, S).

    H/G heads of q share a head of k. The sum has any order, or a declared one (`narrowgauge.contract.gemm`).
    """
    options = {} if order is None else {"order": order}
    return q.trace.add(SCORES, (q, k, request), (*q.axes[:2], k.axes[1]), "float32", **options)


def rescaled(p: Value, d: Value, m: Value) -> Value:
    """Weights p = exp(d) that a kernel multiplies by exp of the growth of a running maximum, and by the weights of
    splits, from their log-sum-exps. d (M, H, S): logits less their maximum m (M, H, 1)."""
    return p.trace.add(RESCALED, (in_float32(p), in_float32(d), in_float32(m)), p.axes, "float32")


def weights(p: Value, d: Value, dtype: str) -> Value:
    """Weights p = exp(d) rounded to a dtype of `narrowgauge.spec.program.WEIGHT_DTYPES`; "any": to any of
    them.

    A kernel takes a running maximum in place of the maximum, and so it rounds p times a factor, which cancels later.
    The factor is exp of the difference of the maximum and the maximum of any tiles of 16 keys, each of which
    begins at a multiple of 16.
    """
    if dtype not in WEIGHT_DTYPES:
        p.trace.fail(f"the weights of a softmax have a dtype of {', '.join(WEIGHT_DTYPES)}, not {dtype!r}")
    return p.trace.add(WEIGHTS, (in_float32(p), in_float32(d)), p.axes, "float32", to=dtype)


def weighted_sum(p: Value, v: Value, request: Value, *, narrow: bool = False) -> Value:
    """Σ p·v of the weights (M, H, S) and the tokens of the request of each row, v (B, S, G, E): (M, H, E).

    `narrow`: whether kernels may multiply 8-bit weights, whose tensor cores keep 13 fraction bits.
    """
    axes = (*p.axes[:2], v.axes[3])
    return p.trace.add(WEIGHTED, (in_float32(p), v, request), axes, "float32", narrow=narrow)


def squeezed(x: Value) -> Value:
    """(…, 1) without its last axis."""
    if x.axes[-1:] != ("1",):
        x.trace.fail(f"c.squeezed takes a last axis of one element, not ({', '.join(x.axes)})")
    return x.trace.add(SQUEEZED, (x,), x.axes[:-1], x.dtype)
