"""Products of the rows of experts in a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowgauge.reference.gemm.gemm import gemm
from narrowgauge.spec.modules.routing import ALIGNMENT, Grouping, rows_of_experts
from narrowgauge.spec.quantized import BatchedQuantized, Quantized


def gemm_masked(
    a: BatchedQuantized, b: Sequence[Quantized], masked_m: torch.Tensor, *, out_dtype: torch.dtype,
    expected_m: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The first masked_m[g] rows of each matrix of `a` (G, most, K) times b[g] (N, K): (G, most, N), 0 in other rows.

    `expected_m`: rows of an expert on average, which decide nothing here. Raises as `gemm`.
    """
    found = torch.zeros(*a.shape[:2], b[0].shape[0], dtype=out_dtype, device=a.codes.device)
    for number, (matrix, size) in enumerate(zip(a.matrices(), masked_m.tolist(), strict=True)):
        found[number, :size] = gemm(_rows(matrix, range(size)), b[number], out_dtype=out_dtype)
    return found


def gemm_contiguous(
    a: Quantized, b: Sequence[Quantized], m_indices: torch.Tensor, *, out_dtype: torch.dtype,
    grouping: Grouping = "contiguous", alignment: int = ALIGNMENT, experts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rows of each expert in `a` (M, K) times b[g] (N, K): (M, N), 0 in rows of no expert.

    `m_indices`, and `experts` of "sorted-ids": `narrowgauge.spec.modules.routing.Grouping`. `a` has an amax for each
    expert, if its recipe has an amax, and a scale for each, if a tensor has one. Raises as `gemm`.
    """
    found = torch.zeros(a.shape[0], b[0].shape[0], dtype=out_dtype, device=a.codes.device)
    blocks = [] if experts is None else experts.tolist()
    for expert, rows in rows_of_experts(grouping, m_indices.tolist(), a.shape[0], alignment, blocks).items():
        one = slice(expert, expert + 1)
        own = replace(a, amax=None if a.amax is None else a.amax[one], tensor_scale=None)
        own = replace(own, scales=a.scales[one]) if a.recipe.whole else own
        found[rows] = gemm(_rows(own, rows), b[expert], out_dtype=out_dtype)
    return found


def _rows(a: Quantized, rows: Sequence[int]) -> Quantized:
    """Rows of a matrix. A scale belongs to a row, or to the whole matrix."""
    some = list(rows)
    scales = a.scales if a.recipe.whole else a.scales[some]
    return replace(a, codes=a.codes[some], scales=scales, shape=(len(some), a.shape[1]))
