"""What the doors refuse, and that they say what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from native import ops
from native.ops import Quantized
from tests.native.samples import RECIPES

X = torch.ones(3, 32)
HALF = torch.float16
FP32 = torch.float32


def q(**changes: object) -> Quantized:
    """A valid (3, 32) operand with some parts replaced."""
    return replace(ops.quantize(X, "nvfp4"), **changes)


def quantize(x: torch.Tensor = X, recipe: object = "nvfp4", **options: object) -> Quantized:
    return ops.quantize(x, recipe, **options)  # type: ignore[arg-type]


def gemm(a: Quantized | None = None, b: Quantized | None = None, **options: object) -> torch.Tensor:
    return ops.gemm(a or q(), b or q(), **{"out_dtype": FP32, **options})  # type: ignore[arg-type]


META = torch.device("meta")
ONE = torch.ones(1)

REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    # dtypes
    ("amax of float64", lambda: ops.amax(X.double()), TypeError, "x is float32, bfloat16, float16, not float64"),
    ("x of float64", lambda: quantize(X.double()), TypeError, "x is float32, bfloat16, float16, not float64"),
    ("x of int8", lambda: quantize(X.to(torch.int8)), TypeError, "x is float32, bfloat16, float16, not int8"),
    ("amax of float16", lambda: quantize(amax=ONE.half()), TypeError, "amax is float32, not float16"),
    ("codes of int8", lambda: ops.dequantize(q(codes=q().codes.to(torch.int8))), TypeError,
     "q.codes is uint8, not int8"),
    ("scales of float32", lambda: ops.dequantize(q(scales=q().scales.float())), TypeError,
     "q.scales is uint8, not float32"),
    ("values of float64", lambda: ops.dequantize(q(), torch.float64), TypeError,
     "dequantize gives float32, bfloat16 or float16, not torch.float64"),
    ("output of float64", lambda: gemm(out_dtype=torch.float64), TypeError,
     "gemm gives float32, bfloat16 or float16, not torch.float64"),
    ("c of int32", lambda: gemm(c=torch.ones(3, 3).int()), TypeError,
     "c is float32, bfloat16, float16, not int32"),
    ("bias of float64", lambda: gemm(bias=torch.ones(3).double()), TypeError,
     "bias is float32, bfloat16, float16, not float64"),
    # shapes
    ("a vector", lambda: quantize(torch.ones(32)), ValueError,
     "quantize takes a matrix (M, K), not shape (32,); reshape it first"),
    ("three dimensions", lambda: quantize(torch.ones(2, 3, 32)), ValueError,
     "quantize takes a matrix (M, K), not shape (2, 3, 32); reshape it first"),
    ("an amax a row", lambda: quantize(amax=torch.ones(3)), ValueError, "amax has shape (1,), not (3,)"),
    ("a scalar amax", lambda: quantize(amax=torch.tensor(1.0)), ValueError, "amax has shape (1,), not ()"),
    ("codes of another K", lambda: ops.dequantize(q(shape=(3, 48))), ValueError,
     "q.codes has shape (3, 24), not (3, 16)"),
    ("scales of another K", lambda: ops.dequantize(q(scales=q().scales[:, :1].contiguous())), ValueError,
     "q.scales has shape (3, 2), not (3, 1)"),
    ("operands of another K", lambda: gemm(b=quantize(torch.ones(5, 48))), ValueError,
     "gemm multiplies (M, K) by (N, K); a is (3, 32) and b (5, 48)"),
    ("b of wrong codes", lambda: gemm(b=q(codes=q().codes[:2])), ValueError, "b.codes has shape (3, 16), not (2, 16)"),
    ("c of another shape", lambda: gemm(c=torch.ones(3, 4)), ValueError, "c has shape (3, 3), not (3, 4)"),
    ("c of one row", lambda: gemm(c=torch.ones(3)), ValueError, "c has shape (3, 3), not (3,)"),
    ("bias of another shape", lambda: gemm(bias=torch.ones(1, 3)), ValueError, "bias has shape (3,), not (1, 3)"),
    # memory
    ("a transposed x", lambda: quantize(torch.ones(32, 3).T), ValueError,
     "x of shape (3, 32) has strides (1, 3); the kernels read contiguous memory: pass x.contiguous()"),
    ("amax of every second", lambda: ops.amax(torch.ones(8)[::2]), ValueError,
     "x of shape (4,) has strides (2,); the kernels read contiguous memory: pass x.contiguous()"),
    ("strided codes", lambda: ops.dequantize(q(codes=torch.zeros(3, 32, dtype=torch.uint8)[:, ::2])), ValueError,
     "q.codes of shape (3, 16) has strides (32, 2); the kernels read contiguous memory: pass q.codes.contiguous()"),
    ("a transposed c", lambda: gemm(c=torch.ones(3, 3).T), ValueError,
     "c of shape (3, 3) has strides (1, 3); the kernels read contiguous memory: pass c.contiguous()"),
    ("an expanded bias", lambda: gemm(bias=ONE.expand(3)), ValueError,
     "bias of shape (3,) has strides (0,); the kernels read contiguous memory: pass bias.contiguous()"),
    # recipes
    ("no such recipe", lambda: quantize(recipe="nvpf4"), ValueError,
     "no recipe is called 'nvpf4' (did you mean 'nvfp4'?)"),
    ("no such dialect", lambda: quantize(recipe="nvfp4@te-2.9"), ValueError,
     "recipe nvfp4 has no dialect 'te-2.9' (did you mean 'te-2.8'?)"),
    ("a recipe without kernels", lambda: quantize(recipe=replace(RECIPES["te"], name="nvfp4-2d")), NotImplementedError,
     "the native kernels do not have recipe nvfp4-2d"),
    ("operands of two recipes", lambda: gemm(b=quantize(recipe="nvfp4@te-2.8")), ValueError,
     "gemm takes two operands of one recipe, not nvfp4 and nvfp4@te-2.8"),
    ("random bits", lambda: quantize(random=torch.zeros(3, 32, dtype=torch.uint8)), ValueError,
     "recipe nvfp4 rounds nearest-even; it takes no random bits"),
    ("an operand without amax", lambda: ops.dequantize(q(amax=None)), ValueError,
     "q.amax is None; nvfp4 has a tensor scale"),
    ("b without amax", lambda: gemm(b=q(amax=None)), ValueError, "b.amax is None; nvfp4 has a tensor scale"),
    # devices
    ("amax elsewhere", lambda: quantize(amax=ONE.to(META)), ValueError,
     "kernel quantize_nvfp4_fp32 runs on cpu, but a tensor lies on meta; move it first"),
    ("scales elsewhere", lambda: ops.dequantize(q(scales=q().scales.to(META))), ValueError,
     "kernel dequantize_nvfp4_fp32 runs on cpu, but a tensor lies on meta; move it first"),
    ("c elsewhere", lambda: gemm(c=torch.ones(3, 3, device=META)), ValueError,
     "kernel gemm_nvfp4 runs on cpu, but a tensor lies on meta; move it first"),
    ("x on no device", lambda: quantize(X.to(META)), ValueError, "kernel amax_fp32 runs on cpu and cuda, not meta"),
    ("x and amax on no device", lambda: quantize(X.to(META), amax=ONE.to(META)), ValueError,
     "kernel quantize_nvfp4_fp32 runs on cpu and cuda, not meta"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_it_is_refused_with_a_sentence(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
