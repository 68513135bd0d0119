"""The result of quantizing: what every backend returns, and what `dequantize` and `gemm` take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.spec.recipes import Recipe

if TYPE_CHECKING:
    import torch


@dataclass
class Quantized:
    """A quantized (M, K) matrix, its blocks along K.

    codes: uint8, (M, ⌈K/2⌉) for 4-bit elements (first element in the low nibble, an odd K leaves the last high nibble
    0), (M, K) otherwise. scales: decode scales, uint8 codes of the recipe's scale format or float32 numbers, linear and
    unpadded: (M, ⌈K/block⌉), that of a block of 16 or 32 rows once for each of them; float32 ones (⌈M/rows⌉,
    ⌈K/block⌉), (1, 1) of a whole tensor. Or, where `swizzled`, padded and in the 128×4 layout. amax: float32, (1,), or
    (M,) where the recipe has one for each row, or None where it has no tensor scale. tensor_scale: float32, like amax,
    the encode factor that was used; None where a kernel does not show it. shape: (M, K) as given, before the last block
    was padded with zeros. transposed: codes are stored as (K, M) and linear scales as (⌈K/block⌉, M), as columnwise MX
    halves are (`Recipe.columnwise`).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    recipe: Recipe
    shape: tuple[int, int]
    tensor_scale: torch.Tensor | None = None
    swizzled: bool = False
    transposed: bool = False

    @property
    def required_amax(self) -> torch.Tensor:
        """`amax`, for operations that decode by it. Raises ValueError if it is None."""
        return _required_amax(self.amax, self.recipe)


@dataclass
class GroupedQuantized:
    """A matrix (M, K) quantized in sections along M, each by itself: `sections()` are its Quantized parts.

    sizes: int64 (G,), rows of each section, on the device of the rest. Rowwise (`columnwise` False), codes (M, ⌈K/2⌉)
    or (M, K), and scales (M, ⌈K/block⌉), are those of the sections one below the other; so are float32 scales, as many
    rows as each section has. Columnwise, codes and scales are flat: those of the transpose (K, m) of each section, as
    they are stored, one behind the other. What is left at the end is not used. amax and tensor_scale: float32 (G,), or
    None where the recipe has no tensor scale.
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
    def required_amax(self) -> torch.Tensor:
        """`amax`, one number for each section. Raises ValueError if it is None."""
        return _required_amax(self.amax, self.recipe)

    def sections(self) -> list[Quantized]:
        """One Quantized for each section, views of this one's memory. Waits for the device that holds `sizes`."""
        parts = []
        start = code = scale = 0
        transposed = self.columnwise and self.recipe.columnwise == "in-place"
        for number, rows in enumerate(self.sizes.tolist()):
            shape = (self.shape[1], rows) if self.columnwise else (rows, self.shape[1])
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
                None if every is None else every[number : number + 1] for every in (self.amax, self.tensor_scale)
            )
            parts.append(Quantized(codes, scales, amax, self.recipe, shape, encode, transposed=transposed))
        return parts


def _required_amax(amax: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    if amax is None:
        raise ValueError(f"amax is None; recipe {recipe} needs the amax of the tensor: quantize with it, or set amax")
    return amax


def codes_shape(shape: tuple[int, int], recipe: Recipe, *, transposed: bool = False) -> tuple[int, int]:
    """Shape of the codes of a (M, K) matrix, as they are stored."""
    rows, columns = shape[::-1] if transposed else shape
    return (rows, -(-columns // 2)) if recipe.element.bits == 4 else (rows, columns)


def scales_shape(shape: tuple[int, int], recipe: Recipe, *, transposed: bool = False) -> tuple[int, int]:
    """Shape of the unpadded block scales of a (M, K) matrix, as they are stored: a row for every row of the matrix.

    Float32 scales have one for every row of blocks; a tensor with one scale has (1, 1), also where it is empty.
    """
    if recipe.whole:
        return 1, 1
    rows, columns = -(-shape[0] // recipe.stored_rows), -(-shape[1] // recipe.block[1])
    return (columns, rows) if transposed else (rows, columns)


def swizzled_shape(shape: tuple[int, int], recipe: Recipe) -> tuple[int, int]:
    """Shape of the block scales of a (M, K) matrix in the 128×4 layout: whole tiles."""
    rows, columns = scales_shape(shape, recipe)
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def amax_shape(shape: tuple[int, int], recipe: Recipe) -> tuple[int]:
    """Shape of the amax of a (M, K) matrix."""
    return (shape[0],) if recipe.granularity == "row" else (1,)


def words_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the random words of a (M, K) matrix that is rounded stochastically: one for four elements of a row."""
    rows, columns = shape
    return rows, -(-columns // 4)
