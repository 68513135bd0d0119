"""Layouts of block scales in memory, as data: orders of digits of the row and of the column.

Rows (R) and columns (C) of linear scales are split into named digits, the slowest first. A layout joins the digits of
both in another order. The digit without a size takes the rest, and R and C are padded to whole digits. The code reads
no name of a layout: a further layout is a row of `LAYOUTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, TypeVar

if TYPE_CHECKING:
    import torch

ScaleLayout = Literal["linear", "128x4", "8x4"]
"""Name of a layout, of `LAYOUTS`."""
LINEAR: Final = "linear"
TILES: Final = "128x4"
"""The layout of `swizzle`, which tensor cores read."""

Place = TypeVar("Place", int, "torch.Tensor")


@dataclass(frozen=True)
class Layout:
    """A layout of the block scales (R, C) of a matrix."""

    name: str
    rows: str
    """Digits of the row: names, with `:` and the size of all but one."""
    columns: str
    order: str
    """Names of all digits in the order in memory."""
    padding: Literal["none", "0"]
    """Content of the cells that the padding adds."""
    meaning: str
    users: str
    """Libraries with this layout."""

    @cached_property
    def _digits(self) -> tuple[dict[str, int], ...]:
        """Digits of the row and of the column with their sizes, the slowest first; 0 for the digit without a size."""
        texts = ([digit.partition(":") for digit in text.split()] for text in (self.rows, self.columns))
        return tuple({name: int(size or 0) for name, _, size in digits} for digits in texts)

    @cached_property
    def tile(self) -> tuple[int, ...]:
        """Rows and columns whose multiples are not padded."""
        return tuple(math.prod(filter(None, digits.values())) for digits in self._digits)

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of linear scales (R, C) after the padding, which is also the shape of packed scales."""
        rows, columns = (-(-extent // whole) * whole for extent, whole in zip(shape, self.tile, strict=True))
        return rows, columns

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Size of every digit for padded scales of `shape`."""
        return {
            name: size or extent // whole
            for digits, extent, whole in zip(self._digits, shape, self.tile, strict=True)
            for name, size in digits.items()
        }

    def pad(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales (R, C) in linear order with zeros on the right and below."""
        shape = self.padded_shape(scales.shape)
        if shape == scales.shape:
            return scales
        padded = scales.new_zeros(shape)
        padded[: scales.shape[0], : scales.shape[1]] = scales
        return padded

    def pack(self, scales: torch.Tensor) -> torch.Tensor:
        """Linear scales (R, C) of any dtype in this layout: `padded_shape`, the padding 0."""
        padded = self.pad(scales)
        sizes, order = self._sizes(padded.shape), self.order.split()
        digits = padded.reshape(list(sizes.values())).permute([list(sizes).index(name) for name in order])
        return digits.reshape(padded.shape)

    def unpack(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Linear scales of `shape` (R, C): the inverse of `pack`. `padded_shape` as the shape keeps the padding."""
        padded = self.padded_shape(shape)
        sizes, order = self._sizes(padded), self.order.split()
        digits = packed.reshape([sizes[name] for name in order]).permute([order.index(name) for name in sizes])
        return digits.reshape(padded)[: shape[0], : shape[1]].contiguous()

    def offset(self, row: Place, column: Place, shape: Sequence[int]) -> Place:
        """Place in memory of the scale at (row, column) of linear scales of `shape` (R, C), counted in scales."""
        sizes = self._sizes(self.padded_shape(shape))
        values: dict[str, Place] = {}
        for digits, number in zip(self._digits, (row, column), strict=True):
            slowest, *others = digits
            rest = number
            for name in reversed(others):
                values[name], rest = rest % sizes[name], rest // sizes[name]
            values[slowest] = rest
        first, *others = self.order.split()
        place = values[first]
        for name in others:
            place = place * sizes[name] + values[name]
        return place


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("linear", "m", "k", "m k", "none", "a row of scales for each row, no padding",
               "torchao, modelopt, compressed-tensors, FlashInfer (linear)"),
        # docs/numerics.md#scale-layout
        Layout("128x4", "A b:4 c:32", "G h:4", "A G c b h", "0",
               "tiles of 128 rows by 4 columns of block-scaled tensor cores, padded with zeros",
               "cuBLAS, CUTLASS, torch (scaled_mm), torchao (to_blocked), vLLM, FlashInfer, comfy-kitchen"),
        # TensorRT-LLM and FlashInfer, `get_sf_out_offset_8x4`
        Layout("8x4", "A c:8", "G h:4", "A G c h", "0", "tiles of 8 rows by 4 columns, row by row, padded with zeros",
               "FlashInfer, TensorRT-LLM"),
    )
}  # fmt: skip
TILED = {name: layout for name, layout in LAYOUTS.items() if layout.padding != "none"}
"""The layouts with tiles and padding."""
