"""Mixtures of experts: the rows of the choices of each token, added with the weights of the router.

The fields say how libraries differ (`narrowgauge.contracts.dialects`):

- `order`: choices are added in "any" order, or from the first to the last one ("choices");
- `accumulate`: partial sums are in "float32", or each product and each partial sum is rounded to the dtype of the
  output ("output"), as atomic additions do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.contracts.dialects import COMBINED

Order = Literal["any", "choices"]
Accumulate = Literal["float32", "output"]


@c.contract(dialects=COMBINED)
def combine(
    y: Annotated[c.Matrix, ("rows", "N")], positions: c.Positions, weights: c.RouterWeights, *,
    order: Order = "any", accumulate: Accumulate = "float32",
):  # fmt: skip
    """Σ weights[t, j]·y[positions[t, j]] over the choices j of token t whose position is not negative, rounded once to
    the dtype of y: (tokens, N).

    moe_unpermute and, with weights of 1, moe_sum of vLLM 0.33 (csrc/moe).
    """
    products = c.float32(c.chosen(y, positions)) * c.unsqueezed(weights)
    if accumulate == "float32":
        return c.cast(c.accumulated(products, positions, order), y.dtype)
    rounded = c.float32(c.cast(products, y.dtype))
    return c.cast(c.accumulated(rounded, positions, order, y.dtype), y.dtype)
