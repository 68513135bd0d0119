"""Grouped GEMM of the rows of experts in a buffer, by kernels/experts/group_rows.cu and the kernels of gemm_grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowgauge.native.gemm.gemm import Rows, check_matrices, multiply_sections
from narrowgauge.native.runtime.arguments import check_tensor
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.modules.routing import ALIGNMENT, Grouping
from narrowgauge.spec.quantized import BatchedQuantized, Quantized, codes_shape, scales_shape

_GROUP = KernelStruct("experts/group_rows.cu", "GroupParameters")
_FORMS = {"contiguous": "indices", "psum": "ends", "indptr": "starts"}
_THREADS = {"cuda": 256, "cpu": 8}


def gemm_masked(
    a: BatchedQuantized, b: Sequence[Quantized], masked_m: torch.Tensor, *, out_dtype: torch.dtype,
    expected_m: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The first masked_m[g] rows of each matrix of `a` (G, most, K) times b[g] (N, K): (G, most, N).

    `masked_m`: int32 or int64 (G,). `expected_m`: rows of an expert on average, which decide between kernels. Other
    rows of the result are not written. `a` has scales of rows, or a scale per expert. Raises as
    `native.gemm.gemm.gemm_grouped`, and NotImplementedError for scales of tiles.
    """
    count, most, k = a.shape
    joined = replace(
        a, codes=a.codes.flatten(0, 1), scales=a.scales.flatten(0, 1), amax=None if a.amax is None else a.amax.flatten()
    )
    check_tensor(masked_m, "masked_m", (torch.int32, torch.int64), (count,))
    expected = count * (most if expected_m is None else expected_m)
    out = _multiply(joined, (count * most, k), b, masked_m, "masked", most, expected, out_dtype)
    return out.view(count, most, -1)


def gemm_contiguous(
    a: Quantized, b: Sequence[Quantized], m_indices: torch.Tensor, *, out_dtype: torch.dtype,
    grouping: Grouping = "contiguous", alignment: int = ALIGNMENT, experts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rows of each expert in `a` (M, K) times b[g] (N, K): (M, N).

    `m_indices`, and `experts` of "sorted-ids", int32 or int64: `narrowgauge.spec.modules.routing.Grouping`. `a` has an
    amax for each expert, if its recipe has an amax. Rows of no expert are not written. Rows of "sorted-ids" are copied
    to sections first, and the results back. Raises as `gemm_masked`, and ValueError for another grouping.
    """
    if grouping == "sorted-ids" and experts is not None:
        return _multiply_sorted(a, b, m_indices.long(), experts, alignment, out_dtype)
    if grouping not in _FORMS:
        raise ValueError(f"grouping is {grouping!r}; it can be {', '.join(_FORMS)}, and sorted-ids with experts")
    shape = {"contiguous": a.shape[:1], "psum": (len(b),), "indptr": (len(b) + 1,)}[grouping]
    check_tensor(m_indices, "m_indices", (torch.int32, torch.int64), shape)
    return _multiply(a, a.shape, b, m_indices, _FORMS[grouping], alignment, a.shape[0], out_dtype)


def _multiply_sorted(
    a: Quantized, b: Sequence[Quantized], ids: torch.Tensor, experts: torch.Tensor, alignment: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`gemm_contiguous` of rows `ids` in blocks of one expert each, with M in places of no row."""
    check_tensor(experts, "experts", (torch.int32, torch.int64), (len(ids) // alignment,))
    (height, k), rows = a.shape, ids.clamp(max=a.shape[0] - 1)
    index = experts.long().repeat_interleave(alignment, output_size=len(ids)).masked_fill(ids >= height, -1)
    scales = a.scales if a.recipe.whole else a.scales[rows]
    moved = replace(a, codes=a.codes[rows], scales=scales, shape=(len(ids), k))
    found = _multiply(moved, moved.shape, b, index, "indices", alignment, height, out_dtype)
    out = torch.empty(height + 1, b[0].shape[0], dtype=out_dtype, device=ids.device)  # the last row is of no row
    out[ids] = found
    return out[:height]


def _multiply(
    a: Quantized | BatchedQuantized, shape: tuple[int, int], b: Sequence[Quantized], index: torch.Tensor, form: str,
    step: int, expected: int, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    check_matrices(a.recipe, shape[1], b)
    recipe, count = a.recipe, len(b)
    if recipe.stored_rows != 1 and not recipe.whole:
        raise NotImplementedError(f"{recipe} shares scales among rows; rows of experts have scales of their own")
    check_tensor(a.codes, "a.codes", (torch.uint8,), codes_shape(shape, recipe))
    scales = (count, 1) if recipe.whole else scales_shape(shape, recipe)
    check_tensor(a.scales, "a.scales", (torch.float32 if recipe.scale is FP32 else torch.uint8,), scales)
    if recipe.decode != "s":
        check_tensor(a.required_amax, "a.amax", (torch.float32,), (count,))
    device = a.codes.device
    sizes, starts = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    parameters = _GROUP(index=index.int().contiguous(), sizes=sizes, starts=starts, rows=shape[0], step=step)
    launch("group_rows", f"group_rows_{form}", (count,), (_THREADS[device.type],), [parameters], device=device)
    parts = a.codes, a.scales, a.amax
    return multiply_sections(parts, recipe, shape, b, Rows(sizes, starts, expected), out_dtype)
