"""The result of quantizing: what every backend returns, and what `dequantize` and `gemm` take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference.recipes import Recipe

if TYPE_CHECKING:
    import torch


@dataclass
class Quantized:
    """A quantized (M, K) matrix.

    codes: uint8, (M, ⌈K/2⌉) for 4-bit elements (first element in the low nibble, an odd K leaves the last high nibble
    0), (M, K) otherwise. scales: uint8 codes of the recipe's scale format, linear and unpadded, (M, ⌈K/block⌉). amax:
    float32, (1,), or None where the recipe has no tensor scale. tensor_scale: float32, (1,), the encode factor that was
    used; None where a kernel does not show it. shape: (M, K) as given, before the last block was padded with zeros.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None
    recipe: Recipe
    shape: tuple[int, int]
    tensor_scale: torch.Tensor | None = None


def codes_shape(shape: tuple[int, int], recipe: Recipe) -> tuple[int, int]:
    """Shape of the codes of a (M, K) matrix."""
    rows, columns = shape
    return (rows, -(-columns // 2)) if recipe.element.bits == 4 else (rows, columns)


def scales_shape(shape: tuple[int, int], recipe: Recipe) -> tuple[int, int]:
    """Shape of the unpadded block scales of a (M, K) matrix: a row for every row of the matrix."""
    rows, columns = shape
    return rows, -(-columns // recipe.block[1])
