"""GEMM of quantized operands, and of the sections of one with a matrix each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from native.arguments import DTYPES, blocks_for, check_operand, check_tensor, supported, type_code
from native.launch import Argument, launch
from native.layout import linear_scales
from reference.quantized import GroupedQuantized, Quantized
from reference.recipes import Recipe

_ALPHA_ORDER = {"(a*b)/d": 0, "(b*a)*(1/d)": 1}
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

    `c` (M, N) and `bias` (N,) are of those dtypes. The recipes may differ, but not in formats, rotation or the order of
    α. Raises TypeError or ValueError for operands that do not fit, and as `quantize` does.
    """
    _check_pair(a.recipe, b.recipe)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"gemm multiplies (M, K) by (N, K); a is {a.shape} and b {b.shape}")
    amax, b_amax = check_operand(a, "a"), check_operand(b, "b")
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    out = _output(m, n, out_dtype, c, a.codes.device)
    if bias is not None:
        check_tensor(bias, "bias", DTYPES, (n,))
    launch(
        "gemm_nvfp4",
        "gemm_nvfp4",
        (blocks_for(n, _TILE), blocks_for(m, _TILE)),
        (_THREADS,),
        (a.codes, linear_scales(a), amax, np.int32(len(amax) != 1), b.codes, linear_scales(b), b_amax,
         np.int32(len(b_amax) != 1), c, bias, out, *_sizes_and_types(m, n, k, c, bias, out),
         *_alpha(a.recipe, b.recipe)),
        device=a.codes.device,
    )  # fmt: skip
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
    if a.columnwise:
        raise ValueError("gemm_grouped multiplies sections that were quantized rowwise; these are columnwise")
    if len(b) != len(a.sizes) or not b:
        raise ValueError(f"gemm_grouped multiplies each section by one matrix: {len(a.sizes)} sections, {len(b)} of b")
    (m, k), n = a.shape, b[0].shape[0]
    for number, matrix in enumerate(b):
        _check_pair(a.recipe, matrix.recipe)
        if matrix.recipe != b[0].recipe or matrix.shape != (n, k) or matrix.recipe.granularity == "row":
            raise ValueError(
                f"gemm_grouped multiplies sections (m, {k}) by matrices {(n, k)} of one recipe with one amax each; "
                f"b[{number}] is {matrix.shape}, {matrix.recipe}"
            )
    whole = Quantized(a.codes, a.scales, a.amax[:1], a.recipe, a.shape)
    check_operand(whole, "a")
    check_tensor(a.amax, "a.amax", (torch.float32,), (len(b),))
    amaxes = [check_operand(matrix, f"b[{number}]") for number, matrix in enumerate(b)]
    scales = [linear_scales(matrix) for matrix in b]
    device = a.codes.device
    for tensor in (*amaxes, *scales, *(matrix.codes for matrix in b)):
        if tensor.device != device:
            raise ValueError(f"gemm_grouped runs on {device}, but a part of b lies on {tensor.device}; move it first")
    out = _output(m, n, out_dtype, c, device)
    if bias is not None:
        check_tensor(bias, "bias", DTYPES, (len(b), n))
    launch(
        "gemm_nvfp4",
        "gemm_grouped_nvfp4",
        (blocks_for(n, _TILE), blocks_for(m, _TILE), len(b)),
        (_THREADS,),
        (a.codes, a.scales, a.amax, a.sizes, _addresses([matrix.codes for matrix in b]), _addresses(scales),
         _addresses(amaxes), c, bias, out, *_sizes_and_types(m, n, k, c, bias, out), *_alpha(a.recipe, b[0].recipe)),
        device=device,
    )  # fmt: skip
    return out


def _check_pair(a: Recipe, b: Recipe) -> None:
    supported(a)
    supported(b)
    for what in ("element", "scale", "transform", "alpha"):
        one, other = getattr(a, what), getattr(b, what)
        if one != other:
            raise ValueError(f"gemm cannot multiply {a} by {b}: {what} is {one} and {other}")


def _output(m: int, n: int, out_dtype: torch.dtype, c: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if out_dtype not in DTYPES:
        raise TypeError(f"gemm gives float32, bfloat16 or float16, not {out_dtype}")
    if c is not None:
        check_tensor(c, "c", DTYPES, (m, n))
    return torch.empty(m, n, dtype=out_dtype, device=device)


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the tensors lie, on their device, for a kernel that picks one."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)


def _sizes_and_types(
    m: int, n: int, k: int, c: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
) -> list[Argument]:
    types = [0 if tensor is None else type_code(tensor.dtype) for tensor in (c, bias, out)]
    return [np.int64(m), np.int64(n), np.int64(k), *(np.int32(code) for code in types)]


def _alpha(a: Recipe, b: Recipe) -> list[Argument]:
    """The order of α, its divisor d and fl(1/d)."""
    divisor = a.max_product * b.max_product
    return [np.int32(_ALPHA_ORDER[a.alpha]), np.float32(divisor), np.float32(1 / divisor)]
