"""Partial sums of slices of K that are kept in bfloat16 or float16."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    EPILOGUE,
    Ends,
    GemmParts,
    cast_ends,
    correct_epilogue,
    scale_ends,
    select_columns,
)
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.gemm.operands import element_values, scale_values
from narrowgauge.spec.summation import UNIT

_COUNTS = (2, 3, 4, 5, 6, 8)
_WIDTHS = (16, 32, 64, 128, 256)
_MAX_SLICES = 64


def slice_widths(columns: int, step: int) -> list[int]:
    """Columns of a slice of K, for at least two slices; the last slice may be shorter.

    First equal slices of whole blocks of `step` columns, then slices of fixed width.
    """
    blocks = -(-columns // step)
    equal = [-(-blocks // count) * step for count in _COUNTS]
    fixed = [width for width in _WIDTHS if width % step == 0 and columns <= width * _MAX_SLICES]
    return [width for width in dict.fromkeys(equal + fixed) if width < columns]


def _outputs(kind: tuple[torch.dtype, str], parts: GemmParts, slices: list[Ends]) -> list[Ends]:
    """Ends of the outputs, given the ends of the sums of all slices. A kind is a dtype, and the number that is rounded
    to it: the sum of a slice, this sum times α, or the sum of all slices so far."""
    dtype, rounded_number = kind
    low = high = torch.zeros_like(slices[0][0])
    for ends in slices:
        scaled = scale_ends(ends, parts.factor) if rounded_number == "times α" else ends
        if rounded_number == "so far":
            low, high = cast_ends((low + scaled[0], high + scaled[1]), dtype)
        else:
            rounded = cast_ends(scaled, dtype)
            low, high = low + rounded[0], high + rounded[1]
    if rounded_number == "times α":
        parts = replace(parts, factor=torch.ones_like(parts.factor))
    return correct_epilogue(parts, (low, high))


_ROUNDED: tuple[tuple[Deviation[GemmParts], str], ...] = (
    (Deviation("partial-sums-{}", "sums of {of} columns of K are rounded to {} before they are added", "partial sums",
               _outputs), "alone"),
    (Deviation("partial-sums-{}", "sums of {of} columns of K, times α, are rounded to {} before they are added",
               "partial sums", _outputs), "times α"),
    (Deviation("accumulator-{}", "sums are rounded to {} after every {of} columns of K", "partial sums", _outputs),
     "so far"),
)  # fmt: skip
KINDS = tuple(row.bound(name, (dtype, number)) for name, dtype in NARROW.items() for row, number in _ROUNDED)
"""Partial sums that are rounded to a dtype. The sentence has {of} for the columns of a slice."""


def slice_sums(parts: GemmParts, width: int) -> list[Ends]:
    """Ends of the float32 sums of each slice of K, in any order inside the slice."""
    ends = []
    for start in range(0, parts.left.shape[1], width):
        columns = slice(start, min(start + width, parts.left.shape[1]))
        part = replace(
            parts.any_order, left=select_columns(parts.left, columns), right=select_columns(parts.right, columns)
        )
        ends.append(part.sums().ends)
    return ends


def _of_elements(dtype: torch.dtype, parts: GemmParts, _: Ends) -> list[Ends]:
    """Ends of the outputs if the sums of the elements of a block are rounded before its scales multiply them."""
    width, columns = parts.left.recipe.block[1], parts.left.shape[1]
    if parts.tensor_factors is not None or parts.left.recipe.spans_k:
        return []
    left, right = (scale_values(q) for q in (parts.left, parts.right))
    low, high, size = (torch.zeros_like(parts.output, dtype=torch.float64) for _ in range(3))
    for number, start in enumerate(range(0, columns, width)):
        block = slice(start, min(start + width, columns))
        a, b = (element_values(select_columns(q, block)) for q in (parts.left, parts.right))
        total, error = a @ b.T, (width + 8) * UNIT * (a.abs() @ b.abs().T)
        scale = left[:, number, None] * right[None, :, number]
        ends = [(total + side * error).float().to(dtype).double() * scale for side in (-1, 1)]
        low, high, size = low + ends[0], high + ends[1], size + torch.maximum(ends[0].abs(), ends[1].abs())
    slack = 2 * (columns // width + 1) * UNIT * size
    low, high = (torch.where(end.isfinite(), end + side * slack, end) for side, end in ((-1, low), (1, high)))
    return correct_epilogue(parts, (low.float(), high.float()))


OF_ELEMENTS: tuple[Deviation[GemmParts], ...] = tuple(
    Deviation(f"partial-sums-{name}", f"sums of the elements of a block are rounded to {name} before its scales "
              "multiply them", EPILOGUE, partial(_of_elements, dtype)) for name, dtype in NARROW.items()
)  # fmt: skip
"""Sums of elements without their scales that are rounded."""
