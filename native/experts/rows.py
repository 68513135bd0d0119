"""Rows of tokens copied to the sections of experts, and added again, by kernels/experts/permute.cu and combine.cu."""

from __future__ import annotations

import math

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import blocks_for, check_tensor, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.modules.routing import check_routing, permuted_rows

_PERMUTE = KernelStruct("experts/permute.cu", "PermuteParameters")
_COMBINE = KernelStruct("experts/combine.cu", "CombineParameters")
_IDS = {torch.int32: "i32", torch.int64: "i64"}
_THREADS = {"cuda": 256, "cpu": 8}
"""Of the kernels with barriers. On a CPU every thread needs a stack."""
_GATHER_THREADS, _COMBINE_THREADS, _VECTOR, _WORD = 256, 128, 8, 16
_BLOCKS = {"cuda": 1 << 16, "cpu": 16}


def permute(
    x: torch.Tensor, expert_ids: torch.Tensor, *, experts: int, alignment: int = 1, capacity: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the rows of `x` (T, K) for each choice of a token, ordered by expert, then by token and choice.

    `expert_ids`: int32 or int64 (T, k); a negative id is no choice. Section e begins behind section e − 1, at a
    multiple of `alignment`; with a `capacity` at e·capacity, and choices beyond the capacity are left out. Returns the
    rows (R, K), with zeros in rows of no choice, `source_rows` int64 (R,), t·k + j of choice j of token t, −1 of no
    choice, and the sizes of the sections, int64 (experts,). R: `spec.modules.routing.permuted_rows`. Any dtype. Does
    not wait for the device. Raises TypeError or ValueError for ids of another dtype or shape, ToolchainError if kernels
    cannot be compiled.
    """
    check_routing(x, expert_ids, experts, alignment, capacity)
    x, ids, device = x.contiguous(), expert_ids.contiguous(), x.device
    choices = ids.shape[1]
    rows = permuted_rows(ids.numel(), experts, alignment, capacity)
    sizes = torch.empty(experts, dtype=torch.int64, device=device)
    source_rows = torch.empty(rows, dtype=torch.int64, device=device)
    out = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=device)
    parameters = _PERMUTE(
        ids=ids, sizes=sizes, source_rows=source_rows, choices=ids.numel(), rows=rows, alignment=alignment,
        capacity=capacity, experts=experts,
    )  # fmt: skip
    threads = (_THREADS[device.type],)
    launch("permute", f"count_{_IDS[ids.dtype]}", (experts,), threads, [parameters], device=device)
    launch("permute", f"place_{_IDS[ids.dtype]}", (experts + 1,), threads, [parameters], device=device)
    if out.numel():
        width = x.shape[1] * x.element_size()
        word = math.gcd(_WORD, width, x.data_ptr(), out.data_ptr())
        grid = (min(blocks_for(rows, _GATHER_THREADS // 32), _BLOCKS[device.type]),)
        numbers = np.int64(rows), np.int64(width // word), np.int64(max(1, choices))
        launch("permute", f"gather_{word}", grid, (_GATHER_THREADS,), [x, out, source_rows, *numbers], device=device)
    return out, source_rows, sizes


def combine(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ weights[t, j]·y[positions[t, j]] over the choices j of token t whose position is not negative: (T, N).

    `y` (rows, N) float32, bfloat16 or float16, which is the dtype of the result; `positions` int64 (T, k), `weights`
    float32 (T, k). Choices are added in their order, in float32. Positions are not checked. Raises TypeError or
    ValueError for tensors of another dtype or shape, ToolchainError if kernels cannot be compiled.
    """
    y, positions, weights = y.contiguous(), positions.contiguous(), weights.contiguous()
    tokens, columns = len(positions), y.shape[1]
    check_tensor(y, "y", INPUT_DTYPES, (len(y), columns))
    check_tensor(positions, "positions", (torch.int64,), tuple(positions.shape))
    check_tensor(weights, "weights", (torch.float32,), tuple(positions.shape))
    out = torch.empty((tokens, columns), dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    vectors = columns % _VECTOR == 0 and not any(t.data_ptr() % (_VECTOR * t.element_size()) for t in (y, out))
    parameters = _COMBINE(
        y=y, positions=positions, weights=weights, out=out, columns=columns, choices=positions.shape[1], vectors=vectors
    )
    grid = blocks_for(columns // (_VECTOR if vectors else 1), _COMBINE_THREADS), tokens
    launch("combine", f"combine_{suffix(y.dtype)}", grid, (_COMBINE_THREADS,), [parameters], device=y.device)
    return out
