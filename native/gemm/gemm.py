"""GEMM of quantized operands, and of the sections of one with a matrix each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.native.gemm import tensor_core
from narrowgauge.native.gemm.operands import (
    alpha_of,
    element_of,
    epilogue,
    layout_of,
    operand,
    product_arguments,
    rule_of,
    source_of,
)
from narrowgauge.native.gemm.paths import ORDERS, PORTABLE, SKINNY, TENSOR, path_of
from narrowgauge.native.runtime.arguments import blocks_for, check_tensor
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import check_sections_of_product
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import GroupedQuantized, Quantized, codes_shape, scales_shape

_TILE = 64
_THREADS = 64


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias): (M, K) and (N, K) to (M, N) in float32, bfloat16 or float16. Any M, N and K.

    `c` (M, N) and `bias` (N,) are of those dtypes; FP8 with scales of blocks adds `c` last, to what is cast already.
    Recipes may differ as far as `spec.recipe` says. Sums are in the order that `gemm_order` names. Raises TypeError
    or ValueError for operands that do not fit, and as `quantize` does.
    """
    rule = rule_of(a.recipe, b.recipe)
    (m, k), n = a.shape, b.shape[0]
    operands, factors = product_arguments(a, b)
    sizes = epilogue((m, n, k), out_dtype, c, bias)
    out = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    ends = (c, bias, out, *sizes)
    path = path_of(m, n, k, rule, out.device, skinny=gemm_skinny.takes(a, b, rule))
    if path == SKINNY:
        gemm_skinny.multiply(rule, (m, n, k), operands, factors, ends)
        return out
    if path == TENSOR:
        tensor_core.multiply(rule, (m, n, k), operands, factors, ends)
        return out
    grid = (blocks_for(n, _TILE), blocks_for(m, _TILE))
    launch(source_of(rule), f"gemm_{rule}", grid, (_THREADS,), (*operands, *ends, *factors), device=out.device)
    return out


def gemm_grouped(
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each section of `a` (M, K), quantized rowwise, times its own matrix of `b` (N, K), one below the other: (M, N).

    One launch, which reads the sections' sizes where they lie. `c` is (M, N), `bias` (G, N). Raises as `gemm` does, and
    ValueError where there is not one matrix for each section.
    """
    check_sections_of_product(a, b)
    (m, k), n = a.shape, b[0].shape[0]
    rule = rule_of(a.recipe, b[0].recipe)
    for number, matrix in enumerate(b):
        if matrix.recipe != b[0].recipe or matrix.shape != (n, k) or matrix.recipe.granularity == "row":
            raise ValueError(
                f"gemm_grouped multiplies sections (m, {k}) by matrices {(n, k)} of one recipe with one amax each; "
                f"b[{number}] is {matrix.shape}, {matrix.recipe}"
            )
    section_scales = _section_scales(a)
    parts = [operand(matrix, f"b[{number}]") for number, matrix in enumerate(b)]
    device = a.codes.device
    amaxes = [amax for _, _, amax in parts if amax is not None]
    codes, scales = [part[0] for part in parts], [part[1] for part in parts]
    for tensor in (*codes, *scales, *amaxes):
        if tensor.device != device:
            raise ValueError(f"gemm_grouped runs on {device}, but a part of b lies on {tensor.device}; move it first")
    layouts = torch.tensor([layout_of(matrix.recipe, matrix) for matrix in b], dtype=torch.int32).to(device)
    factors: list[Argument] = [a.amax, _addresses(amaxes), *alpha_of(a.recipe, b[0].recipe)] if amaxes else []
    sizes = epilogue((m, n, k), out_dtype, c, bias, len(b))
    out = torch.empty(m, n, dtype=out_dtype, device=device)
    operands: list[Argument] = [
        a.sizes, a.codes, section_scales, element_of(a.recipe), np.int32(layout_of(a.recipe)), _addresses(codes),
        _addresses(scales), element_of(b[0].recipe), layouts,
    ]  # fmt: skip
    ends = (c, bias, out, *sizes)
    if path_of(m, n, k, rule, device) == TENSOR:
        tensor_core.multiply(rule, (m, n, k), operands[1:], factors, ends, sizes=a.sizes)
        return out
    grid = (blocks_for(n, _TILE), blocks_for(m, _TILE), len(b))
    launch(source_of(rule), f"gemm_grouped_{rule}", grid, (_THREADS,), (*operands, *ends, *factors), device=device)
    return out


def gemm_order(a: Quantized | Sequence[Quantized], b: Quantized | Sequence[Quantized]) -> str:
    """The order in which `gemm` adds the products of two operands, by a name of `spec.summation.ORDERS`, or
    "truncating": any, by an accumulator that truncates.

    Of two lists of them, those of all sections: that of `gemm_grouped`. It depends on the shape and the device, and for
    MX on the numbers, so that it may wait for the device.
    """
    left, right = ([q] if isinstance(q, Quantized) else list(q) for q in (a, b))
    rule = rule_of(left[0].recipe, right[0].recipe)
    shape = sum(q.shape[0] for q in left), right[0].shape[0], left[0].shape[1]
    skinny = isinstance(a, Quantized) and gemm_skinny.takes(left[0], right[0], rule)
    path = path_of(*shape, rule, left[0].codes.device, skinny=skinny)
    if path == TENSOR and rule == "mx" and any(map(_refused, (*left, *right))):
        path = PORTABLE
    return ORDERS[path]


def _refused(q: Quantized) -> bool:
    codes, scales, _ = operand(q, "q")
    return tensor_core.refuses((codes, scales, element_of(q.recipe), np.int32(layout_of(q.recipe, q))), *q.shape)


def _section_scales(a: GroupedQuantized) -> torch.Tensor:
    """The scales of all sections. Raises TypeError or ValueError where a part of `a` has not its shape or dtype.

    Sections of tiles have a row of scales for every 128 rows or fewer at their end: at least as many as any sizes of so
    many sections could ask for, so that wrong ones do not reach beyond them.
    """
    r, count = a.recipe, len(a.sizes)
    check_tensor(a.codes, "a.codes", (torch.uint8,), codes_shape(a.shape, r))
    if r.decode != "s":
        if a.amax is None:
            raise ValueError(f"a.amax is None; {r} has a tensor scale")
        check_tensor(a.amax, "a.amax", (torch.float32,), (count,))
    check_tensor(a.sizes, "a.sizes", (torch.int64,), (count,))
    height, width = (count, 1) if r.whole else scales_shape(a.shape, r)
    dtype = torch.float32 if r.scale is FP32 else torch.uint8
    if r.stored_rows == 1 or r.whole:
        check_tensor(a.scales, "a.scales", (dtype,), (height, width))
        return a.scales
    check_tensor(a.scales, "a.scales", (dtype,), (len(a.scales), width))
    missing = a.shape[0] // r.stored_rows + count - len(a.scales)
    return torch.nn.functional.pad(a.scales, (0, 0, 0, missing)) if missing > 0 else a.scales


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the tensors lie, on their device, for a kernel that picks one."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)
