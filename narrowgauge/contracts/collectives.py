"""Collectives of a group of processes: matrices quantized for the wire, summed, and quantized again.

`x` is the matrix of each rank. `reduce` says in which order a kernel adds the values of the ranks:

- "any": not declared, as sums over NVLink multicast are;
- "rank-order": rank 0, 1, … in float32, with or without fused multiply-adds;
- "bf16-hops": a ring, whose partial sum is rounded to the dtype of x at each hop, from any rank on.
"""

from __future__ import annotations

from typing import Literal

from narrowgauge import contract as c
from narrowgauge.contracts.dialects import COLLECTIVES, NORMS
from narrowgauge.contracts.norm import Order, Rounded, Subnormals, Sum, _factor, normalized

Reduce = Literal["any", "rank-order", "bf16-hops"]


@c.contract
def all_gather(q: c.QuantizedRanks, recipe: c.Recipe, *, ranks: int = 2):
    """The codes and scales of all ranks on each rank, those of rank 0 first: (ranks·M, K)."""
    return {f"rank{rank}": one for rank, one in enumerate(q)}


@c.contract(dialects=COLLECTIVES)
def all_reduce(
    x: c.Ranks, recipe: c.Recipe, *, ranks: int = 2, reduce: Reduce = "any", own_stripe: bool = False,
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """The sum of the values of all quantized x (M, K), quantized again, decoded, in the dtype of x, on each rank.

    quantized_all_reduce of FlashInfer 0.7.2.post1. own_stripe: the rank that reduces rows keeps their sum unquantized.
    """
    total = _total(x, recipe, reduce)
    q = c.quantize(total, recipe)
    own = {"own_stripe": c.cast(total, x[0].dtype)} if own_stripe else {}
    return {"output": c.cast(c.dequantize(q, fused=True), x[0].dtype), "quantized": q, **own}


@c.contract(dialects=COLLECTIVES)
def reduce_scatter(
    x: c.Ranks, recipe: c.Recipe, *, ranks: int = 2, reduce: Reduce = "any", subnormals: Subnormals = "kept",
):  # fmt: skip
    """The sum of the values of all quantized x (M, K), in the dtype of x. Rank r has ⌈M/ranks⌉ rows, from r·⌈M/ranks⌉
    on."""
    return {"own_stripe": c.cast(_total(x, recipe, reduce), x[0].dtype)}


@c.contract(dialects={**NORMS, **COLLECTIVES})
def all_reduce_norm_quantize(
    x: c.Ranks, weight: c.Row, recipe: c.Recipe, *, ranks: int = 2, residual: c.Matrix | None = None,
    eps: float = 1e-6, bias: float = 0.0, scale: c.Scale | None = None,
    reduce: Reduce = "any", accumulate: Literal["float32", "rounded"] = "float32",
    zeros: Literal["kept", "positive"] = "kept",
    rounded: Rounded = "result", order: Order = "rs-first", sum_of: Sum = "stored", product_of: Sum = "stored",
    subnormals: Subnormals = "kept",
):  # fmt: skip
    """RMSNorm of the rows of the sum of all x and the residual (M, K), quantized; the sum is the next residual.

    allreduce_fusion_kernel of TensorRT-LLM in FlashInfer 0.7.2.post1 (include/flashinfer/comm). bias: 1 for a weight
    around 0. accumulate: "rounded" rounds to the dtype of x after each addition, in rank order. zeros: "positive" adds
    −0 of x as +0.
    """
    values = [c.float32(one) + 0.0 if zeros == "positive" else c.float32(one) for one in x]
    hops = _rounded_sum(values, x[0].dtype) if accumulate == "rounded" else _sum(values, reduce, x[0].dtype)
    z = c.float32(c.cast(hops, x[0].dtype)) + c.float32(residual)
    stored = c.cast(z, x[0].dtype)
    numbers = {"stored": c.float32(stored), "unrounded": z}
    y = normalized(
        x[0], numbers[sum_of], numbers[product_of], _factor(weight, bias, zero_weight="free"), eps, rounded, order
    )
    return {"residual": stored, "quantized": c.quantize(y, recipe, scale if c.takes_scale(recipe) else None)}


def _total(x, recipe, reduce):
    """The sum of the values of the quantized matrices of all ranks."""
    codes = [c.quantize(one, recipe) for one in x]
    return _sum([c.dequantize(q, fused=True) for q in codes], reduce, x[0].dtype)


def _sum(values, reduce, dtype):
    if reduce == "any":
        return c.sum(values)
    if reduce == "bf16-hops":
        return c.any_of(*(_rounded_sum(values[r:] + values[:r], dtype) for r in range(len(values))))
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _rounded_sum(values, dtype):
    """The sum in the order of the values, rounded to a dtype after each addition."""
    total = values[0]
    for value in values[1:]:
        total = c.float32(c.cast(total + value, dtype))
    return total
