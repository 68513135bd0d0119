"""Steps of mixtures of experts: rows that the choices of tokens name, and sums over choices.

This module does not import torch.
"""

from __future__ import annotations

from narrowgauge.contract.values import Value, in_float32
from narrowgauge.spec.program import ACCUMULATED, CHOSEN, ORDERS_OF_CHOICES


def chosen(x: Value, positions: Value) -> Value:
    """The row of a matrix (rows, N) that each choice of a token names: (tokens, choices, N).

    `positions`: an argument of the type Positions. A choice that names no row has any numbers, and `accumulated` leaves
    it out.
    """
    return x.trace.add(CHOSEN, (x, positions), (*positions.axes, *x.axes[1:]), x.dtype)


def accumulated(x: Value, positions: Value, order: str = "any", dtype: str = "float32") -> Value:
    """Σ over the choices of a token that name a row, (tokens, choices, N) to (tokens, N).

    `order`: "any", or "choices", from the first choice to the last one. `dtype`: every kernel rounds each partial sum
    to it; a sum in float32 may be fused with the product before it.
    """
    if order not in ORDERS_OF_CHOICES:
        x.trace.fail(f"choices are added in the order {' or '.join(ORDERS_OF_CHOICES)}, not {order!r}")
    options = {"order": order} | ({} if dtype == "float32" else {"to": dtype})
    return x.trace.add(ACCUMULATED, (in_float32(x), positions), (x.axes[0], *x.axes[2:]), "float32", **options)
