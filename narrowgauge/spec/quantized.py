"""The result of quantization, returned by every backend and passed to `dequantize` and `gemm`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILES, ScaleLayout

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")
PARTS = ("codes", "scales", "amax", "tensor_scale")
"""Tensors of a stored matrix."""


class Half(StrEnum):
    """A half of a matrix x (M, K): x quantized along K, or its transpose (K, M) quantized along M.

    `tuple(Half)` are both, in the order of every pair: results, amaxes and words of `quantize_both`.
    """

    ROW = "rowwise"
    COLUMN = "columnwise"

    @classmethod
    def of(cls, *, columnwise: bool) -> Half:
        """The half that an argument `columnwise` names."""
        return cls.COLUMN if columnwise else cls.ROW

    def pick(self, pair: Sequence[Value]) -> Value:
        """The entry of this half."""
        return pair[self is Half.COLUMN]

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """The matrix that is quantized along its rows: `x` (M, K), or a view of its transpose."""
        return self.pick((x, x.T))

    def shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of `matrix` for x of shape (M, K)."""
        rows, columns = shape
        return self.pick(((rows, columns), (columns, rows)))

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of this half in `quantize_both`, which rotates the columnwise half alone."""
        return self.pick((recipe.rowwise, recipe))

    def operand(self, role: str) -> str:
        """Name of the half of an operand of a layer for an observer: `x` or `x columnwise`."""
        return self.pick((role, f"{role} columnwise"))

    def transposed(self, recipe: Recipe) -> bool:
        """Whether the half is stored as `Quantized.transposed` says."""
        return self is Half.COLUMN and recipe.columnwise == "in-place"


class _Stored:
    """Methods of a stored matrix."""

    amax: torch.Tensor | None
    recipe: Recipe

    @property
    def required_amax(self) -> torch.Tensor:
        """`amax`, for operations that need the amax. Raises ValueError if `amax` is None."""
        if self.amax is None:
            raise ValueError(
                f"amax is None; recipe {self.recipe} needs the amax of the tensor: quantize with it, or set amax"
            )
        return self.amax

    def to(self, device: torch.device | str) -> Self:
        """The same matrix on a device. Tensors of this device are not copied."""
        return replace(self, **{name: part.to(device) for name, part in vars(self).items() if hasattr(part, "to")})  # type: ignore[type-var]


@dataclass(repr=False)
class Quantized(_Stored):
    """A quantized (M, K) matrix with blocks along K.

    codes: uint8, (M, ⌈K/2⌉) for 4-bit elements (first element in the low nibble; an odd K leaves the last high nibble
    0), else (M, K).
    scales: decode scales, linear and unpadded. uint8 codes of the scale format: (M, ⌈K/block⌉); a block of 16 or 32
    rows stores its scale once per row. float32 scales: (⌈M/rows⌉, ⌈K/block⌉), (M, 1) for a scale
    per row, or (1, 1) for a whole tensor.
    amax: float32 (1,), or (M,) for a recipe with an amax per row; None for a recipe without tensor scale.
    tensor_scale: the encode factor of the quantization, or the decode factor if the dialect has one, float32, of the
    shape of amax; None if the kernel does not report the factor.
    shape: (M, K) of the input, before the last block was padded with zeros.
    scale_layout: layout of the scales, with its padding if it is not linear. `swizzled=True`, also in its position, is
    the layout 128x4.
    transposed: codes are stored as (K, M) and linear scales as (⌈K/block⌉, M), like the columnwise MX halves
    (`Recipe.columnwise`).
    zeros: zero points, codes of the elements, uint8 of the shape of the scales; None for a recipe without them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    recipe: Recipe
    shape: tuple[int, int]
    tensor_scale: torch.Tensor | None = None
    scale_layout: ScaleLayout = LINEAR
    transposed: bool = False
    zeros: torch.Tensor | None = None

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        amax: torch.Tensor | None,
        recipe: Recipe,
        shape: tuple[int, int],
        tensor_scale: torch.Tensor | None = None,
        scale_layout: ScaleLayout | bool = LINEAR,
        transposed: bool = False,
        zeros: torch.Tensor | None = None,
        *,
        swizzled: bool | None = None,
    ) -> None:
        self.codes, self.scales, self.amax, self.recipe, self.shape = codes, scales, amax, recipe, shape
        self.tensor_scale, self.transposed, self.zeros = tensor_scale, transposed, zeros
        layout = scale_layout if swizzled is None else swizzled
        self.scale_layout = layout if isinstance(layout, str) else TILES if layout else LINEAR

    @property
    def swizzled(self) -> bool:
        """Whether the scales are in the layout 128x4."""
        return self.scale_layout == TILES

    def __repr__(self) -> str:
        """Recipe, shape, device and storage, without the content of a tensor."""
        storage = [] if self.scale_layout == LINEAR else [f"scales {self.scale_layout}"]
        storage += ["transposed"] if self.transposed else []
        return f"Quantized({', '.join([str(self.recipe), _size(self.shape), str(self.codes.device), *storage])})"


