"""Paged caches of keys and values: rows quantized and stored in slots, and rows read.

Rows of k and v are (tokens, heads, columns); the recipe says how a row is stored (`narrowgauge.spec.kv_cache.Cache`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c

Keys = Annotated[c.Matrix, ("tokens*heads", "dim")]
Values = Annotated[c.Matrix, ("tokens*heads", "v_dim")]
PageLayout = c.Passed[Literal["nhd", "hnd", "x-packed"]]


@c.contract
def kv_write(
    k: Keys, v: Values, cache: c.Cache, slots: c.Slots, recipe: c.Recipe, *,
    k_scale: c.Scale | None = None, v_scale: c.Scale | None = None, page_layout: PageLayout = "nhd",
):  # fmt: skip
    """Keys and values of tokens, quantized, in the slots of a cache.

    A kernel changes the cache in place and returns it. reshape_and_cache of vLLM (csrc/cache_kernels.cu).
    """
    given = c.takes_scale(recipe)
    keys, values = (c.quantize(x, recipe, scale if given else None) for x, scale in ((k, k_scale), (v, v_scale)))
    return {"keys": c.write(keys, cache.keys, slots), "values": c.write(values, cache.values, slots)}


@c.contract
def kv_read(
    cache: c.Cache, pages: c.Pages, lengths: c.Lengths, recipe: c.Recipe, *,
    dtype: c.Passed[Literal["bfloat16", "float16"]] = "bfloat16",
    k_scale: c.Scale | None = None, v_scale: c.Scale | None = None, page_layout: PageLayout = "nhd",
):  # fmt: skip
    """Keys and values of the tokens of all requests, one request behind another: (tokens, heads, columns).

    gather_and_maybe_dequant_cache of vLLM (csrc/cache_kernels.cu).
    """
    slots, given = c.slots_of(pages, lengths), c.takes_scale(recipe)
    return {
        "k": c.dequantize(c.read(cache.keys, slots, k_scale if given else None), dtype),
        "v": c.dequantize(c.read(cache.values, slots, v_scale if given else None), dtype),
    }
