"""Mixtures of experts: the rows of the choices of each token, added with the weights of the router.

The fields say how libraries differ (`narrowgauge.contracts.dialects`):

- `order`: choices are added in "any" order, or from the first to the last one ("choices");
- `accumulate`: partial sums are in "float32", or each product and each partial sum is rounded to the dtype of the
  output ("output"), as atomic additions do;
- `router_weight` of `moe`: the weight of a choice multiplies its row when the choices are added ("combined"), the
  activation before it is quantized ("activation"), or the float32 product with w2 before it is rounded ("product");
  under "none" the choices are added without weights;
- `rounded` and `fast_math` of `moe`: as of silu_mul_quantize (`narrowgauge.contracts.activation`);
- `gate_up`: the rows of an expert in w13 are those of gate, then those of up ("gate-up"), the other way round
  ("up-gate"), or by turns, one row or 8 rows at a time ("interleaved", "interleaved-8").
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.contracts.activation import Rounded, _silu, gated
from narrowgauge.contracts.dialects import COMBINED, MIXTURES

Order = Literal["any", "choices"]
Accumulate = Literal["float32", "output"]
RouterWeight = Literal["combined", "activation", "product", "none"]
GateUp = Literal["gate-up", "up-gate", "interleaved", "interleaved-8"]


@c.contract(dialects=COMBINED)
def combine(
    y: Annotated[c.Matrix, ("rows", "N")], positions: c.Positions, weights: c.RouterWeights, *,
    order: Order = "any", accumulate: Accumulate = "float32",
):  # fmt: skip
    """Σ weights[t, j]·y[positions[t, j]] over the choices j of token t whose position is not negative, rounded once to
    the dtype of y: (tokens, N).

    moe_unpermute and, with weights of 1, moe_sum of vLLM 0.33 (csrc/moe).
    """
    return _combined(c.chosen(y, positions), positions, weights, order, accumulate)


@c.contract(dialects=MIXTURES)
def moe(
    x: Annotated[c.Matrix, ("tokens", "K")], w13: Annotated[c.Codes, ("experts*2*F", "K")],
    w2: Annotated[c.Codes, ("experts*K", "F")], expert_ids: c.Positions, weights: c.RouterWeights, recipe: c.Recipe, *,
    router_weight: RouterWeight = "combined", gate_up: GateUp = "gate-up", rounded: Rounded = "result",
    fast_math: bool = False, order: Order = "any", accumulate: Accumulate = "float32",
):  # fmt: skip
    """A mixture of experts: x (tokens, K) quantized, times w13 of the expert of each choice, SiLU of gate times up,
    quantized, times w2 of the expert, and the choices of each token added: (tokens, K).

    w13 and w2 are the matrices of all experts, one behind another. A negative id is no choice. fused_moe of vLLM
    0.33 (vllm/model_executor/layers/fused_moe). A kernel may return `output` alone.
    """
    products = c.cast(c.gemm(c.quantize(x, recipe), w13), x.dtype)
    first, layout = int(gate_up == "up-gate"), gate_up if gate_up.startswith("interleaved") else "joined"
    gate, up = (c.of_expert(products, expert_ids, "F", part=p, layout=layout) for p in (first, 1 - first))
    y = gated(gate, up, _silu(fast_math), rounded)
    if router_weight == "activation":
        y = y * c.unsqueezed(weights)
    activated = c.quantize(c.rows_of_choices(y if rounded == "none" else c.cast(y, x.dtype)), recipe)
    rows = c.of_expert(c.gemm(activated, w2), expert_ids, "K")
    rows = c.cast(rows * c.unsqueezed(weights) if router_weight == "product" else rows, x.dtype)
    own = weights if router_weight == "combined" else None
    output = _combined(rows, expert_ids, own, order, accumulate)
    return {"output": output, "gate": gate, "up": up, "activated": activated, "rows": rows}


def _combined(rows, positions, weights, order, accumulate):
    """The sum of the rows of the choices of a token (tokens, choices, N), with weights or without them."""
    dtype, products = rows.dtype, c.float32(rows)
    products = products if weights is None else products * c.unsqueezed(weights)
    if accumulate == "float32":
        return c.cast(c.accumulated(products, positions, order), dtype)
    rounded = c.float32(c.cast(products, dtype))
    return c.cast(c.accumulated(rounded, positions, order, dtype), dtype)
