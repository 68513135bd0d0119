"""The result of quantization, returned by every backend and passed to `dequantize` and `gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, TILES, ScaleLayout

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


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


@dataclass(repr=False)
class Quantized:
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
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    recipe: Recipe
    shape: tuple[int, int]
    tensor_scale: torch.Tensor | None = None
    scale_layout: ScaleLayout = LINEAR
    transposed: bool = False

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
        *,
        swizzled: bool | None = None,
    ) -> None:
        self.codes, self.scales, self.amax, self.recipe, self.shape = codes, scales, amax, recipe, shape
        self.tensor_scale, self.transposed = tensor_scale, transposed
        layout = scale_layout if swizzled is None else swizzled
        self.scale_layout = layout if isinstance(layout, str) else TILES if layout else LINEAR

    @property
    def swizzled(self) -> bool:
        """Whether the scales are in the layout 128x4."""
        return self.scale_layout == TILES

    @property
    def required_amax(self) -> torch.Tensor:
        """`amax`, for operations that need the amax. Raises ValueError if `amax` is None."""
        return _required_amax(self.amax, self.recipe)

    def to(self, device: torch.device | str) -> Quantized:
        """The same matrix on a device. Tensors of this device are not copied."""
        codes, scales, amax, tensor_scale = _moved(device, self.codes, self.scales, self.amax, self.tensor_scale)
        return replace(self, codes=codes, scales=scales, amax=amax, tensor_scale=tensor_scale)

    def __repr__(self) -> str:
        """Recipe, shape, device and storage, without the content of a tensor."""
        storage = [] if self.scale_layout == LINEAR else [f"scales {self.scale_layout}"]
        storage += ["transposed"] if self.transposed else []
        return f"Quantized({', '.join([str(self.recipe), _size(self.shape), str(self.codes.device), *storage])})"


@dataclass(repr=False)
class GroupedQuantized:
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

    @property
    def half(self) -> Half:
        """The half of each section."""
        return Half.of(columnwise=self.columnwise)

    @property
    def required_amax(self) -> torch.Tensor:
        """`amax`, a number per section. Raises ValueError if `amax` is None."""
        return _required_amax(self.amax, self.recipe)

    def to(self, device: torch.device | str) -> GroupedQuantized:
        """The same sections on a device. Tensors of this device are not copied."""
        codes, scales, amax, tensor_scale, sizes = _moved(
            device, self.codes, self.scales, self.amax, self.tensor_scale, self.sizes
        )
        return replace(self, codes=codes, scales=scales, amax=amax, tensor_scale=tensor_scale, sizes=sizes)

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
        parts = []
        start = code = scale = 0
        transposed = self.half.transposed(self.recipe)
        for number, rows in enumerate(self.sizes.tolist()):
            shape = self.half.shape((rows, self.shape[1]))
            high, wide = codes_shape(shape, self.recipe, transposed=transposed)
            tall, broad = scales_shape(shape, self.recipe, transposed=transposed)
            if self.columnwise:
                codes = self.codes[code : code + high * wide].view(high, wide)
                scales = self.scales[scale : scale + tall * broad].view(tall, broad)
                code, scale = code + high * wide, scale + tall * broad
            else:
                codes, scales = self.codes[start : start + rows], self.scales[scale : scale + tall]
                start, scale = start + rows, scale + tall
            amax, encode = (
                None if values is None else values[number : number + 1] for values in (self.amax, self.tensor_scale)
            )
            parts.append(Quantized(codes, scales, amax, self.recipe, shape, encode, transposed=transposed))
        return parts


def _moved(device: torch.device | str, *tensors: torch.Tensor | None) -> Iterator[Any]:
    """The tensors on a device; None stays None."""
    return (None if tensor is None else tensor.to(device) for tensor in tensors)


def _size(shape: tuple[int, int]) -> str:
    """`128x256`."""
    return "x".join(map(str, shape))


def _required_amax(amax: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    if amax is None:
        raise ValueError(f"amax is None; recipe {recipe} needs the amax of the tensor: quantize with it, or set amax")
    return amax


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
        return LAYOUTS[layout].padded_shape(scales_shape(shape, recipe))
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
