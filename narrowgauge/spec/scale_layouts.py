"""Layouts of block scales in memory, as data: orders of digits of the row and of the column.

Rows (R) and columns (C) of linear scales are split into named digits, the slowest first. A layout joins the digits of
both in another order. The digit without a size takes the rest, and R and C are padded to whole digits. The code reads
no name of a layout: a further layout is a row of `LAYOUTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, TypeVar

if TYPE_CHECKING:
    import torch

ScaleLayout = Literal[
    "linear", "128x4", "8x4", "ue8m0-int32", "ue8m0-int32-flashinfer", "ue4m3-int32", "hopper-mxfp4", "hopper-mxfp4-4",
    "cdna4-mxfp4", "blackwell-ragged", "kv-v-swizzled", "marlin-64", "marlin-64-swapped", "marlin-32",
    "marlin-32-swapped",
]  # fmt: skip
"""Name of a layout, of `LAYOUTS`."""
LINEAR: Final = "linear"
TILES: Final = "128x4"
"""The layout of `swizzle`, which tensor cores read."""
Cells = Literal["none", "0", "any", "absent"]
"""Content of padding cells. none: the layout has no padding, and a shape consists of whole digits. absent: the kernel
leaves the cells as they are."""

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
    padding: Cells
    """Content of the cells that the padding adds."""
    meaning: str
    users: str
    """Libraries with this layout."""
    version: str = ""
    """Release of the library whose code has this layout; empty if all releases have the layout."""
    word: Literal["byte", "int32"] = "byte"
    """Type in which the library stores packed scales. An int32 holds four scales, the first in the lowest byte."""
    row_padding: Cells | None = None
    """Content of the cells of padded rows, if other than `padding`."""
    scale: Literal["", "E8M0", "E4M3"] = ""
    """Format of the scales; empty: any byte."""
    by_group: bool = False
    """Whether a row has the scales of a group of K, and a column those of an output column: the transpose of the scales
    of a quantized matrix."""

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
        """Shape of linear scales (R, C) after the padding."""
        rows, columns = (-(-extent // whole) * whole for extent, whole in zip(shape, self.tile, strict=True))
        return rows, columns

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of packed scales: the padded shape, or a row for each value of the slowest digit if that is a digit of
        the column."""
        padded = self.padded_shape(shape)
        first = self.order.split()[0]
        if first not in self._digits[1]:
            return padded
        count = self._sizes(padded)[first]
        return count, math.prod(padded) // count if count else padded[0] * self.tile[1]

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why scales of `shape` (R, C) do not have this layout, or None."""
        if self.padding != "none" or self.padded_shape(shape) == tuple(shape):
            return None
        return f"layout {self.name} has no padding: rows are a multiple of {self.tile[0]}, columns of {self.tile[1]}"

    def digit_strides(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Size of each digit in the order in memory, for linear scales of `shape`, and the numbers of rows and of
        columns between two values of the digit."""
        sizes = self._sizes(self.padded_shape(shape))
        strides: dict[str, tuple[int, int]] = {}
        for of_columns, digits in enumerate(self._digits):
            step = 1
            for name in reversed(digits):
                strides[name] = (0, step) if of_columns else (step, 0)
                step *= sizes[name]
        return [(sizes[name], *strides[name]) for name in self.order.split()]

    @property
    def divisible_rows(self) -> bool:
        """Whether parts with different numbers of rows can lie one behind another: the digit of the row without a size
        is the slowest in memory."""
        return self._digits[0].get(self.order.split()[0]) == 0

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
        """Linear scales (R, C) of any dtype in this layout: `packed_shape`, the padding 0. Raises ValueError for a
        shape that the layout does not have."""
        if problem := self.problem(scales.shape):
            raise ValueError(f"{problem}; these are {tuple(scales.shape)}")
        padded = self.pad(scales)
        sizes, order = self._sizes(padded.shape), self.order.split()
        digits = padded.reshape(list(sizes.values())).permute([list(sizes).index(name) for name in order])
        return digits.reshape(self.packed_shape(scales.shape))

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
        Layout("8x4", "A c:8", "G h:4", "A G c h", "any", "tiles of 8 rows by 4 columns, row by row, padded with any "
               "bytes", "FlashInfer, TensorRT-LLM"),
        # DeepGEMM `get_mn_major_tma_aligned_packed_ue8m0_tensor`
        Layout("ue8m0-int32", "a c:4", "G h:4", "G a c h", "0", "four columns in an int32, the words of a column of "
               "words one behind another; words of padded rows are not written", "DeepGEMM, vLLM, SGLang",
               version="DeepGEMM 54e2261, vLLM 0.33.0", word="int32", row_padding="absent", scale="E8M0"),
        Layout("ue8m0-int32-flashinfer", "a c:4", "G h:4", "G a c h", "0",
               "as ue8m0-int32, and padded rows hold any bytes", "FlashInfer",
               version="FlashInfer 0.7.2", word="int32", row_padding="any", scale="E8M0"),
        Layout("ue4m3-int32", "a c:4", "G h:4", "G a c h", "0", "as ue8m0-int32, of E4M3 scales", "DeepGEMM",
               version="DeepGEMM 54e2261", word="int32", row_padding="absent", scale="E4M3"),
        # triton_kernels `HopperMXScaleLayout`, w = number of warps
        Layout("hopper-mxfp4", "a b:2 c:8 e:2 f:8", "g h:2", "a c g b f h e", "0",
               "rows of 8 warps and pairs of columns, as wgmma of 8 warps reads them", "triton_kernels"),
        Layout("hopper-mxfp4-4", "a b:2 c:4 e:2 f:8", "g h:2", "a c g b f h e", "0", "the same for 4 warps",
               "triton_kernels"),
        Layout("cdna4-mxfp4", "a b:2 c:16", "g h:2 i:4", "a g i c h b", "none",
               "tiles of 32 rows by 8 columns of MFMA instructions", "triton_kernels, aiter"),
        Layout("blackwell-ragged", "A b:4 c:32", "G H:2 h:4", "A G H c b h", "0",
               "128x4, columns padded to 8, each section of rows padded by itself", "triton_kernels"),
        Layout("kv-v-swizzled", "T t:4", "s:4 r", "T s r t", "none",
               "scales of V of a page: four tokens together, and each quarter of the columns by itself", "vLLM",
               version="vLLM 0.33.0"),
        # vLLM `marlin_permute_scales`
        *(Layout(f"marlin-{width}{'-swapped' * swapped}", "m", columns, swapped_order if swapped else order, "none",
                 f"{width} output columns of a group{', the last two digits exchanged' * swapped}", "vLLM (Marlin)",
                 version="vLLM 0.33.0", by_group=True)
          for width, columns, order, swapped_order in (
              (64, "a J:2 x:2 y:2 i:8", "m a i J x y", "m a i J y x"),
              (32, "a Q:2 p:2 i:4 r:2", "m a i Q p r", "m a i Q r p"))
          for swapped in (False, True)),
    )
}  # fmt: skip
TILED = {name: layout for name, layout in LAYOUTS.items() if name != LINEAR}
"""All layouts but the linear one: layouts of bytes."""