@dataclass(repr=False)
class BatchedQuantized(_Stored):
    """A batch of quantized matrices (B, M, K), each quantized by itself; `matrices()` returns a `Quantized` for each.

    codes, scales, amax, tensor_scale, zeros: those of a `Quantized`, with a further axis B in front. So each matrix has
    its own amax, and the padding of its own scales.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    recipe: Recipe
    shape: tuple[int, int, int]
    tensor_scale: torch.Tensor | None = None
    scale_layout: ScaleLayout = LINEAR
    transposed: bool = False
    zeros: torch.Tensor | None = None

    def __repr__(self) -> str:
        """Recipe, shape and device, without the content of a tensor."""
        return f"BatchedQuantized({self.recipe}, {_size(self.shape)}, {self.codes.device})"

    def matrices(self) -> list[Quantized]:
        """A `Quantized` for each matrix, as views of the same memory: nothing is copied."""
        parts = {name: getattr(self, name) for name in (*PARTS, "zeros")}
        given = {name: part for name, part in parts.items() if part is not None}
        own: dict[str, Any] = {"scale_layout": self.scale_layout, "transposed": self.transposed, "amax": None}
        return [
            Quantized(recipe=self.recipe, shape=self.shape[1:], **own | {name: part[n] for name, part in given.items()})
            for n in range(self.shape[0])
        ]


@dataclass(repr=False)
class GroupedQuantized(_Stored):
    """A matrix (M, K), quantized in separate sections along M; `sections()` returns a `Quantized` per section.

    sizes: int64 (G,), rows of each section, on the device of the codes.
    codes, scales, rowwise (`columnwise` False): codes (M, ⌈K/2⌉) or (M, K) and scales (M, ⌈K/block⌉), section below
    section. float32 scales have ⌈m/rows⌉ rows for a section of m rows.
    codes, scales, columnwise: flat. The stored codes and scales of the transpose (K, m) of each section are adjacent in
    memory, in order of the sections. Bytes behind the last section are unused.
    amax, tensor_scale: float32 (G,), or None for a recipe without tensor scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    recipe: Recipe
    shape: tuple[int, int]
    sizes: torch.Tensor
    tensor_scale: torch.Tensor | None = None
    columnwise: bool = False

    def __repr__(self) -> str:
        """Recipe, shape, number of sections, device and orientation, without the content of a tensor."""
        shape = f"{_size(self.shape)} in {len(self.sizes)} section{'' if len(self.sizes) == 1 else 's'}"
        orientation = ["columnwise"] if self.columnwise else []
        return f"GroupedQuantized({', '.join([str(self.recipe), shape, str(self.codes.device), *orientation])})"

    def sections(self) -> list[Quantized]:
        """A `Quantized` for each section, in order, as views of the same memory: nothing is copied.

        A section of m rows, which may be 0, has the shape (m, K), codes (m, ⌈K/2⌉) or (m, K), scales (m, ⌈K/block⌉) and
        an amax (1,), as `quantize` of these rows alone gives; a columnwise one has those of its transpose (K, m).
        Waits for the device of `sizes`.
        """
        half, count = Half.of(columnwise=self.columnwise), len(self.sizes)
        transposed = half.transposed(self.recipe)
        shapes = [half.shape((rows, self.shape[1])) for rows in self.sizes.tolist()]
        codes, scales = (
            self._split(part, [shape_of(shape, self.recipe, transposed=transposed) for shape in shapes])
            for part, shape_of in ((self.codes, codes_shape), (self.scales, scales_shape))
        )
        numbers = (
            [None] * count if n is None else n[:count].unsqueeze(1).unbind() for n in (self.amax, self.tensor_scale)
        )
        return [
            Quantized(code, scale, amax, self.recipe, shape, encode, transposed=transposed)
            for shape, code, scale, amax, encode in zip(shapes, codes, scales, *numbers, strict=True)
        ]

    def _split(self, part: torch.Tensor, shapes: list[tuple[int, int]]) -> Iterable[torch.Tensor]:
        # A split instead of a slice for each section: with guard zones each call of torch costs ten times as much.
        counts = [math.prod(shape) if self.columnwise else shape[0] for shape in shapes]
        pieces = part[: sum(counts)].split(counts)  # type: ignore[no-untyped-call]
        return (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


def joined_sections(sections: Sequence[Quantized], half: Half = Half.ROW) -> dict[str, torch.Tensor]:
    """codes, scales, amax and tensor_scale of a GroupedQuantized, from those of its sections."""
    import torch

    joined: dict[str, torch.Tensor] = {}
    for name in PARTS:
        parts = [getattr(section, name) for section in sections]
        if not any(part is None for part in parts):
            joined[name] = torch.cat([part.flatten() for part in parts] if half is Half.COLUMN else parts)
    return joined


def _size(shape: Sequence[int]) -> str:
    """`128x256`."""
    return "x".join(map(str, shape))


def codes_shape(shape: tuple[int, int], recipe: Recipe, *, transposed: bool = False) -> tuple[int, int]:
    """Shape of the stored codes of a (M, K) matrix."""
    rows, columns = shape[::-1] if transposed else shape
    return (rows, -(-columns // 2)) if recipe.element.bits == 4 else (rows, columns)


def scales_shape(
    shape: tuple[int, int], recipe: Recipe, *, transposed: bool = False, layout: ScaleLayout = LINEAR
) -> tuple[int, int]:
    """Shape of the stored block scales of a (M, K) matrix: a row of scales per row of the matrix.

    Linear scales are unpadded; other layouts have their padded shape, also if the codes are `transposed`. Float32
    scales have a row per row of blocks. A tensor with a single scale has (1, 1), even if the tensor is empty; a recipe
    with a scale per row has (M, 1), even if K is 0.
    """
    if layout != LINEAR:
        return LAYOUTS[layout].packed_shape(scales_shape(shape, recipe))
    if recipe.whole:
        return 1, 1
    if recipe.spans_k:
        return (1, shape[0]) if transposed else (shape[0], 1)
    rows, columns = -(-shape[0] // recipe.stored_rows), -(-shape[1] // recipe.block[1])
    return (columns, rows) if transposed else (rows, columns)


def amax_shape(shape: tuple[int, int], recipe: Recipe) -> tuple[int]:
    """Shape of the amax of a (M, K) matrix."""
    return (shape[0],) if recipe.granularity == "row" else (1,)


def words_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the random words for stochastic rounding of a (M, K) matrix: a word per four elements of a row."""
    rows, columns = shape
    return rows, -(-columns // 4)
