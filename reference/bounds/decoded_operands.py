"""Both operands of a GEMM as float64 numbers, with the sizes of their products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass
class DecodedOperands:
    """Operands (M, K) and (N, K), float64; infinities and NaN are replaced by 0."""

    left: torch.Tensor
    right: torch.Tensor
    """Elements times the scales of their blocks."""
    elements: tuple[torch.Tensor, torch.Tensor]
    """Elements without scales, of the same shapes."""
    scales: tuple[torch.Tensor, torch.Tensor]
    """Block scales (M, B) and (N, B)."""
    block_width: int
    """Columns of a block."""
    slice_step: int
    """Columns that "split-<n>" never separates: the columns of a block, or 1 if a single block spans all of K."""
    element_span: float
    """The largest product of two elements divided by the smallest, a divisor of every product of elements."""
    magnitude: torch.Tensor
    """Sum of the magnitudes of all products (M, N)."""
    quantum: torch.Tensor
    """A power of two that divides every product of an output (M, N)."""

    def tile(self, left_rows: slice, right_rows: slice) -> DecodedOperands:
        """The operands of a tile of the output."""
        return replace(
            self,
            left=self.left[left_rows],
            right=self.right[right_rows],
            elements=(self.elements[0][left_rows], self.elements[1][right_rows]),
            scales=(self.scales[0][left_rows], self.scales[1][right_rows]),
            magnitude=self.magnitude[left_rows, right_rows],
            quantum=self.quantum[left_rows, right_rows],
        )

    @property
    def columns(self) -> int:
        """K."""
        return self.left.shape[1]
