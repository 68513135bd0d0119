"""Steps of sequences: the rows of a batch and the tokens of their requests, and the softmax of attention in its parts.

Tokens are a matrix (tokens·heads, dim), one request behind another, as `narrowgauge.contract.read` gives. This module
does not import torch.
"""

from __future__ import annotations

from narrowgauge.contract.values import Value, in_float32
from narrowgauge.spec.program import (
    HEADS,
    INDEX,
    OF_TOKENS,
    PLACES,
    RESCALED,
    SCORES,
    SEGMENTS,
    SQUEEZED,
    UNSQUEEZED,
    WEIGHT_DTYPES,
    WEIGHTED,
    WEIGHTS,
)


def segments(lengths: Value, rows: Value) -> tuple[Value, Value]:
    """The number of the request of each row of a batch, an index, and the place of the row in its request:
    (queries, 1, 1).

    The rows of a request are neighbours, and `lengths` (requests,) counts them. `rows`: the batch.
    """
    axes, found = (rows.axes[0], "1", "1"), []
    for part, dtype in (("request", INDEX), ("place", "float32")):
        found.append(rows.trace.add(SEGMENTS, (lengths, rows), axes, dtype, part=part))
    return found[0], found[1]


def shared_heads(q: Value, lengths: Value, k: Value) -> Value:
    """The head of the tokens k (tokens·heads, dim) that each head of q (queries, q_heads, dim) has, an index
    (q_heads,): q_heads/heads neighbours share one. `lengths` (requests,): tokens of each request."""
    return q.trace.add(HEADS, (q, lengths, k), q.axes[1:2], INDEX)


def scores(q: Value, k: Value, request: Value, head: Value, lengths: Value, order: str | None = None) -> Value:
    """Σ q·k of each row and head of q (queries, q_heads, dim) and the tokens of its request, k (tokens·heads, dim):
    (queries, q_heads, keys).

    `head`: `shared_heads`. `lengths` (requests,) has the tokens of each request, and "keys" is the largest of them; the
    products behind the last token of a request are 0. The sum has any order, or a declared one
    (`narrowgauge.contract.gemm`).
    """
    options = {} if order is None else {"order": order}
    return q.trace.add(SCORES, (q, k, request, head, lengths), (*q.axes[:2], "keys"), "float32", **options)


def of_tokens(x: Value, q: Value, request: Value, head: Value, lengths: Value) -> Value:
    """The number x (tokens·heads, 1) of each token of the request of a row, and its head, for each row and head of q:
    (queries, q_heads, keys), 0 behind the last token of a request. Further arguments: those of `scores`."""
    return q.trace.add(OF_TOKENS, (q, in_float32(x), request, head, lengths), (*q.axes[:2], "keys"), "float32")


def places(x: Value) -> Value:
    """0, 1, … along the last axis of x."""
    return x.trace.add(PLACES, (x,), x.axes[-1:], "float32")


def rescaled(p: Value, d: Value, m: Value) -> Value:
    """Weights p = exp(d) that a kernel multiplies by exp of the growth of a running maximum, and by the weights of
    splits, from their log-sum-exps. d (queries, q_heads, keys): logits less their maximum m (queries, q_heads, 1)."""
    return p.trace.add(RESCALED, (in_float32(p), in_float32(d), in_float32(m)), p.axes, "float32")


def weights(p: Value, d: Value, dtype: str) -> Value:
    """Weights p = exp(d) rounded to a dtype of `narrowgauge.spec.program.WEIGHT_DTYPES`; "any": to any of them.

    A kernel takes a running maximum in place of the maximum, and so it rounds p times a factor, which cancels later.
    The factor is exp of the difference of the maximum and the maximum of any tiles of 16 keys, each of which begins at
    a multiple of 16.
    """
    if dtype not in WEIGHT_DTYPES:
        p.trace.fail(f"the weights of a softmax have a dtype of {', '.join(WEIGHT_DTYPES)}, not {dtype!r}")
    return p.trace.add(WEIGHTS, (in_float32(p), in_float32(d)), p.axes, "float32", to=dtype)


def weighted_sum(p: Value, v: Value, request: Value, head: Value, lengths: Value, *, narrow: bool = False) -> Value:
    """Σ p·v of the weights (queries, q_heads, keys) and the tokens of the request of each row, v (tokens·heads, v_dim):
    (queries, q_heads, v_dim).

    `narrow`: whether kernels may multiply 8-bit weights, whose tensor cores keep 13 fraction bits.
    """
    axes = (*p.axes[:2], v.axes[1])
    return p.trace.add(WEIGHTED, (in_float32(p), v, request, head, lengths), axes, "float32", narrow=narrow)


def squeezed(x: Value) -> Value:
    """(…, 1) without its last axis."""
    if x.axes[-1:] != ("1",):
        x.trace.fail(f"c.squeezed takes a last axis of one element, not ({', '.join(x.axes)})")
    return x.trace.add(SQUEEZED, (x,), x.axes[:-1], x.dtype)


def unsqueezed(x: Value) -> Value:
    """(…,) with a last axis of one element, float32."""
    return x.trace.add(UNSQUEEZED, (in_float32(x),), (*x.axes, "1"), "float32")
