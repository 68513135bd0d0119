"""Partial sums of slices of K that are kept in bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    Ends,
    GemmParts,
    cast_ends,
    correct_epilogue,
    scale_ends,
    select_columns,
)

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


@dataclass(frozen=True)
class PartialSums:
    """Partial sums that are rounded to a dtype."""

    cause: str
    sentence: str
    """With {width} for the columns of a slice."""
    dtype: torch.dtype
    scaled: bool = False
    """Whether α multiplies a partial sum before it is rounded."""
    running: bool = False
    """Whether the sum of all slices so far is rounded, or each slice alone."""

    def outputs(self, parts: GemmParts, slices: list[Ends]) -> list[Ends]:
        """Ends of the outputs, given the ends of the sums of all slices."""
        low = high = torch.zeros_like(slices[0][0])
        for ends in slices:
            scaled = scale_ends(ends, parts.factor) if self.scaled else ends
            if self.running:
                low, high = cast_ends((low + scaled[0], high + scaled[1]), self.dtype)
            else:
                rounded = cast_ends(scaled, self.dtype)
                low, high = low + rounded[0], high + rounded[1]
        if self.scaled:
            parts = replace(parts, factor=torch.ones_like(parts.factor))
        return correct_epilogue(parts, (low, high))


def _kinds() -> Iterator[PartialSums]:
    sums = "sums of {width} columns of K"
    for partial, running, dtype, name in (
        ("partial-sums-bf16", "accumulator-bf16", torch.bfloat16, "bf16"),
        ("partial-sums-fp16", "accumulator-fp16", torch.float16, "fp16"),
    ):
        yield PartialSums(partial, f"{sums} are rounded to {name} before they are added", dtype)
        yield PartialSums(partial, f"{sums}, times α, are rounded to {name} before they are added", dtype, scaled=True)
        yield PartialSums(
            running, f"sums are rounded to {name} after every {{width}} columns of K", dtype, running=True
        )


KINDS: tuple[PartialSums, ...] = tuple(_kinds())


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
