"""Products of two matrices of 8-bit whole numbers with scales of rows, by kernels/gemm/gemm_int8.cu.

The tensor cores of Hopper, `native.gemm.wgmma_fp8`, take those without zero points."""

from __future__ import annotations

import math

import torch

from narrowgauge.native.gemm import wgmma_fp8
from narrowgauge.native.gemm.operands import Product, epilogue_fields
from narrowgauge.native.gemm.paths import SMALLEST, is_hopper
from narrowgauge.native.runtime.arguments import blocks_for, check_operand
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, Value
from narrowgauge.spec.quantized import BatchedQuantized, Quantized
from narrowgauge.spec.recipes import Recipe

Operand = Quantized | BatchedQuantized
_PARAMETERS = KernelStruct("gemm/gemm_int8.cu", "Int8Parameters")
_TILE, _THREADS, _ALIGNMENT = 64, 128, 16
_INT32 = 2**31 - 1


def takes(recipe: Recipe) -> bool:
    """Whether a matrix has 8-bit whole numbers with a scale for each row, and a zero point or not."""
    return recipe.integer and recipe.element.bits == 8 and recipe.spans_k


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """a @ b.T (+ bias) of (M, K) and (N, K), or of batches (B, M, K) and (B, N, K) in one launch: exact int32 sums,
    times the product of the scales, in float32. bias: (N,), or (B, N).

    Raises ValueError for a K whose sums may exceed int32, and TypeError or ValueError for parts that do not fit.
    """
    batch, (m, k), n = a.shape[:-2], a.shape[-2:], b.shape[-2]
    largest = _magnitude(a.recipe) * _magnitude(b.recipe)
    if k * largest > _INT32:
        raise ValueError(
            f"sums of K = {k} products of {a.recipe} and {b.recipe}, up to {largest} each, may exceed int32; "
            f"K is at most {_INT32 // largest}"
        )
    left, right = _fields(a, "a"), _fields(b, "b")
    epilogue = epilogue_fields((m, n), out_dtype, None, bias, *batch)
    out = torch.empty(*batch, m, n, dtype=out_dtype, device=a.codes.device)
    if out.numel() == 0:
        return out
    codes = left["codes"], right["codes"]
    if _fits_tensor_cores(left, right, out, k):
        factors: dict[str, Value] = {"a": left["scales"], "b": right["scales"], "a_per_row": True, "b_per_row": True}
        factors |= {"order": "MULTIPLY", "divisor": 1.0, "reciprocal": 1.0}
        a_fields, b_fields = ({**side, "element": "INT8", "layout": 0} for side in (left, right))
        terms = Product("fp8_tensor", m, n, k, a_fields, b_fields, epilogue, factors)
        wgmma_fp8.multiply_batch(terms, out, math.prod(batch))
        return out
    aligned = k % _ALIGNMENT == 0 and all(isinstance(c, torch.Tensor) and c.data_ptr() % _ALIGNMENT == 0 for c in codes)
    parameters = _PARAMETERS(a=left, b=right, epilogue={**epilogue, "out": out}, k=k, aligned=aligned)
    grid = blocks_for(n, _TILE), blocks_for(m, _TILE), *batch
    launch("gemm_int8", "gemm_int8", grid, (_THREADS,), [parameters], device=out.device)
    return out


def _fits_tensor_cores(a: dict[str, Value], b: dict[str, Value], out: torch.Tensor, k: int) -> bool:
    """Whether the kernel of Hopper's tensor cores multiplies two operands. `a`, `b`: Int8Operand."""
    if out.numel() * k < max(SMALLEST, 1) or not is_hopper(out.device) or (a["zeros"], b["zeros"]) != (None, None):
        return False
    left, right = (part["codes"].view(-1, k) for part in (a, b) if isinstance(part["codes"], torch.Tensor))
    return wgmma_fp8.takes_codes(left, right)


def _magnitude(recipe: Recipe) -> int:
    """The largest magnitude of a code less a zero point."""
    return recipe.element.codes - 1 if recipe.zero_points else int(recipe.element.largest_magnitude)


def _fields(q: Operand, name: str) -> dict[str, Value]:
    """Int8Operand of a matrix, or of a batch."""
    for matrix in q.matrices() if isinstance(q, BatchedQuantized) else [q]:
        check_operand(matrix, name)
    codes, zeros = q.codes.mT if q.transposed else q.codes, q.zeros
    return {
        "codes": codes.contiguous(), "scales": q.scales.contiguous(), "rows": q.shape[-2],
        "zeros": None if zeros is None else zeros.contiguous(),
    }  # fmt: skip
