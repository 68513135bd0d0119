"""Steps of mixtures of experts: rows of the choices of tokens, and sums over choices.

This module does not import torch.
"""

from __future__ import annotations

from narrowgauge.contract.values import Value, in_float32
from narrowgauge.spec.program import (
    ACCUMULATED,
    CHOSEN,
    LAYOUTS_OF_PARTS,
    OF_EXPERT,
    ORDERS_OF_CHOICES,
    ROWS_OF_CHOICES,
)


def chosen(x: Value, positions: Value) -> Value:
    """The rows of a matrix (rows, N), a row per choice of a token: (tokens, choices, N).

    `positions`: an argument of the type Positions. A choice without a row has any numbers, and `accumulated` leaves the
    choice out.
    """
    return x.trace.add(CHOSEN, (x, positions), (*positions.axes, *x.axes[1:]), x.dtype)


def accumulated(x: Value, positions: Value, order: str = "any", dtype: str = "float32") -> Value:
    """Σ over the choices of a token that name a row, (tokens, choices, N) to (tokens, N).

    `order`: "any", or "choices", from the first choice to the last one. `dtype`: every kernel rounds every partial sum
    to the dtype; a sum in float32 may be fused with the product before it.
    """
    if order not in ORDERS_OF_CHOICES:
        x.trace.fail(f"choices are added in the order {' or '.join(ORDERS_OF_CHOICES)}, not {order!r}")
    options = {"order": order} | ({} if dtype == "float32" else {"to": dtype})
    return x.trace.add(ACCUMULATED, (in_float32(x), positions), (x.axes[0], *x.axes[2:]), "float32", **options)


def of_expert(
    x: Value, experts: Value, columns: str, *, part: int | None = None, layout: str = LAYOUTS_OF_PARTS[0]
) -> Value:  # fmt: skip
    """The columns of the expert that each choice of a token names: (tokens, choices, columns).

    `x`: products with the matrices of all experts, one behind another in its columns; a row for each token, or for each
    choice (`rows_of_choices`). `experts`: an argument of the type Positions; a choice of no expert has zeros.
    `columns`: name of the axis. `part`: 0 or 1 if the columns of an expert are two parts, which lie in the `layout` of
    `narrowgauge.spec.program.LAYOUTS_OF_PARTS`.
    """
    if layout not in LAYOUTS_OF_PARTS:
        x.trace.fail(f"parts of an expert lie {', '.join(LAYOUTS_OF_PARTS)}, not {layout!r}")
    options = {} if part is None else {"part": part, "layout": layout}
    return x.trace.add(OF_EXPERT, (x, experts), (*experts.axes, columns), x.dtype, **options)


def rows_of_choices(x: Value) -> Value:
    """The choices of all tokens as rows: (tokens, choices, N) to (tokens·choices, N)."""
    return x.trace.add(ROWS_OF_CHOICES, (x,), ("*".join(x.axes[:2]), x.axes[2]), x.dtype)
