"""The doors of the native kernels, the same as those of `reference.ops`. Tensors on a CPU or a GPU, contiguous."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

from native import cuda, host
from native.launch import launch
from reference.quantized import Quantized, codes_shape, scales_shape
from reference.recipes import Recipe, recipe

__all__ = ["Quantized", "amax", "check", "dequantize", "gemm", "quantize", "recipe", "variations"]

_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCALE_ORDER = {"amax*(enc*(1/6))": 0, "(amax/6)*enc": 1}
_ALPHA_ORDER = {"(a*b)/d": 0, "(b*a)*(1/d)": 1}
_THREADS = 256
_BLOCK = 16
_AMAX_PER_THREAD = 16
# The grid strides over the rest. 1024 blocks fill any present GPU; on a CPU every block costs its warps' exchanges.
_AMAX_BLOCKS = {"cuda": 1024, "cpu": 64}
_GEMM_TILE = 64
_GEMM_THREADS = 64


def _blocks(items: int, each: int) -> int:
    return max(1, -(-items // each))


def _checked(
    tensor: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
) -> None:
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} is {allowed}, not {str(tensor.dtype).removeprefix('torch.')}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {shape}, not {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
            f"the kernels read contiguous memory: pass {name}.contiguous()"
        )


def _supported(r: Recipe) -> Recipe:
    if r.name != "nvfp4":
        raise NotImplementedError(f"the native kernels do not have recipe {r}")
    return r


def _operand(q: Quantized, name: str) -> torch.Tensor:
    _checked(q.codes, f"{name}.codes", (torch.uint8,), codes_shape(q.shape, q.recipe))
    _checked(q.scales, f"{name}.scales", (torch.uint8,), scales_shape(q.shape, q.recipe))
    if q.amax is None:
        raise ValueError(f"{name}.amax is None; {q.recipe} has a tensor scale")
    _checked(q.amax, f"{name}.amax", (torch.float32,), (1,))
    return q.amax


def amax(x: torch.Tensor, *, propagate_nan: bool = False) -> torch.Tensor:
    """max|x| of a contiguous tensor, float32 (1,); NaN is left out unless `propagate_nan`. 0 for an empty tensor."""
    _checked(x, "x", tuple(_SUFFIX))
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    grid = min(_AMAX_BLOCKS.get(x.device.type, 1), _blocks(x.numel(), _THREADS * _AMAX_PER_THREAD))
    arguments = (x, out, np.int64(x.numel()), np.int32(propagate_nan))
    launch("amax", f"amax_{_SUFFIX[x.dtype]}", (grid,), (_THREADS,), arguments, device=x.device)
    return out


_own_amax = amax  # in quantize the name is a parameter


def quantize(
    x: torch.Tensor, recipe_: str | Recipe, *, amax: torch.Tensor | None = None, random: torch.Tensor | None = None
) -> Quantized:
    """Quantize a contiguous `x` (M, K), float32, bfloat16 or float16, along K; any M and K.

    `amax`, float32 (1,), replaces the tensor's own. Raises TypeError or ValueError for inputs that do not fit,
    NotImplementedError for a recipe that the kernels do not have, ToolchainError where they cannot be compiled.
    """
    r = _supported(recipe(recipe_))
    _checked(x, "x", tuple(_SUFFIX))
    if x.dim() != 2:
        raise ValueError(f"quantize takes a matrix (M, K), not shape {tuple(x.shape)}; reshape it first")
    if random is not None:
        raise ValueError(f"recipe {r} rounds {r.rounding}; it takes no random bits")
    propagate_nan = r.nan == "propagate"
    if amax is None:
        amax = _own_amax(x, propagate_nan=propagate_nan)
    _checked(amax, "amax", (torch.float32,), (1,))
    rows, columns = x.shape
    codes = torch.empty(codes_shape((rows, columns), r), dtype=torch.uint8, device=x.device)
    scales = torch.empty(scales_shape((rows, columns), r), dtype=torch.uint8, device=x.device)
    tensor_scale = torch.empty(1, dtype=torch.float32, device=x.device)
    launch(
        "quantize_nvfp4",
        f"quantize_nvfp4_{_SUFFIX[x.dtype]}",
        (_blocks(scales.numel(), _THREADS),),
        (_THREADS,),
        (x, amax, codes, scales, tensor_scale, np.int64(rows), np.int64(columns),
         np.int32(_SCALE_ORDER[r.block_scale]), np.int32(propagate_nan)),
        device=x.device,
    )  # fmt: skip
    return Quantized(codes, scales, amax, r, (rows, columns), tensor_scale)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values (M, K) of `q` in float32, bfloat16 or float16. Raises as `quantize` does."""
    _supported(q.recipe)
    if dtype not in _SUFFIX:
        raise TypeError(f"dequantize gives float32, bfloat16 or float16, not {dtype}")
    amax = _operand(q, "q")
    rows, columns = q.shape
    out = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    launch(
        "dequantize_nvfp4",
        f"dequantize_nvfp4_{_SUFFIX[dtype]}",
        (_blocks(q.scales.numel(), _THREADS),),
        (_THREADS,),
        (q.codes, q.scales, amax, out, np.int64(rows), np.int64(columns)),
        device=q.codes.device,
    )
    return out


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias): (M, K) and (N, K) to (M, N) in float32, bfloat16 or float16. Any M, N and K.

    `c` (M, N) and `bias` (N,) are of those dtypes. Raises TypeError or ValueError for operands that do not fit, and as
    `quantize` does.
    """
    r = _supported(a.recipe)
    if a.recipe != b.recipe:
        raise ValueError(f"gemm takes two operands of one recipe, not {a.recipe} and {b.recipe}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"gemm multiplies (M, K) by (N, K); a is {a.shape} and b {b.shape}")
    if out_dtype not in _TYPE:
        raise TypeError(f"gemm gives float32, bfloat16 or float16, not {out_dtype}")
    a_amax, b_amax = _operand(a, "a"), _operand(b, "b")
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    for tensor, name, shape in ((c, "c", (m, n)), (bias, "bias", (n,))):
        if tensor is not None:
            _checked(tensor, name, tuple(_TYPE), shape)
    out = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    launch(
        "gemm_nvfp4",
        "gemm_nvfp4",
        (_blocks(n, _GEMM_TILE), _blocks(m, _GEMM_TILE)),
        (_GEMM_THREADS,),
        (a.codes, a.scales, a_amax, b.codes, b.scales, b_amax, c, bias, out, np.int64(m), np.int64(n), np.int64(k),
         np.int32(0 if c is None else _TYPE[c.dtype]), np.int32(0 if bias is None else _TYPE[bias.dtype]),
         np.int32(_TYPE[out_dtype]), np.int32(_ALPHA_ORDER[r.alpha])),
        device=a.codes.device,
    )  # fmt: skip
    return out


def check(device: torch.device) -> None:
    """Raises ToolchainError where kernels cannot be compiled or launched for `device`: no C++ compiler, no CuPy."""
    (cuda if device.type == "cuda" else host).check()


def variations(device: torch.device) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Ways to run a kernel that must give the same bytes: on a CPU every order of threads, on a GPU two runs."""
    if device.type == "cpu":
        return {f"{order} threads": partial(host.thread_order, order) for order in host.ORDERS}
    return {"first run": nullcontext, "second run": nullcontext}
