"""Attention over a quantized cache in pages: decode, prefill and batches of both.

The fields say how libraries differ. p are the weights of the softmax, l their sum:

- `p`: dtype of the weights of the second product; "input" is that of q, "e4m3" a code of 2⁸·p, "e5m2" of 2⁷·p, "any"
  any dtype;
- `l`: the sum of the weights before ("exact") or after they are rounded ("rounded"), or "any" of the two;
- `exponential`: exp within 2 ulp ("accurate"), or "any" form, such as the polynomial of FlashAttention-4;
- `decode`: the scales multiply the logits and the result ("folded"), or each k and v, which are rounded to the dtype of
  q ("rounded"). Folded scales of tokens multiply the logits, and the weights before these are rounded: to at least 16
  bits, unless `p` is "e4m3" or "e5m2";
- `output`: one rounding of the result, or "two": R(R(Σ p·v/l)·v_scale);
- `base` of the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.contracts.cache import PageLayout, has_scales_of_rows, has_two_levels
from narrowgauge.contracts.dialects import ATTENTION

Weights = Literal["any", "input", "float32", "bfloat16", "float16", "e4m3", "e5m2"]
Lse = Annotated[c.Column, ("queries", "q_heads")]
Sums = Literal["any", "exact", "rounded"]
Exponential = Literal["any", "accurate"]
Decode = Literal["folded", "rounded"]
Output = Literal["one", "two"]
Base = Literal["e", "2"]
SCALE = 0.08664339756999316
"""fl(ln 2)/8, near 1/√128: logits of small integers are integers in base 2, so that their exponentials are exact."""


@c.contract(dialects=ATTENTION)
def attention(
    q: c.Heads, cache: c.Cache, pages: c.Pages, lengths: c.Lengths, q_lengths: c.QueryLengths, recipe: c.Recipe, *,
    k_scale: c.Scale | None = None, v_scale: c.Scale | None = None, page_layout: PageLayout = "nhd",
    scale: float = SCALE, causal: c.Flag = True, window: int = 0, softcap: float = 0.0,
    p: Weights = "any", l: Sums = "any", exponential: Exponential = "any",  # noqa: E741  # its name in all sources
    decode: Decode = "folded", output: Output = "one", base: Base = "e",
):  # fmt: skip
    """softmax(scale·q·kᵀ)·v of each row and head of q (queries, q_heads, dim), bfloat16 or float16, and the tokens of
    its request: "output" (queries, q_heads, v_dim), and "lse" (queries, q_heads), float32, the logarithm of the sum of
    exponentials, which a kernel may leave out.

    Request b has q_lengths[b] rows of q, one request behind another, and lengths[b] tokens in the cache. q_heads/heads
    of q share a head of the cache. causal: the last row of a request sees all its tokens, and each row before it one
    token less. window: a row sees so many of its last tokens; 0: all. softcap: logits s are softcap·tanh(s/softcap);
    0: they stay. recipe, k_scale and v_scale: those of the cache; a recipe whose scales are all stored has none.
    """
    found = q, cache, pages, lengths, q_lengths, recipe, k_scale, v_scale
    return _attention(*found, None, scale, causal, window, softcap, p, l, exponential, decode, output, base)


@c.contract(dialects=ATTENTION)
def attention_sinks(
    q: c.Heads, cache: c.Cache, pages: c.Pages, lengths: c.Lengths, q_lengths: c.QueryLengths, sinks: c.Sinks,
    recipe: c.Recipe, *,
    k_scale: c.Scale | None = None, v_scale: c.Scale | None = None, page_layout: PageLayout = "nhd",
    scale: float = SCALE, causal: c.Flag = True, window: int = 0, softcap: float = 0.0,
    p: Weights = "any", l: Sums = "any", exponential: Exponential = "any",  # noqa: E741  # its name in all sources
    decode: Decode = "folded", output: Output = "one", base: Base = "e",
):  # fmt: skip
    """`attention` with a further logit of each head, sinks (q_heads,), float32, that has a weight and no value.

    Attention of gpt-oss (openai/gpt-oss at a194b99, gpt_oss/torch/model.py, sdpa).
    """
    found = q, cache, pages, lengths, q_lengths, recipe, k_scale, v_scale
    return _attention(*found, sinks, scale, causal, window, softcap, p, l, exponential, decode, output, base)


@c.contract(dialects=ATTENTION)
def merge_attention(
    o_a: c.Heads, lse_a: Lse, o_b: c.Heads, lse_b: Lse, *, base: Base = "e"
):  # fmt: skip
    """The attention to two sets of keys, from the results of both: "output" (queries, q_heads, dim), o_a and o_b
    weighted by the exponentials of lse_a and lse_b (queries, q_heads), and "lse", that of all keys.

    merge_attn_states of vLLM 0.33 (csrc/attention/merge_attn_states.cu); merge_state of FlashInfer 0.7.2
    (include/flashinfer/attention/cascade.cuh), whose log-sum-exps have the base 2.
    """
    of = [c.unsqueezed(lse) * (math.log(2) if base == "2" else 1.0) for lse in (lse_a, lse_b)]
    m = c.maximum(*of)
    weights = [c.exp(c.roundings(lse - m, 4, abs(lse) + abs(m))) for lse in of]
    total = weights[0] + weights[1]
    numbers = [c.float32(o) for o in (o_a, o_b)]
    weighted = numbers[0] * weights[0] + numbers[1] * weights[1]
    shares = [c.divide(weight, total, "approximate") for weight in weights]
    y = c.any_of(c.divide(weighted, total, "approximate"), numbers[0] * shares[0] + numbers[1] * shares[1])
    return {"output": c.cast(y, o_a.dtype), "lse": c.squeezed(_lse(m, total, base))}


def _attention(
    q, cache, pages, lengths, q_lengths, recipe, k_scale, v_scale, sinks,
    scale, causal, window, softcap, dtype, sum_of, exponential, decode, output, base,
):  # fmt: skip
    slots, given = c.slots_of(pages, lengths), c.takes_scale(recipe)
    k = c.read(cache.keys, slots, k_scale if given else None)
    v = c.read(cache.values, slots, v_scale if given else None)
    folded = decode == "folded"
    factors = [
        c.factor(x) * scale if has_two_levels(recipe) else c.factor(x) for x, scale in ((k, k_scale), (v, v_scale))
    ]
    if folded:
        keys, values = c.decode(k), c.decode(v)
    else:
        keys, values = (_rounded(x, scale, recipe, q.dtype) for x, scale in ((k, k_scale), (v, v_scale)))
    request, place = c.segments(q_lengths, q)
    head = c.shared_heads(q, lengths, keys)
    by_token = folded and has_scales_of_rows(recipe)
    if by_token:
        factors = [c.of_tokens(x, q, request, head, lengths) for x in factors]
    s = c.roundings(c.scores(q, keys, request, head, lengths) * (factors[0] * scale if folded else scale), 2)
    if softcap:
        s = c.tanh(c.roundings(s * (1 / softcap), 1), "tanhf", "sigmoid") * softcap
    seen = lengths[request] - q_lengths[request] + place + 1.0 if causal else lengths[request]
    s = c.where(c.places(s) < seen, s, -math.inf)
    if window:
        s = c.where(c.places(s) >= seen - float(window), s, -math.inf)
    m = c.largest(s)
    if sinks is not None:
        sink = c.unsqueezed(sinks)
        m = c.maximum(m, sink)
    d = c.roundings(s - m, 4, abs(s) + abs(m))
    forms = ("expf", "exp2", "polynomial") if exponential == "any" else ()
    exact = c.rescaled(c.exp(d, *forms), d, m)
    rounded = c.weights(exact, d, q.dtype if dtype == "input" else dtype)
    sums = {"exact": c.sum(exact), "rounded": c.sum(rounded)}
    total = c.any_of(*sums.values()) if sum_of == "any" else sums[sum_of]
    if sinks is not None:
        total = total + c.exp(c.roundings(sink - m, 4, abs(sink) + abs(m)), *forms)
    narrow = dtype in ("any", "e4m3", "e5m2") and not (by_token and dtype == "any")
    weights = _weights_of_tokens(exact * factors[1], d, q.dtype if dtype == "input" else dtype) if by_token else rounded
    y = c.weighted_sum(weights, values, request, head, lengths, narrow=narrow) / total
    y = c.float32(c.cast(y, q.dtype)) if output == "two" else y
    y = c.roundings(y * factors[1], 2) if folded and not by_token else y
    return {"output": c.cast(y, q.dtype), "lse": c.squeezed(_lse(m, total, base))}


def _weights_of_tokens(p, d, dtype):
    """Weights times scales of tokens, which exceed the largest 8-bit weight: "any" dtype has at least 16 bits."""
    dtypes = ("bfloat16", "float16", "float32") if dtype == "any" else (dtype,)
    return c.any_of(*(c.weights(p, d, one) for one in dtypes))


def _rounded(q, scale, recipe, dtype):
    """Elements times all their scales, rounded once."""
    return c.cast(c.dequantize(q) * scale, dtype) if has_two_levels(recipe) else c.dequantize(q, dtype)


def _lse(m, total, base):
    """The logarithm of a sum of exponentials, from a maximum and the sum of what exceeds it."""
    log = c.log(total)
    lse = c.roundings(m + log, 4, abs(m) + abs(log))
    return c.roundings(lse * math.log2(math.e), 2) if base == "2" else lse
