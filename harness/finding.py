"""A finding: what a person needs to see of a wrong stage, as plain data.

Keys: stage; rule; sentence; elements, a list of views of single elements (`which` is "first" or "worst", then
coordinates, input, expected and actual in bits and as values, scale, distance in steps); modulo, {"row": {"16":
counts, "128": counts}, "column": …}; heat, {"rows": tile height, "columns": tile width, "counts": rows of mismatch
counts a tile}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Describe = Callable[[int, int], dict[str, Any]]
"""(row, column) of an element to what is known of it."""

_MODULI = (16, 32, 128)
_HEAT = 32
"""A heat map has at most this many tiles a side."""


def sentence(wrong: torch.Tensor, distance: torch.Tensor, noun: str) -> str:
    """How many, how far, where: "37 of 1 048 576 codes differ, each by 1 step, all at column 15 modulo 16"."""
    count, total = int(wrong.sum()), wrong.numel()
    far = distance[wrong]
    low, high = int(far.amin()), int(far.amax())
    steps = f"{spaced(high)} step{'s' if high != 1 else ''}"
    # A distance of 0 is a sign of zero.
    how_far = "each the other zero" if high == 0 else f"each by {steps}" if low == high else f"by up to {steps}"
    return f"{spaced(count)} of {spaced(total)} {noun} differ, {how_far}{_where(wrong)}"


def spaced(count: int) -> str:
    """A count with a space between thousands."""
    return f"{count:,}".replace(",", " ")


def _where(wrong: torch.Tensor) -> str:
    if wrong.dim() != 2 or wrong.numel() == 1:
        return ""
    rows, columns = wrong.nonzero(as_tuple=True)
    if rows.numel() == 1:
        return f", at row {int(rows[0])}, column {int(columns[0])}"
    for name, index, extent in (("row", rows, wrong.shape[0]), ("column", columns, wrong.shape[1])):
        if extent > 1 and bool((index == index[0]).all()):
            return f", all in {name} {int(index[0])}"
        for modulus in _MODULI:
            phase = index % modulus
            if extent > modulus and bool((phase == phase[0]).all()):
                return f", all at {name} {int(phase[0])} modulo {modulus}"
    return f", the first at row {int(rows[0])}, column {int(columns[0])}"


def finding(
    stage: str, rule: str, text: str, wrong: torch.Tensor, distance: torch.Tensor, *, describe: Describe
) -> dict[str, Any]:
    """The finding of a stage with wrong elements, a bool tensor (M, N) or (1,), and their distances in steps."""
    grid = wrong.view(1, -1) if wrong.dim() == 1 else wrong
    steps = distance.view(grid.shape)
    width = grid.shape[1]
    first, worst = int(grid.view(-1).int().argmax()), int(steps.view(-1).argmax())
    elements = []
    for which, flat in (("first", first), ("worst", worst)) if worst != first else (("first", first),):
        row, column = divmod(flat, width)
        elements.append({"which": which, **describe(row, column), "distance": int(steps[row, column])})
    return {
        "stage": stage, "rule": rule, "sentence": text, "elements": elements,
        "modulo": {"row": _modulo(grid, 1), "column": _modulo(grid, 0)}, "heat": _heat(grid),
    }  # fmt: skip


def _modulo(wrong: torch.Tensor, summed: int) -> dict[str, list[int]]:
    counts = wrong.sum(summed)
    found = {}
    for modulus in _MODULI:
        padded = torch.nn.functional.pad(counts, (0, -counts.numel() % modulus))
        found[str(modulus)] = padded.view(-1, modulus).sum(0).tolist()
    return found


def _heat(wrong: torch.Tensor) -> dict[str, Any]:
    height, width = (max(16, -(-extent // _HEAT)) for extent in wrong.shape)
    padded = torch.nn.functional.pad(wrong.int(), (0, -wrong.shape[1] % width, 0, -wrong.shape[0] % height))
    tiles = padded.view(padded.shape[0] // height, height, -1, width).sum((1, 3))
    return {"rows": height, "columns": width, "counts": tiles.tolist()}


def bits(value: int, width: int) -> str:
    """A code in binary, its sign, exponent and mantissa together: 0b0101."""
    return f"0b{value:0{width}b}"


def float_view(x: torch.Tensor) -> tuple[float | str, str]:
    """A single number of a tensor, as a value that JSON can hold and as hexadecimal bits."""
    width = x.element_size()
    integer = {4: torch.int32, 2: torch.int16, 8: torch.int64}[width]
    raw = int(x.reshape(1).contiguous().view(integer)) & ((1 << (8 * width)) - 1)
    value = float(x)
    return (value if abs(value) < float("inf") else str(value)), f"0x{raw:0{2 * width}X}"