def find_layout(layout: ScaleLayout | Layout) -> Layout:
    """The layout of a name. Raises ValueError for an unknown name."""
    if isinstance(layout, Layout):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it can be {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[layout]


@dataclass(frozen=True)
class Packing:
    """Scales (R, C), batches of scales (B, R, C), or sections of the rows of scales (R, C), in a layout.

    Every batch and every section is padded by itself. Raises ValueError for a shape, or for sections, that
    the layout does not have.
    """

    layout: Layout
    shape: tuple[int, ...]
    """Shape of the linear scales."""
    sections: tuple[int, ...] | None = None
    """Rows of each section, or None."""

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise ValueError(f"scales are (R, C) or (B, R, C), not shape {self.shape}")
        if self.sections is None:
            problem = self.layout.problem(self.shape[-2:])
        elif len(self.shape) == 3:
            problem = "scales (B, R, C) have no sections"
        elif not self.layout.divisible_rows:
            problem = f"layout {self.layout.name} has no sections: its slowest digit is of the column; pad one by one"
        elif min(self.sections, default=0) < 0 or sum(self.sections) != self.shape[0]:
            problem = (
                f"sections {list(self.sections)} are not negative and sum to the {self.shape[0]} rows of the scales"
            )
        else:
            problem = next(filter(None, (self.layout.problem((rows, self.shape[1])) for rows in self.sections)), None)
        if problem:
            raise ValueError(f"{problem}; the scales have shape {self.shape}")

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each part that is padded by itself."""
        if self.sections is not None:
            return self.sections
        return (self.shape[-2],) * (self.shape[0] if len(self.shape) == 3 else 1)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Bytes of each packed part; one part lies behind another."""
        return tuple(math.prod(self.layout.padded_shape((rows, self.shape[-1]))) for rows in self.rows)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed scales: (…) of `Layout.packed_shape`, (B, …) of batches, (rows of all sections, …)."""
        if self.sections is None:
            return (*self.shape[:-2], *self.layout.packed_shape(self.shape[-2:]))
        columns = self.layout.padded_shape((0, self.shape[1]))[1]
        return sum(self.layout.padded_shape((rows, 0))[0] for rows in self.sections), columns

    @property
    def has_padding(self) -> bool:
        """Whether some cells of padding are 0 or absent."""
        content = {self.layout.padding, self.layout.row_padding} & {"0", "absent"}
        return bool(content) and sum(self.part_sizes) > math.prod(self.shape)

    def pack(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales of `shape`, of any dtype, in the layout; all padding 0."""
        import torch

        rows = scales if scales.dim() == 2 else scales.flatten(0, -2)
        parts = [self.layout.pack(part).flatten() for part in torch.split(rows, list(self.rows))] if self.rows else []
        return torch.cat(parts).view(self.packed_shape) if parts else scales.new_zeros(self.packed_shape)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`: linear scales of `shape`."""
        import torch

        parts = [
            self.layout.unpack(part, (rows, self.shape[-1]))
            for rows, part in zip(self.rows, torch.split(packed.flatten(), list(self.part_sizes)), strict=True)
        ]
        return torch.cat(parts).view(self.shape) if parts else packed.new_zeros(self.shape)

    def cells(self, content: Cells) -> torch.Tensor:
        """bool mask of the packed scales: the padding cells with this content."""
        import torch

        numbers = torch.ones(self.shape, dtype=torch.uint8)
        inside = self.pack(numbers) != 0
        columns = self.layout.padded_shape((0, self.shape[-1]))[1]
        of_rows = replace(self, shape=(*self.shape[:-1], columns)).pack(numbers.new_ones((*self.shape[:-1], columns)))
        in_rows = of_rows.view(inside.shape) != 0
        below = ~in_rows if (self.layout.row_padding or self.layout.padding) == content else torch.zeros_like(inside)
        beside = in_rows & ~inside if self.layout.padding == content else torch.zeros_like(inside)
        return below | beside
