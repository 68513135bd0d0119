"""Conch as a backend, on a GPU: Triton GEMMs of FP8 or INT8 with a scale for each tensor or row, and of a matrix of 16
bits by INT4 weights; norms, SiLU, and writes to a cache of FP8."""

from __future__ import annotations

from typing import ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import base_name, fp8_cache, library
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "conch-triton-kernels 1.3"
_INSTALL = 'pip install "conch-triton-kernels[cuda]", for a GPU'
_RECIPES = ("fp8-current-e4m3", "fp8-row-e4m3", "int8-row")
_WEIGHTS = ("int4-g128", "int4-g128-zp")


class Backend:
    """`scaled_gemm`, in tiles of 128x64x64 without masks for K and N, and `mixed_precision_gemm`."""

    calls: ClassVar = {
        "": "conch.ops.quantization.gemm.scaled_gemm",
        **dict.fromkeys(_WEIGHTS, "conch.ops.quantization.gemm.mixed_precision_gemm"),
    }
    dialects: ClassVar = {**dict.fromkeys((*_RECIPES, *_WEIGHTS), "te"), "fp8-static-e4m3": "conch-kv"}
    constraints: ClassVar = {"K": 64, "N": 64, "layout": ["tn"]}
    declares: ClassVar = {
        "gemm": "probe-13", "accumulator": "truncating", "weight-only-gemm": {"decode": "rounded-scale"},
        "silu-mul": "conch-activation", **dict.fromkeys(("rmsnorm", "add-rmsnorm"), "conch"),
    }  # fmt: skip

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing, ValueError without a GPU."""
        library("conch.ops.quantization.gemm", _INSTALL)
        if device.type != "cuda":
            raise ValueError("the Triton kernels need --device cuda")

    def scaled_gemm(self, a: Quantized, b: Quantized, *, out_dtype: str = "bfloat16") -> torch.Tensor:
        """`gemm` with a dtype by name. Raises NotImplementedError for refused recipes, batches and transposed codes."""
        if not (isinstance(a, Quantized) and isinstance(b, Quantized)) or a.transposed or b.transposed:
            raise NotImplementedError(f"scaled_gemm takes two matrices of codes along K, not {a} and {b}")
        return self.gemm(a, b, out_dtype=getattr(torch, out_dtype))

    def weight_only_gemm(self, a: torch.Tensor, b: Quantized) -> torch.Tensor:
        """`a` (M, K) in 16 bits, `b` (N, K) of INT4 in groups of 128: (M, N). Scales and zero points are rounded to the
        dtype of a. Raises NotImplementedError for refused recipes, batches, and K that is no multiple of a group."""
        base_name(b.recipe, _WEIGHTS, {})
        if not isinstance(b, Quantized) or b.shape[1] % 128:
            raise NotImplementedError(f"mixed_precision_gemm takes a matrix with K % 128 = 0, not {b}")
        words, offset = packed_words(b)
        scales, zeros = (
            None if part is None else part.T.to(a.dtype).contiguous() for part in (b.scales, b.zeros)
        )  # fmt: skip
        module = library("conch.ops.quantization.gemm", _INSTALL)
        output: torch.Tensor = module.mixed_precision_gemm(a.contiguous(), words, scales, zeros, 4, offset, 128)
        return output

    def gemm(self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype) -> torch.Tensor:
        """`a` (M, K), `b` (N, K): the output (M, N). Raises NotImplementedError for refused recipes."""
        if base_name(a.recipe, _RECIPES, {}) != base_name(b.recipe, _RECIPES, {}):
            raise NotImplementedError(f"the adapter takes operands of one recipe, not {a.recipe} and {b.recipe}")
        dtype = torch.int8 if str(a.recipe) == "int8-row" else torch.float8_e4m3fn
        left, right = (q.codes.view(dtype) for q in (a, b))
        scales = (q.scales.view(-1, 1) for q in (a, b))
        module = library("conch.ops.quantization.gemm", _INSTALL)
        output: torch.Tensor = module.scaled_gemm(left, right.T, *scales, out_dtype)
        return output

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        """`rms_norm`."""
        output: torch.Tensor = library("conch.ops.normalization.rms_norm", _INSTALL).rms_norm(x, weight, eps)
        return output

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
    ) -> dict[str, torch.Tensor]:
        """`fused_add_rms_norm`, which writes into copies of its operands."""
        module = library("conch.ops.normalization.rms_norm", _INSTALL)
        output, total = module.fused_add_rms_norm(x.clone(), residual.clone(), weight, eps)
        return {"residual": total, "output": output}

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`silu_and_mul`."""
        output: torch.Tensor = library("conch.ops.activation.silu_and_mul", _INSTALL).silu_and_mul(x)
        return output

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, cache: Cache, slots: torch.Tensor, recipe: Recipe, *,
        k_scale: torch.Tensor, v_scale: torch.Tensor,
    ) -> Cache:  # fmt: skip
        """`reshape_and_cache`. Raises NotImplementedError for other caches than `fp8_cache` takes, scales of heads, and
        values of another width than the keys."""
        keys, values = fp8_cache(cache, k_scale, v_scale)
        if k.shape != v.shape:
            raise NotImplementedError(f"reshape_and_cache takes keys and values of one width; v is {tuple(v.shape)}")
        write = library("conch.ops.vllm.reshape_and_cache", _INSTALL).reshape_and_cache
        write(k.contiguous(), v.contiguous(), keys, values, slots, "fp8", k_scale, v_scale)
        return cache


def packed_words(b: Quantized) -> tuple[torch.Tensor, int]:
    """INT4 codes (N, K) as int32 (K/8, N), eight to a word, from 0 to 15; and what is subtracted beside zero points."""
    offset = 0 if b.zeros is not None else 8
    return (b.codes ^ 0x11 * offset).contiguous().view(torch.int32).T.contiguous(), offset
