"""Paged caches of keys and values: rows quantized and stored in slots, and rows read.

Rows of k and v are (tokens, heads, columns); the recipe says how a row is stored (`narrowgauge.spec.kv_cache.Cache`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.recipes import find_recipe

Keys = Annotated[c.Matrix, ("tokens*heads", "dim")]
Values = Annotated[c.Matrix, ("tokens*heads", "v_dim")]
PageLayout = c.Passed[Literal["nhd", "hnd", "x-packed", "nvfp4-page"]]


@c.contract
def kv_write(
    k: Keys, v: Values, cache: c.Cache, slots: c.Slots, recipe: c.Recipe, *,
    k_scale: c.Scales | None = None, v_scale: c.Scales | None = None, page_layout: PageLayout = "nhd",
):  # fmt: skip
    """Keys and values of tokens, quantized, in the slots of a cache.

    A kernel changes the cache in place and returns it. reshape_and_cache of vLLM (csrc/cache_kernels.cu).
    """
    keys, values = _quantized(k, recipe, k_scale), _quantized(v, recipe, v_scale)
    return {"keys": c.write(keys, cache.keys, slots), "values": c.write(values, cache.values, slots)}


def _quantized(x, recipe, scale):
    if c.takes_scale(recipe):
        return c.quantize(x, recipe, scale)
    if not has_two_levels(recipe):
        return c.quantize(x, recipe)
    # x/s, in whatever order a kernel multiplies x by reciprocals of s and of the scale of the block.
    return c.quantize(c.roundings(c.float32(x) / c.of_heads(scale), 6), recipe)


def has_two_levels(recipe):
    """Whether a given scale of the tensor is a factor of the scales of blocks: of E4M3."""
    return find_recipe(recipe).scale is E4M3


def has_scales_of_rows(recipe):
    """Whether each token and head has a stored scale."""
    rule = find_recipe(recipe)
    return rule.tensor_scale != "given" and rule.spans_k and not rule.whole


@c.contract
def kv_read(
    cache: c.Cache, pages: c.Pages, lengths: c.Lengths, recipe: c.Recipe, *,
    dtype: c.Passed[Literal["bfloat16", "float16"]] = "bfloat16",
    k_scale: c.Scales | None = None, v_scale: c.Scales | None = None, page_layout: PageLayout = "nhd",
):  # fmt: skip
    """Keys and values of the tokens of all requests, one request behind another: (tokens, heads, columns).

    gather_and_maybe_dequant_cache of vLLM (csrc/cache_kernels.cu).
    """
    slots = c.slots_of(pages, lengths)
    return {
        "k": _decoded(cache.keys, slots, recipe, k_scale, dtype),
        "v": _decoded(cache.values, slots, recipe, v_scale, dtype),
    }


def _decoded(half, slots, recipe, scale, dtype):
    q = c.read(half, slots, scale if c.takes_scale(recipe) else None)
    if not has_two_levels(recipe):
        return c.dequantize(q, dtype)
    return c.cast(c.dequantize(q) * c.of_heads(scale), dtype)
